"""Thousands of simple agents in one simulation. Each agent consists of a session of the hub and a function. The agent
has no task, journal or model.

A crowd is for questions about whole networks, such as how a rumor spreads, or how a limit affects ten thousand agents.
A member reads its deliveries and answers at once, with the same sessions and frames as any other participant. A member
never writes turn records, waits, or resumes. Use `simulation.start_agent` for agents that do. docs/scenarios.md shows
an example.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import UNSET, Raw

from roundelay.agents.policy import AgentPolicy, count_most
from roundelay.agents.prompt import ConversationPrompt, select_threads
from roundelay.network.addresses import complete_address
from roundelay.network.core.entries import Peer
from roundelay.network.errors import RoundelayError, error_from_wire
from roundelay.network.frames import (
    PROTOCOL_VERSION,
    AckFrame,
    CallFrame,
    DeliverFrame,
    ErrorFrame,
    HelloFrame,
    NoticeFrame,
    PresenceFrame,
    ResultFrame,
    SendFrame,
    SignalOutFrame,
    StoredFrame,
    WelcomeFrame,
    WireMessage,
    decode_json,
    encode,
)
from roundelay.network.hub import Hub
from roundelay.network.messages import MessageThread, message_from_wire
from roundelay.simulation.network import Simulation, SimulationError

_decoder = msgspec.json.Decoder(
    WelcomeFrame | StoredFrame | DeliverFrame | ResultFrame | ErrorFrame | SignalOutFrame | PresenceFrame | NoticeFrame
)

ACK_EVERY, ACK_WITHIN_S = 16, 0.5
"""Number of deliveries after which a member acknowledges, and the maximum delay before it acknowledges in seconds."""
AT_ONCE = 128
"""Number of members that react in one iteration of the event loop. A limit of this size lets messages stay in the
processor's cache on their way through the hub.
"""

_crowds: WeakKeyDictionary[Simulation, int] = WeakKeyDictionary()
"""Number of crowds in each simulation. The number gives each crowd different message ids and random numbers."""
_STORED = b'{"type":"stored"'


class _Window(msgspec.Struct):
    threads: list[dict[str, Any]]


_window_decoder = msgspec.json.Decoder(_Window)


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message that was delivered to a member. ``prompt`` is the rendered conversation, or an empty string if the
    crowd renders no prompts.
    """

    agent_id: str
    sender_id: str
    text: str
    message: WireMessage
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """A message that a member sends to an id or an address."""

    to: str
    text: str


CrowdScript = Callable[[Incoming], Iterable[Message]]
"""Function that returns the answers of a member to a message. In every run of a seed, the same message must get the
same answers.
"""


