"""The demo's team: three agents, each run as a process of its own by ``python -m roundelay.demo.team AGENT --url URL``.

`desk` takes questions, passes them on to everyone, has the answers checked and tells the person; `numbers` and `words` compute. Without
``--model`` they are driven by the scripts here, which see only what a model would see: the prompt that the runner rendered and the results of
their own tool calls. Nothing is remembered between two calls, so a reaction that is resumed in another process goes on as if nothing had been.

The process tells its parent on standard output what happens in it, one JSON object to a line (`Report`), and ends when its standard input does:
no agent outlives the demo.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from roundelay.agents.events import Event, Resumed, ToolCallEnd, ToolCallStart, TurnStart, event_to_json
from roundelay.agents.foreign import first_error
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import PromptView, read_prompt
from roundelay.agents.models.scripted import Action, Call, Script, ScriptedModel, broadcast, finish, say, send
from roundelay.agents.ongoing import ReactionResult
from roundelay.agents.policy import AgentPolicy, OnText
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner, SimpleOpenAIAgentRunner
from roundelay.agents.tools import Tool
from roundelay.demo.skills import (
    Task,
    calculate,
    check_palindrome,
    count_days,
    count_in_text,
    find_sums,
    find_word_tasks,
    name_weekday,
    pick_word,
    reverse_text,
)
from roundelay.network.client import Delivery, NetworkClient
from roundelay.network.errors import RoundelayError
from roundelay.network.messages import BaseMessage, MessageThread
from roundelay.nodes.endings import wait_for_input_end

DESK = "desk"
THINKING_S = 0.25
"""A script's pause before each reply: a reader can follow, and there is a middle of a reaction in which an agent can be killed."""

Report = dict[str, object]
"""What a team member's process writes: ``type`` is ``ready``, ``delivered``, ``reacted`` or that of an agent's event."""


@dataclass(frozen=True, slots=True)
class Role:
    """One member of the team: what it can do, for its card, for a model and for a script."""

    agent_id: str
    description: str
    tags: tuple[str, ...]
    instruction: str
    tools: tuple[Tool, ...]
    script: Callable[[PromptView], Sequence[Action]]
    on_text: OnText = "auto"


# --- the scripts

_ASKS = re.compile(r"^(?:@\S+ )*@\S+, (?P<asker>\S+) asks: (?P<question>.*)", re.DOTALL)
_ANSWERS = re.compile(r"^@desk, for (?P<asker>\S+): (?P<part>.*)", re.DOTALL)
_DRAFT = re.compile(r"^My draft for (?P<asker>\S+): (?P<draft>.*)\nIs your part right\?$", re.DOTALL)
_CHECKED = re.compile(r"^Checked for (?P<asker>\S+): (?P<part>.*) — (?P<verdict>.*)$", re.DOTALL)
_NOTHING = "nothing here that I can"


def run_desk(view: PromptView) -> Sequence[Action]:
    """Pass a question on, join the answers, have them checked, and tell the person: each at the one message that completes it."""
    if view.turn > 1:
        return _end_or_admit(view)
    is_direct = view.incoming_thread_id.startswith("direct:")
    if view.incoming_sender not in SPECIALISTS:
        if not is_direct and f"@{DESK}" not in view.incoming_text:
            return [finish("said to everyone; whoever can, answers")]
        names = " ".join(f"@{name}" for name in SPECIALISTS)
        return [broadcast(f"{names}, {view.incoming_sender} asks: {view.incoming_text}")]
    return _tell_asker(view) if is_direct else _join_answers(view)


def _join_answers(view: PromptView) -> Sequence[Action]:
    """Act at the answer that completes the set, and at no other: which one that is stands in the thread, whoever came first."""
    thread = view.find_thread(view.incoming_thread_id)
    earlier = {it.sender: found for it in thread.messages if (found := _ANSWERS.match(it.text))}
    answer = _ANSWERS.match(view.incoming_text)
    if answer is None or view.incoming_sender in earlier:
        return [finish("nothing new")]
    answers = earlier | {view.incoming_sender: answer}
    missing = [name for name in SPECIALISTS if name not in answers]
    if missing:
        return [finish(f"waiting for {', '.join(missing)}")]
    asker = answer["asker"]
    able = [name for name in SPECIALISTS if not answers[name]["part"].startswith(_NOTHING)]
    if not able:
        offers = " ".join(f"{name} {ROLES[name].description}." for name in SPECIALISTS)
        return [send(asker, f"None of us can answer that, and we would rather not guess. {offers}")]
    draft = "; ".join(answers[name]["part"] for name in able)
    return [send(able[0], f"My draft for {asker}: {draft}\nIs your part right?")]


