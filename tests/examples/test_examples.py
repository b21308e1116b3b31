"""Tests that every example runs as its docstring says."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from roundelay.agents.team import build_runner, load_agents
from roundelay.app import Network, serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig, load_yaml
from tests.support.agents import Person
from tests.support.forks import Process, run_python, start_python
from tests.support.programs import read_output, run_program, strip_lines

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 60.0
PROGRAMS = [path for path in sorted(EXAMPLES.rglob("*.py")) if read_output(path) is not None]
COMPLETE = ("orchestrator", "handoff_flow")
"""Folders of programs that show many features together."""


@asynccontextmanager
async def started(*command: str, folder: Path) -> AsyncIterator[Process]:
    """Run a program in a folder of the test, and stop it at the end."""
    pipe = asyncio.subprocess.PIPE
    process = await start_python(*command, cwd=folder, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(TIMEOUT_S):
            await process.wait()


async def read_line(process: Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        return (await process.stdout.readline()).decode()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_example_prints_what_its_docstring_says(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_program(program.read_text(encoding="utf-8"), str(program))
    assert strip_lines(printed) == read_output(program)


def test_examples_that_print_are_short_and_name_their_command() -> None:
    assert len(PROGRAMS) > 25
    for program in PROGRAMS:
        text = program.read_text(encoding="utf-8")
        path = program.relative_to(EXAMPLES)
        lines = len(text.splitlines()) - len((read_output(program) or "").splitlines())
        assert lines <= (150 if path.parts[0] in COMPLETE else 80), path
        assert f"Run it: python examples/{path}\n" in text


@pytest.mark.full
def test_a_killed_agent_goes_on_and_does_not_charge_twice(tmp_path: Path) -> None:
    done = run_python(EXAMPLES / "killed_agent" / "killed.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, second = (f"{nth} process: " for nth in ("first", "second"))
    assert done.stdout.splitlines() == [
        *(first + it for it in ("is there", "charged 40", "thinks", "killed")),
        second + "is there",
        "till: Done: 40 EUR were charged.",
    ]


RESEARCH = EXAMPLES / "deep_research"
REPORT = [
    "What was found",
    "",
    "- Bees find flowers by the waggle dance: its angle gives the direction, its length the distance. [1] Under clouds bees find flowers by "
    "the polarisation of the light of the sky. [2]",
    "- Whales sing to be heard by others of their kind; a song lasts up to half an hour. [3] Low notes of whales carry over hundreds of "
    "kilometres in deep water. [4]",
    "- Leaves turn red when their green fades and anthocyanins are made in autumn. [5]",
]


@pytest.mark.full
def test_a_team_of_five_processes_researches_and_cites(tmp_path: Path) -> None:
    done = run_python(RESEARCH / "research.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *shown, _, first, _, _, _, fifth = done.stdout.splitlines()
    assert shown[-5:] == REPORT
    assert [first, fifth] == ["[1] The dance language of bees", "[5] Why leaves turn red"]
    assert {"supervisor: researcher-3", "researcher-3: search"} <= {line.partition(" {")[0] for line in shown}


async def test_research_team_asks_back_if_the_question_has_no_topic() -> None:
    team = [build_runner(spec) for spec in load_agents(load_yaml(RESEARCH / "team.yaml").value["agents"].value)]
    async with Network.open() as network, network.run(*team):
        zoe = await Person.join(network, "zoe")
        assert (await zoe.ask("guide", "Please research.")).text == "Which topics do you mean: bees, whales or leaves?"
        report = await zoe.ask("guide", "How do bees find flowers?")
        assert report.text.splitlines()[0] == "What was found"
        assert len((report.metadata or {})["sources"]) == 2


async def test_team_answers_a_person_at_a_terminal(tmp_path: Path) -> None:
    up = ("-m", "roundelay", "up", str(EXAMPLES / "team_with_a_person" / "team.yaml"))
    async with started(*up, "--port", "0", "--db", str(tmp_path / "library.db"), folder=tmp_path) as node:
        assert "ws://127.0.0.1:" in await read_line(node)
        async with started("-m", "roundelay", "chat", "--to", "host", "--as", "zoe", folder=tmp_path) as chat:
            async with asyncio.timeout(TIMEOUT_S):
                out, _ = await chat.communicate(b"something by Woolf\ncookery\n")
    assert "host → zoe: Mrs Dalloway by Virginia Woolf; To the Lighthouse by Virginia Woolf" in out.decode()
    assert "host → zoe: nothing on the shelf fits" in out.decode()


async def test_client_in_plain_websockets_answers_people_and_nobody_else(tmp_path: Path) -> None:
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    async with serve(config) as node, NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
        client = ("-I", str(EXAMPLES / "bring_your_own_client" / "client.py"), node.url, "mirror")
        for word in ("refrain", "level"):  # the second run uses the token of the first one
            async with started(*client, folder=tmp_path) as mirror:
                assert "mirror is connected" in await read_line(mirror)
                async with NetworkClient("ann", node.url) as ann:
                    await ann.send_text("mirror", "from an agent")
                sent = await zoe.send_text("mirror", word)
                answer = await anext(aiter(zoe))
                assert (answer.text, answer.reply_to, answer.cause) == (word[::-1], sent.seq, sent.seq)
        thread = await zoe.history("direct:mirror~zoe")
        assert [it.text for it in thread.messages] == ["refrain", "niarfer", "level", "level"]
    assert os.stat(tmp_path / "mirror.token").st_mode & 0o777 == 0o600


def test_client_in_plain_websockets_without_arguments_says_how_to_use_it() -> None:
    client = EXAMPLES / "bring_your_own_client" / "client.py"
    done = subprocess.run([sys.executable, "-I", client], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stderr == "Usage: python -I client.py URL AGENT_ID, such as ws://127.0.0.1:8700/ mirror\n"


async def test_shop_books_an_order_once_however_often_it_is_started(tmp_path: Path) -> None:
    config = NodeConfig(port=0, db=tmp_path / "node.db", durability="memory")
    async with serve(config) as node, NetworkClient("zoe", node.url, kind="human", token=node.owner_token) as zoe:
        shop = (str(EXAMPLES / "exactly_once" / "shop.py"), node.url)
        async with started(*shop, folder=tmp_path) as process:
            await zoe.call("network.watch", {"presence": True})
            agents = (await zoe.call("network.list_agents", {"online": True}))["agents"]
            if "shop" not in [agent["agent_id"] for agent in agents]:
                await anext(aiter(zoe.events()))
            seqs = [(await zoe.send_text("shop", order)).seq for order in ("3 apples", "1 pear")]
            assert [await read_line(process) for _ in seqs] == [
                f"booking {seqs[0]} 3 apples\n",
                f"booking {seqs[1]} 1 pear\n",
            ]
            last = (await zoe.send_text("shop", "the end")).seq
            assert await read_line(process) == f"booking {last} the end\n"
        async with started(*shop, folder=tmp_path) as process:
            await zoe.send_text("shop", "later")
            while "later" not in await read_line(process):
                pass
    with closing(sqlite3.connect(tmp_path / "shop.db")) as db:
        assert db.execute("SELECT seq FROM orders ORDER BY seq").fetchall()[:2] == [(seqs[0],), (seqs[1],)]


def test_the_list_of_examples_is_complete_and_its_files_are_there() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/.]+)\)", text))
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.*"))}
    assert folders - {path.split("/")[0] for path in linked} == set()
    assert [path for path in PROGRAMS if str(path.relative_to(EXAMPLES)) not in linked] == []
    for path in re.findall(r"examples/[\w/]+\.\w+", text):
        assert (EXAMPLES.parent / path).is_file()


@pytest.mark.full
def test_two_coding_agents_and_a_person_are_told_in_mid_turn_what_was_written(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "coding_agents" / "pair.py"]
    slow = {**os.environ, "ROUNDELAY_HOOK_TIMEOUT_S": "60"}  # processes start slowly under load
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=2 * TIMEOUT_S, env=slow)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-5:] == [
        "claude-shop sends: Stored as #4 in direct:claude-shop~codex-shop. codex-shop is not woken by the message, and "
        "reads it at its next turn.",
        "codex-shop reads, mid-turn, from claude-shop: I rename total() to sum().",
        "claude-shop reads, about to stop, from codex-shop: Then I test sum().",
        "claude-shop reads, about to stop, from mia: Keep total() as an alias.",
        "mia sees that claude-shop has her message: handled",
    ]
