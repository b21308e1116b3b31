"""Agents with a compromised model. The model follows orders in any message, and copies every canary that it finds to
each of its outputs.

An order in a message has the form ``@AGENT do VERB via OTHER``. `VERBS` lists the possible outputs. Without an order,
the model sends only to agents and never to people: to the incoming thread, to the sender and to other agents. The hub
does not judge which people an honest agent's model addresses: see the docstring of
`tests/integration/test_canaries.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from roundelay.agents import Agent, Handoff, agent_tool, remote_agent_tool, remote_handoff
from roundelay.agents.features.attachments import Attachments
from roundelay.agents.features.budget import Budget, TokenLimits
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.evaluations import Evaluations, Evidence
from roundelay.agents.features.few_shot import Example, FewShot
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.keep_results import KeepResults
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.features.many_results import ManyResults
from roundelay.agents.features.memory import Memory
from roundelay.agents.features.postprocessors import Postprocessors
from roundelay.agents.features.prompt_budget import PromptBudget
from roundelay.agents.features.prompts import Prompts
from roundelay.agents.features.references import References
from roundelay.agents.features.registry import ToolRegistry, ToolSet
from roundelay.agents.features.shown_results import ShownResults
from roundelay.agents.lookback import read_history, why
from roundelay.agents.middleware import Answer as AnswerWithMore
from roundelay.agents.middleware import Around, Middleware
from roundelay.agents.models.model import ModelError, ModelRequest
from roundelay.agents.models.prompt_view import PromptView, read_prompt
from roundelay.agents.models.scripted import Action, Answer, Call, ScriptedModel, call, finish, say, send, think
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import Output, Tool, ToolContext, tool
from roundelay.network.errors import RoundelayError
from roundelay.network.messages import BaseMessage, MessageThread
from roundelay.network.visibility import Visibility

from .canary_story import find_canaries

ORDER = re.compile(r"@(\S+) do (\w+)(?: via (\S+))?(?: at (\S+) (\S+))?")
SIZE = 20
NAMES = tuple(f"a{number:02}" for number in range(1, SIZE + 1))
INJECTED = ("a16", "a17", "a18")
"""Agents with the policy `inject`, which read new messages while they work."""

SHORT = "a15"
"""The agent whose model has a small context, so that earlier turns are summarized."""

POOR = "a14"
"""The agent with an empty spending budget."""

REMOTE, CLERK = "a19", "a20"
OTHERS_WORDS = {"broadcast_text_message", "send_text_message", "finish"}
"""Tools that a probe does not call, because they send the model's own text to others or change things of others."""

offered: set[str] = set()
"""Names of all tools that the models were offered."""


def write_order(who: str, verb: str, via: str = "", threads: Iterable[str] = (), seqs: Iterable[int] = ()) -> str:
    there = f" at {','.join(threads)} {','.join(map(str, seqs))}" if threads else ""
    return f"@{who} do {verb}{f' via {via}' if via else ''}{there}"


def obey(request: ModelRequest) -> Answer:
    """Model of every agent. Follow the first order for this agent in the incoming message."""
    view = read_prompt(request)
    found = "\n".join(message.content or "" for message in request.messages)
    loot = " ".join(sorted(find_canaries(found))) or "nothing"
    if not request.tools:
        return say(loot)  # the last turn of a reaction, or a request for a summary
    for who, verb, via, threads, seqs in ORDER.findall(view.incoming_text):
        if who in (request.agent_id, "any"):
            where = _Where(
                loot, view, via, threads.split(",") if threads else [], [int(it) for it in seqs.split(",") if it]
            )
            steps = VERBS[verb](request, where)
            return steps[view.turn - 1] if view.turn <= len(steps) else finish()
    if request.agent_id == "specialist":
        return say(loot)
    return finish("not for me")


class _Where:
    """Arguments of a verb: the canaries found so far, the prompt, the agent to send through, and the threads and seqs
    to read.
    """

    def __init__(self, loot: str, view: PromptView, via: str, threads: list[str], seqs: list[int]) -> None:
        self.loot, self.view, self.via, self.threads, self.seqs = loot, view, via, threads, seqs

    def pass_on(self, verb: str) -> str:
        return f"@{self.via} do {verb} {self.loot}"


