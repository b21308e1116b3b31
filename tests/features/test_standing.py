"""Tests of the end of a prompt: the answers that the agent owes, the participants that it waits for, and the rest of
the conversation's budget.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Answer, ScriptedModel, call, finish, say
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.prompt import MAX_STANDING_BYTES, render_standing
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.network.config import Limits
from roundelay.network.ledger.log_file import read_log
from roundelay.runs.recording import Recording
from roundelay.runs.replay import replay
from roundelay.simulation import Simulation, simulate


def script(request: ModelRequest) -> Answer:
    """Ask tom about what mia wants, and answer everybody else at once."""
    view = read_prompt(request)
    if view.turn == 1 and view.incoming_text == "ask tom":
        return call("ask", agent_ids=["tom"], text="Which one?", timeout_s=600)
    return [say("done"), finish()]


def make(**policy: Any) -> SimpleAgentRunner:
    return SimpleAgentRunner("desk", instruction="x", model=ScriptedModel(script), policy=AgentPolicy(**policy))


def prompts_of(simulation: Simulation, text: str) -> list[str]:
    """Return the first user message of each request about a message with this text."""
    contents = [str(asked.request.messages[1].content) for asked in simulation.asked if asked.agent_id == "desk"]
    return [it for it in contents if f"<content>{text}</content></incoming_message>" in it]


async def wait_for_tom(simulation: Simulation) -> list[str]:
    """Let mia make the agent wait for tom. Then let her ask it something in another conversation."""
    mia, tom = await simulation.join_person("mia"), await simulation.join_person("tom")
    first = await mia.client.send_text("desk", "ask tom")
    await simulation.idle()
    await asyncio.sleep(120)
    await mia.client.send_text("desk", "and this", cause=first.seq, conversation="second")
    await simulation.idle()
    found = prompts_of(simulation, "and this")
    await tom.client.send_text("desk", "the blue one", reply_to=tom.heard[0].seq, cause=tom.heard[0].seq)
    await simulation.idle()
    return found


def test_prompt_ends_with_what_the_agent_owes_and_waits_for() -> None:
    async def main(simulation: Simulation) -> tuple[list[str], list[str], list[dict[str, Any]]]:
        await simulation.start_agent(make)
        found = await wait_for_tom(simulation)
        started = [json.loads(it.data) for it in simulation.rows if it.type == "record" and it.label == "started"]
        return prompts_of(simulation, "ask tom"), found, started

    first, [second], started = simulate(main)
    assert all("<standing>" not in prompt for prompt in first)
    # Mia may not read the conversation with tom, so his name must not be in a prompt for mia.
    _, _, end = second.partition("</conversation>")
    assert "\n\n<standing>\nYou owe mia an answer (2 min).\n</standing>" in end
    assert "standing" not in started[0]
    assert started[1]["standing"] in end


def test_prompt_names_tasks_of_its_conversation_that_its_people_may_see() -> None:
    async def main(simulation: Simulation) -> tuple[int, list[str]]:
        await simulation.start_agent(make)
        mia, tom = [(await simulation.join_person(name)) for name in ("mia", "tom")]
        first = await mia.client.send_text("desk", "ask tom")
        await simulation.idle()
        asked = tom.heard[0].seq
        for client, title, cause, op in (
            (mia.client, "Shared <b>", first.seq, "complete"),
            (tom.client, "Secret", asked, "complete"),  # mia may not read the thread of this message
            (mia.client, "Draft", first.seq, "claim"),
            (mia.client, "Cited", first.seq, "complete"),
            (mia.client, "Elsewhere", (await mia.client.send_text("tom", "hello")).seq, "complete"),
            (mia.client, "Open", first.seq, ""),
        ):
            task = (await client.call("tasks.create", {"title": title, "cause": cause}))["task"]
            if title == "Cited":  # tom names a message that mia does not read
                await mia.client.call("tasks.update", {"task": task, "assignee": "tom"})
                await tom.client.call("tasks.complete", {"task": task, "messages": [asked]})
            elif op == "complete":
                await client.call("tasks.complete", {"task": task, "messages": [cause]})
            elif op:
                await client.call(f"tasks.{op}", {"task": task})
        await mia.client.send_text("desk", "and this", cause=first.seq, conversation="second")
        last = (await mia.client.call("tasks.create", {"title": "Late", "cause": first.seq}))["task"]
        await mia.client.call("tasks.complete", {"task": last})
        await simulation.idle()
        return first.seq, prompts_of(simulation, "and this")

    first, [prompt] = simulate(main, mods=["channels", "tasks"], limits=Limits(max_root_messages=1000))
    end = prompt.partition("<standing>\n")[2]
    assert [line for line in end.splitlines() if "ask" in line and "owe" not in line] == [
        "Task 4 (Cited) is done by tom.",
        "mia works on Task 3 (Draft).",
        f"Task 1 (Shared &lt;b&gt;) is done by mia in #{first}.",
    ]


def test_standing_can_be_turned_off() -> None:
    async def main(simulation: Simulation) -> list[str]:
        await simulation.start_agent(lambda: make(shows_standing=False))
        return await wait_for_tom(simulation)

    [prompt] = simulate(main)
    assert "<standing>" not in prompt


def test_budget_is_shown_near_its_end() -> None:
    async def main(simulation: Simulation) -> list[str]:
        await simulation.start_agent(make)
        mia = await simulation.join_person("mia")
        stored = await mia.client.send_text("desk", "hello 0")
        for number in range(1, 5):
            await simulation.idle()
            stored = await mia.client.send_text("desk", f"hello {number}", cause=stored.seq)
        await simulation.idle()
        return [prompts_of(simulation, f"hello {number}")[0] for number in range(5)]

    prompts = simulate(main, limits=Limits(max_root_messages=12))
    assert ["<standing>" in prompt for prompt in prompts] == [False, False, False, False, True]
    assert "This conversation has 3 messages left. It has used " in prompts[-1]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_standing_stays_within_its_bytes(count: int) -> None:
    name = "a" * 64
    standing = {"owes": [{"to": f"{name[:60]}{n}", "seq": n, "since": 0} for n in range(count)], "messages_left": 3}
    text = render_standing(standing, 60_000)
    assert text.startswith("<standing>\nThis conversation has 3 messages left.\nYou owe ")
    assert text.endswith("\n</standing>")
    assert len(text.encode()) <= MAX_STANDING_BYTES
    assert render_standing({}, 0) == ""


def test_replay_reads_the_recorded_standing(tmp_path: Path) -> None:
    async def main(simulation: Simulation) -> bytes:
        await simulation.start_agent(make)
        await wait_for_tom(simulation)
        return simulation.export()

    file = tmp_path / "run.jsonl"
    file.write_bytes(simulate(main))
    report = replay(Recording(*read_log(file)), [make()])
    assert report.differences == ()
    assert report.turns == 3
