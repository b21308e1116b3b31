"""The code of the deep-research team beside `team.yaml`: tools, the supervisor's rules, and scripts instead of
models."""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

from roundelay import ToolContext, tool
from roundelay.agents import Middleware, NamedTool, Output, remote_agent_tool, remote_handoff
from roundelay.agents.models import ModelRequest, read_prompt
from roundelay.agents.models.scripted import Action, call, say, think

PAUSE_S = 0.5  # so that a person can follow

# --- tools

SHELF = [
    ("bees", "The dance language of bees", "Bees find flowers by the waggle dance: its angle gives the direction, its length the distance."),
    ("bees", "Bees and polarised light", "Under clouds bees find flowers by the polarisation of the light of the sky."),
    ("whales", "Songs of the humpback", "Whales sing to be heard by others of their kind; a song lasts up to half an hour."),
    ("whales", "Sound in the sea", "Low notes of whales carry over hundreds of kilometres in deep water."),
    ("leaves", "Why leaves turn red", "Leaves turn red when their green fades and anthocyanins are made in autumn."),
]  # fmt: skip


@tool(idempotent=True)
async def search(context: ToolContext, query: str) -> AsyncIterator[str | Output]:
    """Search the library."""
    words = set(re.findall(r"\w+", query.lower()))
    found = [(topic, title, text) for topic, title, text in SHELF if topic in words]
    for _, title, _ in found:
        context.report(f"reading {title}")
        await asyncio.sleep(PAUSE_S)
    references = [{"id": title, "title": title, "text": text} for _, title, text in found]
    yield Output(f"{len(found)} documents" if found else "nothing", {"references": references})


@tool(idempotent=True, answers=True)
async def write_report(title: str, findings: list[str]) -> AsyncIterator[str]:
    """Write the report: it is the answer. Each finding is a paragraph with its citations."""
    yield f"{title}\n"
    for finding in findings:
        await asyncio.sleep(PAUSE_S)
        yield f"\n- {finding}"


@tool(idempotent=True, answers=True)
def feedback_questions(questions: list[str]) -> str:
    """Ask the person before the research. The questions are the answer."""
    return "\n".join(questions)


hand_over = remote_handoff("supervisor", description="Has questions researched.")
researcher_1, researcher_2, researcher_3 = (remote_agent_tool(f"researcher-{n}") for n in (1, 2, 3))


# --- the supervisor's rules


class Supervision(Middleware):
    """The work ends with a report: text alone is sent back, twice; then the report is forced."""

    def initial_state(self) -> dict[str, object]:
        return {"retries": 0}

    def on_no_tool_calls(self, state, reason):
        if reason != "no_calls":
            return None
        state.values["retries"] += 1
        return "That is no report. Ask the researchers what is missing, or call write_report."

    def prepare(self, state, step):
        is_late = state.values["retries"] >= 2 or state.turn == state.max_turns - 1
        forced = NamedTool("write_report") if is_late and step.tools else step.tool_choice
        return replace(step, tool_choice=forced)


# --- scripts: each sees what a model would see


def guide(request: ModelRequest) -> Action:
    return call("hand_over_to_supervisor", note="Please have this researched.")


def supervise(request: ModelRequest) -> list[Action] | Action:
    view = read_prompt(request)
    if not view.tool_results:
        question = view.incoming_text.rpartition(" wrote: ")[2]
        if not any(topic in question for topic, _, _ in SHELF):
            return call("feedback_questions", questions=["Which topics do you mean: bees, whales or leaves?"])
        topics = [it.strip(" ?") for it in re.split(r",|\band\b|\?", question) if it.strip(" ?")][:3]
        plan = think(f"There are {len(topics)} topics: a researcher for each.")
        return [plan, *(call(f"researcher-{n}", task=topic) for n, topic in enumerate(topics, 1))]
    if view.turn == 2:
        return say("I think that I know enough.")  # lazy, as models are
    findings = [it.content.partition("\n\nSources. ")[0] for it in view.tool_results]
    return call("write_report", title="What was found", findings=findings)


def research(request: ModelRequest) -> list[Action] | Action:
    results = read_prompt(request).tool_results
    if not results:
        topic = read_prompt(request).incoming_text
        return [think(f"What is there on {topic!r}?"), call("search", query=topic)]
    read = re.findall(r"^\[(\d+)\] .*\n(.+)$", results[-1].content, re.MULTILINE)
    return say(" ".join(f"{text} [{number}]" for number, text in read) or "Nothing is known of it.")
