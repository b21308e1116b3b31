"""Screen of one thread: its messages, live activity, and the text field.

`ThreadPane` connects its parts. `MessageWindow` shows the messages, `thread_lines` draws the lines around them, and
`ThreadDraft` stores the unsent text.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Static

from roundelay.agents.approvals import read_request
from roundelay.display.text import sanitize
from roundelay.network.addresses import reply_thread
from roundelay.network.client import AnyMessage
from roundelay.network.errors import RequestError, RoundelayError
from roundelay.terminal.actions import read_yes_or_no
from roundelay.terminal.places import Place, find_place
from roundelay.tui.composer import Composer, Offered
from roundelay.tui.desk import Desk, Part, tell_here
from roundelay.tui.draft import ThreadDraft, send_replacement
from roundelay.tui.keys import Keys
from roundelay.tui.messages import MessageWindow
from roundelay.tui.parts import FileKeys, ReadStateKeys
from roundelay.tui.thread_lines import LinesBelow, OpenLine, write_activity, write_draft, write_title
from roundelay.tui.views import list_ids

VIEWING_SENT_EVERY_S = 20.0


class ThreadPane(ReadStateKeys, FileKeys):
    """Screen of one thread. If ``at`` is given, the thread is opened at that message."""

    name_here = "thread"
    tab = "threads"
    BINDINGS: ClassVar = [
        ("i", "write", "Write"),
        ("r", "reply", "Reply"),
        *Keys.decide,
        ("w", "why", "Why"),
        ("s", "stop", "Stop"),
        ("o", "take_over", "Take over / give back"),
        Binding("E", "edit", "Edit", show=False),
        Binding("S", "save_files", "Save files", show=False),
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
        """Destination of the text in the field, or None if the person may not write here."""
        self._at = at
        self._draft = ThreadDraft(desk, thread_id)
        self._lines_below = LinesBelow(desk, thread_id)
        self._open_line = OpenLine(desk, thread_id)
        self._sending: list[str] = []  # texts that are being sent to the hub
        self._is_viewed = False
        self._is_busy = False
        self._epoch = desk.epoch

    def compose(self) -> ComposeResult:
        offered = Offered()
        composer = Composer(
            offered, lambda: [agent_id for agent_id in list_ids(self.desk.agents) if agent_id != self.desk.me]
        )
        composer.load_text(self.desk.drafts.get(self.thread_id, ""))
        yield Static(id="about", markup=False)
        yield MessageWindow(self.desk.client, self.thread_id)
        yield Static(id="live", markup=False)
        yield offered
        yield Static(id="replying", markup=False)
        yield composer

    @property
    def marked_thread(self) -> str:
        return self.thread_id

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
        self.set_interval(VIEWING_SENT_EVERY_S, self._update_viewing)

    async def load(self, at: int | None = None) -> None:
        """Load the messages from the hub. Raises `RoundelayError`."""
        try:
            self.place = await find_place(self.desk.client, self.thread_id)
        except RoundelayError:
            self.place = None  # an operator reads a thread of other participants
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
        self.terminal.work(self._read_receipts)
        self.terminal.work(self._open_line.follow, self.window, self._draw)
        self._update_viewing()

    def focus_main(self) -> None:
        (self.window if self._at is not None else self.composer).focus()

    def on_resize(self) -> None:
        self._draw()

    def on_unmount(self) -> None:
        self.display = False
        self._update_viewing()

    @on(events.Show)
    @on(events.Hide)
    def _update_viewing(self) -> None:
        """Signal to the readers of the thread whether this person is viewing it."""
        was_viewed, self._is_viewed = self._is_viewed, self.display and self.thread_id in self.desk.threads
        # Repeat the signal while the thread is open, because the signal expires on other screens. When the person
        # leaves the thread, signal that only once.
        if was_viewed or self._is_viewed:
            signal = partial(self.desk.client.signal, "viewing", {"active": self._is_viewed}, thread_id=self.thread_id)
            self.terminal.work(signal)

    # --- drawing

    async def handle_message(self, message: AnyMessage) -> None:
        """Show a new message of this thread."""
        await self.window.add(message)
        if message.sender_id == self.desk.me:
            # Show the person's own message even if the person has scrolled elsewhere.
            await self.window.action_newest()
        self._draw()
        self.terminal.work(self._read_receipts)
        self.terminal.work(self._open_line.follow, self.window, self._draw)

    def handle_change(self, part: Part) -> None:
        if part in ("live", "threads"):
            self._draw()
        is_busy = self.thread_id in self.desk.activity.list_busy_threads()
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self.terminal.work(self._read_receipts)
        if part == "connection" and not self.desk.lost and self._epoch != self.desk.epoch:
            self.terminal.work(self.load)  # the ledger was replaced

    async def on_message_window_on_screen(self, event: MessageWindow.OnScreen) -> None:
        event.stop()
        self._lines_below.draw(self.window)
        await self.desk.acknowledge_shown(self.thread_id, event.first, event.last)

    def _draw(self) -> None:
        if not self.is_mounted:
            return
        desk, width = self.desk, max(self.size.width - 2, 20)
        self.query_one("#about", Static).update(write_title(desk, self.thread_id, width))
        for name, content in (
            ("#live", write_activity(desk, self.thread_id, self._sending, self._open_line.text, width)),
            ("#replying", write_draft(self._draft, width)),
        ):
            static = self.query_one(name, Static)
            static.display = bool(content)
            static.update(content)
        if self.place is not None:
            self.composer.border_title = Content(f"to {sanitize(self.place.describe())}").markup
        self._lines_below.draw(self.window)

    async def _read_receipts(self) -> None:
        await self._lines_below.read_receipts(self.window)

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
        reply, replaces = self._draft.reply_to, self._draft.replaces
        # Clear the field before the hub has answered, so that the person can continue. If the hub refuses the text, it
        # is restored.
        self.composer.load_text(self._draft.reset() or "")
        self._draft.store(self.composer.text)
        self.terminal.work(self._send, text.removeprefix("/") if text.startswith("//") else text, reply, replaces)

    async def _send(self, text: str, reply: AnyMessage | None, replaces: AnyMessage | None) -> None:
        desk, place = self.desk, self.place
        assert place is not None
        self._sending.append(text)
        self._draw()
        try:
            if replaces is not None:
                await self.terminal.show_sent(await send_replacement(desk.client, replaces, text))
                return
            # A reply to a selected message belongs to that message, even if the text is a plain "yes".
            decision = read_yes_or_no(desk.activity, self.thread_id, text) if reply is None else None
            if decision is not None:
                await self.terminal.actions.send_decision(decision[1], f"/{decision[0]}")
                return
            if reply is not None:
                stored = await desk.client.reply(reply, text)
            else:
                # In a reply thread, a text answers the newest message, which may have arrived after the thread was
                # opened.
                reply_to = max(place.reply_to, self.window.newest) if place.reply_to is not None else None
                stored = await desk.client.send(place.to, text, reply_to=reply_to, conversation=place.conversation)
            await self.terminal.show_sent(stored.seq)
        except RoundelayError as error:
            desk.show_line(f"Not sent: {tell_here(str(error))}")
            # Do not overwrite text that the person has written meanwhile.
            if self.is_mounted and not self.composer.text:
                self.composer.load_text(text)
            else:
                desk.drafts.setdefault(self.thread_id, text)
        finally:
            self._sending.remove(text)
            if self.is_mounted:
                self._draw()

    def on_composer_left(self, event: Composer.Left) -> None:
        event.stop()
        if self._draft.reply_to is None and self._draft.replaces is None:
            self.window.focus()
            return
        self._leave_reply_or_edit()
        self._draw()

    def _leave_reply_or_edit(self) -> None:
        text_before_edit = self._draft.reset()
        if text_before_edit is not None:
            self.composer.load_text(text_before_edit)

    def on_text_area_changed(self) -> None:
        self._draft.store(self.composer.text)
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
            self._leave_reply_or_edit()
            self._draft.reply_to = self.chosen
            self._draw()
            self.composer.focus()

    def action_edit(self) -> None:
        chosen = self.chosen
        if chosen is None or chosen.sender_id != self.desk.me or self.place is None:
            self.desk.show_hint("Select a message of your own by j and k: E edits it.")
        elif not isinstance(chosen.content, str):
            self.desk.show_hint(f"#{chosen.seq} contains more than text, so it cannot be edited here.")
        else:
            self._draft.start_edit(chosen, self.composer.text)
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
        """Decide on the selected request, or on the request that waits in this thread."""
        waiting = [request.seq for request in self.desk.activity.list_own_requests(self.thread_id)]
        if self.chosen is not None and read_request(self.chosen) is not None:
            self.terminal.actions.decide(word, self.chosen.seq, scope)
        elif len(waiting) == 1:
            self.terminal.actions.decide(word, waiting[0], scope)
        else:
            self.desk.show_hint("Several calls wait here: select one by j and k." if waiting else "No call waits here.")

    def action_why(self) -> None:
        """Explain the selected message, or the newest message of this thread."""
        boxes = self.window.boxes
        if boxes:
            self.terminal.open_why((self.chosen or boxes[-1].message).seq)
        else:
            self.desk.show_hint("There is no message here yet. w explains why a message was sent.")

    def action_stop(self) -> None:
        self.terminal.actions.stop(self.thread_id)

    def action_take_over(self) -> None:
        self.terminal.actions.toggle_takeover(self.thread_id)
