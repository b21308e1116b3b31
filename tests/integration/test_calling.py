"""Tests of a mod in a file next to the node's file, and of its operations on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_up import node_up
from tests.support.command import invoke, run

POLLS = '''
from roundelay.network.mod import Change, Mod, Reading, operation


class Polls(Mod):
    id = "polls"

    @operation("change")
    def vote(self, change: Change, *, poll: int, choice: str, weights: list[float] | None = None, is_final: bool = False) -> dict:
        """Vote for a choice."""
        change.put(f"{poll}/{change.origin.agent_id}", [choice, weights, is_final])
        return {"poll": poll, "choice": choice}

    @operation("read")
    async def votes(self, reading: Reading, *, poll: int, of: str) -> dict:
        """Tell how somebody voted."""
        return {"vote": reading.get(f"{poll}/{of}")}
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "roundelay.yaml").write_text("port: 0\nmods: [channels, discovery, 'polls:Polls']\n")
    (tmp_path / "polls.py").write_text(POLLS)
    return tmp_path


@pytest.mark.usefixtures("real_processes")
async def test_a_mod_beside_the_nodes_file_is_called_from_the_command_line(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    async with node_up(elsewhere, folder / "roundelay.yaml") as (up, url):
        by = ("--url", url, "--as", "mia", "--as-kind", "human")
        await invoke("send", "--url", url, "--as-kind", "human", "broadcast", "hello")
        token = (await invoke("token", "create", "mia", "--kind", "human", "--url", url)).lines[0]
        by = (*by, "--token", token)
        listed = (await invoke("call", *by)).out
        assert "polls.vote" in listed
        assert "poll=..." in listed
        assert "network.info" in listed
        done = await invoke(
            "call", "polls.vote", "poll=7", "choice=12", "weights=[1, 0.5]", "is_final=true", "--json", *by
        )
        assert json.loads(done.out) == {"poll": 7, "choice": "12"}
        done = await invoke("call", "polls.votes", "poll=7", "of=mia", *by)
        assert done.out == 'vote: ["12",[1.0,0.5],true]\n'
        for words, part in (
            (["polls.vot", "poll=7"], "Did you mean polls.vote"),
            (["polls.vote", "poll=7"], "also needs choice"),
            (["polls.vote", "poll=seven", "choice=tea"], "is not of type integer"),
            (["polls.vote", "poll", "choice=tea"], "NAME=VALUE"),
            (["polls.vote", "pol=7", "choice=tea"], "no argument 'pol'"),
            (["polls.vote", "poll=7", "poll=8", "choice=tea"], "given twice"),
        ):
            refused = await invoke("call", *words, *by, code=2)
            assert part in refused.err
        (await invoke("call", "polls.vote", "poll=1.5", "choice=tea", *by, code=1)).err.index("polls.vote")
        await up.stop()


@pytest.mark.parametrize(
    ("named", "text", "parts"),
    [
        ("poll:Polls", POLLS, ("no poll.py beside the node's file",)),
        ("polls:Poll", POLLS, ("polls has no Poll",)),
        ("polls:id", "id = 7", ("is a int",)),
        ("polls:Polls", "import no_such_package", ("failed to load", "no_such_package")),
        ("polls:Polls", "class Polls: pass", ("failed to load",)),
        ("../polls:Polls", POLLS, ("is not an import path",)),
    ],
)
async def test_a_mod_that_cannot_be_loaded_is_told_with_its_line(
    folder: Path, named: str, text: str, parts: tuple[str, ...]
) -> None:
    (folder / "roundelay.yaml").write_text(f"port: 0\nmods: ['{named}']\n")
    (folder / "polls.py").write_text(text)
    done = await run("up", cwd=folder, code=2)
    for part in ("roundelay.yaml:2", *parts):
        assert part in done.err


async def test_doctor_and_rights_find_it_too(folder: Path) -> None:
    assert "failed" not in (await run("doctor", cwd=folder)).out
    (folder / "roundelay.yaml").write_text(
        "mods: ['polls:Polls']\nrights: {voters: {kinds: [human], call: ['polls.*']}}\n"
    )
    assert "polls.vote" in (await run("rights", "show", "--as", "mia", "--kind", "human", "--json", cwd=folder)).out
