"""Implement ``roundelay agent try``: send one message to one agent in a temporary network, and show what happens.

`try_agent` runs the agent, and a `Show` prints the output: `ShowText` for people, `ShowJson` for programs. The output
contains the events of `roundelay.agents.events` and the sent messages, in chronological order.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Protocol

from roundelay.agents.agent import Agent
from roundelay.agents.approval_rule import ApprovalRule
from roundelay.agents.events import (
    AnswerReviewed,
    Event,
    Finished,
    HandedOver,
    ModelOutput,
    ModelRetry,
    Progress,
    RemoteCall,
    RemoteOutput,
    Resumed,
    ToolCallEnd,
    ToolOutput,
    ToolRequests,
    TurnEnd,
    TurnStart,
    Waiting,
    event_to_json,
)
from roundelay.agents.models.model import Usage
from roundelay.agents.models.tokens import Prices, write_dollars
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import AgentSpec, build_runner
from roundelay.agents.tools import as_tool
from roundelay.app import Network
from roundelay.display.screen import Screen, StreamedText
from roundelay.display.text import sanitize, sanitize_json, sanitize_lines
from roundelay.network.addresses import short_address
from roundelay.network.client import AnyMessage, NetworkClient, Signal
from roundelay.network.errors import ConfigError, RoundelayError
from roundelay.network.text import count
from roundelay.runs.node_source import HubLog, LiveSource

_Happened = asyncio.Queue[tuple[Event | None, int]]
"""Queue of an agent's events, each with the last sequence number of the ledger at that time. The event None means that
the agent's reaction has ended and is recorded."""


class Show(Protocol):
    """Printer of events and messages."""

    def event(self, event: Event) -> None: ...

    def message(self, message: AnyMessage) -> None: ...

    def end(self, finish: Finished, cost: Decimal | None) -> None:
        """Print the end of the reaction. ``cost`` is in dollars, or None if a price is unknown."""
        ...


async def try_agent(spec: AgentSpec, text: str, *, person: str, approves: bool, show: Show) -> bool:
    """Let the agent react to a person's message. Return whether the reaction finished normally.

    ``approves`` decides whether calls are approved or denied. Raises the error that ends the agent, for example a wrong
    file or an unusable model. Raises `RoundelayError` if the agent failed before its reaction began.
    """
    if person == spec.id:
        raise ConfigError(f"The person cannot be {person}, the agent's own id; choose another one with --as.")
    happened = _Happened()
    async with Network.open() as network:
        # Store the end of the log with each event, to find the messages that came before the event.
        runner = build_runner(spec, on_event=lambda event: happened.put_nowait((event, network.hub.state.head)))
        runner.agent = _let_one_person_approve(runner.agent)
        client = await network.join(person, kind="human")
        joined = await network.join(runner.agent_id, role="reactor", card=runner.describe_card())
        # Start watching before the message is sent, so that the end of the reaction cannot be missed.
        await client.call("network.watch", {"signals": True})
        async with asyncio.TaskGroup() as group:
            running = group.create_task(runner.run(joined))  # if the runner raises an exception, the group ends
            trial = _Trial(client, runner, happened, approves, show)
            watching = group.create_task(trial.watch())
            await runner.ready()
            finish = await trial.follow(text)
            cost = await trial.read_cost()
            watching.cancel()
            await runner.stop()
            await running
    if finish is None:
        raise RoundelayError("The agent failed before its reaction started. The log above says why.")
    show.end(finish, cost)
    return finish.status == "finished"


def _let_one_person_approve(agent: Agent) -> Agent:
    """Remove the approvers that the author named, because this network has only one person."""
    return replace(
        agent,
        tools=tuple(replace(as_tool(it), approval=ApprovalRule()) for it in agent.tools),
        policy=replace(agent.policy, approvers=(), approvals_needed=1, escalate_to=()),
        handoffs=tuple(replace(it, agent=_let_one_person_approve(it.agent)) for it in agent.all_handoffs),
    )


