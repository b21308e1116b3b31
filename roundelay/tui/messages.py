"""Messages of a thread on the screen. Each message is a widget, in a window that moves over the thread.

`MessageWindow` has at most `MAX_SHOWN` widgets. It fetches more messages when the person scrolls near an end, and
removes distant widgets. It reports the messages that were on the screen, and the `Desk` acknowledges these messages.
This module sanitizes participants' text and breaks it into lines. Such text is never treated as markup.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.message import Message as TextualMessage
from textual.widget import Widget
from textual.worker import Worker

from roundelay.agents.approvals import read_request
from roundelay.display.screen import describe_place, format_time, list_beside, name_sender
from roundelay.display.text import break_lines, sanitize, sanitize_lines
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.network.text import count
from roundelay.runs.approvals import KnownRequests, format_until, read_until
from roundelay.tui.keys import Keys
from roundelay.tui.markdown import render

MAX_SHOWN, PAGE = 200, 50
NEAR = 6
"""Distance from an end of the window, in lines, at which more messages are loaded."""
MAX_LINES, MAX_CHARS = 40, 4000
"""Maximum number of lines of a folded message."""
MAX_OPEN_LINES, MAX_OPEN_CHARS = 4000, 200_000
INDENT = "  "
NAME_COLORS = ("#5fafff", "#87d787", "#d7af5f", "#d787d7", "#5fd7d7", "#ff9f6f", "#afafff", "#c0d75f")
"""Colors of participants' names. Red is reserved for errors."""


def name_color(agent_id: str) -> str:
    """Return a participant's color, which is the same on every screen."""
    return NAME_COLORS[zlib.crc32(agent_id.encode()) % len(NAME_COLORS)]


def fold(text: str, width: int, *, is_open: bool = False) -> list[str]:
    """Return a text as sanitized lines of at most ``width`` columns. If lines are omitted, the last line shows how
    many.
    """
    most_lines, most_chars = (MAX_OPEN_LINES, MAX_OPEN_CHARS) if is_open else (MAX_LINES, MAX_CHARS)
    # Cut the text before it is broken into lines: a message of one megabyte would block the screen.
    lines = break_lines(sanitize_lines(text[:most_chars]), max(width, 8))
    if len(text) <= most_chars and len(lines) <= most_lines:
        return lines
    how = "roundelay history shows all" if is_open else "Enter shows it"
    return [*lines[:most_lines], f"… of {count(len(text), 'character')}; {how}"]


def fold_markdown(text: str, width: int, *, is_open: bool = False) -> Sequence[Content | str]:
    """Fold a text as `fold` does, but with rendered Markdown."""
    most_lines, most_chars = (MAX_OPEN_LINES, MAX_OPEN_CHARS) if is_open else (MAX_LINES, MAX_CHARS)
    lines = render("\n".join(sanitize_lines(text[:most_chars])), width)
    if lines is None:
        return fold(text, width, is_open=is_open)
    if len(text) <= most_chars and len(lines) <= most_lines:
        return lines
    return [*lines[:most_lines], f"… of {count(len(text), 'character')}; Enter shows it"]


def list_replaced(messages: Iterable[AnyMessage]) -> dict[int, int]:
    """Return the messages that their senders have replaced. The values are the sequence numbers of the newest
    replacements."""
    senders: dict[int, str] = {}
    found = {}
    for it in messages:
        old = (it.metadata or {}).get("replaces")
        # Accept a replacement only from the same sender: anybody can write this metadata and could hide others'
        # messages.
        if type(old) is int and senders.get(old) == it.sender_id:
            found[old] = it.seq
        senders[it.seq] = it.sender_id
    return found


