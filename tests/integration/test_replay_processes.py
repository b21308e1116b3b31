"""Tests of five agents in separate processes with a fake provider and a hub that is killed in between: the run is
recorded, and replayed in one process.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from roundelay.network.client import NetworkClient
from roundelay.network.ledger.log_file import read_log
from tests.support import fake_openai
from tests.support.command import run
from tests.support.fake_openai import Reply, calls
from tests.support.once import make_once
from tests.support.processes import Asked, Provider, agent_run, hub_up

AGENTS = ("lead", "left", "right", "proof", "press")


class Newsroom(Provider):
    """Provider for a newsroom: mia asks lead for a story, left and right write one half each, proof reads them, and
    press sends it to everybody.
    """

    def decide(self, asked: Asked) -> Reply:
        match asked:
            case Asked("lead", incoming, 1) if incoming.startswith("Write about "):
                topic = incoming.removeprefix("Write about ")
                return calls(
                    [("ask", {"agent_ids": ["left", "right"], "text": f"A half on {topic}", "timeout_s": 60.0})]
                )
            case Asked("lead", incoming, 2) if incoming.startswith("Write about "):
                topic = incoming.removeprefix("Write about ")
                sent = {"target_agent_id": "proof", "text": f"Read on {topic}"}
                return calls(
                    [("send_text_message", sent), ("channels_post", {"name": "dev", "text": f"On {topic} we work"})]
                )
            case Asked("lead", incoming, 3) if incoming.startswith("Write about "):
                return fake_openai.text("It is on its way.")
            case Asked("left" | "right" as half, incoming, 1) if incoming.startswith("A half on "):
                return fake_openai.text(f"The {half} half")
            case Asked("proof", incoming, 1) if incoming.startswith("Read on "):
                topic = incoming.removeprefix("Read on ")
                return calls([("send_text_message", {"target_agent_id": "press", "text": f"Print {topic}"})])
            case Asked("press", incoming, 1) if incoming.startswith("Print "):
                return calls([("broadcast_text_message", {"text": f"Out now: {incoming.removeprefix('Print ')}"})])
            case _:
                return calls([("finish", {"reason": "done"})])


@pytest.fixture(scope="module")
def newsroom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, with the agents' files and the ledger."""
    return make_once(tmp_path_factory, "newsroom", lambda folder: asyncio.run(print_stories(folder)))


async def print_stories(folder: Path) -> None:
    async with Newsroom() as provider, hub_up(folder) as hub, AsyncExitStack() as stack:
        for agent_id in AGENTS:
            await stack.enter_async_context(agent_run(folder, hub, provider, agent_id, stream=agent_id == "left"))
        mia = await stack.enter_async_context(NetworkClient("mia", hub.url, kind="human"))
        await mia.send_text("lead", "Write about bees")
        await hear(mia, {"It is on its way.", "Out now: bees"})
        await hub.restart()
        await mia.send_text("lead", "Write about owls")
        await hear(mia, {"It is on its way.", "Out now: owls"})


async def hear(client: NetworkClient, wanted: set[str]) -> None:
    """Wait until all these texts have arrived."""
    async with asyncio.timeout(30):
        async for delivery in client.deliveries():
            await delivery.ack()
            wanted.discard(delivery.message.text)
            if not wanted:
                return


def files(folder: Path) -> list[Path]:
    return [folder / f"{agent_id}.yaml" for agent_id in AGENTS]


async def test_the_run_of_five_processes_replays_exactly_in_one(newsroom: Path) -> None:
    done = await run("replay", newsroom / "team.db", *files(newsroom), "--json", OPENAI_API_KEY="")
    report = json.loads(done.out)
    _, rows = read_log(newsroom / "team.db")
    assert report["is_same"] is True
    assert report["rows"] == len(rows)
    assert report["messages"] == sum(row.type == "message" for row in rows)
    assert report["turns"] == sum(row.label == "model_reply" for row in rows)
    assert report["played"] == sorted(AGENTS)
    assert report["recorded"] == []
    assert report["turns"] >= 15


async def test_an_export_of_it_replays_as_well(newsroom: Path, tmp_path: Path) -> None:
    await run("export", "--db", newsroom / "team.db", "-o", tmp_path / "run.jsonl")
    done = await run("replay", tmp_path / "run.jsonl", *files(newsroom))
    assert re.match(r"No differences: \d+ messages, \d+ turns of 5 agents\.", done.lines[-1])


async def test_a_changed_word_of_one_agent_fails_loudly(newsroom: Path, tmp_path: Path) -> None:
    for file in files(newsroom):
        shutil.copy(file, tmp_path)
    proof = tmp_path / "proof.yaml"
    proof.write_text(
        proof.read_text(encoding="utf-8").replace("what you are told", "all you are told"), encoding="utf-8"
    )
    done = await run("replay", newsroom / "team.db", *files(tmp_path), code=1)
    assert done.lines[0].startswith(
        '! proof asks its model something else: message 0 (system): line 1 has changed; it is now: "Pass on all you are told to pass on'
    )
    assert "turn 1" in done.lines[0]
    assert done.lines[-1].startswith("Differences found after ")


@pytest.mark.usefixtures("real_processes")
async def test_a_replay_of_nobody_is_no_success(newsroom: Path, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("id: other\ninstruction: x\nmodel: {rules: []}\n", encoding="utf-8")
    done = await run("replay", newsroom / "team.db", tmp_path / "other.yaml", code=1)
    assert "* other has no part in the recording" in done.lines
    assert any(line.startswith("! Nothing was replayed") for line in done.lines)


@pytest.mark.usefixtures("real_processes")
async def test_a_tape_of_it_plays_without_a_key(newsroom: Path, tmp_path: Path) -> None:
    done = await run("tapes", newsroom / "team.db", "-o", tmp_path)
    assert {line.partition(":")[0].rpartition("/")[2] for line in done.lines} == {f"{it}.jsonl" for it in AGENTS}
    (tmp_path / "right.yaml").write_text(
        "id: right\ninstruction: Pass on what you are told to pass on, and answer who asks.\nmodel: {replay: right.jsonl}\n",
        encoding="utf-8",
    )
    lines = (tmp_path / "right.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[1])
    assert first["text"] == "The right half"
    del first["request"]
    (tmp_path / "right.jsonl").write_text("\n".join([lines[0], json.dumps(first)]), encoding="utf-8")
    done = await run("agent", "try", tmp_path / "right.yaml", "A half on bees", OPENAI_API_KEY="")
    assert "The right half" in done.out


@pytest.mark.usefixtures("real_processes")
async def test_why_leads_from_the_last_word_to_the_first(newsroom: Path) -> None:
    _, rows = read_log(newsroom / "team.db")
    seq = next(row.seq for row in rows if row.type == "message" and b"Out now: bees" in row.data)
    done = await run("why", str(seq), "--db", newsroom / "team.db", "--json")
    chain = json.loads(done.out)["chain"]
    assert [it["message"]["sender_id"] for it in chain] == ["press", "proof", "lead", "mia"]
    assert [it["reaction"]["sent"]["tool_call"]["name"] for it in chain[:-1]] == [
        "broadcast_text_message", "send_text_message", "send_text_message",
    ]  # fmt: skip
    assert "reaction" not in chain[-1]
