"""Connect a person at a terminal to the network: run the typed lines, and show messages and events.

`Chat` connects a `NetworkClient` and a `Screen`. `converse` passes typed lines to `Chat`, and `chat_commands` defines
the commands that begin with /. The current destination is the address or thread to which typed lines are sent
(`Place`). `Chat` never decides who receives a message, and stores nothing permanently. Messages that were shown are
acknowledged, and all other messages are delivered again next time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from roundelay.connection import ReconnectLimit
from roundelay.display.activity import describe_agent
from roundelay.display.screen import Screen, describe_place, format_line, tell_person
from roundelay.display.text import sanitize
from roundelay.live_activity import LiveActivity
from roundelay.network.client import AnyMessage, NetworkClient, Reconnected, Reconnecting, Signal, Stored
from roundelay.network.errors import ConnectError, GiveUp, RequestError, RoundelayError
from roundelay.runs.approvals import KnownRequests, describe_decision, format_until, list_requests, read_until
from roundelay.runs.lists import list_participants, list_threads
from roundelay.terminal.actions import check_place, decide_request, enter_place, is_shown, read_yes_or_no, watch
from roundelay.terminal.activity_lines import describe_news
from roundelay.terminal.places import BROADCAST, Place

HISTORY_MESSAGES = 20
MAX_THREADS = 50
MAX_BUSY_SHOWN = 10
"""Maximum number of agents whose work is listed at the start of a chat."""
MAX_SENT_REMEMBERED = 500
TYPING_INTERVAL_S = 3.0
SHOWN_AT_START = 5
"""Number of earlier messages in the current destination that are shown at the start of a chat."""


@dataclass(frozen=True, slots=True)
class Command:
    """Command of a chat. ``/help`` and completion with the tab key show ``usage`` and ``meaning``."""

    usage: str
    meaning: str
    run: Callable[[Chat, str], Awaitable[None]]
    """Function that runs the command. Its argument is the text after the command's name."""


