"""Agents that react by asking a model: `SimpleAgentRunner`, and the one for OpenAI-compatible servers.

Stands at the end of the inbound dataflow: `react` renders the conversation prompt, drives the reaction and sends the closing answer. The loop
itself is `reaction`, what it does is `driver`; this module puts them together for one agent. It imports no model provider.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from roundelay.network.messages import BaseMessage, MessageThread

from .context import list_manifest, select_threads
from .driver import Driver, first_error
from .events import OnEvent
from .inbox import ReactTo
from .journal import Started, derived_id
from .models.model import Model
from .ongoing import Ongoing, ReactionResult, conclude
from .policy import AgentPolicy
from .prompt import ConversationPrompt, render_system_prompt
from .reaction import Finish, PlannedCall, Reaction
from .runner import AgentRunner, Visibility
from .tools import Tool, ToolContext, communication_tools, index_tools, mod_tools

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient, Welcome


class SimpleAgentRunner(AgentRunner):
    """An agent with an instruction, a model and tools.

    Beside ``tools`` it has those of every agent (`communication_tools`) and the operations of the hub's mods. ``template`` is the path of a
    conversation template of one's own. ``owns_model`` closes the model at the end of every `run`.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        instruction: str,
        model: Model,
        tools: Sequence[Tool | Callable[..., object]] = (),
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
        self.instruction = instruction
        self.model = model
        self.tools = tuple(index_tools(tools).values())
        index_tools(
            [*communication_tools(), *self.tools]
        )  # a name taken twice is refused here, not at the first message
        self._prompt = ConversationPrompt(template)
        self._owns_model = owns_model
        self._toolbox: tuple[Welcome, tuple[Tool, ...]] | None = None

    def describe_card(self) -> dict[str, object]:
        """Give the card by which others find the agent, its own tools included."""
        return {**super().describe_card(), "tools": [tool.name for tool in self.tools]}

    def list_tools(self, client: NetworkClient) -> tuple[Tool, ...]:
        """Give the tools that a model may call on this hub: everybody's, the agent's own, the mods' operations.

        An operation whose name the agent's own tool has is left out.
        """
        if self._toolbox is None or self._toolbox[0] is not client.welcome:
            own = index_tools([*communication_tools(), *self.tools])
            offered = [tool for tool in mod_tools(client.welcome.mods) if tool.name not in own]
            self._toolbox = (client.welcome, (*own.values(), *offered))
        return self._toolbox[1]

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        """Ask the model about a message until it finishes, and send its answer to the incoming thread if somebody waits for one.

        A reaction that was begun earlier goes on where it was.
        """
        ongoing = self.find_ongoing(incoming_message)
        tools = self.list_tools(self.client)
        threads = select_threads(
            message_threads.values(),
            incoming_message,
            max_threads=self.policy.max_threads,
            per_thread=self.policy.per_thread,
        )
        prompt = self._prompt.render(threads, incoming_thread_id, incoming_message)
        config_hash = self._hash_config(tools)
        if ongoing.recorded is None:
            started = Started(
                trigger=incoming_message.seq,
                thread_id=incoming_thread_id,
                as_of=incoming_message.seq,
                manifest=list_manifest(threads.values(), incoming_message),
                config_hash=config_hash,
            )
            if not await ongoing.journal.record_started(started):
                ongoing.recorded = (
                    await ongoing.journal.load()
                )  # begun earlier: it is acked at its end, as nothing new opens it
            elif ongoing.delivery is not None:
                await ongoing.delivery.ack()  # the hub did it with `started`; this moves the client's own window
        ended = ongoing.recorded.finished if ongoing.recorded is not None else None
        if ended is not None:
            return ReactionResult(ongoing.journal.reaction, ended.status, ended.reason, None, ended.turns, ended.usage)
        reaction = Reaction(
            system_prompt=render_system_prompt(self.instruction, self.agent_id),
            prompt=prompt,
            tools=tools,
            policy=self.policy,
            answers=self.should_answer(incoming_message),
        )
        driver = Driver(
            reaction,
            agent_id=self.agent_id,
            model=self.model,
            policy=self.policy,
            journal=ongoing.journal,
            make_context=partial(self._make_context, ongoing),
            on_event=partial(self.observe, ongoing),
        )
        finish = await self._drive(ongoing, driver, config_hash)
        return await conclude(ongoing, finish, attempts=self.policy.hub_attempts)

    async def close(self) -> None:
        """Close the model, where it is the runner's own."""
        await super().close()
        close = getattr(self.model, "close", None)
        if self._owns_model and close is not None:
            await close()

    async def _drive(self, ongoing: Ongoing, driver: Driver, config_hash: str) -> Finish:
        """Drive the reaction in a task of its own, so that a person's stop ends it and nothing else."""
        if ongoing.stopped_by is not None:
            return driver.cancel(_stopped(ongoing.stopped_by))
        try:
            async with asyncio.TaskGroup() as group:
                work = ongoing.work = group.create_task(driver.run(ongoing.recorded, config_hash=config_hash))
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        if work.cancelled():
            return driver.cancel(_stopped(ongoing.stopped_by or "a person"))
        return work.result()

    def _make_context(self, ongoing: Ongoing, turn: int, planned: PlannedCall) -> ToolContext:
        reaction = ongoing.journal.reaction
        call_id = derived_id(reaction, turn, planned.index)
        return ToolContext(self.agent_id, reaction, turn, call_id, ongoing.message, self.client)

    def _hash_config(self, tools: Sequence[Tool]) -> str:
        """Give what the agent's behaviour depends on, in 32 characters: a reaction resumed under another one says so."""
        limits = {field.name: getattr(self.policy, field.name) for field in fields(self.policy)}
        policy = {name: value for name, value in limits.items() if not callable(value)}
        specs = [(tool.name, tool.description, tool.parameters, tool.effect) for tool in tools]
        config = [self.instruction, self.model.name, self._prompt.source, policy, specs]
        return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:32]


class SimpleOpenAIAgentRunner(SimpleAgentRunner):
    """A `SimpleAgentRunner` on an OpenAI-compatible server.

    The key is read from the environment variable ``api_key_env``; ``tool_mode="json_schema"`` is for servers without tool calls. Raises
    `ModelError` when the key is missing.
    """

    def __init__(
        self,
        agent_id: str,
        *,
        instruction: str,
        model_name: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        tool_mode: Literal["native", "json_schema"] = "native",
        stream: bool = False,
        tools: Sequence[Tool | Callable[..., object]] = (),
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
