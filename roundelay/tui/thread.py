"""The screen of one thread: its messages, growing texts, and the text field.

Unsent text belongs to the desk (`Desk.drafts`): it survives the pane and a lost connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Static

from roundelay.agents.approvals import read_request
from roundelay.display.screen import PLAIN
from roundelay.display.text import fit_start, sanitize
from roundelay.live_activity import LiveActivity
from roundelay.network.addresses import conversation_of, reply_thread
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RequestError, RoundelayError
from roundelay.network.text import count
from roundelay.terminal.actions import end_takeover, read_yes_or_no, start_takeover, stop_work
from roundelay.terminal.activity_lines import draw_growing_texts
from roundelay.terminal.places import Place, find_place
from roundelay.tui.composer import Composer, Offered
from roundelay.tui.desk import Desk, Part, tell_here
from roundelay.tui.dialogs import Ask
from roundelay.tui.keys import Keys
from roundelay.tui.messages import MessageWindow
from roundelay.tui.parts import Pane
from roundelay.tui.views import list_ids

VIEWING_SENT_EVERY_S = 20.0
MAX_LIVE_ROWS, MAX_TOLD_RECIPIENTS, MAX_READERS = 8, 4, 6
_COME_TO = {
    "queued": "queued",
    "delivered": "delivered",
    "handled": "handled",
    "in_prompt": "seen",
    "dead": "not delivered",
    "removed": "removed",
}


class ThreadPane(Pane):
    """One thread, opened at the message ``at`` if given."""

    name_here = "thread"
    tab = "threads"
    BINDINGS: ClassVar = [
        ("i", "write", "Write"),
        ("r", "reply", "Reply"),
        *Keys.decide,
        ("w", "why", "Why"),
        ("s", "stop", "Stop"),
        ("o", "hold", "Take over / give back"),
        Binding("E", "say_anew", "Edit", show=False),
        Binding("t", "replies", "Replies", show=False),
        Binding("u", "read", "All read", show=False),
        Binding("p", "mark('is_pinned')", "Pin", show=False),
        Binding("m", "mark('is_muted')", "Mute", show=False),
        Binding("z", "mark('is_archived')", "Archive", show=False),
        Binding("T", "name", "Name", show=False),
    ]

    def __init__(self, desk: Desk, thread_id: str, at: int | None = None) -> None:
        super().__init__(desk)
        self.thread_id = thread_id
        self.place: Place | None = None
        """Where the text field sends to; None if the person may not write here."""
        self._at = at
        self._reply_to: AnyMessage | None = None
        self._replaces: AnyMessage | None = None
        self._set_aside = ""  # unsent text that a replacement has pushed aside
        self._is_viewed = False
        self._waiting: list[str] = []  # number of texts being sent
        self._receipts: dict[int, str] = {}
        self._receipts_are_stale = self._is_reading_receipts = False
        self._is_busy = False
        self._epoch = desk.epoch

    def compose(self) -> ComposeResult:
        offered = Offered()
        composer = Composer(offered, lambda: [it for it in list_ids(self.desk.agents) if it != self.desk.me])
        composer.load_text(self.desk.drafts.get(self.thread_id, ""))
        yield Static(id="about", markup=False)
        yield MessageWindow(self.desk.client, self.thread_id)
        yield Static(id="live", markup=False)
        yield offered
        yield Static(id="replying", markup=False)
        yield composer

    @property
    def window(self) -> MessageWindow:
        return self.query_one(MessageWindow)

    @property
    def composer(self) -> Composer:
        return self.query_one(Composer)

    def on_mount(self) -> None:
        self.composer.border_title = "to …"
        self._draw()
        self.terminal.work(self.load, self._at)
        self.set_interval(VIEWING_SENT_EVERY_S, self._tell_viewing)

    async def load(self, at: int | None = None) -> None:
        """Load the messages from the hub. Raises `RoundelayError`."""
        try:
            self.place = await find_place(self.desk.client, self.thread_id)
        except RoundelayError:
            self.place = None  # a thread of others, which an operator reads
        row = self.desk.threads.get(self.thread_id)
        try:
            unread_from = row.read_upto if row is not None and row.unread and not self.desk.lacks_marks else None
            await self.window.load(at, unread_from)
        except RequestError:
            if row is not None:
                raise  # a thread without messages
        self.composer.display = self.place is not None
        self._epoch = self.desk.epoch
        self._draw()
        self._ask_receipts()
        self._tell_viewing()

    def focus_main(self) -> None:
        (self.window if self._at is not None else self.composer).focus()

    def on_resize(self) -> None:
        self._draw()

    def on_show(self) -> None:
        self._tell_viewing()

    def on_hide(self) -> None:
        self._tell_viewing()

    def on_unmount(self) -> None:
        self.display = False
        self._tell_viewing()

    def _tell_viewing(self) -> None:
        """Signal the readers of the thread whether this person looks at it."""
        was_viewed, self._is_viewed = self._is_viewed, self.display and self.thread_id in self.desk.threads
        if was_viewed or self._is_viewed:
            signal = partial(self.desk.client.signal, "viewing", {"active": self._is_viewed}, thread_id=self.thread_id)
            self.terminal.work(signal)

    def _keep_draft(self) -> None:
        text = self.composer.text if self._replaces is None else self._set_aside
        if text:
            self.desk.drafts[self.thread_id] = text
        else:
            self.desk.drafts.pop(self.thread_id, None)

    # --- drawing

    async def handle_message(self, message: AnyMessage) -> None:
        """Show a new message of this thread."""
        await self.window.add(message)
        if message.sender_id == self.desk.me:
            await self.window.action_newest()
        self._draw()
        self._ask_receipts()

    def handle_change(self, part: Part) -> None:
        if part in ("live", "threads"):
            self._draw()
        is_busy = self.thread_id in self.desk.activity.list_busy_threads()
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._ask_receipts()
        if part == "connection" and not self.desk.lost and self._epoch != self.desk.epoch:
            self.terminal.work(self.load)  # another ledger

    async def on_message_window_on_screen(self, event: MessageWindow.OnScreen) -> None:
        event.stop()
        self._draw_below()
        await self.desk.acknowledge_shown(self.thread_id, event.first, event.last)

    def _draw(self) -> None:
        if not self.is_mounted:
            return
        desk, width = self.desk, max(self.size.width - 2, 20)
        row, held = desk.threads.get(self.thread_id), desk.activity.takeovers.get(self.thread_id)
        readers = [sanitize(it) for it in row.readers[:MAX_READERS]] if row is not None else []
        more = (
            f" and {len(row.readers) - MAX_READERS} more" if row is not None and len(row.readers) > MAX_READERS else ""
        )
        told = f"  read by {', '.join(readers)}{more}" if readers else ""
        looking = [sanitize(it) for it in desk.activity.list_viewing(self.thread_id) if it != desk.me]
        look = (
            f"  {', '.join(looking[:MAX_READERS])} {'looks' if len(looking) == 1 else 'look'} here" if looking else ""
        )
        holds = (
            f"  taken over by {'you: agents are silent here' if held == desk.me else sanitize(held)}" if held else ""
        )
        self.query_one("#about", Static).update(
            Content.assemble(
                (desk.name_thread(self.thread_id), "bold"),
                (holds, "bold magenta"),
                (look, "cyan"),
                (fit_start(told, width), "dim"),
            )
        )
        lines = draw_growing_texts(desk.activity, self.thread_id, width=width, rows=MAX_LIVE_ROWS, paint=PLAIN)
        silent = desk.activity.unanswered.get(self.thread_id, ())
        lines += [fit_start(f"{sanitize(it)} finished without an answer", width) for it in silent]
        lines += [fit_start(f"… on its way to the hub: {sanitize(it)}", width) for it in self._waiting]
        live = self.query_one("#live", Static)
        live.display = bool(lines)
        live.update(Content("\n".join(lines)))
        reply, replaces = self._reply_to, self._replaces
        replying = self.query_one("#replying", Static)
        replying.display = reply is not None or replaces is not None
        if reply is not None:
            replying.update(
                Content(fit_start(f"Reply to #{reply.seq} of {sanitize(reply.sender_id)} (Esc: not)", width))
            )
        if replaces is not None:
            replying.update(Content(fit_start(f"In the place of #{replaces.seq} (Esc: not)", width)))
        if self.place is not None:
            self.composer.border_title = Content(f"to {sanitize(self.place.describe())}").markup
        self._draw_below()

    def _draw_below(self) -> None:
        """Draw the lines below messages: replies, and receipts of the person's own messages."""
        is_at_end = bool(self.window.boxes) and self.window.is_at_end
        for box in self.window.boxes:
            lines = []
            replies = self.desk.threads.get(reply_thread(box.seq))
            if replies is not None and replies.thread_id != self.thread_id:
                newest = f", the newest of {replies.sender_id}: {replies.text}" if replies.text else ""
                lines.append(fit_start(f"↳ {count(replies.messages, 'message')}{newest} (t opens them)", 300))
            if box.seq in self._receipts:
                lines.append(self._receipts[box.seq])
            box.set_below(lines)
            if read_request(box.message) is not None:
                box.set_waiting(any(box.seq == it.seq for it in self.desk.activity.list_own_requests()))
        if is_at_end:
            self.window.call_after_refresh(self.window.scroll_end, animate=False)

    def _ask_receipts(self) -> None:
        self._receipts_are_stale = True
        if not self._is_reading_receipts:
            self.terminal.work(self._read_receipts)

    async def _read_receipts(self) -> None:
        """Read the receipts of the person's newest message: who has seen it, and whose prompt holds it."""
        self._is_reading_receipts = True
        try:
            while self._receipts_are_stale and self.is_mounted:
                self._receipts_are_stale = False
                own = next((it for it in reversed(self.window.boxes) if it.message.sender_id == self.desk.me), None)
                if own is not None:
                    args = {"seq": own.seq, "limit": MAX_TOLD_RECIPIENTS}
                    status = await self.desk.client.call("network.message_status", args)
                    self._receipts = {own.seq: self._tell(status)} if status["recipients"] else {}
                    self._draw_below()
        finally:
            self._is_reading_receipts = False

    def _tell(self, status: dict[str, Any]) -> str:
        told = [f"{sanitize(it['agent_id'])}: {_COME_TO.get(it['state'], it['state'])}" for it in status["recipients"]]
        return sanitize("; ".join(told) + (" …" if status["has_more"] else ""))

    # --- actions

    async def on_composer_entered(self, event: Composer.Entered) -> None:
        event.stop()
        text = event.text
        if not text.strip() or self.place is None:
            return
        if text.startswith("/") and not text.startswith("//"):
            self.desk.show_hint(
                "The commands of a chat are keys here: Esc, then ? lists them. A text that begins with / is sent as //…"
            )
            return
        reply, self._reply_to = self._reply_to, None
        replaces = self._leave_replaced()
        self.composer.load_text(self._set_aside if replaces is not None else "")
        self._keep_draft()
        self.terminal.work(self._send, text.removeprefix("/") if text.startswith("//") else text, reply, replaces)

    def _leave_replaced(self) -> AnyMessage | None:
        replaces, self._replaces = self._replaces, None
        return replaces

    async def _send(self, text: str, reply: AnyMessage | None, replaces: AnyMessage | None) -> None:
        desk, place = self.desk, self.place
        assert place is not None
        self._waiting.append(text)
        self._draw()
        try:
            if replaces is not None:
                await self.terminal.show_sent(await self._send_anew(text, replaces))
                return
            decision = read_yes_or_no(desk.activity, self.thread_id, text) if reply is None else None
            if decision is not None:
                await self.terminal.actions.send_decision(decision[1], f"/{decision[0]}")
                return
            if reply is not None:
                stored = await desk.client.reply(reply, text)
            else:
                reply_to = max(place.reply_to, self.window.newest) if place.reply_to is not None else None
                stored = await desk.client.send(place.to, text, reply_to=reply_to, conversation=place.conversation)
            await self.terminal.show_sent(stored.seq)
        except RoundelayError as error:
            desk.show_line(f"Not sent: {tell_here(str(error))}")
            if self.is_mounted and not self.composer.text:
                self.composer.load_text(text)
            else:
                desk.drafts.setdefault(self.thread_id, text)
        finally:
            self._waiting.remove(text)
            if self.is_mounted:
                self._draw()

    async def _send_anew(self, text: str, old: AnyMessage) -> int:
        """Send a text that replaces an own message, and stop the reactions to that. Return the new seq."""
        client = self.desk.client
        for it in (await client.call("network.message_status", {"seq": old.seq}))["recipients"]:
            newest = it.get("again", it)  # the reaction after a takeover
            if newest.get("reaction_status") == "open" and newest.get("reaction"):
                await client.call("network.cancel", {"reaction": newest["reaction"]})
        sent = await client.send(
            old.to,
            text,
            reply_to=old.reply_to,
            conversation=conversation_of(old.thread_id) or None,
            requires_response=old.requires_response or None,
            metadata={"replaces": old.seq},
        )
        return sent.seq

    def on_composer_left(self, event: Composer.Left) -> None:
        event.stop()
        if self._leave_replaced() is not None:
            self.composer.load_text(self._set_aside)
            self._draw()
        elif self._reply_to is not None:
            self._reply_to = None
            self._draw()
        else:
            self.window.focus()

    def on_text_area_changed(self) -> None:
        self._keep_draft()
        if self.composer.text and self.place is not None:
            self.terminal.actions.send_typing(self.place)

    @property
    def chosen(self) -> AnyMessage | None:
        box = self.window.find(self.window.selected)
        return box.message if box is not None else None

    def action_write(self) -> None:
        if self.place is not None:
            self.composer.focus()

    def action_reply(self) -> None:
        if self.chosen is None:
            self.desk.show_hint("Select a message by j and k: r replies to it.")
        elif self.place is not None:
            self._reply_to = self.chosen
            if self._leave_replaced() is not None:
                self.composer.load_text(self._set_aside)
            self._draw()
            self.composer.focus()

    def action_say_anew(self) -> None:
        chosen = self.chosen
        if chosen is None or chosen.sender_id != self.desk.me or self.place is None:
            self.desk.show_hint("Select a message of your own by j and k: E edits it.")
        elif not isinstance(chosen.content, str):
            self.desk.show_hint(f"#{chosen.seq} is more than a text: it cannot be edited here.")
        else:
            if self._replaces is None:
                self._set_aside = self.composer.text
            self._replaces, self._reply_to = chosen, None
            self.composer.load_text(chosen.content)
            self.composer.move_cursor(self.composer.document.end)
            self._draw()
            self.composer.focus()

    def action_replies(self) -> None:
        if self.chosen is None:
            self.desk.show_hint("Select a message by j and k: t opens the replies to it.")
        elif reply_thread(self.chosen.seq) in self.desk.threads:
            self.terminal.open_thread(reply_thread(self.chosen.seq))

    def action_decide(self, word: str, scope: str) -> None:
        """Decide on the selected request, or on the one that waits here."""
        waiting = [it.seq for it in self.desk.activity.list_own_requests(self.thread_id)]
        if self.chosen is not None and read_request(self.chosen) is not None:
            self.terminal.actions.decide(word, self.chosen.seq, scope)
        elif len(waiting) == 1:
            self.terminal.actions.decide(word, waiting[0], scope)
        else:
            self.desk.show_hint("Several calls wait here: select one by j and k." if waiting else "No call waits here.")

    def action_why(self) -> None:
        """Explain the selected message, or the newest one here."""
        boxes = self.window.boxes
        if boxes:
            self.terminal.open_why((self.chosen or boxes[-1].message).seq)
        else:
            self.desk.show_hint("Nothing was said here yet: w tells why a message was said.")

    def action_stop(self) -> None:
        self.terminal.work(self._say, stop_work)

    def action_hold(self) -> None:
        if self.thread_id in self.desk.activity.takeovers:
            self.terminal.work(self._say, end_takeover)
            return

        def take(answer: str | None) -> None:
            if answer is not None and answer.strip().lower() in ("", "y", "yes"):
                self.terminal.work(self._say, start_takeover)

        name = self.desk.name_thread(self.thread_id)
        self.app.push_screen(Ask(f"Take over {name}? Agents will not answer here. Enter: yes, Esc: no"), take)

    async def _say(self, change: Callable[[NetworkClient, LiveActivity, str], Awaitable[str]]) -> None:
        self.desk.show_line(await change(self.desk.client, self.desk.activity, self.thread_id))

    def action_read(self) -> None:
        if self.thread_id in self.desk.threads:
            self.terminal.work(self.desk.read_all, self.thread_id)

    def action_mark(self, name: str) -> None:
        self.terminal.actions.toggle_read_state(self.thread_id, name)

    def action_name(self) -> None:
        self.terminal.actions.name_thread(self.thread_id)
