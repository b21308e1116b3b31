"""Keys that several screens share, and the list of all keys for the help screen."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding


def is_typed(key: str) -> bool:
    """Return whether a text field treats a key as a letter.

    Textual cannot decide this from the key's name, and would open the search in a text field.
    """
    return key == "slash"


class Keys:
    """Groups of key bindings. A binding calls an action of the widget that declares it."""

    move: ClassVar = [
        Binding("j,down", "down", "Down", show=False),
        Binding("k,up", "up", "Up", show=False),
    ]
    decide: ClassVar = [
        Binding("a", "decide('approve', '')", "Approve"),
        Binding("A", "decide('approve', 'thread')", "… in this thread", show=False),
        Binding("L", "decide('approve', 'always')", "… always", show=False),
        Binding("d", "decide('deny', '')", "Deny"),
        Binding("e", "decide('edit', '')", "Edit", show=False),
    ]


HELP = (
    (
        "Everywhere",
        (
            ("g i, g t, g a, g c", "go to the inbox, the threads, the agents, the cost"),
            ("g m", "go to a screen of a mod, such as tasks or notes"),
            ("/", "search"),
            ("n", "write to somebody, a channel or everyone"),
            ("j k, arrows", "down and up"),
            ("Enter", "open"),
            ("Esc", "back; from the text that you write, to the messages"),
            ("Ctrl-Q", "leave"),
        ),
    ),
    (
        "A thread",
        (
            ("Enter", "in the text: send; on a message: all of a long one"),
            ("Ctrl-J, Shift-Enter", "a new line"),
            ("@", "name a participant; Tab completes the suggested name"),
            ("i", "write"),
            ("r", "reply to the selected message"),
            ("E", "edit your selected message: the new text replaces it"),
            ("t", "open the replies to the selected message"),
            ("w", "why the selected or newest message was sent, and what followed"),
            ("a A L", "approve a call once, in this thread, always"),
            ("d e", "deny it, or edit its arguments"),
            ("s", "stop what agents do here"),
            ("S", "save the files of the selected message into this folder"),
            ("o", "take the thread over, or give it back"),
            ("u", "all is read"),
            ("p m z T", "pin, mute, archive, name the thread, for yourself"),
            ("G", "the newest message"),
        ),
    ),
    (
        "Inbox",
        (
            ("a A L d e", "decide what an agent asks"),
            ("R", "resume a stopped conversation; deliver a dead letter again"),
            ("x", "dismiss"),
        ),
    ),
    ("Cost", (("1 … 5", "by agent, model, thread, conversation, day"),)),
)
"""Keys of each screen, with their meanings."""