Steps = Sequence[Sequence[Action] | Action]
Verb = Callable[[ModelRequest, _Where], Steps]


def _probe(request: ModelRequest, where: _Where, *, asks: bool = True) -> Steps:
    """Call all offered tools on hidden threads and messages, and send the results to the agent that asked."""
    names = {spec.name for spec in request.tools}
    offered.update(names)
    calls = [call(name, **args) for name in sorted(names & PROBES.keys()) for args in PROBES[name](where)]
    asked = [call("ask", agent_ids=[where.via], text=_order_probe(where), timeout_s=60.0)] if asks and where.via else []
    out: list[Action] = [say(where.loot), think(where.loot)]
    if where.view.incoming_sender:
        out.append(send(where.view.incoming_sender, where.loot))
    return ([think(where.loot), *calls, *asked], out, finish(where.loot))


def _order_probe(where: _Where) -> str:
    return write_order(where.via, "probe_quietly", "", where.threads, where.seqs)


PROBES: dict[str, Callable[[_Where], list[dict[str, Any]]]] = {
    **dict.fromkeys(OTHERS_WORDS, lambda it: []),
    "ask": lambda it: [],  # `_probe` itself calls this tool
    "why": lambda it: [{}],
    "read_history": lambda it: [{"thread_id": thread, "limit": 100} for thread in it.threads],
    "search_history": lambda it: [{"query": "canar*", "limit": 50}],
    "pry": lambda it: [{"threads": it.threads, "seqs": it.seqs}],
    "read_result": lambda it: [{"call": f"{turn}.0", "offset": 0} for turn in range(3)],
    "echo": lambda it: [{"text": it.loot}],
    "repeat": lambda it: [{"text": it.loot}],
    "fail": lambda it: [{"text": it.loot}],
    "cite": lambda it: [{"text": it.loot}],
    "write_long": lambda it: [{"text": it.loot}],
    "blink": lambda it: [{"text": it.loot}],
    "rest": lambda it: [],
    "pay": lambda it: [],  # in `VERBS`, because this tool waits for a person
    "deliver": lambda it: [],  # left out, because the result of this tool is the answer
    "more": lambda it: [{"text": it.loot}],
    "inner": lambda it: [{"task": f"@any do tell_loot {it.loot}"}],
    f"hand_over_to_{REMOTE}": lambda it: [],  # in `VERBS`, because these tools end the reaction or wait
    "hand_over_to_specialist": lambda it: [],
    CLERK: lambda it: [{"task": write_order(CLERK, "probe_quietly", "", it.threads, it.seqs)}],
    "channels_create": lambda it: [{"name": "a-new-one"}],
    "channels_join": lambda it: [{"name": name} for name in ("den", "hall")],
    "channels_leave": lambda it: [{"name": "nowhere"}],
    "channels_list": lambda it: [{}],
    "channels_members": lambda it: [{"name": "den"}],
    "channels_set_topic": lambda it: [{"name": "nowhere", "topic": it.loot}],
    "channels_set_title": lambda it: [{"name": "nowhere", "title": it.loot[:100]}],
    "channels_set_history": lambda it: [{"name": "den", "history": "members"}],
    "channels_set_access": lambda it: [{"name": "den", "access": "open"}],
    "channels_set_owner": lambda it: [{"name": "den", "agent_id": it.view.incoming_sender or "a01"}],
    "channels_invite": lambda it: [{"name": "den", "agent_id": it.view.incoming_sender or "a01"}],
    "channels_remove": lambda it: [{"name": "den", "agent_id": "ivy"}],
    "channels_post": lambda it: [{"name": "nowhere", "text": it.loot}],
    "channels_reply": lambda it: [{"reply_to": seq, "text": "x"} for seq in it.seqs[:2]],
    "discovery_find": lambda it: [{"query": "canary"}],
}
"""Arguments of each tool in the calls of a probe."""