class MessageBox(Widget):
    """Widget of one message. ``below`` contains lines about its replies, its readers, and the actions that the person
    may take."""

    def __init__(self, message: AnyMessage, me: str, decision: str | None = None) -> None:
        super().__init__(markup=False)
        self.message = message
        self._decision = decision  # text of the decision, if the message is a decision
        self.is_open = False
        self.below: tuple[str, ...] = ()
        self._is_waiting = False  # whether the message waits for a decision
        self._replaced_by: int | None = None
        self._me = me
        self._drawn: tuple[int, Content] | None = None
        self.set_class(message.sender_id == me, "-own")
        self.set_class(read_request(message) is not None, "-request")

    @property
    def seq(self) -> int:
        return self.message.seq

    def set_below(self, lines: Sequence[str]) -> None:
        # Skip an unchanged list: a new layout for each event of the network would disturb scrolling.
        if tuple(lines) != self.below:
            self.below = tuple(lines)
            self._draw_again()

    def set_waiting(self, is_waiting: bool) -> None:
        """Set whether the approval request in this message waits for a decision."""
        if is_waiting != self._is_waiting:
            self._is_waiting = is_waiting
            self._draw_again()

    def set_replaced(self, by: int | None) -> None:
        """Set the message that replaces this message, and fold the replaced text."""
        if by != self._replaced_by:
            self._replaced_by = by
            self._draw_again()

    def toggle(self) -> None:
        """Unfold a long text, or fold it again."""
        self.is_open = not self.is_open
        self._draw_again()

    def _draw_again(self) -> None:
        self._drawn = None
        # Request a new layout: Textual would keep the old height and cut off the new text.
        self.clear_cached_dimensions()
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._draw(width).plain.count("\n") + 1

    def render(self) -> Content:
        return self._draw(self.content_size.width)

    def _draw(self, width: int) -> Content:
        if self._drawn is None or self._drawn[0] != width:
            self._drawn = (width, self._assemble(width))
        return self._drawn[1]

    def _assemble(self, width: int) -> Content:
        it, room = self.message, width - len(INDENT)
        sender = name_sender(it)
        answers = f" (re #{it.reply_to})" if it.reply_to is not None else ""
        head, place = f"{format_time(it.sent_at)} #{it.seq} ", f" → {sanitize(describe_place(it.to, it.thread_id))}"
        parts: list[Content | str | tuple[str, str]] = [(head, "dim"), (sanitize(sender), f"bold {name_color(sender)}")]
        parts.append((f"{place}{answers}", "dim"))
        if self._replaced_by is not None:
            parts.append((f"\n{INDENT}replaced by #{self._replaced_by}", "dim italic"))
            # The new text is further down, so show the old text only on request.
            if not self.is_open:
                return Content.assemble(*parts, ("; Enter shows what it said", "dim italic"))
        text = fold_markdown(it.text, room, is_open=self.is_open)
        if self._decision is not None:
            text = fold(self._decision, room, is_open=self.is_open)
        for line in text:
            parts += [f"\n{INDENT}", line]
        beside = [line for text in list_beside(it) for line in fold(text, room)]
        parts += [(f"\n{INDENT}{line}", "dim") for line in beside]
        if self._is_waiting:
            until = read_until(it)
            time = f" until {format_until(until)}" if until is not None else ""
            told = f"waits{time}: a approve, A in this thread, L always, d deny, e edit"
            parts += [(f"\n{INDENT}{line}", "bold yellow") for line in fold(told, room)]
        parts += [(f"\n{INDENT}{line}", "dim italic") for text in self.below for line in fold(text, room)]
        return Content.assemble(*parts)

    def on_click(self) -> None:
        window = self.parent
        if isinstance(window, MessageWindow):
            window.select(self.seq)
            window.focus()


