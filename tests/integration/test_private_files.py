"""Tests of files with messages or tokens: only their owner can read them from the first byte on. If others can read a
node's secrets, the node warns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from roundelay.cli import cli
from roundelay.network.config import NodeConfig
from roundelay.network.durable_files import replace_file
from roundelay.network.home import agent_token, announce_node, owner_token
from roundelay.nodes.up import find_exposed
from tests.integration.test_explaining_cli import AGENT, SCENARIO
from tests.support.certificates import make_certificate
from tests.support.command import command, run

RULE = "{when: {contains: Refund}, do: [{say: approved}]}"


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    """Set a umask with which new files are readable by everybody, also in the processes of a test."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a scenario of two agents."""
    monkeypatch.chdir(tmp_path)
    for name in ("desk", "finance"):
        Path(f"{name}.yaml").write_text(AGENT.format(agent_id=name, rule=RULE), encoding="utf-8")
    Path("refund.scenario.yaml").write_text(SCENARIO, encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "existing"])
def test_every_file_of_a_command_is_for_its_owner_alone(is_there: bool) -> None:
    names = ["ledger.jsonl", "junit.xml", "said.md", "diagram.mmd", "log.jsonl", "tapes/desk.jsonl"]
    Path("tapes").mkdir()
    if is_there:
        for name in names:
            Path(name).write_text("old", encoding="utf-8")
            assert mode(Path(name)) == 0o666
    invoke("scenario", "run", "refund.scenario.yaml", "--ledger", "ledger.jsonl", "--junit", "junit.xml")
    for form, name in (("jsonl", "log.jsonl"), ("markdown", "said.md"), ("mermaid", "diagram.mmd")):
        invoke("export", "--db", "ledger.jsonl", "--format", form, "-o", name)
    invoke("tapes", "ledger.jsonl", "-o", "tapes")
    assert {name: oct(mode(Path(name))) for name in names} == dict.fromkeys(names, "0o600")


def test_an_agent_that_names_a_place_of_its_choice_is_left_out_of_the_tapes(folder: Path) -> None:
    invoke("scenario", "run", "refund.scenario.yaml", "--ledger", "ledger.jsonl")
    log = Path("ledger.jsonl").read_text(encoding="utf-8")
    evil = log.replace('"agent":"desk"', '"agent":"../../escaped"')
    assert evil != log
    (folder / "deep" / "er").mkdir(parents=True)
    Path("evil.jsonl").write_text(evil, encoding="utf-8")
    result = CliRunner().invoke(cli, ["tapes", "evil.jsonl", "-o", "deep/er"], catch_exceptions=False)
    assert "../../escaped" in result.stderr
    assert not list(folder.rglob("escaped*"))


def test_a_file_is_for_its_owner_alone_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("old", encoding="utf-8")
    with replace_file(tmp_path / "log") as file:
        file.write("new")
        file.flush()
        [draft] = [path for path in tmp_path.iterdir() if path.name != "log"]
        assert mode(draft) == 0o600
    assert (mode(tmp_path / "log"), (tmp_path / "log").read_text()) == (0o600, "new")


def test_what_says_where_nodes_are_and_with_which_token_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attacker with write access could make commands send the owner's token to another hub."""
    monkeypatch.setenv("ROUNDELAY_HOME", str(tmp_path / "home"))
    note = announce_node("ws://127.0.0.1:8700/", tmp_path / "sub" / "team.db.owner")
    agent_token("ws://127.0.0.1:8700/", "ann")
    owner_token(tmp_path / "sub" / "team.db")
    found = {path: mode(path) for path in tmp_path.rglob("*")}
    assert note in found
    assert {(path.is_dir(), it) for path, it in found.items()} == {(True, 0o700), (False, 0o600)}


def test_the_files_that_others_may_read_are_found(tmp_path: Path) -> None:
    config = NodeConfig(db=tmp_path / "a.db", tls_key=tmp_path / "key.pem")
    files = [tmp_path / "key.pem", tmp_path / "a.db.owner", tmp_path / "a.db"]
    assert find_exposed(config) == []
    for file in files:
        file.write_text("secret", encoding="utf-8")
    assert find_exposed(config) == files
    for rights, is_found in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        for file in files:
            file.chmod(rights)
        assert find_exposed(config) == (files if is_found else [])


async def test_a_key_that_others_may_read_is_told_at_the_start_and_by_doctor(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    key.chmod(0o640)
    config = {"ROUNDELAY_TLS_CERT": str(certificate), "ROUNDELAY_TLS_KEY": str(key), "ROUNDELAY_PORT": "0"}
    async with command("up", cwd=tmp_path, **config) as up:
        await up.line(r"ready at (wss://\S+) ")
        await run("backup", "--db", "roundelay.db", "copy.db", cwd=tmp_path)
        found = {name: mode(tmp_path / name) for name in os.listdir(tmp_path) if "tls" not in name}
        assert {"roundelay.db", "roundelay.db-wal", "roundelay.db.owner", "copy.db"} <= set(found)
        assert set(found.values()) == {0o600}
        doctor = await run("doctor", "--json", cwd=tmp_path, **config)
        await up.stop()
        [told] = [line for line in up.errors if "chmod 600" in line]
        assert str(key) in told
    [secrets] = [check for check in json.loads(doctor.out)["checks"] if check["name"] == "secrets"]
    assert secrets["status"] == "note"
    assert str(key) in secrets["detail"]
