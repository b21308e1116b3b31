"""Lines around the messages of a thread: its title, live activity, and replies and receipts below messages.

`ThreadPane` shows the title and the activity. `LinesBelow` draws lines in the widgets of a `MessageWindow`. This module
sanitizes participants' text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from textual.content import Content

from roundelay.agents.approvals import read_request
from roundelay.display.screen import PLAIN
from roundelay.display.text import fit_start, sanitize
from roundelay.network.addresses import reply_thread
from roundelay.network.client import OpenItems
from roundelay.network.errors import RoundelayError
from roundelay.network.text import count
from roundelay.runs.open_items import summarize_open
from roundelay.terminal.activity_lines import draw_growing_texts
from roundelay.tui.desk import Desk
from roundelay.tui.draft import ThreadDraft
from roundelay.tui.messages import MessageWindow

MAX_LIVE_ROWS, MAX_RECIPIENTS, MAX_READERS = 8, 4, 6
SETTLE_S, OPEN_WAIT_S = 0.5, 15.0
"""Time before the open items of a new message are read, so that fast answers change nothing on the screen, and time
after which their ages are read again."""
_STATES = {
    "queued": "queued",
    "delivered": "delivered",
    "handled": "handled",
    "in_prompt": "seen",
    "dead": "not delivered",
    "removed": "removed",
}


def write_title(desk: Desk, thread_id: str, width: int) -> Content:
    """Return the title line of a thread, with its name, the person who has taken it over, its viewers and its
    readers."""
    row, holder = desk.threads.get(thread_id), desk.activity.takeovers.get(thread_id)
    readers = [sanitize(reader) for reader in row.readers] if row is not None else []
    more = f" and {len(readers) - MAX_READERS} more" if len(readers) > MAX_READERS else ""
    read_by = f"  read by {', '.join(readers[:MAX_READERS])}{more}" if readers else ""
    viewers = [sanitize(viewer) for viewer in desk.activity.list_viewing(thread_id) if viewer != desk.me]
    verb = "looks" if len(viewers) == 1 else "look"
    viewed_by = f"  {', '.join(viewers[:MAX_READERS])} {verb} here" if viewers else ""
    by = "you: agents are silent here" if holder == desk.me else sanitize(holder or "")
    return Content.assemble(
        (desk.name_thread(thread_id), "bold"),
        (f"  taken over by {by}" if holder else "", "bold magenta"),
        (viewed_by, "cyan"),
        (fit_start(read_by, width), "dim"),
    )


def write_activity(desk: Desk, thread_id: str, sending: Iterable[str], open_line: str, width: int) -> Content:
    """Return lines with growing texts, agents that finished without an answer, texts that are being sent, and what the
    conversation waits for."""
    lines = draw_growing_texts(desk.activity, thread_id, width=width, rows=MAX_LIVE_ROWS, paint=PLAIN)
    silent = desk.activity.unanswered.get(thread_id, ())
    lines += [fit_start(f"{sanitize(agent_id)} finished without an answer", width) for agent_id in silent]
    lines += [fit_start(f"… on its way to the hub: {sanitize(text)}", width) for text in sending]
    lines += [fit_start(open_line, width)] if open_line else []
    return Content("\n".join(lines))


def write_draft(draft: ThreadDraft, width: int) -> Content:
    """Return a line about the message that the draft answers or replaces. The line is empty if there is no such
    message.
    """
    if draft.replaces is not None:
        return Content(fit_start(f"Replaces #{draft.replaces.seq} (Esc cancels)", width))
    if draft.reply_to is not None:
        reply = draft.reply_to
        return Content(fit_start(f"Reply to #{reply.seq} of {sanitize(reply.sender_id)} (Esc cancels)", width))
    return Content("")


class OpenLine:
    """The line that says what the newest conversation of a thread waits for, or that all of it is done."""

    def __init__(self, desk: Desk, thread_id: str) -> None:
        self.text = ""
        self._desk = desk
        self._thread_id = thread_id
        self._seq = 0
        self._waited = 0  # the conversation for which the line has shown something

    async def follow(self, window: MessageWindow, draw: Callable[[], None]) -> None:
        """Read the open items of the newest message, until nothing is open or a newer message arrives."""
        seq, wait_s = window.newest, 0.0
        if seq == self._seq:
            return
        self._seq = seq
        while True:
            await asyncio.sleep(SETTLE_S)
            if seq != self._seq or not window.is_attached:
                return
            try:
                found = await self._desk.client.open_items(seq, wait_s=wait_s, limit=20)
            except RoundelayError:  # the rights of the network may deny this operation
                return
            if seq != self._seq or not window.is_attached:
                return
            self.text = self._describe(found, {box.seq for box in window.boxes})
            draw()
            if found.is_quiet:
                return
            wait_s = OPEN_WAIT_S

    def _describe(self, found: OpenItems, shown: Set[int]) -> str:
        # The thread already shows the work of its own agents, and the requests for decisions in it.
        is_busy = self._thread_id in self._desk.activity.list_busy_threads()
        items = [it for it in found.items if not (is_busy and it.kind == "reaction") and it.request not in shown]
        if items:
            self._waited = found.root
            return summarize_open(items, found.hidden, self._desk.client.clock())
        return "All done" if found.is_quiet and self._waited == found.root else ""


class LinesBelow:
    """Lines below messages: the replies to each message, and the receipts of the person's newest message."""

    def __init__(self, desk: Desk, thread_id: str) -> None:
        self._desk = desk
        self._thread_id = thread_id
        self._receipts: dict[int, str] = {}  # receipts by sequence number
        self._is_stale = self._is_reading = False

    def draw(self, window: MessageWindow) -> None:
        """Draw the lines below all messages, and mark the requests that wait for a decision."""
        is_at_end = bool(window.boxes) and window.is_at_end
        for box in window.boxes:
            lines = []
            replies = self._desk.threads.get(reply_thread(box.seq))
            if replies is not None and replies.thread_id != self._thread_id:
                newest = f", the newest of {replies.sender_id}: {replies.text}" if replies.text else ""
                lines.append(fit_start(f"↳ {count(replies.messages, 'message')}{newest} (t opens them)", 300))
            if box.seq in self._receipts:
                lines.append(self._receipts[box.seq])
            box.set_below(lines)
            if read_request(box.message) is not None:
                box.set_waiting(any(box.seq == it.seq for it in self._desk.activity.list_own_requests()))
        if is_at_end:
            window.call_after_refresh(window.scroll_end, animate=False)

    async def read_receipts(self, window: MessageWindow) -> None:
        """Read and draw the receipts of the person's newest message. Raises `RoundelayError`.

        If another call of this method is running, return at once, and the running call reads the receipts again.
        """
        self._is_stale = True
        if self._is_reading:
            return
        self._is_reading = True
        try:
            while self._is_stale and window.is_attached:
                self._is_stale = False
                own = next((box for box in reversed(window.boxes) if box.message.sender_id == self._desk.me), None)
                if own is not None:
                    args = {"seq": own.seq, "limit": MAX_RECIPIENTS}
                    status = await self._desk.client.call("network.message_status", args)
                    self._receipts = {own.seq: _write_receipt(status)} if status["recipients"] else {}
                    self.draw(window)
        finally:
            self._is_reading = False


def _write_receipt(status: Mapping[str, Any]) -> str:
    recipients = [f"{sanitize(it['agent_id'])}: {_STATES.get(it['state'], it['state'])}" for it in status["recipients"]]
    return sanitize("; ".join(recipients) + (" …" if status["has_more"] else ""))
