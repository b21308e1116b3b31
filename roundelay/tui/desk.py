"""Data of the full-screen terminal: threads, the inbox, participants, and deliveries that have not been shown yet.

`Desk` connects a `NetworkClient` and the widgets. Widgets read the data, and ``on_change`` receives the part that has
changed. A delivery is acknowledged only after a widget has reported its message as shown (`acknowledge_shown`). A
message that the person never saw is therefore delivered again. This module draws nothing and never polls. It fetches a
part again when an event reports a change.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from roundelay.agents.approvals import read_request
from roundelay.display.screen import format_event, tell_person
from roundelay.display.text import sanitize
from roundelay.live_activity import LiveActivity
from roundelay.network.addresses import conversation_of
from roundelay.network.client import AnyMessage, NetworkClient, Notice, Presence, Reconnected, Reconnecting, Signal
from roundelay.network.client.acks import Delivery
from roundelay.network.errors import RequestError, RoundelayError, UnknownOperation
from roundelay.network.titles import name_place, write_title
from roundelay.runs.approvals import list_requests
from roundelay.runs.lists import list_dead_letters, list_participants, list_threads
from roundelay.terminal.actions import is_shown, watch

Part = Literal["threads", "inbox", "agents", "live", "connection", "told"]
"""Parts of the data in a `Desk` that change independently of each other."""

MAX_THREADS, MAX_ITEMS, MAX_TOLD, MAX_STOPPED = 200, 200, 100, 50
MAX_TEXT = 200
"""Maximum number of characters of a message in a list."""
AGENTS_EVERY_S = 0.5
"""Minimum time between two fetches of the participants, in seconds. Every signal may change participants."""
KEYS_FOR_COMMANDS = {
    "until you /give it back": "until you give it back (o)",
    "there until /give": "there until it is given back",
    ": /stop THREAD": "",
    "Write /edit SEQ ARGUMENTS with": "Write",
    "/resume": "Enter in the inbox",
    "/agents lists": "the screen Agents lists",
    " /history shows their numbers.": "",
}
"""Chat commands that occur in sentences, and the keys that replace them in the full-screen terminal."""


def tell_here(sentence: str) -> str:
    """Replace the commands in a sentence of the hub or of the chat with the keys of the full-screen terminal."""
    told = tell_person(sentence, in_chat=True)
    for command, key in KEYS_FOR_COMMANDS.items():
        told = told.replace(command, key)
    return told


def _shorten(text: str) -> str:
    return sanitize(" ".join(text[: 4 * MAX_TEXT].split())[:MAX_TEXT])


@dataclass(slots=True)
class ThreadRow:
    """Thread in the list, with its newest message and the person's read state."""

    thread_id: str
    last_seq: int
    messages: int = 0
    readers: tuple[str, ...] = ()
    sender_id: str = ""
    text: str = ""
    at: int = 0
    unread: int = 0
    read_upto: int = 0
    name: str = ""
    """Title that the hub has stored for the thread; empty if unknown."""
    title: str = ""
    """Name that this person has given to the thread."""
    is_pinned: bool = False
    is_muted: bool = False
    is_archived: bool = False

    def set_read_state(self, mark: Mapping[str, Any]) -> None:
        """Apply a read state in the format of ``network.mark``."""
        # Read states may arrive out of order. A message that was read stays read.
        self.read_upto = max(self.read_upto, int(mark.get("read_upto") or 0))
        self.title = sanitize(str(mark.get("title", self.title) or ""))
        self.is_pinned = bool(mark.get("is_pinned", self.is_pinned))
        self.is_muted = bool(mark.get("is_muted", self.is_muted))
        self.is_archived = bool(mark.get("is_archived", self.is_archived))

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> ThreadRow:
        row = cls(str(entry["thread_id"]), int(entry["last_seq"]), int(entry["messages"]))
        row.readers = tuple(map(str, entry.get("readers", ())))
        row.name = sanitize(str(entry.get("title", "")))
        last = entry.get("last") or {}
        row.sender_id, row.text = sanitize(str(last.get("sender_id", ""))), _shorten(str(last.get("text", "")))
        row.at, row.unread = int(last.get("sent_at", 0)), int(entry.get("unread", 0))
        row.set_read_state(entry.get("mark") or {})
        return row

    def add_message(self, message: AnyMessage, me: str) -> None:
        """Update the row for a message of the thread."""
        # Skip a message that the fetched list already contains, because it would be counted twice.
        if message.seq <= self.last_seq and self.text:
            return
        self.messages += message.seq > self.last_seq
        self.unread += message.sender_id != me and message.seq > max(self.read_upto, self.last_seq)
        self.last_seq = max(self.last_seq, message.seq)
        self.sender_id, self.text, self.at = sanitize(message.sender_id), _shorten(message.text), message.sent_at


