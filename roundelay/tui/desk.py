"""What a person's full-screen terminal shows, undrawn: threads, the inbox, who is there, and what was delivered and not
yet shown.

`Desk` stands between a `NetworkClient` and the widgets, which read it and are told by ``on_change`` which part is new.
What is under way comes from `LiveActivity`, what a person does from `roundelay.terminal.actions`, as in the chat. A
delivery is acknowledged when a widget says that its message was shown (`shown`), and not before. It draws nothing and
polls nothing: what has to be fetched again is fetched when news says so.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

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
"""Of what a desk shows."""

MAX_THREADS, MAX_ITEMS, MAX_TOLD, MAX_STOPPED = 200, 200, 100, 50
MAX_TEXT = 200
"""Characters of a message in a list."""
AGENTS_EVERY_S = 0.5
"""Who is there is fetched that often at most: each signal may change it."""
KEYS_FOR_COMMANDS = {
    "until you /give it back": "until you give it back (o)",
    "there until /give": "there until it is given back",
    ": /stop THREAD": "",
    "Write /edit SEQ ARGUMENTS with": "Write",
    "/resume": "Enter in the inbox",
    "/agents lists": "the screen Agents lists",
    " /history shows their numbers.": "",
}
"""What a sentence names that a person types in a chat, and what it is here."""


def tell_here(sentence: str) -> str:
    """A sentence of the hub or of the chat as it is told here."""
    told = tell_person(sentence, in_chat=True)
    for command, key in KEYS_FOR_COMMANDS.items():
        told = told.replace(command, key)
    return told


def _shorten(text: str) -> str:
    return sanitize(" ".join(text[: 4 * MAX_TEXT].split())[:MAX_TEXT])


@dataclass(slots=True)
class ThreadRow:
    """A thread in the list: its newest message, what is unread of it, and how its person marked it."""

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
    """What the hub calls it; empty where it has not said so."""
    title: str = ""
    """The person's own."""
    is_pinned: bool = False
    is_muted: bool = False
    is_archived: bool = False

    def set_read_state(self, mark: Mapping[str, Any]) -> None:
        """Take what `network.mark` keeps."""
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
        """A message of the thread."""
        if message.seq <= self.last_seq and self.text:
            return
        self.messages += message.seq > self.last_seq
        self.unread += message.sender_id != me and message.seq > max(self.read_upto, self.last_seq)
        self.last_seq = max(self.last_seq, message.seq)
        self.sender_id, self.text, self.at = sanitize(message.sender_id), _shorten(message.text), message.sent_at


@dataclass(frozen=True, slots=True)
class InboxItem:
    """Something that waits for its person."""

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