class _Trial:
    """One message and the agent's reaction to it."""

    def __init__(
        self,
        client: NetworkClient,
        runner: SimpleAgentRunner,
        happened: _Happened,
        approves: bool,
        show: Show,
    ) -> None:
        self._client = client
        self._runner = runner
        self._happened = happened
        self._decision = "/approve" if approves else "/deny nobody is here to approve it"
        self._show = show
        self._log = HubLog(client)
        self._trigger = 0
        self._unshown: list[AnyMessage] = []

    async def watch(self) -> None:
        """Watch until cancelled, and queue the end of the agent's work. An agent whose code fails emits no last
        event."""
        async for event in self._client.events():
            match event:
                case Signal(kind="thinking", sender_id=self._runner.agent_id, body={"active": False}):
                    self._happened.put_nowait((None, 0))
                case _:
                    continue

    async def follow(self, text: str) -> Finished | None:
        """Send the message and show what follows. Return the end of the reaction, or None if no reaction began."""
        self._trigger = (await self._client.send_text(self._runner.agent_id, text)).seq
        answer: str | None = None
        while True:
            event, head = await self._happened.get()
            if event is None:
                break
            # Skip streamed text, which arrives many times per second: a request to the hub for each piece would slow
            # down the display.
            if not isinstance(event, ModelOutput):
                await self._show_messages(head)
            # Show this event last, because only the hub's record says whether the answer was accepted.
            if isinstance(event, Finished) and not event.path:
                answer = event.answer
            else:
                self._show.event(event)
        end = await self._read_end(answer)
        await self._show_messages()
        return end

    async def read_cost(self) -> Decimal | None:
        """Return the cost in dollars, including agents inside calls, or None if a price is unknown."""
        spent = (await self._client.call("network.spent", {"seq": self._trigger}))["of_root"]
        prices, total = Prices(), Decimal(0)
        for model, used in spent.items():
            usage = Usage(used["prompt_tokens"], used["completion_tokens"], used["cached_tokens"])
            cost = prices.cost(model, usage, used["calls"])
            # Return nothing instead of an incomplete sum, which would look like the total.
            if cost is None:
                return None
            total += cost
        return total if spent else None

    async def _show_messages(self, up_to: int | None = None) -> None:
        """Show the messages since the previous call, up to the sequence number ``up_to``. Decide requests for approval
        at once."""
        async for message in self._log.read_to_end():
            self._unshown.append(message)
            # Decide on the request before showing it, because the agent waits for the decision.
            if message.sender_id == self._runner.agent_id and "approval" in (message.metadata or {}):
                await self._client.reply(message, self._decision)
        while self._unshown and (up_to is None or self._unshown[0].seq <= up_to):
            self._show.message(self._unshown.pop(0))

    async def _read_end(self, answer: str | None) -> Finished | None:
        """Return the recorded end of the reaction. The record can differ from the agent's event if the hub refused the
        answer."""
        reaction = reaction_id(self._runner.agent_id, self._trigger, self._client.welcome.network.epoch)
        end = (await LiveSource(self._client).reaction(self._runner.agent_id, reaction)).recorded.finished
        if end is None:
            return None
        return Finished(reaction, end.status, end.reason, answer, end.turns, end.usage, end.tool_calls)


class ShowJson:
    """Prints events and messages as JSON lines. The ``type`` of a message is ``message``."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def event(self, event: Event) -> None:
        self._write(sanitize_json(json.dumps(event_to_json(event), ensure_ascii=False)))

    def end(self, finish: Finished, cost: Decimal | None) -> None:
        known = {"cost_usd": float(cost)} if cost is not None else {}
        self._write(sanitize_json(json.dumps({**event_to_json(finish), **known}, ensure_ascii=False)))

    def message(self, message: AnyMessage) -> None:
        self._write(sanitize_json(f'{{"type": "message", "message": {message.model_dump_json(exclude_none=True)}}}'))


class ShowText:
    """Prints lines for people, and streams replies. Lines are wrapped here, so that no text can forge a line."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._text: StreamedText | None = None
        self._shown: tuple[str, int] | None = None
        """Path and turn of the text that was streamed last."""
        self._unsent: tuple[str, str] | None = None
        """Path of an agent, and the text of its last turn if no message contains that text yet."""
        self._trigger: AnyMessage | None = None
        self._has_spoken = False
        """Whether any participant other than the person has sent a message."""

    def event(self, event: Event) -> None:
        if isinstance(event, ModelOutput | ToolRequests) and event.text:
            self._shown = (event.path, event.turn)
        if isinstance(event, ModelOutput | ToolOutput):
            self._stream(event.text)
            return
        self._end_text()
        # Text that was streamed is already on the screen.
        if isinstance(event, TurnEnd) and event.text and self._shown != (event.path, event.turn):
            self._unsent = (event.path, event.text)
        elif isinstance(event, TurnStart) and self._unsent is not None and self._unsent[0] == event.path:
            self._say_unsent()
        line = describe_event(event)
        if line:
            path = f"[{event.path}] " if event.path else ""
            self._say(f"{path}{line}")

    def message(self, message: AnyMessage) -> None:
        self._end_text()
        self._unsent = None  # the message contains this text
        self._trigger = self._trigger or message
        self._has_spoken |= message.sender_id != self._trigger.sender_id
        self._screen.message(message)

    def end(self, finish: Finished, cost: Decimal | None) -> None:
        self._end_text()
        self._say_unsent()
        price = f", about {write_dollars(cost)}" if cost else ""  # an agent that follows rules costs nothing
        self._say(f"{describe_event(finish)}{price}")
        if finish.status == "finished" and self._trigger is not None and not self._has_spoken:
            self._say(f"{short_address(self._trigger.to)} finished without an answer, so no message was sent")

    def _say_unsent(self) -> None:
        """Show text of a turn that sent no message, because no message shows this text."""
        if self._unsent is not None:
            path, text = self._unsent
            self._say(f"{f'[{path}] ' if path else ''}wrote text that was not sent: {text}")
        self._unsent = None

    def _say(self, text: str) -> None:
        self._screen.write("\n".join(self._screen.fold(sanitize_lines(f"* {text}"))))

    def _stream(self, text: str) -> None:
        if not text:
            return
        if self._text is None:
            self._text = StreamedText(self._screen.width)
        self._screen.stream.write(self._text.add(text))
        self._screen.stream.flush()

    def _end_text(self) -> None:
        if self._text is not None:
            self._screen.write(self._text.end())
        self._text = None