@dataclass(frozen=True, slots=True)
class InboxItem:
    """Item of the inbox, which waits for the person."""

    kind: str
    seq: int
    thread_id: str
    at: int
    agent_id: str
    text: str
    root: int | None = None

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> InboxItem:
        root = entry.get("root")
        told = (str(entry.get("kind")), int(entry["seq"]), str(entry.get("thread_id") or ""), int(entry.get("at") or 0))
        by = sanitize(str(entry.get("agent_id") or entry.get("sender_id") or ""))
        return cls(*told, by, _shorten(str(entry.get("text") or "")), root if isinstance(root, int) else None)


class Revised(NamedTuple):
    """A message that its sender has edited or deleted."""

    thread_id: str
    seq: int


class Desk:
    """Data of the full-screen terminal for one person. After `start`, run `follow_messages`, `follow_events` and
    `refresh_forever` concurrently.
    """

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.me = client.agent_id
        self.epoch = client.welcome.network.epoch
        """Epoch of the ledger that contains the shown messages."""
        self.activity = LiveActivity(client.agent_id)
        self.activity.on_change = lambda: self.on_change("live")
        self.threads: dict[str, ThreadRow] = {}
        self.inbox: list[InboxItem] = []
        self.agents: list[dict[str, Any]] = []
        self.told: deque[str] = deque(maxlen=MAX_TOLD)
        """Sentences about events; the newest sentence is last."""
        self.hint = ""
        """Explanation of why a key had no effect. The next screen or event removes it."""
        self.lost = ""
        """Reason for the lost connection to the hub, or an empty text while the hub is connected."""
        self.lacks_marks = self.lacks_inbox = False
        """Whether the hub is too old to store read states or an inbox."""
        self.drafts: dict[str, str] = {}
        """Unsent text of each thread."""
        self.on_change: Callable[[Part], None] = lambda part: None
        self.on_message: Callable[[AnyMessage | Revised], None] = lambda message: None
        self._held: dict[str, dict[int, Delivery]] = {}
        # items that this client has noticed, for a hub without an inbox
        self._stopped: deque[InboxItem] = deque(maxlen=MAX_STOPPED)
        self._stale: set[Part] = set()
        self._marks: dict[str, int] = {}  # read positions that have not been sent to the hub yet
        self._news = asyncio.Event()

    # --- input

    async def start(self) -> None:
        """Subscribe to events and fetch all parts of the data. Raises `RoundelayError`."""
        # Subscribe before fetching, so that no event is missed in between.
        await watch(self.client)
        for part in ("agents", "threads", "inbox"):
            await self._fetch(part)
        self.activity.load_work(self.agents)

    async def follow_messages(self) -> None:
        """Handle deliveries until cancelled. Raises the error that ends the connection."""
        async for delivery in self.client.deliveries():
            message = delivery.message
            self.handle_message(message)
            if message.sender_id == self.me:
                await delivery.ack()  # another session of the same person sent the message
                continue
            # Do not acknowledge the message yet: the person has not seen it, and the hub must deliver it again after a
            # crash.
            self._held.setdefault(message.thread_id, {})[message.seq] = delivery
            self._count_held(message.thread_id)
            self.on_message(message)
            await self._make_room()

    def handle_message(self, message: AnyMessage) -> None:
        """Handle a message of any thread, including messages that the person has sent."""
        self.activity.handle_message(message)
        row = self.threads.get(message.thread_id)
        # Fetch new threads, because only the hub knows their title and readers.
        if row is None:
            self._refresh("threads")
        else:
            row.add_message(message, self.me)
        if read_request(message) is not None or message.reply_to is not None or message.requires_response:
            self._refresh("inbox")
        self.on_change("threads")

    async def follow_events(self) -> None:
        """Handle events until the connection has ended."""
        async for event in self.client.events():
            self.activity.handle_event(event)
            match event:
                case Signal():
                    if event.kind in ("thinking", "tool"):
                        self._refresh("agents")
                    continue
                case Reconnecting():
                    if self.lost:
                        continue  # a repeated delivery
                    self.lost = sanitize(event.reason).rstrip(": ") or "no answer"
                    self.on_change("connection")
                case Reconnected():
                    self.lost = ""
                    self._begin_anew(event.welcome.network.epoch)
                    self.on_change("connection")
                    self._refresh("agents", "threads", "inbox")
                case Presence():
                    self._refresh("agents")
                case Notice(kind="members"):
                    self._refresh("threads")
                case Notice(kind="inbox"):
                    self._refresh("inbox")
                    continue
                case Notice(kind="mod", body={"mod": "messages", "event": "edited" | "deleted", "seq": int(seq)}):
                    self.on_message(Revised(event.thread_id or "", seq))
                    self._refresh("threads", "inbox")  # rows of these lists may quote the message
                    continue
                case Notice(kind="marked", body=dict() as body):
                    self._take_mark(str(body.get("thread_id") or event.thread_id), body)
                    continue
                case Notice():
                    self._take_notice(event)
            if is_shown(event, self.me) and (sentence := format_event(event)):
                self.show_line(sentence)

    def _begin_anew(self, epoch: str) -> None:
        """Discard all data after a reconnection to a different ledger, whose sequence numbers belong to other
        messages."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._held.clear()
            self._marks.clear()
            self.threads.clear()

    def now_ms(self) -> int:
        return self.client.clock()

    def _take_notice(self, notice: Notice) -> None:
        body = notice.body if isinstance(notice.body, dict) else {}
        if notice.kind in ("loop_stopped", "budget_exhausted"):
            kind = "stopped" if notice.kind == "loop_stopped" else "budget"
            self._stopped.append(
                InboxItem(
                    kind,
                    int(body.get("root") or body.get("seq") or 0),
                    notice.thread_id or "",
                    0,
                    sanitize(str(body.get("agent_id") or "")),
                    _shorten(str(body.get("reason") or notice.kind)),
                    body.get("root"),
                )
            )
        if notice.kind in ("loop_stopped", "budget_exhausted", "dead_letter", "dead_letter_withdrawn"):
            self._refresh("inbox")
        if notice.kind in ("taken", "given"):
            self.on_change("threads")

    def _take_mark(self, thread_id: str, mark: Mapping[str, Any]) -> None:
        if thread_id in self.threads:
            row = self.threads[thread_id]
            before = row.title
            row.set_read_state(mark)
            # clear the name if the title has changed: the hub combines the new title with the address
            row.name = row.name if row.title == before else ""
            self._refresh("threads")

    def show_line(self, sentence: str) -> None:
        """Show a sentence to the person."""
        self.hint = ""
        self.told.append(tell_here(sanitize(sentence)))
        self.on_change("told")

    def show_hint(self, sentence: str) -> None:
        """Show an explanation of why a key had no effect."""
        self.hint = sanitize(sentence)
        self.on_change("told")

    # --- acknowledgments

    async def acknowledge_shown(self, thread_id: str, first: int, last: int) -> None:
        """Acknowledge the messages of a thread in a range of sequence numbers, and mark them as read. All of them must
        have been on the screen.
        """
        held = self._held.get(thread_id, {})
        for seq in [it for it in held if first <= it <= last]:
            await held.pop(seq).ack()
        self._count_held(thread_id)
        row = self.threads.get(thread_id)
        # Scrolling back must not mark messages as unread if the person has already read them.
        if row is None or last <= row.read_upto:
            return
        row.read_upto = last
        self._marks[thread_id] = last
        if last >= row.last_seq:
            row.unread = 0
            self.on_change("threads")
        else:
            # Let the hub count the unread messages, because this client does not know all messages in between.
            self._stale.add("threads")
        self._news.set()

    def _count_held(self, thread_id: str) -> None:
        """Count the deliveries of a thread that were not shown, for a hub that does not count unread messages."""
        if self.lacks_marks and thread_id in self.threads:
            self.threads[thread_id].unread = len(self._held.get(thread_id, ()))
            self.on_change("threads")

    async def read_all(self, thread_id: str) -> None:
        """Mark a whole thread as read, including messages that were never shown."""
        await self.acknowledge_shown(thread_id, 0, self.threads[thread_id].last_seq)

    async def _make_room(self) -> None:
        """Acknowledge the oldest deliveries of closed threads when too many wait, because the hub stops at
        ``max_unacked``.

        Their threads still show as unread if the hub stores read states. If the hub does not, acknowledge nothing.
        Otherwise the person would never see those messages.
        """
        most = self.client.welcome.limits.get("max_unacked", 256)
        waiting = sum(map(len, self._held.values()))
        # Acknowledge half of them, to have room for a burst before the hub stops delivering.
        if waiting <= most // 2:
            return
        if self.lacks_marks:
            # Show this warning once, when the limit is reached: after that, the hub delivers no more messages.
            if waiting == most:
                self.show_line(
                    f"{waiting} messages wait in threads that you have not read. Read some of them to receive more."
                )
            return
        # Acknowledge the oldest message first, because the person is least likely to read it soon.
        seq, thread_id = min((seq, thread_id) for thread_id, held in self._held.items() for seq in held)
        await self._held[thread_id].pop(seq).ack()

    # --- fetching

    def _refresh(self, *parts: Part) -> None:
        self._stale.update(parts)
        self._news.set()

    async def refresh_forever(self) -> None:
        """Fetch changed parts of the data, and send read positions to the hub. Runs until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            stale, self._stale = self._stale, set()
            with suppress(RoundelayError):  # without a connection this fails; a reconnection fetches all parts again
                await self._say_marks()
                for part in sorted(stale):
                    await self._fetch(part)
            if "agents" in stale:
                # Changes during the pause are collected in the set, and one fetch handles them all.
                await asyncio.sleep(AGENTS_EVERY_S)

    async def _fetch(self, part: Part) -> None:
        if part == "agents":
            self.agents = await list_participants(self.client)
        elif part == "threads":
            await self._fetch_threads()
        else:
            await self._fetch_inbox()
        self.on_change(part)

    async def _fetch_threads(self) -> None:
        listed = await list_threads(self.client, limit=MAX_THREADS)
        self.activity.load_takeovers(listed)
        self.lacks_marks = any("unread" not in it for it in listed)
        before, self.threads = self.threads, {}
        for entry in listed:
            row = self.threads[str(entry["thread_id"])] = ThreadRow.read(entry)
            if self.lacks_marks:
                known = before.get(row.thread_id, row)
                row.unread = len(self._held.get(row.thread_id, ()))
                row.sender_id, row.text, row.at = known.sender_id, known.text, known.at
            # The hub may not have received this read position yet. Its list would then show read messages as unread.
            row.read_upto = max(row.read_upto, self._marks.get(row.thread_id, 0))

    async def _fetch_inbox(self) -> None:
        waiting = [it for it in await list_requests(self.client) if it.may_decide]
        for it in waiting:
            self.activity.add_request(it.message)
        if not self.lacks_inbox:
            try:
                page = await self.client.call("network.inbox", {"limit": MAX_ITEMS})
                self.inbox = [InboxItem.read(it) for it in page["items"]]
                return
            except UnknownOperation:
                self.lacks_inbox = True
        found = [
            InboxItem("approval", it.seq, it.message.thread_id, it.message.sent_at, it.message.sender_id, it.describe())
            for it in waiting
        ]
        for letter in await list_dead_letters(self.client, limit=MAX_ITEMS):
            text = f"could not be handled: {_shorten(str(letter['reason']))}"
            found.append(InboxItem("dead_letter", letter["seq"], "", letter["at"], sanitize(letter["agent_id"]), text))
        self.inbox = sorted([*found, *self._stopped], key=lambda it: it.seq)[:MAX_ITEMS]

    async def _say_marks(self) -> None:
        while self._marks and not self.lacks_marks:
            thread_id, upto = next(iter(self._marks.items()))
            try:
                await self.client.call("network.mark", {"thread_id": thread_id, "read_upto": upto})
            except UnknownOperation:
                self.lacks_marks = True
            except RequestError:
                pass  # the thread does not belong to this person
            # If the person has read more messages during the call, the newer position must still be sent.
            if self._marks.get(thread_id) == upto:
                del self._marks[thread_id]

    # --- actions

    async def set_read_state(self, thread_id: str, **mark: object) -> None:
        """Pin, mute, archive or name a thread for this person. Raises `RoundelayError`."""
        if self.lacks_marks:
            self.show_line("This hub does not store read state, so threads cannot be pinned, muted or named.")
            return
        await self.client.call("network.mark", {"thread_id": thread_id, **mark})
        # Apply the change before the hub's notice arrives, because the key must have an immediate effect.
        self._take_mark(thread_id, mark)

    async def dismiss(self, item: InboxItem) -> None:
        """Dismiss an item of the inbox. Raises `RoundelayError`."""
        if self.lacks_inbox:
            self.show_hint("This hub does not store an inbox. An item disappears when it is settled.")
            return
        what: dict[str, object] = {"agent_id": item.agent_id} if item.kind == "fault" else {"seq": item.seq}
        await self.client.call("network.dismiss", {"kind": item.kind, **what})
        self._refresh("inbox")

    def remove_item(self, item: InboxItem) -> None:
        """Remove an item that was handled on this terminal."""
        # This is necessary only for a hub without an inbox. A hub with an inbox removes the item itself.
        if item in self._stopped:
            self._stopped.remove(item)
        self._refresh("inbox")

    # --- descriptions

    def list_threads(self) -> list[ThreadRow]:
        """Return the threads, newest first. Pinned threads come before all others, and archived threads come last."""
        rows = self.threads.values()
        return sorted(rows, key=lambda it: (it.is_archived, not it.is_pinned, -it.last_seq))

    def count_unread(self) -> int:
        """Return the number of threads with unread messages, without muted threads."""
        return sum(1 for it in self.threads.values() if it.unread and not it.is_muted and not it.is_archived)

    def name_thread(self, thread_id: str) -> str:
        """Return the title of a thread from the hub, or its address if the hub has not listed the thread."""
        row = self.threads.get(thread_id)
        if row is not None and row.name:
            return row.name
        words = "New conversation" if conversation_of(thread_id) and row is None else ""
        return sanitize(write_title(name_place(thread_id, self.me), words, row.title if row is not None else ""))
