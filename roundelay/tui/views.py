"""Screens that are lists: the inbox, threads, agents, and search.

Each screen is a `Pane`. The app mounts the pane, and calls `handle_change` when a part of the data has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Input, Static

from roundelay.display.activity import describe_activity, list_work
from roundelay.display.screen import format_time
from roundelay.display.text import fit_start, sanitize, sanitize_lines
from roundelay.network.addresses import agent_address
from roundelay.network.messages import message_from_wire
from roundelay.network.text import count
from roundelay.network.units import MINUTE_MS, format_elapsed
from roundelay.tui.desk import Desk, InboxItem, Part, ThreadRow
from roundelay.tui.keys import Keys
from roundelay.tui.messages import name_color
from roundelay.tui.parts import Line, Pane, Parts, ReadStateKeys, Rows, write_row


def describe_age(at: int, now_ms: int) -> str:
    """Return the time since a moment in words, or an empty text if the moment is unknown."""
    if not at:
        return ""
    return format_elapsed(now_ms - at) if now_ms - at >= MINUTE_MS else "now"


class InboxPane(Pane):
    """Screen of the inbox, which lists the items that wait for this person, oldest first."""

    name_here = "inbox"
    WORDS: ClassVar = {
        "approval": ("approval", "bold yellow"),
        "question": ("question", "bold cyan"),
        "dead_letter": ("dead letter", "bold red"),
        "stopped": ("stopped", "bold magenta"),
        "budget": ("budget", "bold magenta"),
        "fault": ("fault", "bold red"),
    }
    BINDINGS: ClassVar = [*Keys.decide, ("x", "dismiss", "Dismiss"), ("R", "go_on", "Resume")]

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        yield Rows()

    def on_mount(self) -> None:
        self.handle_change("inbox")

    def on_resize(self) -> None:
        self.handle_change("inbox")

    def handle_change(self, part: Part) -> None:
        if part != "inbox":
            return
        rows, now_ms = self.query_one(Rows), self.desk.now_ms()
        about = "Nothing waits for you." if not self.desk.inbox else f"{count(len(self.desk.inbox), 'thing')} for you"
        if self.desk.lacks_inbox:
            about += (
                " This hub does not store an inbox. The list shows approvals, dead letters, and stops since you joined."
            )
        self.query_one("#about", Static).update(Content(about))
        # Name rows by content instead of position, so that the selection stays on its item when other items disappear.
        rows.show([(f"{it.kind} {it.seq} {it.agent_id}", self._write(it, rows.room, now_ms)) for it in self.desk.inbox])

    def _write(self, it: InboxItem, width: int, now_ms: int) -> Content:
        word, style = self.WORDS.get(it.kind, (sanitize(it.kind), "bold"))
        left: Parts = [(f"{word:<12}", style), (f"#{it.seq} ", "dim"), (it.agent_id, f"bold {name_color(it.agent_id)}")]
        where = f" in {self.desk.name_thread(it.thread_id)}" if it.thread_id else ""
        return write_row([*left, where], describe_age(it.at, now_ms), width, it.text)

    @property
    def item(self) -> InboxItem | None:
        rows = self.query_one(Rows)
        named = (it for it in self.desk.inbox if f"{it.kind} {it.seq} {it.agent_id}" == rows.chosen)
        return next(named, None)

    def on_option_list_option_selected(self) -> None:
        if (item := self.item) is None:
            return
        if item.thread_id:
            self.terminal.open_thread(item.thread_id, item.seq)
        # A dead letter names no thread, but its message can be explained.
        elif item.seq:
            self.terminal.open_why(item.seq)

    def action_decide(self, word: str, scope: str) -> None:
        if (item := self.item) is not None and item.kind == "approval":
            self.terminal.actions.decide(word, item.seq, scope)

    def action_dismiss(self) -> None:
        if (item := self.item) is not None:
            self.terminal.work(self.desk.dismiss, item)

    def action_go_on(self) -> None:
        if (item := self.item) is not None:
            self.terminal.actions.resume_item(item)


AT_WORK = ("  … at work", "cyan")
NEEDS_DECISION = ("  needs your decision", "yellow")


class ThreadsPane(ReadStateKeys):
    """Screen with the threads of this person: unread counts, last messages, and working agents."""

    name_here = "threads"
    BINDINGS: ClassVar = [
        ("u", "read", "All read"),
        ("p", "mark('is_pinned')", "Pin"),
        Binding("m", "mark('is_muted')", "Mute", show=False),
        Binding("z", "mark('is_archived')", "Archive", show=False),
        Binding("T", "name", "Name", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Static(id="about", markup=False)
        yield Rows()

    def on_mount(self) -> None:
        self.handle_change("threads")

    def on_resize(self) -> None:
        self.handle_change("threads")

    def handle_change(self, part: Part) -> None:
        if part not in ("threads", "live"):
            return
        rows, now_ms = self.query_one(Rows), self.desk.now_ms()
        listed = self.desk.list_threads()
        about = count(len(listed), "thread") if listed else "Nothing has been said yet. Press n to write to somebody."
        if listed and self.desk.lacks_marks:
            about += " This hub does not store read state. Messages since you joined count as unread."
        self.query_one("#about", Static).update(Content(about))
        activity = self.desk.activity
        working = activity.list_working_threads()
        asking = {request.thread_id for request in activity.list_own_requests()}
        badges = {**dict.fromkeys(working, AT_WORK), **dict.fromkeys(asking, NEEDS_DECISION)}
        rows.show([(it.thread_id, self._write(it, badges.get(it.thread_id), rows.room, now_ms)) for it in listed])

    def _write(self, it: ThreadRow, badge: tuple[str, str] | None, width: int, now_ms: int) -> Content:
        unread = f"{it.unread if it.unread < 100 else '99+'}" if it.unread else ""
        signs = "".join(
            sign for sign, is_on in (("▲", it.is_pinned), ("∅", it.is_muted), ("▽", it.is_archived)) if is_on
        )
        left: Parts = [(f"{unread:>3} ", "bold yellow"), (f"{signs} " if signs else "", "dim")]
        left.append((self.desk.name_thread(it.thread_id), "bold" if it.unread else ""))
        held = self.desk.activity.takeovers.get(it.thread_id)
        if held is not None:
            left.append((f"  taken over by {'you' if held == self.desk.me else sanitize(held)}", "magenta"))
        if badge is not None:
            left.append(badge)
        below = (
            f"  {it.sender_id}: {it.text}" if it.text else f"  {count(it.messages, 'message')}, up to #{it.last_seq}"
        )
        return write_row(left, describe_age(it.at, now_ms), width, below)

    @property
    def marked_thread(self) -> str | None:
        return self.query_one(Rows).chosen

    def on_option_list_option_selected(self) -> None:
        if (thread_id := self.marked_thread) is not None:
            self.terminal.open_thread(thread_id)


class AgentsPane(Pane):
    """Screen with the participants and their activity, and the card of the selected participant."""

    name_here = "agents"
    BINDINGS: ClassVar = [("R", "go_on", "Resume")]

    def compose(self) -> ComposeResult:
        yield Rows()
        yield Static(id="card", markup=False)

    def on_mount(self) -> None:
        self.handle_change("agents")

    def on_resize(self) -> None:
        self.handle_change("agents")

    def handle_change(self, part: Part) -> None:
        if part != "agents":
            return
        rows = self.query_one(Rows)
        rows.show([(it["agent_id"], self._write(it, rows.room)) for it in self.desk.agents])
        self._show_card()

    def _write(self, it: dict[str, Any], width: int) -> Content:
        is_here = it["state"] == "online"
        agent_id = sanitize(str(it["agent_id"]))
        left: Parts = [("● " if is_here else "○ ", "green" if is_here else "dim")]
        left += [(agent_id, f"bold {name_color(agent_id)}"), ("  (you)" if agent_id == self.desk.me else "", "dim")]
        left += [f"  {sanitize(describe_activity(it))}"]
        return write_row(left, str(it["kind"]), width)

    @property
    def agent(self) -> dict[str, Any] | None:
        chosen = self.query_one(Rows).chosen
        return next((it for it in self.desk.agents if it["agent_id"] == chosen), None)

    def on_option_list_option_highlighted(self) -> None:
        self._show_card()

    def _show_card(self) -> None:
        agent = self.agent
        self.query_one("#card", Static).update(self._describe(agent) if agent is not None else "")

    def _describe(self, agent: dict[str, Any]) -> Content:
        card = agent.get("card") if isinstance(agent.get("card"), dict) else {}
        assert isinstance(card, dict)
        parts: Parts = [(sanitize(str(agent["agent_id"])), "bold"), (f"  {agent['kind']}, {agent['state']}", "dim")]
        for name, value in card.items():
            if not value:
                continue
            listed = value if isinstance(value, list) else [value]
            # Participants write their own cards, which may have any shape.
            named = [str(it.get("name", it)) if isinstance(it, dict) else str(it) for it in listed]
            parts += [(f"\n{sanitize(str(name))}: ", "dim"), fit_start(sanitize(", ".join(named)), 600)]
        now_ms = self.desk.now_ms()
        for _, does, thread, since in list_work([agent], now_ms):
            told = " ".join(filter(None, (does, f"in {thread}" if thread else "", f"for {since}" if since else "")))
            parts += [("\nnow: ", "dim"), sanitize(told)]
        return Content.assemble(*parts)

    def on_option_list_option_selected(self) -> None:
        agent = self.agent
        if agent is not None and agent["agent_id"] != self.desk.me:
            self.terminal.work(self.terminal.go_to, agent_address(agent["agent_id"]))

    def action_go_on(self) -> None:
        if (agent := self.agent) is not None:
            self.terminal.work(self.terminal.actions.resume, str(agent["agent_id"]))


@dataclass(frozen=True, slots=True)
class _Hit:
    seq: int
    thread_id: str


class SearchPane(Pane):
    """Screen that searches messages by words. Enter opens the thread of a message."""

    name_here = "search"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._found: dict[str, _Hit] = {}

    def compose(self) -> ComposeResult:
        yield Line(placeholder="words that the message must contain; invoi* finds words that begin with invoi")
        yield Static("", id="about", markup=False)
        yield Rows()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip():
            self.terminal.work(self._search, event.value)

    async def _search(self, query: str) -> None:
        page = await self.desk.client.call("network.search", {"query": query, "limit": 100})
        messages = [message_from_wire(it) for it in reversed(page["messages"])]
        rows = self.query_one(Rows)
        shown = []
        self._found = {}
        for it in messages:
            self._found[str(it.seq)] = _Hit(it.seq, it.thread_id)
            left: Parts = [(f"#{it.seq} ", "dim"), (sanitize(it.sender_id), f"bold {name_color(it.sender_id)}")]
            left.append((f" in {self.desk.name_thread(it.thread_id)}", ""))
            shown.append((str(it.seq), write_row(left, format_time(it.sent_at), rows.room, _one_line(it.text))))
        rows.show(shown)
        more = ", the newest" if page["has_more"] else ""
        about = f"{count(len(messages), 'message')}{more}" if messages else "Nothing was found."
        self.query_one("#about", Static).update(Content(about))
        if messages:
            rows.focus()

    def on_option_list_option_selected(self) -> None:
        found = self._found.get(self.query_one(Rows).chosen or "")
        if found is not None:
            self.terminal.open_thread(found.thread_id, found.seq)


def _one_line(text: str) -> str:
    return " ".join(it.strip() for it in sanitize_lines(text[:1000]))


def list_ids(agents: Iterable[dict[str, Any]]) -> list[str]:
    """Return the ids of participants."""
    return [str(it["agent_id"]) for it in agents]