def _tell_asker(view: PromptView) -> Sequence[Action]:
    checked = _CHECKED.match(view.incoming_text)
    if checked is None:
        return [finish("nothing asked")]
    own = [it.text for it in view.find_thread(view.incoming_thread_id).messages if it.sender == DESK]
    for found in filter(None, map(_DRAFT.match, reversed(own))):
        if found["asker"] == checked["asker"] and checked["part"] in found["draft"]:
            draft = found["draft"]
            answer = f"{draft[:1].upper()}{draft[1:]}. ({view.incoming_sender} checked its part: {checked['verdict']})"
            return [send(checked["asker"], answer)]
    return [send(checked["asker"], f"{view.incoming_sender} does not confirm our draft: {view.incoming_text}")]


def _end_or_admit(view: PromptView) -> Sequence[Action]:
    """Finish after what was sent; a send that failed is told, where somebody waits for an answer."""
    failed = [
        result.content for result in view.tool_results if not result.content.startswith("The message is on its way")
    ]
    return [say(f"I could not pass this on: {failed[-1]}")] if failed else [finish("said what there was to say")]


def make_specialist(find_tasks: Callable[[str], list[Task]], can: str) -> Callable[[PromptView], Sequence[Action]]:
    """Give the script of an agent that finds tasks in a question, does them with its tools and says what came out."""

    def run(view: PromptView) -> Sequence[Action]:
        if view.incoming_sender in SPECIALISTS:
            return [finish("my colleague said it; desk joins our answers")]
        asker, question, is_check = _read_question(view, find_tasks)
        tasks = find_tasks(question)
        if view.turn == 1 and tasks:
            return [Call(task.tool, task.arguments) for task in tasks]
        results = [result.content for result in view.tool_results if result.turn == 1]
        part = "; ".join(f"{task.label} {result}" for task, result in zip(tasks, results, strict=False))
        if is_check:
            draft = view.incoming_text
            verdict = "it is right." if part in draft else "the draft says something else."
            return [say(f"Checked for {asker}: {part or 'nothing'} — {verdict}")]
        if view.incoming_sender == DESK:
            return [say(f"@{DESK}, for {asker}: {part or f'{_NOTHING} {can}.'}")]
        if not part and not view.incoming_thread_id.startswith("direct:"):
            return [finish("nothing here for me")]  # said to everyone: silence is an answer
        return [say(part or f"I see {_NOTHING} {can}.")]

    return run


def _read_question(view: PromptView, find_tasks: Callable[[str], list[Task]]) -> tuple[str, str, bool]:
    """Give who asks, what, and whether a draft of the answer is to be checked: then the question is the one that the draft answers."""
    asked = _ASKS.match(view.incoming_text) if view.incoming_sender == DESK else None
    if asked is not None:
        return asked["asker"], asked["question"], False
    draft = _DRAFT.match(view.incoming_text) if view.incoming_sender == DESK else None
    if draft is None:
        return view.incoming_sender, view.incoming_text, False
    said = [it.text for it in view.find_thread("broadcast").messages if it.sender == DESK]
    for found in filter(None, map(_ASKS.match, reversed(said))):
        tasks = find_tasks(found["question"])
        if found["asker"] == draft["asker"] and tasks and all(task.label in draft["draft"] for task in tasks):
            return draft["asker"], found["question"], True
    return draft["asker"], "", True


def make_script(role: Role, thinking_s: float) -> Script:
    """Give a role's script as a model's: it reads the request and nothing else."""

    async def think(request: ModelRequest) -> Sequence[Action]:
        await asyncio.sleep(thinking_s)
        return role.script(read_prompt(request))

    return think


# --- the roles

_COLLEAGUES = (
    "You are one of a team of three agents: desk takes people's questions, numbers calculates, words works on texts. "
)