class Desk:
    """One person's desk. Run `follow_messages`, `follow_events` and `refresh_forever` beside each other after `begin`."""

    def __init__(self, client: NetworkClient) -> None:
        self.client = client
        self.me = client.agent_id
        self.epoch = client.welcome.network.epoch
        """Of the history that is shown."""
        self.activity = LiveActivity(client.agent_id)
        self.activity.on_change = lambda: self.on_change("live")
        self.threads: dict[str, ThreadRow] = {}
        self.inbox: list[InboxItem] = []
        self.agents: list[dict[str, Any]] = []
        self.told: deque[str] = deque(maxlen=MAX_TOLD)
        """What happened, in sentences; the newest stands last."""
        self.hint = ""
        """What a key would need on this screen, until there is another one or something happens."""
        self.lost = ""
        """Why the hub is gone, as long as it is."""
        self.lacks_marks = self.lacks_inbox = False
        """Whether the hub is from before marks, or the inbox, were kept there."""
        self.drafts: dict[str, str] = {}
        """What was typed and not sent, by thread."""
        self.on_change: Callable[[Part], None] = lambda part: None
        self.on_message: Callable[[AnyMessage], None] = lambda message: None
        self._held: dict[str, dict[int, Delivery]] = {}
        self._stopped: deque[InboxItem] = deque(maxlen=MAX_STOPPED)  # heard of here, for a hub without an inbox
        self._stale: set[Part] = set()
        self._marks: dict[str, int] = {}  # read up to, not yet said to the hub
        self._news = asyncio.Event()

    # --- what is told

    async def start(self) -> None:
        """Fetch what stands on the screens. Raises `RoundelayError`."""
        await watch(self.client)
        for part in ("agents", "threads", "inbox"):
            await self._fetch(part)
        self.activity.load_work(self.agents)

    async def follow_messages(self) -> None:
        """Take what is delivered, for ever. Raises what ends the connection."""
        async for delivery in self.client.deliveries():
            message = delivery.message
            self.handle_message(message)
            if message.sender_id == self.me:
                await delivery.ack()  # said in another session of the same person
                continue
            self._held.setdefault(message.thread_id, {})[message.seq] = delivery
            self._count_held(message.thread_id)
            self.on_message(message)
            await self._make_room()

    def handle_message(self, message: AnyMessage) -> None:
        """A message of any thread, also one's own."""
        self.activity.handle_message(message)
        row = self.threads.get(message.thread_id)
        if row is None:
            self._refresh("threads")
        else:
            row.add_message(message, self.me)
        if read_request(message) is not None or message.reply_to is not None or message.requires_response:
            self._refresh("inbox")
        self.on_change("threads")

    async def follow_events(self) -> None:
        """Take what happens beside the messages, until the connection has ended."""
        async for event in self.client.events():
            self.activity.handle_event(event)
            match event:
                case Signal():
                    if event.kind in ("thinking", "tool"):
                        self._refresh("agents")
                    continue
                case Reconnecting():
                    if self.lost:
                        continue  # a further try
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
                case Notice(kind="marked", body=dict() as body):
                    self._take_mark(str(body.get("thread_id") or event.thread_id), body)
                    continue
                case Notice():
                    self._take_notice(event)
            if is_shown(event, self.me) and (sentence := format_event(event)):
                self.show_line(sentence)

    def _begin_anew(self, epoch: str) -> None:
        """The hub is back; of another ledger it has another history."""
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
            row.name = row.name if row.title == before else ""  # the hub puts it together with the place
            self._refresh("threads")

    def show_line(self, sentence: str) -> None:
        """Say something to the person, in a line."""
        self.hint = ""
        self.told.append(tell_here(sanitize(sentence)))
        self.on_change("told")

    def show_hint(self, sentence: str) -> None:
        """Say to the person what a key needs that did nothing."""
        self.hint = sanitize(sentence)
        self.on_change("told")

    # --- what was shown

    async def acknowledge_shown(self, thread_id: str, first: int, last: int) -> None:
        """The messages of a thread from a seq to a seq have been on the screen: they are acknowledged, and read."""
        held = self._held.get(thread_id, {})
        for seq in [it for it in held if first <= it <= last]:
            await held.pop(seq).ack()
        self._count_held(thread_id)
        row = self.threads.get(thread_id)
        if row is None or last <= row.read_upto:
            return
        row.read_upto = last
        self._marks[thread_id] = last
        if last >= row.last_seq:
            row.unread = 0
            self.on_change("threads")
        else:
            self._stale.add("threads")
        self._news.set()

    def _count_held(self, thread_id: str) -> None:
        """What is unread of a thread where the hub does not tell: what came and was not shown."""
        if self.lacks_marks and thread_id in self.threads:
            self.threads[thread_id].unread = len(self._held.get(thread_id, ()))
            self.on_change("threads")

    async def read_all(self, thread_id: str) -> None:
        """The person says that a thread is read, whatever of it was shown."""
        await self.acknowledge_shown(thread_id, 0, self.threads[thread_id].last_seq)

    async def _make_room(self) -> None:
        """The hub delivers only so much that is not acknowledged. Of what waits in threads that are not open, the
        oldest counts as shown by its thread's unread mark, where the hub keeps one; else all of it waits."""
        most = self.client.welcome.limits.get("max_unacked", 256)
        waiting = sum(map(len, self._held.values()))
        if waiting <= most // 2:
            return
        if self.lacks_marks:
            if waiting == most:
                self.show_line(
                    f"{waiting} messages wait in threads that you have not read; no further ones come before."
                )
            return
        seq, thread_id = min((seq, thread_id) for thread_id, held in self._held.items() for seq in held)
        await self._held[thread_id].pop(seq).ack()

    # --- what is fetched

    def _refresh(self, *parts: Part) -> None:
        self._stale.update(parts)
        self._news.set()

    async def refresh_forever(self) -> None:
        """Fetch what is stale, for ever, and say to the hub what was read."""
        while True:
            await self._news.wait()
            self._news.clear()
            stale, self._stale = self._stale, set()
            with suppress(RoundelayError):  # the hub is gone: all is fetched when it is back
                await self._say_marks()
                for part in sorted(stale):
                    await self._fetch(part)
            if "agents" in stale:
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
                pass  # a thread that is not this person's
            if self._marks.get(thread_id) == upto:
                del self._marks[thread_id]

    # --- what the person does

    async def set_read_state(self, thread_id: str, **mark: object) -> None:
        """Pin, mute, archive or name a thread, for oneself. Raises `RoundelayError`."""
        if self.lacks_marks:
            self.show_line("This hub keeps no marks: threads are not pinned, muted or named there.")
            return
        await self.client.call("network.mark", {"thread_id": thread_id, **mark})
        self._take_mark(thread_id, mark)

    async def dismiss(self, item: InboxItem) -> None:
        """Take something out of the inbox. Raises `RoundelayError`."""
        if self.lacks_inbox:
            self.show_hint("This hub keeps no inbox: an item goes when it is settled.")
            return
        what: dict[str, object] = {"agent_id": item.agent_id} if item.kind == "fault" else {"seq": item.seq}
        await self.client.call("network.dismiss", {"kind": item.kind, **what})
        self._refresh("inbox")

    def remove_item(self, item: InboxItem) -> None:
        """An item has been settled here."""
        if item in self._stopped:
            self._stopped.remove(item)
        self._refresh("inbox")

    # --- in words

    def list_threads(self) -> list[ThreadRow]:
        """The threads as they stand in the list: pinned ones first, then the newest; archived ones last."""
        rows = self.threads.values()
        return sorted(rows, key=lambda it: (it.is_archived, not it.is_pinned, -it.last_seq))

    def count_unread(self) -> int:
        """The threads with something unread that are not muted."""
        return sum(1 for it in self.threads.values() if it.unread and not it.is_muted and not it.is_archived)

    def name_thread(self, thread_id: str) -> str:
        """What a thread is called: as the hub says, or, of one that it has not listed, by its place."""
        row = self.threads.get(thread_id)
        if row is not None and row.name:
            return row.name
        words = "New conversation" if conversation_of(thread_id) and row is None else ""
        return sanitize(write_title(name_place(thread_id, self.me), words, row.title if row is not None else ""))