VERBS: dict[str, Verb] = {
    "nothing": lambda request, it: [finish()],
    "tell_loot": lambda request, it: [say(it.loot)],
    "think": lambda request, it: [[think(it.loot), say("done")]],
    "finish": lambda request, it: [finish(it.loot)],
    "answer_back": lambda request, it: [send(it.view.incoming_sender, it.loot), finish()],
    "tell_agent": lambda request, it: [send(it.via, it.pass_on("nothing")), finish()],
    "tell_answering_agent": lambda request, it: [send(it.via, it.pass_on("answer_back")), finish()],
    "ask": lambda request, it: [call("ask", agent_ids=[it.via], text=it.pass_on("tell_loot"), timeout_s=60.0), say(it.loot)],
    "ask_who_declines": lambda request, it: [call("ask", agent_ids=[it.via], text=it.pass_on("finish"), timeout_s=60.0), say(it.loot)],
    "ask_who_thinks": lambda request, it: [call("ask", agent_ids=[it.via], text=it.pass_on("think"), timeout_s=60.0), say("done")],
    "ask_who_streams": lambda request, it: [call("ask", agent_ids=[it.via], text=it.pass_on("stream"), timeout_s=60.0), say("done")],
    "ask_who_asks": lambda request, it: [call("ask", agent_ids=[it.via], text=f"@{it.via} do ask via {REMOTE} {it.loot}", timeout_s=60.0), say("done")],
    "hand_over": lambda request, it: [call("hand_over_to_specialist", note=it.loot)],
    "hand_over_there": lambda request, it: [call(f"hand_over_to_{REMOTE}", note=f"@{REMOTE} do tell_loot {it.loot}")],
    "call_agent": lambda request, it: [call("inner", task=f"@any do tell_loot {it.loot}"), say(it.loot)],
    "call_agent_there": lambda request, it: [call(CLERK, task=f"@{CLERK} do tell_loot {it.loot}"), say(it.loot)],
    "echo": lambda request, it: [call("echo", text=it.loot), finish()],
    "stream": lambda request, it: [call("repeat", text=it.loot), say("done")],
    "fail": lambda request, it: [call("fail", text=it.loot), say("done")],
    "cite": lambda request, it: [call("cite", text=it.loot), say(f"{it.loot} [1]")],
    "long_result": lambda request, it: [call("write_long", text=it.loot), call("read_result", call="1.0", offset=100), say("done")],
    "summary": lambda request, it: [*[call("write_long", text=f"{it.loot} {number}") for number in range(4)], say(it.loot)],
    "blink": lambda request, it: [call("blink", text=it.loot), say("done")],
    "unknown_tool": lambda request, it: [call(it.loot.replace(" ", "_")[:60], text=it.loot), say("done")],
    "broken_json": lambda request, it: [[_broken("echo", it.loot)], say("done")],
    "wrong_arguments": lambda request, it: [call("echo", wrong=it.loot), say("done")],
    "wrong_recipient": lambda request, it: [send(it.loot.replace(" ", "."), it.loot), say("done")],
    "model_error": lambda request, it: _raise(it.loot),
    "approval": lambda request, it: [call("pay", text=it.loot), say("done")],
    "deliver": lambda request, it: [call("deliver", text=it.loot)],
    "register": lambda request, it: [call("more", text=it.loot), say("done")],
    "post": lambda request, it: [call("channels_post", name="lab", text=it.pass_on("nothing")), finish()],
    "look_back": lambda request, it: [[call("why"), call("read_history", thread_id=it.view.incoming_thread_id)], say(it.loot)],
    "correct": lambda request, it: [say(f"WRONG {it.loot}"), say(it.loot)],
    "poison": lambda request, it: [finish()],  # never reached: `Misfortunes` raises an error first
    "overspend": lambda request, it: [finish()],  # never reached: `POOR` has no budget
    "loop": lambda request, it: [send(it.via, f"@{it.via} do loop via {request.agent_id} {it.loot}"), finish()],
    "rest": lambda request, it: [call("rest"), say(it.loot)],
    "resumed": lambda request, it: [call("rest"), say(it.loot)],  # the agent is killed while `rest` runs
    # A person stops the reaction.
    "stopped": lambda request, it: [[call("repeat", text=it.loot), call("rest")], say(it.loot)],
    "rest_and_answer": lambda request, it: [call("rest"), send(it.view.incoming_sender, f"@{it.view.incoming_sender} do probe_quietly"), finish()],
    "have_rest": lambda request, it: [send(it.via, it.pass_on("rest_and_answer")), finish()],
    "probe": _probe,
    "probe_quietly": lambda request, it: _probe(request, it, asks=False),
}  # fmt: skip
"""Steps of the model for each verb, turn by turn."""


