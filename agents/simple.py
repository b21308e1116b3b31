"""Agents that react by asking a model: `SimpleAgentRunner`, and the one for OpenAI-compatible servers.

Stands at the end of the inbound dataflow: `react` renders the conversation prompt, drives the reaction and sends the
closing answer. The loop itself is `reaction`, what it does is `driver`; this module puts them together for one agent.
It imports no model provider.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from roundelay.network.messages import BaseMessage, MessageThread

from .agent import KEEPER, Agent, Handoff, Instruction, check_list, find_agent, list_agents
from .compose import relay
from .config_hash import describe_middleware, hash_config, hash_text
from .context import keep_recorded, list_manifest, select_threads
from .driver import Driver
from .events import OnEvent
from .features.run_limits import limit_run
from .foreign import Broken, describe_error
from .inbox import ReactTo, Visibility
from .middleware import Middleware
from .models.model import Model
from .network_tools import communication_tools, mod_tools
from .ongoing import Ongoing, ReactionResult, conclude
from .policy import AgentPolicy
from .prompt import ConversationPrompt, render_system_prompt
from .reaction import Reaction
from .records import Started
from .runner import AgentRunner
from .steps import Finish, Trigger
from .tool_client import ToolClient
from .tools import Tool, ToolContext, index_tools

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient, Welcome

_logger = logging.getLogger(__name__)


class SimpleAgentRunner(AgentRunner):
    """An agent with an instruction, a model and tools.

    Beside ``tools`` it has those of every agent (`communication_tools`) and the operations of the hub's mods; so have
    the agents in ``handoffs``, to which it may hand a conversation over. ``template`` is the path of a conversation
    template of one's own. ``owns_model`` closes the model at the end of every `run`.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        instruction: Instruction,
        model: Model,
        tools: Sequence[Tool | Callable[..., object]] = (),
        handoffs: Sequence[Handoff | Agent] = (),
        middleware: Sequence[Middleware] = (),
        description: str = "",
        tags: Sequence[str] = (),
        channels: Sequence[str] = (),
        react_to: ReactTo = "mentions",
        policy: AgentPolicy | None = None,
        visibility: Visibility = "people",
        template: str | Path | None = None,
        url: str | None = None,
        token: str | None = None,
        on_event: OnEvent | None = None,
        owns_model: bool = False,
    ) -> None:
        for name, value in (("tools", tools), ("tags", tags), ("channels", channels)):
            check_list(agent_id, name, value)
        for name, chosen, choices in (("react_to", react_to, ReactTo), ("visibility", visibility, Visibility)):
            if chosen not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise ValueError(f"Agent {agent_id}: {name} is {chosen!r} and must be one of {allowed}.")
        super().__init__(
            agent_id,
            description=description,
            tags=tags,
            channels=channels,
            react_to=react_to,
            policy=policy,
            visibility=visibility,
            url=url,
            token=token,
            on_event=on_event,
        )
        self.agent = Agent(
            agent_id,
            instruction,
            model,
            tuple(index_tools(tools).values()),
            self.policy,
            description,
            handoffs,
            middleware,
        )
        _equip(self.agent, communication_tools(), ())  # a name taken twice is refused here, not at the first message
        self._prompt = ConversationPrompt(template)
        self._owns_model = owns_model
        self._equipped: tuple[Welcome, Agent] | None = None
        self._hashed: tuple[Agent, str] | None = None  # of the equipped agent
        self._described = describe_middleware(list_agents(self.agent))

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The agent's own tools."""
        return tuple(index_tools(self.agent.tools).values())

    @property
    def instruction(self) -> Instruction:
        return self.agent.instruction

    @property
    def model(self) -> Model:
        return self.agent.model

    def describe_card(self) -> dict[str, object]:
        """Give the card by which others find the agent, its own tools included."""
        return {**super().describe_card(), "tools": [tool.name for tool in self.agent.refresh().all_tools]}

    def equip(self, client: NetworkClient) -> Agent:
        """Give the agent with all that it may call on this hub: everybody's tools, its own, the mods' operations.

        An operation whose name a tool of its own has is left out.
        """
        if self._equipped is None or self._equipped[0] is not client.welcome:
            offered = mod_tools(client.welcome.mods)
            self._equipped = (client.welcome, _equip(self.agent, communication_tools(), offered))
        return self._equipped[1]

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        """Ask the model about a message until it finishes, and send its answer to the incoming thread if somebody waits
        for one.

        A reaction that was begun earlier goes on where it was.
        """
        ongoing = self.find_ongoing(incoming_message)
        agent = self.equip(self.client)
        chosen, shown = agent.chain.select_messages(message_threads, incoming_message)
        threads = dict(chosen)
        config_hash = self._hash_config(agent)
        if ongoing.recorded is None:
            prompt = self._prompt.render(threads, incoming_thread_id, shown)
            started = Started(
                trigger=incoming_message.seq,
                thread_id=incoming_thread_id,
                as_of=incoming_message.seq,
                manifest=list_manifest(threads.values(), incoming_message),
                config_hash=config_hash,
                prompt_hash=hash_text(prompt),
            )
            if not await ongoing.journal.record_started(started):
                # Begun earlier: it is acked at its end, as nothing new opens it.
                ongoing.recorded = await ongoing.journal.load()
            elif ongoing.delivery is not None:
                await ongoing.delivery.ack()  # the hub did it with `started`; this moves the client's own window
        if ongoing.recorded is not None:
            if (ended := ongoing.recorded.finished) is not None:
                reaction_id = ongoing.journal.reaction
                return ReactionResult(reaction_id, ended.status, ended.reason, None, ended.turns, ended.usage)
            manifest = ongoing.recorded.started.manifest if ongoing.recorded.started is not None else ()
            threads = keep_recorded(threads, incoming_message, manifest)
            prompt = self._prompt.render(threads, incoming_thread_id, shown)
        keeper = self._find_keeper(agent, message_threads.get(incoming_thread_id))
        reaction = ongoing.reaction = Reaction(
            limit_run(keeper or agent, incoming_message),
            keeper=keeper.id if keeper is not None else None,  # its own id, once it gets the thread back
            prompt=prompt,
            answers=self.should_answer(incoming_message),
            threads=(incoming_thread_id, f"thread:{incoming_message.seq}"),
            sent_at=incoming_message.sent_at,
            trigger=Trigger(
                incoming_message.seq,
                incoming_message.sender_id,
                incoming_message.sender_kind,
                incoming_message.text,
                incoming_message.metadata or {},
            ),
            frame=partial(render_system_prompt, agent_id=self.agent_id),
            shorten=partial(self._render_shortly, threads, incoming_thread_id, shown),
        )
        driver = Driver(
            reaction,
            journal=ongoing.journal,
            make_context=partial(self._make_context, ongoing),
            replies=self._replies,
            arrivals=self.find_arrivals(ongoing),
            on_event=partial(self.observe, ongoing),
        )
        finish = await self._drive(ongoing, driver, config_hash, hash_text(prompt))
        return await conclude(ongoing, finish)

    async def close(self) -> None:
        """Close the middleware, and the model where it is the runner's own: all of them, whatever one of them raises."""
        layers = {id(layer): layer for agent in list_agents(self.agent) for layer in agent.middleware}
        async with AsyncExitStack() as held:
            if self._owns_model and (close := getattr(self.model, "close", None)) is not None:
                held.push_async_callback(close)
            for layer in layers.values():
                held.push_async_callback(layer.close)
            await super().close()

    async def _drive(self, ongoing: Ongoing, driver: Driver, config_hash: str, prompt_hash: str) -> Finish:
        """Drive the reaction in a task of its own, so that a person's stop ends it and nothing else."""
        if ongoing.stopped_by is not None:
            return driver.cancel(_stopped(ongoing.stopped_by))

        async def run() -> Finish:
            try:
                return await driver.run(ongoing.recorded, config_hash=config_hash, prompt_hash=prompt_hash)
            except SystemExit as error:  # of middleware: out of a task it would end the event loop
                raise Broken(error) from error

        work = ongoing.work = asyncio.create_task(run())
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            # The runner ends. Whatever the code in it makes of its cancellation, the reaction stays open.
            ongoing.journal.close()
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled() and (failure := work.exception()) is not None and self.client.failure is None:
                self._note_failure(failure)
            raise
        failure = asyncio.CancelledError() if work.cancelled() else work.exception()
        if failure is None:
            return work.result()
        if ongoing.stopped_by is not None:
            if not work.cancelled():
                self._note_failure(failure)
            return driver.cancel(_stopped(ongoing.stopped_by))
        raise Broken(failure) if work.cancelled() else failure  # cancelled by what runs in it: nobody stopped it

    def _note_failure(self, failure: BaseException) -> None:
        told = {"agent_id": self.agent_id, "error": describe_error(failure)}
        _logger.warning("a reaction that was broken off failed of it", extra=told)

    def _make_context(self, ongoing: Ongoing, call_id: str, turn: int) -> ToolContext:
        trigger = ongoing.message
        keeper = ongoing.reaction.keeper if ongoing.reaction is not None else None
        client = ToolClient(
            self.client,
            call_id=call_id,
            cause=trigger.seq,
            visibility=self.visibility,
            reply_metadata={KEEPER: keeper} if keeper is not None else {},
        )
        return ToolContext(self.agent_id, ongoing.journal.reaction, turn, call_id, trigger, client)

    def _find_keeper(self, agent: Agent, thread: MessageThread | None) -> Agent | None:
        """Give the agent that the thread stays with, after a handoff for good: the last one that a message of this
        agent's names. Others of its messages say nothing of it: an apology, what a mod's operation posted."""
        for message in reversed(thread.messages if thread is not None else ()):
            if message.sender_id == self.agent_id and message.kind != "mod":
                keeper = (message.metadata or {}).get(KEEPER)
                if isinstance(keeper, str):
                    return find_agent(agent, keeper) or relay(agent, keeper)
        return None

    def _render_shortly(self, threads: dict[str, MessageThread], thread_id: str, message: BaseMessage) -> str:
        """Render the prompt for a model that finds the whole too long: the end of the incoming thread only."""
        incoming = [thread for name, thread in threads.items() if name == thread_id]
        few = max(1, self.policy.per_thread // 4)
        return self._prompt.render(select_threads(incoming, message, max_threads=1, per_thread=few), thread_id, message)

    def _hash_config(self, agent: Agent) -> str:
        """Give what the agent's behaviour depends on: a reaction resumed under another one says so."""
        if self._hashed is None or self._hashed[0] is not agent:
            self._hashed = (agent, hash_config(agent, self._described, self._prompt.source, self.visibility))
        return self._hashed[1]


def _equip(agent: Agent, everybodys: Sequence[Tool], offered: Sequence[Tool]) -> Agent:
    """Give the agent, and those that it may hand over to, the tools that its hub offers."""
    own = index_tools([*everybodys, *agent.tools])
    tools = (*own.values(), *(tool for tool in offered if tool.name not in own))
    equipped = tuple(replace(it, agent=_equip(it.agent, everybodys, offered)) for it in agent.all_handoffs)
    return replace(agent, tools=tools, handoffs=equipped)


class SimpleOpenAIAgentRunner(SimpleAgentRunner):
    """A `SimpleAgentRunner` on an OpenAI-compatible server.

    The key is read from the environment variable ``api_key_env``; ``tool_mode="json_schema"`` is for servers without
    tool calls. Raises `ModelError` when the key is missing.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        instruction: Instruction,
        model_name: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        tool_mode: Literal["native", "json_schema"] = "native",
        stream: bool = False,
        tools: Sequence[Tool | Callable[..., object]] = (),
        handoffs: Sequence[Handoff | Agent] = (),
        middleware: Sequence[Middleware] = (),
        description: str = "",
        tags: Sequence[str] = (),
        channels: Sequence[str] = (),
        react_to: ReactTo = "mentions",
        policy: AgentPolicy | None = None,
        visibility: Visibility = "people",
        template: str | Path | None = None,
        url: str | None = None,
        token: str | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        from .models.openai_model import OpenAIModel  # only here: it loads the SDK

        super().__init__(
            agent_id,
            instruction=instruction,
            model=OpenAIModel(
                model_name, base_url=base_url, api_key_env=api_key_env, tool_mode=tool_mode, stream=stream
            ),
            tools=tools,
            handoffs=handoffs,
            middleware=middleware,
            description=description,
            tags=tags,
            channels=channels,
            react_to=react_to,
            policy=policy,
            visibility=visibility,
            template=template,
            url=url,
            token=token,
            on_event=on_event,
            owns_model=True,
        )


def _stopped(by: str) -> str:
    return f"stopped by {by}"
