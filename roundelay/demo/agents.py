"""Scripts that replace the models of the demo's agents. `team.yaml` names the scripts.

A script gets the same input as a model: the rendered prompt, and the results of the agent's tool calls. Scripts keep no
state between calls, so another process can resume a reaction after a crash.
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
"""Specialists of the demo, with a description of their skills."""
THINKING_S = 0.25
"""Pause of a script before each reply, in seconds. Readers can follow the conversation, and ``--kill`` hits an agent in the
middle of its reaction."""
THINKING_VARIABLE = "DEMO_THINKING_S"
"""Environment variable that changes the pause in the agents' processes."""

_ASKS = re.compile(r"^(?:@\S+ )*@\S+, (?P<asker>\S+) asks: (?P<question>.*)", re.DOTALL)
_ANSWERS = re.compile(r"^@desk, for (?P<asker>\S+): (?P<part>.*)", re.DOTALL)
_DRAFT = re.compile(r"^My draft for (?P<asker>\S+): (?P<draft>.*)\nIs your part right\?$", re.DOTALL)
_CHECKED = re.compile(r"^Checked for (?P<asker>\S+): (?P<part>.*) — (?P<verdict>.*)$", re.DOTALL)
_NOTHING = "nothing here that I can"


def answer_desk(view: PromptView) -> Sequence[Action]:
    """Forward a question, combine the answers, let an agent check them, and answer the person.

    Each step starts when a message completes the previous step.
    """
    if view.turn > 1:
        sent = "The message is on its way"
        failed = [result.content for result in view.tool_results if not result.content.startswith(sent)]
        return [say(f"I could not pass this on: {failed[-1]}")] if failed else [finish("said what there was to say")]
    is_direct = view.incoming_thread_id.startswith("direct:")
    if view.incoming_sender in SPECIALISTS:
        return _answer_asker(view) if is_direct else _join_answers(view)
    if not is_direct and f"@{DESK}" not in view.incoming_text:
        return [finish("said to everyone; whoever can, answers")]
    names = " ".join(f"@{name}" for name in SPECIALISTS)
    return [broadcast(f"{names}, {view.incoming_sender} asks: {view.incoming_text}")]


def _join_answers(view: PromptView) -> Sequence[Action]:
    """Send the draft when the last missing answer arrives. The thread shows which answers have arrived, in any order."""
    thread = view.find_thread(view.incoming_thread_id)
    earlier = {message.sender: match for message in thread.messages if (match := _ANSWERS.match(message.text))}
    answer = _ANSWERS.match(view.incoming_text)
    # Ignore a second answer of the same specialist, because it would send the draft again.
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


def _answer_asker(view: PromptView) -> Sequence[Action]:
    checked = _CHECKED.match(view.incoming_text)
    if checked is None:
        return [finish("nothing asked")]
    texts = [message.text for message in view.find_thread(view.incoming_thread_id).messages if message.sender == DESK]
    for match in filter(None, map(_DRAFT.match, reversed(texts))):
        if match["asker"] == checked["asker"] and checked["part"] in match["draft"]:
            draft = match["draft"]
            answer = f"{draft[:1].upper()}{draft[1:]}. ({view.incoming_sender} checked its part: {checked['verdict']})"
            return [send(checked["asker"], answer)]
    return [send(checked["asker"], f"{view.incoming_sender} does not confirm our draft: {view.incoming_text}")]


def make_specialist(name: str, find_tasks: Callable[[str], list[Task]]) -> Callable[[PromptView], Sequence[Action]]:
    """Return the script of an agent that finds tasks in a question, solves them with its tools, and reports the
    results.
    """

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
            return [finish("nothing here for me")]  # the message is a broadcast, so the agent need not answer
        text = part or f"{_NOTHING} {SPECIALISTS[name]}."
        return [say(f"@{DESK}, for {asker}: {text}" if view.incoming_sender == DESK else text)]

    return answer


def _read_question(view: PromptView, find_tasks: Callable[[str], list[Task]]) -> tuple[str, str, bool]:
    """Return the sender, the question, and whether the message asks to check a draft.

    For a draft, the question is the original question that the draft answers.
    """
    is_from_desk = view.incoming_sender == DESK
    if is_from_desk and (match := _ASKS.match(view.incoming_text)):
        return match["asker"], match["question"], False
    if not is_from_desk or not (draft := _DRAFT.match(view.incoming_text)):
        return view.incoming_sender, view.incoming_text, False
    texts = [message.text for message in view.find_thread("broadcast").messages if message.sender == DESK]
    for match in filter(None, map(_ASKS.match, reversed(texts))):
        tasks = find_tasks(match["question"])
        if match["asker"] == draft["asker"] and tasks and all(task.label in draft["draft"] for task in tasks):
            return draft["asker"], match["question"], True
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