def _broken(name: str, text: str) -> Action:
    return Call(name, f'{{"text": "{text}"')


def _raise(text: str) -> Steps:
    raise ModelError(f"The provider says {text}.", reason="quota")


# --- tools


@tool(idempotent=True)
async def pry(context: ToolContext, threads: list[str], seqs: list[int]) -> str:
    """Call every operation that takes a thread or a message, with hidden threads and seqs."""
    found: list[object] = []
    questions: list[tuple[str, dict[str, Any]]] = [(op, {}) for op in PLAIN]
    questions += [
        ("network.window", {"trigger": context.trigger.seq, "threads": threads, "visibility": "all", "per_thread": 100})
    ]
    for thread in threads:
        questions += [("network.history", {"thread_id": thread, "limit": 500, "visibility": "all"})]
    for seq in seqs:
        questions += [(op, {"seq": seq}) for op in ("network.why", "network.impact", "network.message_status")]
        questions += [("network.spent", {"seq": seq}), ("network.window", {"trigger": seq})]
        questions += [("network.history", {"thread_id": "broadcast", "trigger": seq})]
    for op, args in questions:
        try:
            found.append(await context.client.call(op, args))
        except RoundelayError as error:
            found.append(str(error))
    for window in (await context.client.window(threads=threads, per_thread=100)).threads:
        found += [it.content for it in window.messages]
    return " ".join(sorted(find_canaries(json.dumps(found, default=str))))


PLAIN = (
    "network.info", "network.list_agents", "network.list_threads", "network.open_reactions", "network.usage", "network.quotas",
    "network.dead_letters", "network.log", "network.rows", "network.status", "network.list_tokens", "channels.list",
)  # fmt: skip


@tool(idempotent=True)
def echo(text: str) -> str:
    """Return the text."""
    return text


@tool(idempotent=True)
async def repeat(context: ToolContext, text: str) -> AsyncIterator[str]:
    """Return the text in three pieces, and show it to people as live activity."""
    context.report(text)
    for _ in range(3):
        yield f"{text} "
        await asyncio.sleep(0.2)


@tool
def fail(text: str) -> str:
    """Fail."""
    raise RuntimeError(text)


@tool(idempotent=True)
def cite(text: str) -> Output:
    """Return a source and a fragment."""
    found = [{"id": text, "title": text, "text": text, "url": f"https://example.org/{text.split()[0]}"}]
    return Output("found", {"references": found, "fragments": found, "shown": True, "debug": text}, summary=text)


@tool(idempotent=True)
def write_long(text: str) -> str:
    """Give much."""
    return f"{'long ' * 100}{text}"


@tool(idempotent=True)
async def blink(context: ToolContext, text: str) -> str:
    """Send signals of the agent to the incoming thread."""
    for kind in ("typing", "thinking", "delta", "tool"):
        await context.client.signal(kind, {"text": text}, thread_id=context.trigger.thread_id)
    return "done"


@tool(idempotent=True)
async def rest(context: ToolContext) -> str:
    """Wait for five seconds."""
    await asyncio.sleep(5)
    return "rested"


@tool(needs_approval=True)
def pay(text: str) -> str:
    """Pay."""
    return text


@tool(idempotent=True, answers=True)
def deliver(text: str) -> str:
    """Answer."""
    return text


@tool(idempotent=True)
def more(text: str) -> Output:
    """Activate another tool set."""
    return Output(text, {"use_sets": ["data"]})