class Chat:
    """Chat session of one person. Run `show_messages`, `show_events` and `send_typing` concurrently with `handle_line`."""

    def __init__(
        self,
        client: NetworkClient,
        screen: Screen,
        *,
        errors: Screen | None = None,
        shows_activity: bool = True,
        patience: ReconnectLimit | None = None,
        commands: Mapping[str, Command] = MappingProxyType({}),
    ) -> None:
        self.client = client
        self.screen = screen
        self.errors = errors or screen
        self.place = BROADCAST
        self.activity = LiveActivity(client.agent_id)
        self.requests = KnownRequests(client)
        self.has_failed = False
        """Whether a typed line had no effect because of an error."""
        self.sent: deque[int] = deque(maxlen=MAX_SENT_REMEMBERED)
        """Sequence numbers of the messages that this chat has sent, for ``/cost``."""
        self.typed = asyncio.Event()
        """Event that is set whenever the person has typed something."""
        self._commands = commands
        self._shows_activity = shows_activity
        self._reconnect_limit = patience or ReconnectLimit(None)
        self._watching: asyncio.Task[None] | None = None
        # Signal typing only to destinations that have accepted a message, so that the owner of a misspelled id never
        # sees it.
        self._accepted = {BROADCAST.to}
        self._typing_sent_at = 0.0

    # --- output

    async def start(self, to: str | None = None) -> None:
        """Show the current destination and the other participants. If ``to`` is given, first make it the current
        destination.
        """
        name, url = sanitize(self.client.welcome.network.name), sanitize(self.client.url)
        await watch(self.client)
        self.screen.note(f"You are {self.client.agent_id} in the network {name} at {url}.")
        participants = await self._show_participants()
        if to is not None:
            await check_place(self.client, to, participants)
            await self.go(to)
        await self._load_activity(participants)
        await self._show_earlier_messages()
        await self._show_requests()

    async def show_messages(self) -> None:
        """Show deliveries until the connection ends. Raises the error that ends the connection."""
        async for delivery in self.client.deliveries():
            async with delivery as message:
                self.activity.handle_message(message)
                self.screen.message(message, await self.requests.describe(message))
                if any(request.seq == message.seq for request in self.activity.list_own_requests()):
                    self._show_how_to_decide(message.seq, read_until(message))
                # In a reply thread, a typed line answers the newest message, so remember the message that has just
                # arrived.
                if self.place.reply_to is not None and message.thread_id == self.place.thread_id:
                    self.place = Place(self.place.to, self.place.thread_id, message.seq)

    async def show_events(self) -> None:
        """Show events other than messages. Raises `ConnectError` when the reconnect limit is reached."""
        async for event in self.client.events():
            news = self.activity.handle_event(event)
            match event:
                case Signal(kind="thinking", body={"active": False}):
                    for entry in news:  # always show that an agent finished without an answer
                        self.screen.note(f"{describe_news(entry)}.")
                case Signal() if not self._shows_activity:
                    continue  # the prompt shows this event
                case Signal(kind="delta" | "tool"):
                    for entry in news:
                        self.screen.note(f"{describe_news(entry)} ({sanitize(event.thread_id)})")
                case Reconnecting() | Reconnected():
                    if self._reconnect_limit.handle_event(event):
                        self.errors.event(event)
                    if isinstance(event, Reconnected):
                        # Use a separate task, because the connection may be lost again before the calls return.
                        self._watching = asyncio.create_task(self._watch_again())
                case _ if is_shown(event, self.client.agent_id):
                    self.screen.event(event)

    async def send_typing(self) -> None:
        """Signal typing to the readers of the current destination whenever `typed` is set. Runs until cancelled."""
        while True:
            await self.typed.wait()
            self.typed.clear()
            now = time.monotonic()
            if self.place.to not in self._accepted or now - self._typing_sent_at < TYPING_INTERVAL_S:
                continue
            self._typing_sent_at = now
            if self.place.reply_to is not None:
                await self.client.signal("typing", {}, thread_id=self.place.thread_id)
            else:
                await self.client.signal("typing", {}, to=self.place.to)

    async def _watch_again(self) -> None:
        with suppress(RoundelayError):
            await watch(self.client)
            await self._load_activity(await list_participants(self.client))

    async def _load_activity(self, participants: Iterable[Mapping[str, Any]]) -> None:
        """Load the takeovers and the work in progress from before the person joined."""
        # Load the work only for a chat with a prompt, because only the prompt can show it.
        if not self._shows_activity:
            self.activity.load_work(participants)
        self.activity.load_takeovers(await list_threads(self.client, limit=MAX_THREADS))

    async def _show_participants(self) -> list[Mapping[str, Any]]:
        participants = await list_participants(self.client)
        others = [entry for entry in participants if entry["agent_id"] != self.client.agent_id]
        for state in ("online", "offline"):
            ids = [sanitize(entry["agent_id"]) for entry in others if entry["state"] == state]
            if ids:
                self.screen.note(f"{state.title()}: {', '.join(ids)}.")
        if not others:
            self.screen.note("Nobody else is registered yet.")
        busy = [entry for entry in others if entry.get("activity") not in ("idle", "gone", None)]
        # `_show_requests` lists agents that wait for a decision
        busy = [entry for entry in busy if not any("decisions" in work for work in entry.get("work", ()))]
        for entry in busy[:MAX_BUSY_SHOWN]:
            self.screen.note(sanitize(f"{describe_agent(entry)}."))
        return [*participants]

    async def _show_earlier_messages(self) -> None:
        """Show the last messages in the current destination that the person has already seen or sent.

        Unread messages are not shown here, because the hub delivers them.
        """
        with suppress(RequestError):  # the current destination may have no messages
            welcome, me = self.client.welcome, self.client.agent_id
            # Show only messages up to the time of joining: later messages arrive as deliveries and would appear twice.
            history = await self.client.history(self.place.thread_id, before=welcome.head + 1, limit=HISTORY_MESSAGES)
            seen = [it for it in history.messages if it.seq <= welcome.cursor or it.sender_id == me]
            for message in seen[-SHOWN_AT_START:]:
                self.screen.message(message, await self.requests.describe(message))

    async def _show_requests(self) -> None:
        """Show all calls that wait for this person's decision, in any thread."""
        with suppress(RequestError):  # an older hub lacks this operation
            for request in await list_requests(self.client):
                if request.may_decide:
                    self.activity.add_request(request.message)
                if request.may_decide or request.may_call:
                    self.screen.note(request.describe())
                    self._show_how_to_decide(request.seq, request.until)

    def _show_how_to_decide(self, seq: int, until: int | None) -> None:
        time = f" until {format_until(until)}" if until is not None else ""
        ways = f"/approve {seq} [thread|always], /deny {seq} [REASON], /edit {seq} JSON"
        self.screen.note(f"#{seq} waits{time} for yes or no in its thread, or {ways}.")

    def _show_sent(self, stored: Stored, to: str, text: str, reply_to: int | None) -> None:
        self.sent.append(stored.seq)
        self.activity.notify()
        now_ms, place = time.time_ns() // 1_000_000, describe_place(to, stored.thread_id)
        paint, width = self.screen.paint, self.screen.width
        me = self.client.agent_id
        self.screen.write(format_line(now_ms, stored.seq, me, place, text, reply_to=reply_to, paint=paint, width=width))

    def show_place(self) -> None:
        self.screen.note(f"Lines now go to {sanitize(self.place.describe())}.")

    def _show_error(self, sentence: str) -> None:
        self.has_failed = True
        self.errors.error(sentence)

    # --- input

    async def handle_line(self, line: str) -> bool:
        """Run one typed line, which is a command or a text for the current destination. Return False if the line ends
        the chat.

        Shows the hub's refusals. Raises only when the connection has ended permanently.
        """
        text = line.strip()
        try:
            if text.startswith("//"):
                await self.say(line.lstrip()[1:])
            elif text.startswith("/"):
                return await self._run_command(text)
            elif text and not await self._answer_yes_or_no(text):
                await self.say(line)
        except ConnectError:
            raise
        except GiveUp as error:
            self._show_error(str(error))
        except RoundelayError as error:
            self._show_error(tell_person(str(error), in_chat=True))
        return True

    async def _run_command(self, text: str) -> bool:
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        if name in self._commands:
            await self._commands[name].run(self, rest.strip())
        else:
            advice = "/help lists the commands. To send a text that begins with /, begin it with //."
            self._show_error(f"There is no command /{sanitize(name)}. {advice}")
        return True

    async def say(self, text: str) -> None:
        """Send a text to the current destination."""
        place = self.place
        stored = await self.client.send(place.to, text, reply_to=place.reply_to, conversation=place.conversation)
        self._accepted.add(place.to)
        self._show_sent(stored, place.to, text, place.reply_to)
        # A message that arrived during the send may have changed the current destination.
        if self.place == place and place.reply_to is not None:
            self.place = Place(place.to, place.thread_id, stored.seq)

    async def go(self, to: str) -> None:
        """Make an address or a thread the current destination. A channel is joined first. Raises `RoundelayError`."""
        self.place, sentence = await enter_place(self.client, to)
        if sentence:
            self.screen.note(sentence)
        if self.place.to.startswith("channel:") and to == self.place.to:
            self._accepted.add(to)

    async def go_and_say(self, to: str, text: str = "") -> None:
        """Open a destination and send text there, unless the text is empty. If the hub refuses the text, return to the
        old destination.
        """
        previous = self.place
        await self.go(to)
        if not text.strip():
            self.show_place()
            return
        try:
            await self.say(text.strip())
        except RoundelayError:
            # Return to the old destination: otherwise further lines would go to one that has refused the text.
            self.place = previous
            raise

    async def answer(self, message: AnyMessage, text: str) -> None:
        """Reply to a message in its thread. The current destination stays the same."""
        stored = await self.client.reply(message, text)
        to = f"agent:{message.sender_id}" if message.kind == "direct" else message.to
        self._show_sent(stored, to, text, message.seq)

    async def decide(self, word: str, seq: int, text: str) -> None:
        """Decide on a call: with a reply in its thread, or through the hub if the person is an operator who does not
        read the thread.
        """
        decision, sent = f"/{word} {text}".strip(), []

        def show(request: AnyMessage, stored: Stored) -> None:
            sent.append(stored.seq)
            sentence = describe_decision(request, self.client.agent_id, decision) or decision
            self._show_sent(stored, self.client.find_reply_address(request), sentence, seq)

        request, stored = await decide_request(self.client, self.activity, seq, decision, show)
        # The hub reported the decision for the operator, so the decision is not shown as a sent message.
        if not sent:
            sentence = describe_decision(request, self.client.agent_id, decision) or decision
            self.screen.note(f"Told {sanitize(request.sender_id)} in #{stored.seq}: {sanitize(sentence)}.")

    async def _answer_yes_or_no(self, text: str) -> bool:
        """Treat a plain yes or no as a decision if a call waits for one in this thread. Return False for any other
        text.
        """
        decision = read_yes_or_no(self.activity, self.place.thread_id, text)
        if decision is not None:
            await self.decide(*decision, "")
        return decision is not None