class Crowd:
    """The members of a simulation that follow the same script.

    With ``renders_prompts``, the conversation of each message is read from the hub with the visibility of an agent, and
    is rendered as for a model. The seed determines the order of members that receive messages at the same moment.
    """

    def __init__(self, simulation: Simulation, script: CrowdScript, *, renders_prompts: bool = False) -> None:
        self.script = script
        self.prompts_rendered = 0
        self.errors: list[RoundelayError] = []
        """Errors with which the hub refused frames of the crowd."""

        self._simulation = simulation
        self._number = _crowds.get(simulation, 0)
        self._chance = simulation.chance(f"crowd/{self._number}")
        self._ids = count(1)
        self._prompt = ConversationPrompt() if renders_prompts else None
        self._policy = AgentPolicy()
        self._members: dict[str, _Member] = {}
        self._written: list[tuple[_Member, list[bytes]]] = []
        self._reading: list[tuple[_Member, list[bytes]]] = []
        self._owing: list[_Member] = []
        self._joining: dict[str, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()
        _crowds[simulation] = self._number + 1

    def __len__(self) -> int:
        return len(self._members)

    async def join(self, agent_ids: Sequence[str]) -> None:
        """Let participants join, all at the same time. Raises the hub's refusals."""
        hub = self._simulation.hub
        if hub is None:
            raise SimulationError("The simulated hub is down.")
        for agent_id in agent_ids:
            self._joining[agent_id] = self._loop.create_future()
            self._members[agent_id] = _Member(self, agent_id, hub)
        await asyncio.gather(*(self._joining[agent_id] for agent_id in agent_ids))
        self._joining.clear()

    def send(self, agent_id: str, to: str, text: str) -> None:
        """Let a member send a message that answers no other message."""
        self._members[agent_id].say(Message(to, text), None)

    def leave(self) -> None:
        """Disconnect all members of the crowd."""
        self._acknowledge()
        for member in self._members.values():
            member.leave()
        self._members.clear()

    # --- members with deliveries; they react once after each tick of the hub

    def take(self, member: _Member, payloads: list[bytes]) -> None:
        if not self._written and not self._reading:
            self._loop.call_soon(self._react)
        self._written.append((member, payloads))

    def _react(self) -> None:
        if not self._reading:
            self._reading, self._written = self._written, []
            self._chance.shuffle(self._reading)
        few = self._reading[-AT_ONCE:]
        del self._reading[-AT_ONCE:]
        for member, payloads in few:
            member.read(payloads)
        if self._reading or self._written:
            self._loop.call_soon(self._react)

    def acknowledge_soon(self, member: _Member) -> None:
        if not self._owing:
            self._loop.call_later(ACK_WITHIN_S, self._acknowledge)
        self._owing.append(member)

    def _acknowledge(self) -> None:
        owing, self._owing = self._owing, []
        for member in owing:
            member.acknowledge()

    def joined(self, agent_id: str, error: RoundelayError | None) -> None:
        future = self._joining.get(agent_id)
        if future is not None and not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        elif error is not None:
            self.errors.append(error)

    def render(self, message: WireMessage, window: list[dict[str, Any]]) -> str:
        """Return the conversation prompt for a message. The message must be in the window."""
        assert self._prompt is not None
        threads, trigger = [], None
        for thread in window:
            messages = [message_from_wire(it) for it in thread["messages"]]
            if thread["thread_id"] == message.thread_id:
                trigger = next((it for it in messages if it.seq == message.seq), None)
            threads.append(
                MessageThread(thread_id=thread["thread_id"], messages=messages, omitted=thread.get("omitted", 0))
            )
        if trigger is None:
            raise SimulationError(f"Message {message.seq} is not in its own window.")
        policy = self._policy
        shown = select_threads(threads, trigger, max_threads=policy.max_threads, per_thread=policy.per_thread)
        self.prompts_rendered += 1
        return self._prompt.render(shown, trigger.thread_id, trigger)

    def make_id(self) -> str:
        """Return a new message id. The id is new even for a member that has returned."""
        return f"crowd-{self._number}-{next(self._ids)}"

    @property
    def renders_prompts(self) -> bool:
        return self._prompt is not None

    @property
    def window_size(self) -> tuple[int, int]:
        return self._policy.max_threads, count_most(self._policy.per_thread) + 1


class _Member:
    """One member, which implements the hub's `Connection` and is also the other end of this connection."""

    __slots__ = (
        "_crowd",
        "_hub",
        "_is_held",
        "_last",
        "_open",
        "_session",
        "_taken",
        "_waiting",
        "agent_id",
        "is_paused",
        "peer",
    )

    def __init__(self, crowd: Crowd, agent_id: str, hub: Hub) -> None:
        self.agent_id = agent_id
        self.peer = Peer(is_trusted=True)
        self.is_paused = False
        self._crowd = crowd
        self._hub = hub
        self._is_held = False
        self._waiting: list[bytes] = []
        self._open: dict[str, WireMessage] = {}
        self._taken = self._last = 0
        self._session = hub.connect(self)
        self._send(HelloFrame(protocol=PROTOCOL_VERSION, agent_id=agent_id, kind="agent", role="reactor"))

    # --- the hub's side

    def write(self, payloads: list[bytes]) -> None:
        self._crowd.take(self, payloads)

    def end(self, code: int, reason: str) -> None:
        if code not in (1000, 4503):
            self._crowd.joined(self.agent_id, SimulationError(f"{self.agent_id} was closed with {code}: {reason}"))

    def admit(self) -> None:
        """Accept the connection without closing another one."""

    def pause_reading(self) -> None:
        self._is_held = True

    def resume_reading(self) -> None:
        self._is_held = False
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self._hub.receive(self._session, data)

    # --- the member's side

    def _send(self, frame: msgspec.Struct) -> None:
        data = encode(frame)
        if self._is_held:
            self._waiting.append(data)
        else:
            self._hub.receive(self._session, data)

    def leave(self) -> None:
        self._hub.disconnect(self._session)

    def say(self, said: Message, cause: int | None) -> None:
        to = complete_address(said.to)
        self._send(
            SendFrame(
                message_id=self._crowd.make_id(),
                to=to,
                content=Raw(encode(said.text)),
                cause=UNSET if cause is None else cause,
            )
        )

    def read(self, payloads: list[bytes]) -> None:
        last = 0
        for payload in payloads:
            if payload.startswith(_STORED):
                continue  # skip these frames, which are half of all, because nobody waits for them
            frame = _decoder.decode(payload)
            # Check for deliveries before the match: they are nearly all frames, and class patterns are slow.
            if type(frame) is DeliverFrame:
                last = frame.message.seq
                if frame.message.sender_id != self.agent_id:
                    self._begin(frame.message)
                continue
            match frame:
                case ResultFrame(call_id=call_id, value=value):
                    window = _window_decoder.decode(value).threads
                    self._react(self._open.pop(call_id), window)
                case WelcomeFrame():
                    self._crowd.joined(self.agent_id, None)
                case ErrorFrame():
                    self._crowd.joined(self.agent_id, error_from_wire(frame.code, frame.message, None))
                case _:
                    continue
        if last:
            self._taken += 1
            self._last = last
            if self._taken >= ACK_EVERY:
                self.acknowledge()
            elif self._taken == 1:
                self._crowd.acknowledge_soon(self)

    def acknowledge(self) -> None:
        """Acknowledge all deliveries so far."""
        if self._taken:
            self._taken = 0
            self._send(AckFrame(seq=self._last))

    def _begin(self, message: WireMessage) -> None:
        if not self._crowd.renders_prompts:
            self._react(message, None)
            return
        threads, per_thread = self._crowd.window_size
        call_id = f"w{message.seq}"
        self._open[call_id] = message
        args = Raw(b'{"trigger":%d,"threads":%d,"per_thread":%d}' % (message.seq, threads, per_thread))
        self._send(CallFrame(call_id=call_id, op="network.window", args=args))

    def _react(self, message: WireMessage, window: list[dict[str, Any]] | None) -> None:
        crowd = self._crowd
        prompt = ""
        if window is not None:
            prompt = crowd.render(message, window)
        content = decode_json(message.content)
        text = content if isinstance(content, str) else str(content)
        incoming = Incoming(self.agent_id, message.sender_id, text, message, prompt)
        for said in crowd.script(incoming):
            self.say(said, message.seq)