def describe_event(event: Event) -> str | None:
    """Describe an event for people. Return None for an event that other events already describe."""
    match event:
        case Resumed():
            return f"continues after {count(event.turns, 'turn')}"
        case TurnStart():
            return f"turn {event.turn} of at most {event.max_turns}"
        case ModelRetry():
            return f"the model failed, again in {event.delay_s:g} s: {event.error}"
        case ToolRequests():
            calls = [
                f"{event.turn}.{n} calls {call.name} {call.arguments or '{}'}" for n, call in enumerate(event.calls)
            ]
            return "\n".join([*calls, *([f"beside: {event.text}"] if event.text else [])])
        case ToolCallEnd():
            took = f" after {event.duration_s:.1f} s" if event.duration_s >= 0.1 else ""
            return f"{event.turn}.{event.call} {event.tool} {'gave' if event.ok else 'failed'}{took}: {event.content}"
        case Waiting():
            until = f"{datetime.fromtimestamp(event.until / 1000, UTC).astimezone():%Y-%m-%d %H:%M}"
            whom = "an approval" if event.is_approval else ", ".join(event.agent_ids)
            return f"{event.turn}.{event.call} waits for {whom} until {until}"
        case Progress(is_done=True):
            return None
        case Progress():
            return f"{event.turn}{'' if event.call is None else f'.{event.call}'} {event.text}"
        case AnswerReviewed():
            if event.is_accepted:
                return "\n".join(event.notes) or None
            what = "answer" if event.call is None else "message"
            fate = "is not sent" if event.is_blocked else "is sent unchanged"
            return "\n".join([f"asks for another {what}" if event.correction else f"the {what} {fate}", *event.notes])
        case RemoteCall(is_active=True, asked=()):
            return f"{event.agent_id} ({event.path}) calls {event.tool}"
        case RemoteOutput(kind="progress", is_done=False):
            return f"{event.agent_id} ({event.path}) {event.text}"
        case HandedOver():
            return f"{event.from_agent_id} hands over to {event.agent_id}"
        case Finished():
            reason = f" ({event.reason})" if event.reason else ""
            done = f"{count(event.turns, 'turn')}, {count(event.tool_calls, 'tool call')}"
            return f"{event.status}{reason}: {done}, {describe_tokens(event.usage)}"
        case _:
            return None


def describe_tokens(usage: Usage) -> str:
    """Describe token counts in a short phrase."""
    cached = f" ({usage.cached_tokens} cached)" if usage.cached_tokens else ""
    return f"{usage.prompt_tokens} prompt{cached} + {usage.completion_tokens} completion tokens"


def make_show(*, as_json: bool) -> Show:
    """Return the printer for standard output."""
    screen = Screen(sys.stdout)
    return ShowJson(screen.write) if as_json else ShowText(screen)


def pick_agent(specs: list[AgentSpec], agent_id: str | None) -> AgentSpec:
    """Return the chosen agent. Raises `ConfigError` if the file has several agents and none is chosen."""
    if len(specs) > 1 and agent_id is None:
        known = ", ".join(sanitize(spec.id) for spec in specs)
        raise ConfigError(f"{specs[0].path} has several agents; choose one with --agent: {known}")
    return specs[0]
