"""What the demo's agents say when no model drives them: a script for each, which sees only what a model would see.

That is the prompt which the runner rendered, and the results of the agent's own tool calls. Nothing is remembered
between two calls, so a reaction that is resumed in another process goes on as if nothing had been. `team.yaml` names
these scripts; `member` runs one agent.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import PromptView, read_prompt
from roundelay.agents.models.scripted import Action, Call, Script, broadcast, finish, say, send
from roundelay.demo.tools import Task, find_sums, find_word_tasks

DESK = "desk"
SPECIALISTS = {"numbers": "calculate with numbers", "words": "count, pick and turn words and letters"}
"""What each of them can do."""
THINKING_S = 0.25
"""A script's pause before each reply: a reader can follow, and there is a middle of a reaction in which an agent can be
killed."""
THINKING_VARIABLE = "DEMO_THINKING_S"
"""Tells an agent's process of another pause."""

_ASKS = re.compile(r"^(?:@\S+ )*@\S+, (?P<asker>\S+) asks: (?P<question>.*)", re.DOTALL)
_ANSWERS = re.compile(r"^@desk, for (?P<asker>\S+): (?P<part>.*)", re.DOTALL)
_DRAFT = re.compile(r"^My draft for (?P<asker>\S+): (?P<draft>.*)\nIs your part right\?$", re.DOTALL)
_CHECKED = re.compile(r"^Checked for (?P<asker>\S+): (?P<part>.*) — (?P<verdict>.*)$", re.DOTALL)
_NOTHING = "nothing here that I can"


def answer_desk(view: PromptView) -> Sequence[Action]:
    """Pass a question on, join the answers, have them checked, and tell the person: each at the one message that
    completes it."""
    if view.turn > 1:
        sent = "The message is on its way"
        failed = [result.content for result in view.tool_results if not result.content.startswith(sent)]
        return [say(f"I could not pass this on: {failed[-1]}")] if failed else [finish("said what there was to say")]
    is_direct = view.incoming_thread_id.startswith("direct:")
    if view.incoming_sender in SPECIALISTS:
        return _tell_asker(view) if is_direct else _join_answers(view)
    if not is_direct and f"@{DESK}" not in view.incoming_text:
        return [finish("said to everyone; whoever can, answers")]
    names = " ".join(f"@{name}" for name in SPECIALISTS)
    return [broadcast(f"{names}, {view.incoming_sender} asks: {view.incoming_text}")]


def _join_answers(view: PromptView) -> Sequence[Action]:
    """Act at the answer that completes the set, and at no other: which one that is stands in the thread, whoever came
    first."""
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
        offers = " ".join(f"{name} can {can}." for name, can in SPECIALISTS.items())
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


def make_specialist(name: str, find_tasks: Callable[[str], list[Task]]) -> Callable[[PromptView], Sequence[Action]]:
    """Give the script of an agent that finds tasks in a question, does them with its tools and says what came out."""

    def answer(view: PromptView) -> Sequence[Action]:
        if view.incoming_sender in SPECIALISTS:
            return [finish("my colleague said it; desk joins our answers")]
        asker, question, is_check = _read_question(view, find_tasks)
        tasks = find_tasks(question)
        if view.turn == 1 and tasks:
            return [Call(task.tool, task.arguments) for task in tasks]
        results = [result.content for result in view.tool_results if result.turn == 1]
        part = "; ".join(f"{task.label} {result}" for task, result in zip(tasks, results, strict=False))
        if is_check:
            verdict = "it is right." if part in view.incoming_text else "the draft says something else."
            return [say(f"Checked for {asker}: {part or 'nothing'} — {verdict}")]
        if not part and view.incoming_sender != DESK and not view.incoming_thread_id.startswith("direct:"):
            return [finish("nothing here for me")]  # said to everyone: silence is an answer
        said = part or f"{_NOTHING} {SPECIALISTS[name]}."
        return [say(f"@{DESK}, for {asker}: {said}" if view.incoming_sender == DESK else said)]

    return answer


def _read_question(view: PromptView, find_tasks: Callable[[str], list[Task]]) -> tuple[str, str, bool]:
    """Give who asks, what, and whether a draft of the answer is to be checked: then the question is the one that the
    draft answers."""
    is_from_desk = view.incoming_sender == DESK
    if is_from_desk and (asked := _ASKS.match(view.incoming_text)):
        return asked["asker"], asked["question"], False
    if not is_from_desk or not (draft := _DRAFT.match(view.incoming_text)):
        return view.incoming_sender, view.incoming_text, False
    said = [it.text for it in view.find_thread("broadcast").messages if it.sender == DESK]
    for found in filter(None, map(_ASKS.match, reversed(said))):
        tasks = find_tasks(found["question"])
        if found["asker"] == draft["asker"] and tasks and all(task.label in draft["draft"] for task in tasks):
            return draft["asker"], found["question"], True
    return draft["asker"], "", True


def _as_script(answer: Callable[[PromptView], Sequence[Action]]) -> Script:
    async def think(request: ModelRequest) -> Sequence[Action]:
        await asyncio.sleep(float(os.environ.get(THINKING_VARIABLE, THINKING_S)))
        return answer(read_prompt(request))

    return think


ANSWERS = {
    DESK: answer_desk,
    "numbers": make_specialist("numbers", find_sums),
    "words": make_specialist("words", find_word_tasks),
}
desk, numbers, words = map(_as_script, ANSWERS.values())