ROLES = {
    role.agent_id: role
    for role in (
        Role(
            DESK,
            "takes questions and gathers the answers",
            ("questions", "help"),
            _COLLEAGUES + "You are desk. When a person asks you something, broadcast the question once, beginning with '@numbers @words', "
            "and say whose question it is; then finish. They answer in a reply thread and wake you with each answer. While an answer is "
            "missing, finish without a word. Once both have answered, send numbers a direct message with your draft and ask it to check; "
            "then finish. When numbers has confirmed, send the person who asked one direct message with the whole answer, then finish. "
            "Never compute anything yourself.",
            (),
            run_desk,
        ),
        Role(
            "numbers",
            "calculates with numbers and dates",
            ("arithmetic", "numbers", "dates"),
            _COLLEAGUES + "You are numbers. Do what a message asks for with numbers and dates, with your tools only, and leave texts to "
            "words. Then answer in one sentence of plain text, without a tool call; it goes to whoever wrote. Begin an answer to desk "
            "with '@desk'. If nothing is to be calculated, say just that.",
            (calculate, count_days, name_weekday),
            make_specialist(find_sums, "calculate"),
            "reply",
        ),
        Role(
            "words",
            "counts, picks and turns words and letters",
            ("words", "letters", "text"),
            _COLLEAGUES + "You are words. Do what a message asks for about words, letters and texts, with your tools only, and leave "
            "calculating to numbers. Then answer in one sentence of plain text, without a tool call; it goes to whoever wrote. Begin an "
            "answer to desk with '@desk'. If nothing is asked about a text, say just that.",
            (pick_word, count_in_text, reverse_text, check_palindrome),
            make_specialist(find_word_tasks, "count, pick or turn"),
            "reply",
        ),
    )
}  # fmt: skip
SPECIALISTS = tuple(name for name in ROLES if name != DESK)


# --- the process


def report(what: Report) -> None:
    """Tell the parent process; a line at a time, at once."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Member(AgentRunner):
    """Reports each reaction's end: after its answer is stored and its end recorded, which no event says."""

    async def react(
        self, message_threads: dict[str, MessageThread], incoming_thread_id: str, incoming_message: BaseMessage
    ) -> ReactionResult:
        try:
            result = await super().react(message_threads, incoming_thread_id, incoming_message)  # type: ignore[safe-super]
        except Exception as error:
            report({"type": "reacted", "trigger": incoming_message.seq, "status": "failed", "reason": str(error)})
            raise
        report({"type": "reacted", "trigger": incoming_message.seq, "status": result.status, "reason": result.reason})
        return result


class ScriptedMember(_Member, SimpleAgentRunner):
    """A member that is driven by its role's script."""


class ModelMember(_Member, SimpleOpenAIAgentRunner):
    """A member that is driven by a real model."""


class MeasuringClient(NetworkClient):
    """Reports how long each message took from the hub's stamp to here; what waited for this session to begin is left out."""

    async def deliveries(self) -> AsyncIterator[Delivery]:
        backlog = self.welcome.head
        async for delivery in super().deliveries():
            message = delivery.message
            if message.seq > backlog and delivery.attempt == 1:
                report({"type": "delivered", "after_ms": time.time() * 1000 - message.sent_at})
            yield delivery


def report_event(event: Event) -> None:
    """Report the events that the demo shows or waits for."""
    if isinstance(event, Resumed | TurnStart | ToolCallStart | ToolCallEnd):
        report(event_to_json(event))


def make_member(role: Role, *, model: str | None, base_url: str | None, thinking_s: float) -> SimpleAgentRunner:
    """Make the runner of a role. Raises `ModelError` when the model's key is missing."""
    policy = AgentPolicy(on_text=role.on_text)
    if model is not None:
        return ModelMember(
            role.agent_id, instruction=role.instruction, model_name=model, base_url=base_url, tools=role.tools,
            description=role.description, tags=role.tags, policy=policy, on_event=report_event,
        )  # fmt: skip
    return ScriptedMember(
        role.agent_id, instruction=role.instruction, model=ScriptedModel(make_script(role, thinking_s), name="demo"),
        tools=role.tools, description=role.description, tags=role.tags, policy=policy, on_event=report_event,
    )  # fmt: skip


async def run_member(runner: SimpleAgentRunner, url: str) -> None:
    """Run until standard input ends."""
    async with MeasuringClient(runner.agent_id, url, role="reactor", card=runner.describe_card()) as client:
        report({"type": "ready", "open_reactions": len(client.welcome.open_reactions)})
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(client))
            await wait_for_input_end()
            await runner.stop()


def main() -> int:
    """Run one member; 1 when it cannot start or loses its hub, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m roundelay.demo.team")
    parser.add_argument("agent", choices=sorted(ROLES))
    parser.add_argument("--url", required=True)
    parser.add_argument("--model")
    parser.add_argument("--base-url")
    parser.add_argument("--thinking-s", type=float, default=THINKING_S)
    args = parser.parse_args()
    try:
        runner = make_member(ROLES[args.agent], model=args.model, base_url=args.base_url, thinking_s=args.thinking_s)
        asyncio.run(run_member(runner, args.url))
    except (RoundelayError, BaseExceptionGroup) as failure:
        error = first_error(failure) if isinstance(failure, BaseExceptionGroup) else failure
        if not isinstance(error, RoundelayError):
            raise
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