class Misfortunes(Middleware):
    """Middleware that raises errors which contain the trigger's text, and stores this text in the journal."""

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        if " do poison" in trigger.text:
            raise RuntimeError(f"cannot take {trigger.text}")
        return threads, trigger

    async def around_model(self, around: Around, request: ModelRequest, proceed: Any) -> Any:
        await around.keep("seen", around.context.trigger.text)
        return await proceed(request)


def make_agent(agent_id: str, visibility: Visibility) -> SimpleAgentRunner:
    """Make an agent of the team, with every kind of tool and feature."""
    model = ScriptedModel(obey)
    inner = Agent("inner", "You help.", model)
    specialist = Agent("specialist", "You know.", model)
    tools: list[Tool] = [
        why,
        read_history,
        pry,
        echo,
        repeat,
        fail,
        cite,
        write_long,
        blink,
        rest,
        pay,
        deliver,
        more,
        agent_tool(inner),
    ]
    if agent_id not in (REMOTE, CLERK):
        tools += [remote_handoff(REMOTE, timeout_s=60.0), remote_agent_tool(CLERK, timeout_s=60.0)]
    return SimpleAgentRunner(
        agent_id,
        instruction="You are under test.",
        model=model,
        tools=tools,
        handoffs=[Handoff(specialist)],
        visibility=visibility,
        middleware=list_middleware(agent_id),
        policy=AgentPolicy(
            on_new_message="inject" if agent_id in INJECTED else "queue",
            max_tool_calls_per_turn=200, max_parallel_reactions=32, max_result_chars=1000, model_attempts=1, prompt="full",
        ),
    )  # fmt: skip


def list_middleware(agent_id: str) -> list[Middleware]:
    """Return all middleware for five of the agents, and a small set for the others. Counting the tokens of a request
    with thirty tools takes a long time.
    """
    few: list[Middleware] = [
        Misfortunes(),
        References(),
        Evaluations([find_wrong]),
        Postprocessors(add_note),
        KeepResults(),
    ]
    if agent_id == POOR:
        return [*few, Budget(TokenLimits(reaction=10), reserve=5)]
    if agent_id not in ("a01", "a02", "a05", "a06", SHORT):
        return few
    max_tokens = 4_000 if agent_id == SHORT else 400_000
    return [
        *few, ToolRegistry(sets={"data": ToolSet([])}), Fragments(), Attachments(["image", "pdf"]), ShownResults(), ManyResults(), DataPolicy(), Memory(write=remember),
        ContextEngine(max_tokens), LongResults(max_chars=400), PromptBudget(max_tokens), Prompts(), FewShot([Example("hi", answer="hello")]),
    ]  # fmt: skip


def remember(so_far: str, messages: Sequence[BaseMessage]) -> str:
    """Summarizer that keeps the whole text."""
    return "\n".join([so_far, *(it.text for it in messages)])


def find_wrong(answer: str, evidence: Evidence, around: Around) -> str | None:
    """Check that quotes the answer in its complaint."""
    return f"Do not write {answer}" if answer.startswith("WRONG") else None


def add_note(answer: str, around: Around) -> AnswerWithMore:
    """Postprocessor that copies the answer to the metadata."""
    return AnswerWithMore(answer, {"note": answer})


ROUTES_OF_MIDDLEWARE = {
    "attachments": "parts", "images": "parts", "budget": "overspend", "context": "summary", "long_results": "long_result", "many_results": "probe",
    "prompt_budget": "every prompt", "data_policy": "every record", "evaluations": "correct", "postprocessors": "every answer",
    "few_shot": "every prompt", "fragments": "cite", "references": "cite", "prompts": "every prompt", "registry": "register",
    "shown_results": "cite", "keep_results": "cite", "custom": "poison", "memory": "every prompt",
    "forced_tools": "none: it chooses tools, and adds no text", "structured": "none: it gives an answer its form",
    "mcp": "none: its tools are tools like others", "tracing": "none: spans go to the operator's exporter",
}  # fmt: skip
"""Path of a canary through each middleware, by the middleware's name."""
