"""Agents that react by asking a model: `SimpleAgentRunner`, and a subclass for OpenAI-compatible servers.

`react` renders the prompt, and creates the loop (`reaction`) and its driver. `running_reaction` runs the driver and
concludes the reaction. The package of a model provider is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack, cast, get_args

from roundelay.network.client import NetworkClient, Welcome
from roundelay.network.messages import BaseMessage, MessageThread

from .agent import KEEPER, Agent, Handoff, check_list, find_agent, limit_run, list_agents
from .agent_tools import relay
from .config_hash import describe_middleware, hash_config, hash_text
from .driver import Driver
from .inbox import is_addressed, read_waiting
from .lookback import read_history
from .middleware import Instruction, Middleware
from .models.endpoint_rules import RuleChanges
from .models.model import ChatMessage, Model
from .network_tools import check_wanted, choose_tools, communication_tools, mod_tools
from .offered_tools import READ_HISTORY, Situation, list_deferred, list_lean_tools
from .policy import PromptForm
from .prompt import (
    ConversationPrompt,
    add_standing,
    drop_empty,
    is_near,
    is_task,
    keep_recorded,
    list_manifest,
    render_chat,
    render_lean_system_prompt,
    render_system_prompt,
    select_threads,
)
from .reaction import Reaction
from .reaction_state import ReactionSetup
from .recorded import Started
from .runner import AgentRunner, RunnerOptions
from .running_reaction import ReactionResult, RunningReaction
from .tool_client import ToolClient
from .tools import FINISH, Tool, ToolContext, index_tools
from .values import Trigger


class SimpleAgentRunner(AgentRunner):
    """An agent with an instruction, a model and tools.

    In addition to ``tools``, the agent has the tools of every agent (`communication_tools`) and the operations of the
    hub's mods. The agents in ``handoffs``, to which the agent may hand over a conversation, also have these network
    tools. ``network_tools`` limits the network tools to some names or patterns (``channels_*``). `run` raises
    `ConfigError` for a name that the network does not offer.

    ``template`` is the path of a custom conversation template. All tools can use ``state`` as `ToolContext.state`, for
    example a connection, a store, or an object that a test inspects. With ``owns_model``, the model is closed at the
    end of every `run`.
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
        network_tools: Sequence[str] | None = None,
        template: str | Path | None = None,
        state: Any = None,
        owns_model: bool = False,
        **options: Unpack[RunnerOptions],
    ) -> None:
        check_list(agent_id, "tools", tools)
        if network_tools is not None:
            check_list(agent_id, "network_tools", network_tools)
        super().__init__(agent_id, **options)
        self.agent = Agent(
            agent_id,
            instruction,
            model,
            tuple(index_tools(tools).values()),
            self.policy,
            self.description,
            handoffs,
            middleware,
        )
        self.network_tools = tuple(network_tools) if network_tools is not None else None
        common = choose_tools(communication_tools(), self.network_tools)
        can_finish = any(tool.name == FINISH for tool in common)
        if not can_finish and self.policy.on_text == "nudge":
            raise ValueError(
                f"Agent {agent_id}: with on_text nudge, only finish can end a reaction. Add finish to network_tools."
            )
        # Refuse a duplicate tool name now instead of at the first message. The name `finish` is always reserved for the
        # loop.
        _equip(self.agent, [*common, *(() if can_finish else communication_tools()[-1:])], ())
        self.state = state
        self._prompts = {form: ConversationPrompt(template, form) for form in get_args(PromptForm)}
        self._owns_model = owns_model
        # the agent with the tools of the hub that sent this welcome frame, and the names of the network's tools
        self._equipped: tuple[Welcome, dict[bool, tuple[Agent, frozenset[str]]]] | None = None
        self._config_hash: tuple[Agent, str] | None = None  # the equipped agent, and the hash of its configuration
        self._middleware_settings = describe_middleware(list_agents(self.agent))

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
        """Return the agent's card, which describes the agent and its own tools to other participants."""
        return {**super().describe_card(), "tools": [tool.name for tool in self.agent.refresh().all_tools]}

    def equip(self, client: NetworkClient, form: PromptForm | None = None) -> Agent:
        """Return the agent with all tools that it may call on this hub: the tools of every agent, its own tools, and
        the mods' operations. For a lean prompt (``form``), the network's tools have short descriptions.

        An operation is omitted if the agent has a tool of its own with the same name.
        """
        is_lean = (form or self.policy.prompt) != "full"
        # Build the agent once per welcome frame: the schemas of a hub's operations are large, and the mods change only
        # with a new session.
        if self._equipped is None or self._equipped[0] is not client.welcome:
            self._equipped = (client.welcome, {})
        equipped = self._equipped[1]
        if is_lean not in equipped:
            common, offered = self._list_network_tools(client, is_lean=is_lean)
            wanted = [choose_tools(tools, self.network_tools) for tools in (common, offered)]
            names = frozenset(tool.name for tool in (*common, *offered))
            equipped[is_lean] = (_equip(self.agent, wanted[0], wanted[1], own_first=is_lean), names)
        return equipped[is_lean][0]

    def check_network(self, client: NetworkClient) -> None:
        if self.network_tools is not None:
            common, offered = self._list_network_tools(client, is_lean=self.policy.prompt != "full")
            check_wanted(self.agent_id, self.network_tools, [*common, *offered])

    def _list_network_tools(self, client: NetworkClient, *, is_lean: bool) -> tuple[list[Tool], list[Tool]]:
        """Return the tools of every agent, and the operations of the hub's mods."""
        mods = client.welcome.mods
        if not is_lean:
            return communication_tools(), mod_tools(mods)
        # Omit `read_history` if the agent or its middleware already has this tool.
        return list_lean_tools(mods, with_history=READ_HISTORY not in self._list_own_names())

    def find_form(self, running: RunningReaction) -> PromptForm:
        """Return the form of a reaction's prompt: the recorded form, or the form of the policy."""
        recorded = running.recorded.started if running.recorded is not None else None
        form = recorded.form if recorded is not None else None
        if form is None and self.playback is not None:
            form = self.playback.find_form(running.id)
        if form is None:
            return self.policy.prompt
        return cast(PromptForm, form) if form in self._prompts else "full"

    def _list_own_names(self) -> set[str]:
        """Return the names of the agent's own tools and of the tools that its middleware provides now."""
        try:
            return {tool.name for tool in self.agent.refresh().all_tools}
        except Exception:  # noqa: BLE001  # an author's hook failed: the loop calls it again and reports the error
            return {tool.name for tool in self.agent.all_tools}

    def can_open_threads(self) -> bool:
        own = self._list_own_names()
        return READ_HISTORY in own or bool(choose_tools([read_history], self.network_tools))

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        """Ask the model about a message until the model finishes. If somebody waits for an answer, send the model's
        answer to the thread of the trigger.

        A reaction that was interrupted by a restart continues where it stopped.
        """
        running = self.find_under_way(incoming_message)
        form = self.find_form(running)
        agent, template = self.equip(running.client, form), self._prompts[form]  # mods may change with a reconnect
        chosen, shown = await agent.chain.select_messages(message_threads, incoming_message)
        threads, omitted = message_threads, running.context.omitted_threads
        if chosen is not message_threads:
            threads, dropped = drop_empty(chosen)
            omitted += dropped
        config_hash = self._hash_config(agent, form)
        # In a replay, the hub's tables do not contain the original state, so read the standing from the record.
        standing = running.context.standing if self.playback is None else self.playback.find_standing(running.id)
        # Record the start before asking the model. After this record, the trigger counts as handled, and a restarted
        # agent resumes the reaction.
        if running.recorded is None:
            prompt, chat = self._render(form, threads, incoming_thread_id, shown, omitted)
            prompt_hash = hash_text(prompt)
            started = Started(
                trigger=incoming_message.seq,
                thread_id=incoming_thread_id,
                as_of=incoming_message.seq,
                manifest=list_manifest(threads.values(), incoming_message),
                config_hash=config_hash,
                prompt_hash=prompt_hash,
                standing=standing,
                form="" if form == "full" else form,
                is_alone=form != "full" and running.context.is_alone,
            )
            if not await running.journal.record_started(started):
                # The reaction started before a restart. The message of this reaction is acknowledged at the end.
                running.recorded = await running.journal.load()
            elif running.delivery is not None and running.journal.is_new:
                running.delivery.mark_known()  # the hub treats the record `started` as an acknowledgement
        if running.recorded is not None:
            if (ended := running.recorded.finished) is not None:
                return ReactionResult(running.id, ended.status, ended.reason, None, ended.turns, ended.usage)
            # Render the prompt again with only the messages of the first prompt. The ledger may contain newer messages,
            # which the model had not read when it wrote the recorded replies.
            manifest = running.recorded.started.manifest if running.recorded.started is not None else ()
            standing = running.recorded.started.standing if running.recorded.started is not None else ""
            threads = keep_recorded(threads, incoming_message, manifest)
            prompt, chat = self._render(form, threads, incoming_thread_id, shown, omitted)
            prompt_hash = hash_text(prompt)
        # Use the whole thread, because middleware may have filtered out the message that names the owner.
        keeper = self._find_keeper(agent, message_threads.get(incoming_thread_id))
        message = incoming_message
        setup = ReactionSetup(
            threads=(incoming_thread_id, f"thread:{message.seq}"),
            frame=self._make_frame(form, is_chat=chat is not None),
            shorten=partial(self._render_shortly, form, threads, incoming_thread_id, shown, omitted),
            # ``keeper`` is the agent's own id if the agent got the thread back.
            keeper=keeper.id if keeper is not None else None,
            earlier=[agent] if keeper is not None and keeper.id != agent.id else (),
            sent_at=message.sent_at,
            trigger=Trigger(
                message.seq,
                message.sender_id,
                message.sender_kind,
                message.text,
                message.metadata or {},
                {name: thread.messages[0].seq for name, thread in threads.items() if thread.omitted},
            ),
            conversation=[*(it for thread in threads.values() for it in thread.messages), shown],
            is_explained=template.says_how_to_answer,
            form=form,
            chat=chat or (),
            deferred=self._list_deferred(form, running, threads.values()),
        )
        reaction = running.reaction = Reaction(
            limit_run(keeper or agent, message),
            prompt=add_standing(prompt, standing),
            answers=running.is_awaited,
            setup=setup,
        )
        running.reporter.shows_text = reaction.sends_text
        driver = Driver(
            reaction,
            journal=running.journal,
            make_context=partial(self._make_context, running),
            replies=running.replies,
            new_messages=running.new_messages,
            on_event=running.reporter.report,
            playback=self.playback,
        )
        return await running.run(driver, config_hash, prompt_hash)

    async def close(self) -> None:
        """Close the middleware, and the model if the runner owns it. An error in one object does not prevent the others
        from being closed.
        """
        # Key by identity: agents may share middleware, and each object must be closed only once.
        layers = {id(layer): layer for agent in list_agents(self.agent) for layer in agent.middleware}
        async with AsyncExitStack() as held:
            if self._owns_model and (close := getattr(self.model, "close", None)) is not None:
                held.push_async_callback(close)
            for layer in layers.values():
                held.push_async_callback(layer.close)
            await super().close()

    def _make_context(self, running: RunningReaction, call_id: str, turn: int) -> ToolContext:
        trigger = running.message
        loop = running.reaction
        keeper, form = (loop.keeper, loop.setup.form) if loop is not None else (None, "full")
        client = ToolClient(
            running.client,
            call_id=call_id,
            cause=trigger.seq,
            visibility=self.visibility,
            reply_metadata={KEEPER: keeper} if keeper is not None else {},
            queue=running.journal.queue,
            askers=frozenset((trigger.sender_id, *(read_waiting(trigger) if trigger.metadata else ()))),
        )
        journal = running.journal
        return ToolContext(self.agent_id, journal.reaction, turn, call_id, trigger, client, state=self.state, form=form)

    def _find_keeper(self, agent: Agent, thread: MessageThread | None) -> Agent | None:
        """Return the agent that owns the thread after a permanent handoff, or None. The owner is named in the metadata
        of this agent's messages. The most recent message that names an owner decides.
        """
        for message in reversed(thread.messages if thread is not None else ()):
            if message.sender_id == self.agent_id and message.kind != "mod":
                keeper = (message.metadata or {}).get(KEEPER)
                if isinstance(keeper, str):
                    return find_agent(agent, keeper) or relay(agent, keeper)
        return None

    def _render_shortly(
        self, form: PromptForm, threads: dict[str, MessageThread], thread_id: str, message: BaseMessage, omitted: int
    ) -> str:
        """Render a short prompt for a model that rejects the full prompt as too long. The short prompt contains only
        the end of the trigger's thread.
        """
        incoming = [thread for name, thread in threads.items() if name == thread_id]
        few = max([1, *(len(thread.messages) // 4 for thread in incoming)])
        shown = select_threads(incoming, message, max_threads=1, per_thread=few)
        omitted += len(threads) - len(shown)
        return self._prompts[form].render(shown, thread_id, message, omitted)

    def _render(
        self, form: PromptForm, threads: dict[str, MessageThread], thread_id: str, message: BaseMessage, omitted: int
    ) -> tuple[str, list[ChatMessage] | None]:
        """Return the prompt, and the earlier messages as plain chat if the prompt is a chat."""
        template = self._prompts[form]
        if form == "chat" and template.path is None and message.kind == "direct" and threads.keys() <= {thread_id}:
            earlier = threads[thread_id].messages if threads else []
            return render_chat(earlier, message, self.agent_id)
        return template.render(threads, thread_id, message, omitted), None

    def _make_frame(self, form: PromptForm, *, is_chat: bool) -> Callable[[str], str]:
        if form == "full":
            return partial(render_system_prompt, agent_id=self.agent_id)
        return partial(render_lean_system_prompt, agent_id=self.agent_id, is_chat=is_chat)

    def _list_deferred(
        self, form: PromptForm, running: RunningReaction, threads: Iterable[MessageThread]
    ) -> frozenset[str]:
        """Return the network tools that the reaction offers only after a call has loaded them."""
        # If the author chose the network tools, all of them are always offered.
        if form == "full" or self.network_tools is not None:
            return frozenset()
        client, message = running.client, running.message
        assert self._equipped is not None, "react equips the agent first"
        network_names = self._equipped[1][True][1]
        own = self._list_own_names()
        forced = {name for layer in self.agent.middleware for name in layer.tool_names}
        situation = Situation(
            message,
            running.is_awaited,
            is_task(message, self.agent_id),
            running.context.is_alone,
            message.kind == "direct" or is_addressed(message, self.agent_id),
            any(not is_near(thread, message) for thread in threads),
            self._prompts[form].says_how_to_answer,
        )
        names = network_names - own - forced
        mods = {mod.id for mod in client.welcome.mods if mod.operations}
        return frozenset(list_deferred(names, situation, self.policy, mods))

    def _hash_config(self, agent: Agent, form: PromptForm) -> str:
        """Return the hash of everything that determines the agent's behavior. A reaction that resumes with a
        different hash reports the change.
        """
        if self._config_hash is None or self._config_hash[0] is not agent:
            details = (self._middleware_settings, self._prompts[form].source, self.visibility)
            self._config_hash = (agent, hash_config(agent, *details))
        return self._config_hash[1]


def _equip(agent: Agent, common: Sequence[Tool], offered: Sequence[Tool], *, own_first: bool = False) -> Agent:
    """Return the agent, and the agents to which it may hand over, with the tools that the hub offers.

    ``own_first``: put the agent's own tools first. These tools are the same in each request, so providers can cache
    them.
    """
    own = index_tools([*agent.tools, *common] if own_first else [*common, *agent.tools])
    tools = (*own.values(), *(tool for tool in offered if tool.name not in own))
    equipped = tuple(
        replace(handoff, agent=_equip(handoff.agent, common, offered, own_first=own_first))
        for handoff in agent.all_handoffs
    )
    return replace(agent, tools=tools, handoffs=equipped)


class SimpleOptions(RunnerOptions, total=False):
    """Options of every `SimpleAgentRunner`, independent of its model."""

    tools: Sequence[Tool | Callable[..., object]]
    handoffs: Sequence[Handoff | Agent]
    middleware: Sequence[Middleware]
    network_tools: Sequence[str] | None
    template: str | Path | None
    state: Any


class SimpleOpenAIAgentRunner(SimpleAgentRunner):
    """A `SimpleAgentRunner` on an OpenAI-compatible server.

    The environment variable ``api_key_env`` contains the key. A missing key raises `ModelError`.
    Use ``tool_mode="json_schema"`` for servers without tool calls. Use ``rules`` if the address of a server implies the
    wrong rules (`models.endpoint_rules`).
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
        stream: bool | None = None,
        cache_control: bool = False,
        rules: RuleChanges | None = None,
        **options: Unpack[SimpleOptions],
    ) -> None:
        from .models.openai_model import OpenAIModel

        model = OpenAIModel(
            model_name,
            base_url=base_url,
            api_key_env=api_key_env,
            tool_mode=tool_mode,
            stream=stream,
            cache_control=cache_control,
            rules=rules,
        )
        super().__init__(agent_id, instruction=instruction, model=model, owns_model=True, **options)