class MessageWindow(VerticalScroll, can_focus=True):
    """Visible part of a thread, with one selected message."""

    BINDINGS: ClassVar = [
        *Keys.move,
        Binding("home", "oldest", "Oldest here", show=False),
        Binding("end,G", "newest", "Newest", show=False),
        Binding("enter", "open", "All of a long text", show=False),
    ]

    class OnScreen(TextualMessage):
        """Event: the messages in this range of sequence numbers were on the screen."""

        def __init__(self, first: int, last: int) -> None:
            super().__init__()
            self.first, self.last = first, last

    def __init__(self, client: NetworkClient, thread_id: str) -> None:
        super().__init__()
        self.thread_id = thread_id
        self.selected: int | None = None
        self.has_before = self.has_after = False
        self.newest = 0
        """Sequence number of the newest known message of the thread."""
        self._client = client
        self._requests = KnownRequests(client)
        self._is_loading = False
        self._is_settled = True  # whether loaded messages have reached their final position
        self._told = (0, 0)

    @property
    def boxes(self) -> list[MessageBox]:
        """Widgets of the messages, oldest first."""
        return [it for it in self.children if isinstance(it, MessageBox) and it.is_attached]

    def find(self, seq: int | None) -> MessageBox | None:
        return next((it for it in self.boxes if it.seq == seq), None)

    # --- loading

    async def load(self, at: int | None = None, unread_from: int | None = None) -> None:
        """Show the thread from its first unread message, or the part of the thread around one message.

        Raises `RoundelayError`.
        """
        page = await self._client.history(self.thread_id, limit=1 if at is not None else PAGE)
        self.newest = page.messages[-1].seq if page.messages else 0
        messages = list(page.messages)
        if at is not None:
            page = await self._client.history(self.thread_id, before=at + 1, limit=PAGE)
            messages = [*page.messages, *await self._read_after(at)]
        self._is_settled = False
        await self.remove_children(MessageBox)
        self.has_before, self.has_after = page.has_more, bool(messages) and messages[-1].seq < self.newest
        await self._mount(messages)
        self.selected = None
        first_unread = next((it for it in self.boxes if unread_from is not None and it.seq > unread_from), None)
        self.call_after_refresh(self._go_to, at, first_unread)

    def _go_to(self, at: int | None, first_unread: MessageBox | None) -> None:
        """When the layout is done, scroll to a message, to the first unread message, or to the end."""
        if at is not None:
            self.select(at)
        elif first_unread is not None:
            self.scroll_to_widget(first_unread, animate=False, top=True)
        else:
            self.scroll_end(animate=False)
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        self._is_settled = True
        self.look()

    async def add(self, message: AnyMessage) -> None:
        """Add a new message if the end of the thread is loaded. Scroll to the message if the person is looking at the
        end.
        """
        self.newest = max(self.newest, message.seq)
        boxes = self.boxes
        self._told = (0, 0)  # forces a new report, because the history may already contain the message
        self.call_after_refresh(self.look)
        # This part of the thread is not loaded. The message appears when the person scrolls there.
        if self.has_after or (boxes and self.has_before and message.seq < boxes[0].seq) or self.find(message.seq):
            return
        # Check this before the message is added, because the message moves the end.
        follows = self.is_at_end
        behind = next((it for it in boxes if it.seq > message.seq), None)
        await self._mount([message], before=behind)
        if follows:
            await self._drop(self.boxes[:-MAX_SHOWN])
            self.scroll_end(animate=False)
        elif len(self.boxes) > MAX_SHOWN:
            await self._drop(self.boxes[MAX_SHOWN:])
        self.call_after_refresh(self.look)

    @property
    def is_at_end(self) -> bool:
        boxes = self.boxes
        if not self._is_settled or (boxes and not boxes[-1].virtual_region.height):
            return False  # new widgets have no position yet
        return not self.has_after and self.max_scroll_y - self.scroll_y <= 2

    async def load_before(self) -> None:
        """Load earlier messages above, and remove widgets far below. Raises `RoundelayError`."""
        first = self.boxes[0]
        page = await self._client.history(self.thread_id, before=first.seq, limit=PAGE)
        self.has_before = page.has_more
        distance = first.virtual_region.y - self.scroll_y
        await self._mount(page.messages, before=first)
        await self._drop(self.boxes[MAX_SHOWN:])
        self.call_after_refresh(lambda: self._keep_at(first, distance))

    async def load_after(self) -> None:
        """Load later messages below, and remove widgets far above. Raises `RoundelayError`."""
        last = self.boxes[-1]
        found = await self._read_after(last.seq)
        self.has_after = bool(found) and found[-1].seq < self.newest
        distance = last.virtual_region.y - self.scroll_y
        await self._mount(found)
        too_many = self.boxes[:-MAX_SHOWN]
        if too_many:
            await self._drop(too_many)
            self.has_before = True
        self.call_after_refresh(lambda: self._keep_at(last, distance))

    async def _read_after(self, seq: int) -> list[AnyMessage]:
        """Return some of the messages that follow a sequence number.

        The hub only pages backward from a seq, so guess a seq ahead. Guess further ahead if the thread is sparse, and
        nearer if a page would not reach back to the current messages.
        """
        nothing_upto, step = 0, 400
        while True:
            page = await self._client.history(self.thread_id, before=seq + step + 1, limit=500)
            found = [it for it in page.messages if it.seq > seq]
            # The page does not reach back to ``seq``, so messages in between are missing.
            is_cut = page.has_more and len(found) == len(page.messages)
            if found and not is_cut:
                return found[:PAGE]
            if found:
                step = nothing_upto + (step - nothing_upto) // 2
            elif seq + step >= self.newest:
                return []
            else:
                nothing_upto, step = step, step * 4

    async def replace(self, seq: int) -> None:
        """Show a message in its new form after it was edited or deleted. Raises `RoundelayError`."""
        page = await self._client.history(self.thread_id, before=seq + 1, limit=1)
        old = self.find(seq)  # find it after the read, because the person may have scrolled meanwhile
        if old is not None and page.messages and page.messages[-1].seq == seq:
            await self._mount(page.messages[-1:], before=old)
            await old.remove()

    async def _mount(self, messages: Iterable[AnyMessage], before: MessageBox | None = None) -> None:
        await self.mount_all([await self._make(it) for it in messages], before=before)
        replaced = list_replaced(it.message for it in self.boxes)
        for box in self.boxes:
            box.set_replaced(replaced.get(box.seq))

    async def _make(self, message: AnyMessage) -> MessageBox:
        return MessageBox(message, self._client.agent_id, await self._requests.describe(message))

    async def _drop(self, boxes: Sequence[MessageBox]) -> None:
        if not boxes:
            return
        if boxes[-1] is self.boxes[-1]:
            self.has_after = True
        else:
            self.has_before = True
        await self.remove_children(boxes)

    def _keep_at(self, box: MessageBox, distance: float) -> None:
        """Keep a message at the same distance from the top, so that the text that the person reads does not move."""
        self.scroll_to(y=box.virtual_region.y - distance, animate=False, force=True)
        self.call_after_refresh(self.look)

    # --- scrolling and selection

    def watch_scroll_y(self, old: float, new: float) -> None:
        super().watch_scroll_y(old, new)
        if self.is_attached:
            self.call_after_refresh(self.look)

    def look(self) -> None:
        """Report which messages are on the screen, and load more messages near an end."""
        boxes = self.boxes
        # Wait for the layout: before it is done, every message seems to be on the screen and would count as read.
        if not boxes or not self._is_settled or not self.is_on_screen or self.size.height == 0:
            return
        bottom = self.scroll_y + self.size.height
        seen = [it.seq for it in boxes if it.virtual_region.y < bottom and it.virtual_region.height]
        if seen and self._told != (boxes[0].seq, seen[-1]):
            self._told = (boxes[0].seq, seen[-1])
            self.post_message(self.OnScreen(*self._told))
        if self._is_loading:
            return
        if self.has_before and self.scroll_y < NEAR:
            self._load(before=True)
        elif self.has_after and self.max_scroll_y - self.scroll_y < NEAR:
            self._load(before=False)

    def _load(self, *, before: bool) -> None:
        self._is_loading = True

        async def load() -> None:
            try:
                await (self.load_before() if before else self.load_after())
            except RoundelayError:
                pass  # the next scroll event retries
            finally:
                self._is_loading = False

        _: Worker[None] = self.run_worker(load)

    def select(self, seq: int | None) -> None:
        """Select the message to which the keys apply."""
        for it in self.boxes:
            it.set_class(it.seq == seq, "-selected")
        self.selected = seq
        box = self.find(seq)
        if box is not None:
            self.scroll_to_widget(box, animate=False)

    def _move(self, by: int) -> None:
        seqs = [it.seq for it in self.boxes]
        if not seqs:
            return
        if self.selected in seqs:
            place = min(max(seqs.index(self.selected) + by, 0), len(seqs) - 1)
        else:
            place = len(seqs) - 1
        self.select(seqs[place])

    def action_down(self) -> None:
        self._move(1)

    def action_up(self) -> None:
        self._move(-1)

    def action_oldest(self) -> None:
        self.scroll_home(animate=False)
        if self.boxes:
            self.select(self.boxes[0].seq)

    async def action_newest(self) -> None:
        if self.has_after:
            await self.load()
        self.select(None)
        self.scroll_end(animate=False)

    def action_open(self) -> None:
        box = self.find(self.selected)
        if box is not None:
            box.toggle()

    def on_resize(self, _event: events.Resize) -> None:
        # A person who reads the end should still see it after the window changes its size.
        if self.boxes and self.is_at_end:
            self.scroll_end(animate=False)
        self.call_after_refresh(self.look)
