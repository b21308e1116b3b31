"""Draft of one thread: unsent text, and the message that this text answers or replaces.

The thread's pane shows and sends the draft. The text is stored in `Desk.drafts`, so that it survives when the pane is
closed or the connection is lost. This module draws nothing.
"""

from __future__ import annotations

from roundelay.network.addresses import conversation_of
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.tui.desk import Desk


class ThreadDraft:
    """Unsent text of a thread. It is a plain text, a reply, or an edit of one of the person's messages."""

    def __init__(self, desk: Desk, thread_id: str) -> None:
        self.reply_to: AnyMessage | None = None
        self.replaces: AnyMessage | None = None
        """Message that is being edited, or None."""
        self._desk = desk
        self._thread_id = thread_id
        self._text_before_edit = ""

    def store(self, text: str) -> None:
        """Store the text of the field. During an edit, store the text from before the edit, because an edit ends with
        its pane.
        """
        if self.replaces is not None:
            text = self._text_before_edit
        if text:
            self._desk.drafts[self._thread_id] = text
        else:
            self._desk.drafts.pop(self._thread_id, None)

    def start_edit(self, message: AnyMessage, text: str) -> None:
        """Start to edit a message. ``text`` is the current text of the field, which is restored after the edit."""
        # If another message is already being edited, the field contains that message and not the person's draft.
        if self.replaces is None:
            self._text_before_edit = text
        self.replaces, self.reply_to = message, None

    def reset(self) -> str | None:
        """End the reply or the edit. Return the text from before the edit, or None if no message was edited."""
        text = self._text_before_edit if self.replaces is not None else None
        self.reply_to = self.replaces = None
        return text


async def send_replacement(client: NetworkClient, replaced: AnyMessage, text: str) -> int:
    """Send a text that replaces one of the person's messages, and cancel the reactions to that message. Return the
    sequence number of the new message."""
    for recipient in (await client.call("network.message_status", {"seq": replaced.seq}))["recipients"]:
        newest = recipient.get("again", recipient)  # after a takeover, stop the second reaction
        # Cancel the reaction: otherwise the agent would answer both the old text and the new text.
        if newest.get("reaction_status") == "open" and newest.get("reaction"):
            await client.call("network.cancel", {"reaction": newest["reaction"]})
    sent = await client.send(
        replaced.to,
        text,
        reply_to=replaced.reply_to,
        conversation=(conversation_of(replaced.thread_id) or None) if replaced.to.startswith("agent:") else None,
        requires_response=replaced.requires_response or None,
        metadata={"replaces": replaced.seq},
    )
    return sent.seq
