"""A person in the conversation: what a typed line does, and what is shown of what happens.

`Chat` stands between a `NetworkClient` and a `Screen`; `converse` gives it its lines. It never decides who gets a
message and keeps nothing that must survive: what was shown is acknowledged, what was not comes again next time. A line
that begins with / is a command: those stand at the end, each with the usage and the meaning that ``/help`` lists and
the tab key goes by.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roundelay.connection import ReconnectLimit
from roundelay.display.activity import describe_agent, list_work
from roundelay.display.screen import (
    Screen,
    describe_place,
    format_line,
    format_participants,
    format_table,
    tell_person,
)
from roundelay.display.text import sanitize
from roundelay.live_activity import LiveActivity
from roundelay.network.client import (
    AnyMessage,
    NetworkClient,
    Reconnected,
    Reconnecting,
    Signal,
    Stored,
)
from roundelay.network.errors import ConnectError, GiveUp, InvalidArguments, RequestError, RoundelayError
from roundelay.runs.approvals import (
    KnownRequests,
    check_arguments,
    describe_decision,
    find_message,
    format_until,
    list_requests,
    read_until,
)
from roundelay.runs.lists import list_channels, list_participants, list_threads
from roundelay.terminal.actions import (
    check_place,
    choose_request,
    decide_request,
    end_takeover,
    enter_place,
    is_shown,
    read_yes_or_no,
    resume,
    start_takeover,
    stop_work,
    watch,
)
from roundelay.terminal.activity_lines import describe_news
from roundelay.terminal.places import BROADCAST, Place

HISTORY_MESSAGES = 20
MAX_THREADS = 50
MAX_BUSY = 10
"""Agents of whom it is told at the beginning what they do."""
SENT_REMEMBERED = 500
TYPING_SENT_EVERY_S = 3.0
SHOWN_AT_FIRST = 5
_SCOPES = ("", "thread", "always")

Obey = Callable[["Chat", str], Awaitable[None]]
"""Obeys a command, given what stands behind its name."""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    meaning: str
    obey: Obey


COMMANDS: dict[str, Command] = {}
"""By their names, in the order of ``/help``."""


def command(usage: str, meaning: str) -> Callable[[Obey], Obey]:
    """Make a method of `Chat` the command of this usage."""

    def keep(obey: Obey) -> Obey:
        COMMANDS[usage.split()[0].removeprefix("/")] = Command(usage, meaning, obey)
        return obey

    return keep


class Chat:
    """One person's conversation. Run `show_messages`, `show_events` and `tell_typing` beside the lines that go to
    `handle_line`."""

    def __init__(
        self,
        client: NetworkClient,
        screen: Screen,
        *,
        errors: Screen | None = None,
        shows_activity: bool = True,
        patience: ReconnectLimit | None = None,
    ) -> None:
        self.client = client
        self.screen = screen
        self.errors = errors or screen
        self.place = BROADCAST
        self.activity = LiveActivity(client.agent_id)
        self._requests = KnownRequests(client)
        self.has_failed = False
        """Whether a line could not be obeyed."""
        self.sent: deque[int] = deque(maxlen=SENT_REMEMBERED)
        """The seqs of what was sent here, for `/cost`."""
        self.typed = asyncio.Event()
        """Set whenever the person has typed something."""
        self._shows_activity = shows_activity
        self._patience = patience or ReconnectLimit(None)
        self._watching: asyncio.Task[None] | None = None
        self._proven = {BROADCAST.to}  # places that took a message: elsewhere nobody is told of typing
        self._typing_sent_at = 0.0

    # --- what is shown

    async def start(self, to: str | None = None) -> None:
        """Say where one is and who is there; go to ``to`` if it is given."""
        name, url = sanitize(self.client.welcome.network.name), sanitize(self.client.url)
        await watch(self.client)
        self.screen.note(f"You are {self.client.agent_id} in the network {name} at {url}.")
        listed = await self._show_participants()
        if to is not None:
            await check_place(self.client, to, listed)
            await self.go(to)
        await self._take_up(listed)
        await self._show_before()
        await self._show_waiting()

    async def show_messages(self) -> None:
        """Show what is delivered, for ever. Raises what ends the connection."""
        async for delivery in self.client.deliveries():
            async with delivery as message:
                self.activity.handle_message(message)
                self.screen.message(message, await self._requests.describe(message))
                if any(it.seq == message.seq for it in self.activity.list_own_requests()):
                    self._show_how_to_decide(message.seq, read_until(message))
                if self.place.reply_to is not None and message.thread_id == self.place.thread_id:
                    self.place = Place(self.place.to, self.place.thread_id, message.seq)

    async def show_events(self) -> None:
        """Show what happens beside the messages, until the connection has ended. Raises `ConnectError` when patience
        does."""
        async for event in self.client.events():
            news = self.activity.handle_event(event)
            match event:
                case Signal(kind="thinking", body={"active": False}):
                    for it in news:  # of who waits for an answer, whatever the prompt shows
                        self.screen.note(f"{describe_news(it)}.")
                case Signal() if not self._shows_activity:
                    continue  # the prompt shows it
                case Signal(kind="delta" | "tool"):
                    for it in news:
                        self.screen.note(f"{describe_news(it)} ({sanitize(event.thread_id)})")
                case Reconnecting() | Reconnected():
                    if self._patience.handle_event(event):
                        self.errors.event(event)
                    if isinstance(event, Reconnected):
                        self._watching = asyncio.create_task(self._watch_again())  # beside: it may be lost again
                case _ if is_shown(event, self.client.agent_id):
                    self.screen.event(event)

    async def send_typing(self) -> None:
        """Let the readers of the current place know when a line is being written (`typed` is set); for ever."""
        while True:
            await self.typed.wait()
            self.typed.clear()
            now = time.monotonic()
            if self.place.to not in self._proven or now - self._typing_sent_at < TYPING_SENT_EVERY_S:
                continue
            self._typing_sent_at = now
            if self.place.reply_to is not None:
                await self.client.signal("typing", {}, thread_id=self.place.thread_id)
            else:
                await self.client.signal("typing", {}, to=self.place.to)

    async def _watch_again(self) -> None:
        with suppress(RoundelayError):
            await watch(self.client)
            await self._take_up(await list_participants(self.client))

    async def _take_up(self, listed: Iterable[Mapping[str, Any]]) -> None:
        """Take what went on before one came: who works, for a prompt that shows it, and which threads are held."""
        if not self._shows_activity:
            self.activity.load_work(listed)
        self.activity.load_takeovers(await list_threads(self.client, limit=MAX_THREADS))

    async def _show_participants(self) -> list[Mapping[str, Any]]:
        listed = await list_participants(self.client)
        others = [agent for agent in listed if agent["agent_id"] != self.client.agent_id]
        for state in ("online", "offline"):
            ids = [sanitize(agent["agent_id"]) for agent in others if agent["state"] == state]
            if ids:
                self.screen.note(f"{state.title()}: {', '.join(ids)}.")
        if not others:
            self.screen.note("Nobody else is registered yet.")
        busy = [it for it in others if it.get("activity") not in ("idle", "gone", None)]
        busy = [
            it for it in busy if not any("decisions" in work for work in it.get("work", ()))
        ]  # which are shown next
        for agent in busy[:MAX_BUSY]:
            self.screen.note(sanitize(f"{describe_agent(agent)}."))
        return [*listed]

    async def _show_before(self) -> None:
        """The last messages of this place that the person has seen, or has said: what is new is delivered."""
        with suppress(RequestError):  # a place where nothing was said yet
            welcome, me = self.client.welcome, self.client.agent_id
            history = await self.client.history(self.place.thread_id, before=welcome.head + 1, limit=HISTORY_MESSAGES)
            known = [it for it in history.messages if it.seq <= welcome.cursor or it.sender_id == me]
            for message in known[-SHOWN_AT_FIRST:]:
                self.screen.message(message, await self._requests.describe(message))

    async def _show_waiting(self) -> None:
        """What waits for this person's decision, wherever it is."""
        with suppress(RequestError):  # an older hub
            for it in await list_requests(self.client):
                if it.may_decide:
                    self.activity.add_request(it.message)
                if it.may_decide or it.may_call:
                    self.screen.note(it.describe())
                    self._show_how_to_decide(it.seq, it.until)

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

    def _show_place(self) -> None:
        self.screen.note(f"Lines now go to {sanitize(self.place.describe())}.")

    def _complain(self, sentence: str) -> None:
        self.has_failed = True
        self.errors.error(sentence)

    # --- what a line does

    async def handle_line(self, line: str) -> bool:
        """Obey one line: a command, or text for the current place. False when it says to leave.

        What the hub refuses is shown; raises only when the connection has ended for good.
        """
        text = line.strip()
        try:
            if text.startswith("//"):
                await self.say(line.lstrip()[1:])
            elif text.startswith("/"):
                return await self._obey(text)
            elif text and not await self._answer_yes_or_no(text):
                await self.say(line)
        except ConnectError:
            raise
        except GiveUp as error:
            self._complain(str(error))
        except RoundelayError as error:
            self._complain(tell_person(str(error), in_chat=True))
        return True

    async def say(self, text: str) -> None:
        """Send text to the current place."""
        place = self.place
        stored = await self.client.send(place.to, text, reply_to=place.reply_to, conversation=place.conversation)
        self._proven.add(place.to)
        self._show_sent(stored, place.to, text, place.reply_to)
        if self.place == place and place.reply_to is not None:
            self.place = Place(place.to, place.thread_id, stored.seq)

    async def go(self, to: str) -> None:
        """Make an address or a thread the current place; a channel is joined. Raises `RoundelayError`."""
        self.place, told = await enter_place(self.client, to)
        if told:
            self.screen.note(told)
        if self.place.to.startswith("channel:") and to == self.place.to:
            self._proven.add(to)

    async def _go_and_say(self, to: str, text: str = "") -> None:
        before = self.place
        await self.go(to)
        if not text.strip():
            self._show_place()
            return
        try:
            await self.say(text.strip())
        except RoundelayError:
            self.place = before
            raise

    async def _answer(self, message: AnyMessage, text: str) -> None:
        """Reply to a message where it is; the current place stays."""
        stored = await self.client.reply(message, text)
        to = f"agent:{message.sender_id}" if message.kind == "direct" else message.to
        self._show_sent(stored, to, text, message.seq)

    async def _decide(self, word: str, seq: int, text: str) -> None:
        """Answer an agent that asks whether it may make a call: by a reply, or as an operator who does not read it."""
        decision, shown = f"/{word} {text}".strip(), []

        def show(request: AnyMessage, stored: Stored) -> None:
            shown.append(stored.seq)
            told = describe_decision(request, self.client.agent_id, decision) or decision
            self._show_sent(stored, self.client.find_reply_address(request), told, seq)

        request, stored = await decide_request(self.client, self.activity, seq, decision, show)
        if not shown:
            told = describe_decision(request, self.client.agent_id, decision) or decision
            self.screen.note(f"Told {sanitize(request.sender_id)} in #{stored.seq}: {sanitize(told)}.")

    def _read_request(self, word: str, rest: str) -> tuple[int, str]:
        """The request that is decided, the one that waits where none is named, and what is said of it."""
        number, _, text = rest.removeprefix("#").partition(" ")
        if number.isdecimal():
            return int(number), text.strip()
        if number[:1].isdecimal():
            raise InvalidArguments(f"{sanitize(number)!r} is no number of a message; write /{word} SEQ.")
        return choose_request(word, self.activity.list_own_requests()), rest.strip()

    async def _answer_yes_or_no(self, text: str) -> bool:
        """Take a plain yes or no as a decision where a call waits for one in this thread; False where it is a text like
        any other."""
        decision = read_yes_or_no(self.activity, self.place.thread_id, text)
        if decision is not None:
            await self._decide(*decision, "")
        return decision is not None

    def _read_whom_and_where(self, word: str, rest: str) -> tuple[str, str]:
        """Who is named, and the channel that is: the current one if none is."""
        who, _, channel = rest.partition(" ")
        place = channel.strip() or self.place.to
        if not who or (not channel.strip() and not place.startswith("channel:")):
            raise InvalidArguments(f"Write /{word} ID CHANNEL; without CHANNEL it is the one that you are in.")
        return who.removeprefix("agent:"), place.removeprefix("channel:")

    # --- commands

    async def _obey(self, text: str) -> bool:
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        if name in COMMANDS:
            await COMMANDS[name].obey(self, rest.strip())
        else:
            known = "/help lists them. A text that begins with / is sent as //..."
            self._complain(f"There is no command /{sanitize(name)}; {known}")
        return True

    @command("/who", "what agents do at the moment: who works, who waits, for whom")
    async def _who(self, _rest: str) -> None:
        rows = list_work(await list_participants(self.client), time.time_ns() // 1_000_000)
        head = ("AGENT", "DOES", "THREAD", "FOR")
        self.screen.write(format_table(head, rows, paint=self.screen.paint) if rows else "There are no agents.")

    @command("/agents", "who is registered, and what they can do")
    async def _agents(self, _rest: str) -> None:
        self.screen.write(format_participants(await list_participants(self.client), paint=self.screen.paint))

    @command("/dm ID [TEXT]", "write to one participant, and go on there")
    async def _dm(self, rest: str) -> None:
        target, _, text = rest.partition(" ")
        if not target:
            raise InvalidArguments("Write /dm ID with whom to write to; /agents lists who is there.")
        await self._go_and_say(f"agent:{target.removeprefix('agent:')}", text)

    @command("/broadcast [TEXT]", "write to everyone, and go on there")
    async def _broadcast(self, rest: str) -> None:
        await self._go_and_say("broadcast", rest)

    @command("/to [PLACE]", "go on at an ID, channel:NAME, broadcast or thread:SEQ; or say where lines go")
    async def _to(self, rest: str) -> None:
        if rest:
            await check_place(self.client, rest, await list_participants(self.client))
            await self.go(rest)
        self._show_place()

    @command("/threads", "the threads that you read, the newest first, and who holds them")
    async def _threads(self, _rest: str) -> None:
        threads = await list_threads(self.client, limit=MAX_THREADS)
        self.activity.load_takeovers(threads)
        rows = [
            (
                it["thread_id"],
                it.get("title", ""),
                it["messages"],
                f"#{it['last_seq']}",
                it.get("held", {}).get("by", ""),
            )
            for it in threads
        ]
        head = ("THREAD", "TITLE", "MESSAGES", "LAST", "TAKEN OVER BY")
        self.screen.write(format_table(head, rows, paint=self.screen.paint) if rows else "Nothing has been said yet.")

    @command("/channels", "the channels that there are for you")
    async def _channels(self, _rest: str) -> None:
        channels = await list_channels(self.client)
        rows = [
            (
                it["name"],
                it["members"],
                "yes" if it["is_member"] else "invited" if it.get("is_invited") else "",
                it["access"],
                it["topic"],
            )
            for it in channels
        ]
        head = ("CHANNEL", "MEMBERS", "YOU ARE IN", "ACCESS", "TOPIC")
        self.screen.write(format_table(head, rows, paint=self.screen.paint) if rows else "There are no channels yet.")

    @command("/take [THREAD]", "take this thread over, or another: its agents are silent there until /give")
    async def _take(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        self.screen.note(await start_takeover(self.client, self.activity, thread_id))

    @command("/give [THREAD]", "give it back: they read what was said meanwhile, and answer again")
    async def _give(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        self.screen.note(await end_takeover(self.client, self.activity, thread_id))

    @command("/join CHANNEL", "join a channel, or make it, and go on there")
    async def _join(self, rest: str) -> None:
        if not rest:
            raise InvalidArguments("Write /join CHANNEL with the name of a channel; one that is not there is made.")
        await self._go_and_say(f"channel:{rest.removeprefix('channel:')}")

    @command("/create CHANNEL [ACCESS]", "make a channel; ACCESS: open (default), invite or closed")
    async def _create(self, rest: str) -> None:
        name, _, access = rest.removeprefix("channel:").partition(" ")
        access = access.strip() or "open"
        if not name or access not in ("open", "invite", "closed"):
            raise InvalidArguments("Write /create CHANNEL ACCESS; ACCESS is open (anybody may join), invite or closed.")
        await self.client.call("channels.create", {"name": name, "access": access})
        await self._go_and_say(f"channel:{name}")

    @command("/invite ID [CHANNEL]", "let somebody join the channel that you own")
    async def _invite(self, rest: str) -> None:
        who, name = self._read_whom_and_where("invite", rest)
        await self.client.call("channels.invite", {"name": name, "agent_id": who})
        self.screen.note(
            f"{sanitize(who)} may join the channel {sanitize(name)} now. The network does not tell it: write to it."
        )

    @command("/remove ID [CHANNEL]", "take somebody out of it")
    async def _remove(self, rest: str) -> None:
        who, name = self._read_whom_and_where("remove", rest)
        await self.client.call("channels.remove", {"name": name, "agent_id": who})
        self.screen.note(
            f"{sanitize(who)} is out of the channel {sanitize(name)}, and comes back only if it is invited."
        )

    @command("/leave [CHANNEL]", "leave a channel")
    async def _leave(self, rest: str) -> None:
        name = (rest or self.place.to).removeprefix("channel:")
        if not rest and not self.place.to.startswith("channel:"):
            raise InvalidArguments("You are in no channel now; write /leave CHANNEL.")
        await self.client.call("channels.leave", {"name": name})
        if self.place.to == f"channel:{name}":
            self.place = BROADCAST
        self.screen.note(f"You left the channel {sanitize(name)}.")
        self._show_place()

    @command("/thread THREAD", "go on in a thread, such as thread:15 or direct:ann~mia")
    async def _thread(self, rest: str) -> None:
        if rest:
            await self._go_and_say(rest)
        else:
            self.screen.note(f"You are in {sanitize(self.place.thread_id)}.")

    @command("/history [THREAD]", f"the last {HISTORY_MESSAGES} messages of this thread, or of another")
    async def _history(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        history = await self.client.history(thread_id, limit=HISTORY_MESSAGES)
        more = f", the last {len(history.messages)}" if history.has_more else ""
        self.screen.note(f"{sanitize(thread_id)}{more}:")
        for message in history.messages:
            self.screen.message(message, await self._requests.describe(message))

    @command("/reply SEQ TEXT", "answer one message, and stay here")
    async def _reply(self, rest: str) -> None:
        number, _, text = rest.removeprefix("#").partition(" ")
        if not number.isdecimal() or not text.strip():
            raise InvalidArguments("Write /reply SEQ TEXT with the number of the message that you answer.")
        await self._answer(await find_message(self.client, int(number)), text.strip())

    @command("/approve [SEQ] [SCOPE]", "let an agent make the call that it asks for; SCOPE: thread or always")
    async def _approve(self, rest: str) -> None:
        seq, scope = self._read_request("approve", rest)
        if scope not in _SCOPES:
            raise InvalidArguments(
                f"Write /approve SEQ, then thread, always or nothing; {sanitize(scope)!r} is none of these."
            )
        await self._decide("approve", seq, scope)

    @command("/deny [SEQ] [REASON]", "do not let it")
    async def _deny(self, rest: str) -> None:
        await self._decide("deny", *self._read_request("deny", rest))

    @command("/edit [SEQ] JSON", "let it, with these arguments instead")
    async def _edit(self, rest: str) -> None:
        seq, arguments = self._read_request("edit", rest)
        check_arguments(arguments)
        await self._decide("edit", seq, arguments)

    @command("/stop [THREAD]", "stop what agents do in this thread, or in another")
    async def _stop(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        told = await stop_work(self.client, self.activity, thread_id)
        if rest:
            await self.client.history(rest, limit=1)  # raises where there is no such thread
        self.screen.note(told)

    @command("/resume SEQ|AGENT", "let a conversation that stopped at its limit go on, or an agent")
    async def _resume(self, rest: str) -> None:
        if not rest:
            raise InvalidArguments("Write /resume SEQ, or /resume AGENT, with what the notice names.")
        self.screen.note(await resume(self.client, rest.removeprefix("#")))

    @command("/cost", "tokens that agents used on what was said since you joined")
    async def _cost(self, _rest: str) -> None:
        from roundelay.runs.cost import read_usage
        from roundelay.runs.cost_text import describe_usage

        usage = await read_usage(self.client, self.activity.reactions, self.sent)
        self.screen.write(describe_usage(usage, paint=self.screen.paint))

    @command("/help", "this list")
    async def _help(self, _rest: str) -> None:
        for usage, meaning in [*((it.usage, it.meaning) for it in COMMANDS.values()), ("/quit", "leave")]:
            self.screen.write(f"  {usage:<28} {self.screen.paint.dim(meaning)}")
        self._show_place()
