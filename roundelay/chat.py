"""A person in the conversation: what a typed line does, what is shown of what happens.

`Chat` stands between a `NetworkClient` and a `Screen`; `chat_input` gives it its lines, from a terminal or a pipe. It never decides
who gets a message and keeps nothing that must survive: what was shown is acknowledged, what was not comes again next time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from roundelay.activity import Activity
from roundelay.approvals import find_settled, read_request
from roundelay.clean_text import clean
from roundelay.identity import READER_ID
from roundelay.lists import list_participants
from roundelay.live import LiveView
from roundelay.network.client import AnyMessage, NetworkClient, Presence, Reconnected, Reconnecting, Signal, Stored
from roundelay.network.errors import ConnectError, GiveUp, InvalidArguments, RoundelayError, UnknownRecipient
from roundelay.network.messages import message_from_wire
from roundelay.patience import Patience
from roundelay.places import BROADCAST, Place, find_place
from roundelay.terminal import Screen, describe_place, format_line, format_participants, tell_person

HISTORY_MESSAGES = 20
SENT_REMEMBERED = 500
TYPING_SENT_EVERY_S = 3.0


class Chat:
    """One person's conversation. Run `show_messages` and `show_events` beside the lines that go to `take_line`."""

    def __init__(
        self,
        client: NetworkClient,
        screen: Screen,
        *,
        errors: Screen | None = None,
        shows_activity: bool = True,
        patience: Patience | None = None,
    ) -> None:
        self.client = client
        self.screen = screen
        self.errors = errors or screen
        self.place = BROADCAST
        self.activity = Activity()
        self.live = LiveView()
        """What agents are writing."""
        self.has_failed = False
        """Whether a line could not be obeyed."""
        self.sent: deque[int] = deque(maxlen=SENT_REMEMBERED)
        """The seqs of what was sent here, for `/cost`."""
        self.typed = asyncio.Event()
        """Set whenever the person has typed something."""
        self._shows_activity = shows_activity
        self._patience = patience or Patience(None)
        self._watching: asyncio.Task[None] | None = None
        self._proven = {BROADCAST.to}  # places that took a message: elsewhere nobody is told of typing
        self._typing_sent_at = 0.0

    # --- what happens

    async def begin(self, to: str | None = None) -> None:
        """Say where one is and who is there; go to ``to`` if it is given."""
        welcome = self.client.welcome
        await self._watch()
        self.screen.note(
            f"You are {self.client.agent_id} in the network {clean(welcome.network.name)} at {clean(self.client.url)}."
        )
        await self._show_participants()
        if to is not None:
            await self.go(to)

    async def show_messages(self) -> None:
        """Show what is delivered, for ever. Raises what ends the connection."""
        async for delivery in self.client.deliveries():
            async with delivery as message:
                self.live.end_of(message.sender_id, message.thread_id)
                self.screen.message(message)
                self._notice_message(message)

    async def show_events(self) -> None:
        """Show what happens beside the messages, until the connection has ended. Raises `ConnectError` when patience does."""
        async for event in self.client.events():
            reports = self.live.take(event) if isinstance(event, Signal) else []
            if isinstance(event, Presence) and event.state == "offline":
                self.live.drop(event.agent_id)
            self.activity.take(event)
            match event:
                case Signal() if not self._shows_activity:
                    continue
                case Signal(kind="delta" | "tool"):
                    for report in reports:
                        self.screen.note(f"{report} ({clean(event.thread_id)})")
                    continue
                case Presence(agent_id=agent_id) if agent_id in (self.client.agent_id, READER_ID):
                    continue
                case Reconnecting() | Reconnected():
                    self.live.clear()
                    if self._patience.take(event):
                        self.errors.event(event)
                    if isinstance(event, Reconnected):
                        self._watching = asyncio.create_task(self._watch_again())  # beside: it may be lost again
                    continue
            self.screen.event(event)

    async def _watch(self) -> None:
        await self.client.call("network.watch", {"presence": True, "signals": True})

    async def _watch_again(self) -> None:
        with suppress(RoundelayError):
            await self._watch()

    def _notice_message(self, message: AnyMessage) -> None:
        self.activity.happened()
        if (reaction := read_request(message)) is not None:
            self.activity.asked(message.sender_id, reaction, message.seq)
        if self.place.reply_to is not None and message.thread_id == self.place.thread_id:
            self.place = Place(self.place.to, self.place.thread_id, message.seq)

    # --- what one does

    async def take_line(self, line: str) -> bool:
        """Obey one line: a command, or text for the current place. False when it says to leave.

        What the hub refuses is shown; raises only when the connection has ended for good.
        """
        text = line.strip()
        if not text:
            return True
        try:
            if text.startswith("//"):
                await self.say(line.lstrip()[1:])
            elif text.startswith("/"):
                return await self._obey(text)
            else:
                await self.say(line)
        except (ConnectError, GiveUp) as error:
            if isinstance(error, ConnectError):
                raise
            self._complain(str(error))
        except RoundelayError as error:
            self._complain(tell_person(str(error), in_chat=True))
        return True

    async def say(self, text: str) -> None:
        """Send text to the current place."""
        place = self.place
        stored = await self.client.send(place.to, text, reply_to=place.reply_to)
        self._proven.add(place.to)
        self._show_sent(stored, place.to, text, place.reply_to)
        if self.place == place and place.reply_to is not None:
            self.place = Place(place.to, place.thread_id, stored.seq)

    def _show_sent(self, stored: Stored, to: str, text: str, reply_to: int | None) -> None:
        self.sent.append(stored.seq)
        self.activity.happened()
        now_ms = time.time_ns() // 1_000_000
        shown = describe_place(to, stored.thread_id)
        self.screen.write(
            format_line(
                now_ms,
                stored.seq,
                self.client.agent_id,
                shown,
                text,
                reply_to=reply_to,
                paint=self.screen.paint,
                width=self.screen.width,
            )
        )

    async def tell_typing(self) -> None:
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

    async def go(self, to: str) -> None:
        """Make an address or a thread the current place; a channel is joined. Raises `RoundelayError`."""
        if to.startswith("channel:") and to != "channel:":
            await self._join(to.removeprefix("channel:"))
        self.place = await find_place(self.client, to)

    async def _join(self, name: str) -> None:
        try:
            await self.client.call("channels.join", {"name": name})
        except UnknownRecipient:
            await self.client.call("channels.create", {"name": name})
            self.screen.note(f"Created the channel {name}.")
        self._proven.add(f"channel:{name}")

    def _complain(self, sentence: str) -> None:
        self.has_failed = True
        self.errors.error(sentence)

    def _say_place(self) -> None:
        self.screen.note(f"Lines now go to {clean(self.place.describe())}.")

    # --- commands

    async def _obey(self, text: str) -> bool:
        name, _, rest = text[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        command = COMMANDS.get(name)
        if command is None:
            self._complain(
                f"There is no command /{clean(name)}; /help lists them. A text that begins with / is sent as //..."
            )
        else:
            await command.function(self, rest.strip())
        return True

    async def _show_participants(self) -> None:
        listed = await list_participants(self.client)
        others = [agent for agent in listed if agent["agent_id"] != self.client.agent_id]
        for state in ("online", "offline"):
            ids = [clean(agent["agent_id"]) for agent in others if agent["state"] == state]
            if ids:
                self.screen.note(f"{state.title()}: {', '.join(ids)}.")
        if not others:
            self.screen.note("Nobody else is registered yet.")

    async def _agents(self, _rest: str) -> None:
        self.screen.write(format_participants(await list_participants(self.client), paint=self.screen.paint))

    async def _dm(self, rest: str) -> None:
        target, _, text = rest.partition(" ")
        if not target:
            raise InvalidArguments("Write /dm ID with whom to write to; /agents lists who is there.")
        await self._go_and_say(f"agent:{target.removeprefix('agent:')}", text)

    async def _broadcast(self, rest: str) -> None:
        await self._go_and_say("broadcast", rest)

    async def _thread(self, rest: str) -> None:
        if not rest:
            self.screen.note(f"You are in {clean(self.place.thread_id)}.")
            return
        await self._go_and_say(rest, "")

    async def _join_channel(self, rest: str) -> None:
        if not rest:
            raise InvalidArguments("Write /join CHANNEL with the name of a channel; one that is not there is made.")
        await self._go_and_say(f"channel:{rest.removeprefix('channel:')}", "")

    async def _go_and_say(self, to: str, text: str) -> None:
        before = self.place
        await self.go(to)
        if not text.strip():
            self._say_place()
            return
        try:
            await self.say(text.strip())
        except RoundelayError:
            self.place = before
            raise

    async def _reply(self, rest: str) -> None:
        number, _, text = rest.partition(" ")
        if not number.isdecimal() or not text.strip():
            raise InvalidArguments("Write /reply SEQ TEXT with the number of the message that you answer.")
        await self._answer(await self._find(int(number)), text.strip())

    async def _approve(self, rest: str) -> None:
        await self._decide("approve", rest)

    async def _deny(self, rest: str) -> None:
        await self._decide("deny", rest)

    async def _edit(self, rest: str) -> None:
        try:
            is_object = isinstance(json.loads(rest.partition(" ")[2]), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise InvalidArguments(
                "Write /edit SEQ ARGUMENTS with the arguments that the call is made with, as a JSON object."
            )
        await self._decide("edit", rest)

    async def _decide(self, word: str, rest: str) -> None:
        """Answer an agent that asks whether it may make a call: its decision counts only as a reply to the request."""
        number, _, text = rest.partition(" ")
        if not number.isdecimal():
            raise InvalidArguments(f"Write /{word} SEQ with the number of the message that asks for it.")
        request = await self._find(int(number))
        if read_request(request) is None:
            raise InvalidArguments(f"#{number} asks for no approval, so nothing was sent; /reply {number} answers it.")
        if why := await find_settled(self.client, request):
            raise InvalidArguments(f"#{number} {why}, so nothing was sent.")
        await self._answer(request, f"/{word} {text.strip()}".strip())
        self.activity.decided(request.seq)

    async def _find(self, seq: int) -> AnyMessage:
        return message_from_wire((await self.client.call("network.why", {"seq": seq}))["chain"][0])

    async def _answer(self, message: AnyMessage, text: str) -> None:
        """Reply to a message where it is; the current place stays."""
        stored = await self.client.reply(message, text)
        to = f"agent:{message.sender_id}" if message.kind == "direct" else message.to
        self._show_sent(stored, to, text, message.seq)

    async def _leave(self, rest: str) -> None:
        name = (rest or self.place.to).removeprefix("channel:")
        if not rest and not self.place.to.startswith("channel:"):
            raise InvalidArguments("You are in no channel now; write /leave CHANNEL.")
        await self.client.call("channels.leave", {"name": name})
        if self.place.to == f"channel:{name}":
            self.place = BROADCAST
        self.screen.note(f"You left the channel {clean(name)}.")
        self._say_place()

    async def _history(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        history = await self.client.history(thread_id, limit=HISTORY_MESSAGES)
        more = f", the last {len(history.messages)}" if history.has_more else ""
        self.screen.note(f"{clean(thread_id)}{more}:")
        for message in history.messages:
            self.screen.message(message)

    async def _stop(self, rest: str) -> None:
        thread_id = rest or self.place.thread_id
        stopped = (await self.client.call("network.cancel", {"thread_id": thread_id}))["reactions"]
        if stopped:
            count = "1 reaction" if len(stopped) == 1 else f"{len(stopped)} reactions"
            self.screen.note(f"Asked {count} in {clean(thread_id)} to stop.")
            return
        elsewhere = sorted(self.activity.thinking_threads() - {thread_id})
        hint = f" Agents are at work in {', '.join(map(clean, elsewhere))}: /stop THREAD." if elsewhere else ""
        self.screen.note(f"Nobody is at work in {clean(thread_id)}.{hint}")

    async def _resume(self, rest: str) -> None:
        if not rest.isdecimal():
            raise InvalidArguments("Write /resume SEQ with the number that the notice names.")
        await self.client.call("network.resume_root", {"root": int(rest)})
        self.screen.note(f"The conversation that began with #{rest} may go on.")

    async def _cost(self, _rest: str) -> None:
        from roundelay.reading.usage import (  # only here: it loads what reads journals
            add_others,
            describe_usage,
            find_reactions,
            read_spent,
            read_usage,
        )

        # Signals may claim anybody's reaction: whose it is the hub says, where it knows, and none counts twice.
        reactions = dict(self.activity.reactions) | dict(await find_reactions(self.client, self.sent))
        usage = await read_usage(self.client, reactions.items())
        whole = add_others(usage, await read_spent(self.client, self.sent))
        self.screen.write(describe_usage(whole, paint=self.screen.paint))

    async def _help(self, _rest: str) -> None:
        for command in COMMANDS.values():
            self.screen.write(f"  {command.usage:<20} {self.screen.paint.dim(command.help)}")
        self.screen.write(f"  {'/quit':<20} {self.screen.paint.dim('leave')}")
        self._say_place()


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    function: Callable[[Chat, str], Awaitable[None]]


COMMANDS = {
    "agents": Command("/agents", "who is registered, and what they can do", Chat._agents),
    "dm": Command("/dm ID [TEXT]", "write to one participant, and go on there", Chat._dm),
    "broadcast": Command("/broadcast [TEXT]", "write to everyone, and go on there", Chat._broadcast),
    "join": Command("/join CHANNEL", "join a channel, or make it, and go on there", Chat._join_channel),
    "leave": Command("/leave [CHANNEL]", "leave a channel", Chat._leave),
    "thread": Command("/thread ID", "go on in a thread, such as thread:15 or direct:ann~mia", Chat._thread),
    "history": Command(
        "/history [ID]", f"the last {HISTORY_MESSAGES} messages of this thread, or of another", Chat._history
    ),
    "reply": Command("/reply SEQ TEXT", "answer one message, and stay here", Chat._reply),
    "approve": Command("/approve SEQ", "let an agent make the call that it asks for in this message", Chat._approve),
    "deny": Command("/deny SEQ [REASON]", "do not let it", Chat._deny),
    "edit": Command("/edit SEQ JSON", "let it, with these arguments instead", Chat._edit),
    "stop": Command("/stop [THREAD]", "stop what agents do in this thread, or in another", Chat._stop),
    "resume": Command("/resume SEQ", "let a conversation go on that was stopped at its limit", Chat._resume),
    "cost": Command("/cost", "tokens that agents used on what was said since you joined", Chat._cost),
    "help": Command("/help", "this list", Chat._help),
}
