"""Tests of explanations with careless or hostile input: files that are truncated, edited or overwritten, empty parts,
and endless chains.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from roundelay.cli import cli
from roundelay.network.errors import ConfigError, ConnectError, LedgerError, UnknownMessage
from roundelay.runs.why import MAX_DEPTH
from tests.support.node import running_node

HEAD = {"roundelay_log": 1, "epoch": "E", "name": "x", "first_seq": 1, "is_excerpt": False}


def message(seq: int, cause: int | None, text: str = "Hello", **changes: Any) -> dict[str, Any]:
    sender, to = ("ann", "bob") if seq % 2 else ("bob", "ann")
    common = {
        "seq": seq, "sender_id": sender, "sender_kind": "human", "kind": "direct", "to": f"agent:{to}",
        "thread_id": "direct:ann~bob", "root": 1, "hops": 0,
    }  # fmt: skip
    body = {**common, "message_id": f"{seq:032x}", "sent_at": 1_800_000_000_000, "content": text, **changes}
    if cause is not None:
        body["cause"] = cause
    head = {**common, "label": seq, "cause": cause, "excluded": []}
    return {
        "seq": seq, "at": 1, "type": "message", "actor": sender, "key": f"m:{seq:032x}", "target": f"agent:{to}",
        "stream": "direct:ann~bob", "label": str(seq), "head": head, "data": body,
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in (HEAD, *rows)), encoding="utf-8")
    return path


def look(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(cli, [str(it) for it in arguments], env=environment)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A conversation of 3,000 answers, each to the previous one."""
    return write(tmp_path / "log.jsonl", *(message(seq, seq - 1 or None) for seq in range(1, 3001)))


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    kept = tmp_path / "monday.jsonl"
    kept.write_text("kept", encoding="utf-8")
    assert isinstance(look("--url", "ws://127.0.0.1:1/", "export", "-o", kept).exception, ConnectError)
    assert [it.read_text(encoding="utf-8") for it in tmp_path.iterdir()] == ["kept"]


async def _send_numbers(db: Path) -> None:
    async with running_node(db=db, durability="full") as node:
        evil = await node.agent("evil")
        await node.agent("ann")
        for text in ("9" * 5000, "1e999", '{"deep": [-' + "8" * 5000 + "]}"):
            await evil.send_raw(f'{{"type":"send","message_id":"m{len(text)}","to":"agent:ann","content":{text}}}')
        await evil.send("agent:ann", "the last one")
        await evil.settle()


def test_a_number_that_no_computer_holds_hides_no_log(tmp_path: Path) -> None:
    """The hub passes content through unchanged, so the number stays in the ledger."""
    db = tmp_path / "team.db"
    team = tmp_path / "zed.yaml"
    team.write_text("id: zed\ninstruction: x\nmodel: {rules: []}\n", encoding="utf-8")
    asyncio.run(_send_numbers(db))
    assert "the last one" in look("export", "--db", db, "--format", "markdown").output
    log = tmp_path / "log.jsonl"
    assert look("export", "--db", db, "-o", log).exit_code == 0
    for source in (db, log):
        assert look("impact", 1, "--db", source).exit_code in (0, 1)
        found = look("tapes", source, tmp_path / "tapes")
        assert "no JSON" not in str(found.exception)
        replayed = look("replay", source, team)
        assert "Nothing was replayed, because this ledger contains nothing of these agents" in replayed.output


def test_an_export_over_its_own_source_loses_nothing(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", message(1, None), message(2, 1))
    assert look("export", "--db", log, "-o", tmp_path / "copy.jsonl").exit_code == 0
    assert look("export", "--db", log, "-o", log).exit_code == 0
    assert log.read_bytes() == (tmp_path / "copy.jsonl").read_bytes()
    assert log.read_bytes().count(b"\n") == 3


@pytest.mark.parametrize(
    "command", [("export",), ("export", "--root", 1), ("export", "--from", 990), ("why", 1000), ("impact", 1)]
)
def test_a_log_is_not_held_by_who_looks_into_it(tmp_path: Path, command: tuple[object, ...]) -> None:
    long = "many words " * 200
    log = write(tmp_path / "log.jsonl", *(message(seq, None, long) for seq in range(1, 1001)))
    wanted = (*command, "--db", log, *(("-o", tmp_path / "copy.jsonl") if command[0] == "export" else ()))
    look(*wanted)  # the imports of a first run are not counted
    tracemalloc.start()
    try:
        assert look(*wanted).exit_code == 0
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < log.stat().st_size / 4


def test_an_export_to_no_folder_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", message(1, None))
    failed = look("export", "--db", log, "-o", tmp_path / "no" / "x.jsonl").exception
    assert isinstance(failed, FileNotFoundError)
    assert failed.filename == str(tmp_path / "no" / "x.jsonl")


@pytest.mark.parametrize("format_", ["jsonl", "markdown", "mermaid"])
@pytest.mark.parametrize("part", [("--thread", "channel:no"), ("--root", 2), ("--root", 99), ("--from", 99)])
def test_a_part_that_holds_nothing_is_an_error(tmp_path: Path, format_: str, part: tuple[object, ...]) -> None:
    log = write(tmp_path / "log.jsonl", message(1, None), message(2, 1))
    done = look("export", "--db", log, "--format", format_, *part)
    assert isinstance(done.exception, UnknownMessage)
    assert done.output == ""


def test_a_range_that_ends_before_it_begins_is_wrong_usage(tmp_path: Path) -> None:
    done = look("export", "--db", write(tmp_path / "log.jsonl", message(1, None)), "--from", 5, "--to", 3)
    assert done.exit_code == 2
    assert "--from 5 is after --to 3" in done.output


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([message(1, None), message(2, 2)], "seq 2 does not contain the message"),  # a message that is its own cause
        # Two messages, each of which is the cause of the other.
        ([message(1, 2), message(2, 1)], "seq 1 does not contain the message"),
        ([message(1, None), message(1, None)], "seq 1 comes after 1"),
        ([message(2, None), message(1, None)], "seq 1 comes after 2"),
        ([{**message(1, None), "data": 5}], "seq 1 does not contain the message"),
        ([message(1, None) | {"seq": 7}], "seq 7 does not contain the message"),
        ([message(1, None, kind="shout")], "seq 1 is not a message"),
        ([message(1, None) | {"data": {**message(1, None)["data"], "content": None}}], None),
        ([message(1, None) | {"data": {"seq": 1}}], "seq 1 does not contain the message"),
    ],
)
@pytest.mark.timeout(20)
def test_a_log_that_was_edited_is_refused_and_its_place_named(
    tmp_path: Path, rows: list[dict[str, Any]], said: str | None
) -> None:
    log = write(tmp_path / "log.jsonl", *rows)
    failed = look("why", rows[-1]["seq"], "--db", log).exception
    if said is None:
        assert failed is None
        return
    assert isinstance(failed, LedgerError)
    assert said in str(failed)


def test_a_deep_chain_is_told_as_far_as_it_can_be_read(chain: Path) -> None:
    done = look("impact", 1, "--db", chain)
    assert done.exit_code == 0
    assert f"{2999 - MAX_DEPTH} more: roundelay impact {MAX_DEPTH + 1}" in done.output
    assert "2999 messages followed" in done.output
    assert f"{2999 - 2 * MAX_DEPTH} more" in look("impact", MAX_DEPTH + 1, "--db", chain).output


def test_a_deep_chain_as_json_says_how_much_is_left_out(chain: Path) -> None:
    effect = json.loads(look("impact", 1, "--db", chain, "--json").output)
    for _ in range(MAX_DEPTH):
        assert "more" not in effect
        (effect,) = effect["followers"]
    assert (effect["message"]["seq"], effect["more"], effect["followers"]) == (MAX_DEPTH + 1, 2999 - MAX_DEPTH, [])


def test_what_was_said_makes_no_heading_and_no_formula(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", message(1, None, "Read this\n===\n$$x$$"))
    lines = look("export", "--db", log, "--format", "markdown").output.splitlines()
    assert lines[-2:] == [r"> \=\=\=", r"> \$\$x\$\$"]
    assert "$" not in look("export", "--db", log, "--format", "mermaid").output


def test_a_tool_that_nobody_called_is_not_run_again(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", message(1, None))
    agent = tmp_path / "ann.yaml"
    agent.write_text("id: ann\ninstruction: Add.\nmodel: {rules: []}\n", encoding="utf-8")
    failed = look("replay", log, agent, "--run-tool", "lookup").exception
    assert isinstance(failed, ConfigError)
    assert "--run-tool lookup: no agent called this tool" in str(failed)


def test_what_was_typed_goes_before_the_environment() -> None:
    failed = look("--url", "ws://127.0.0.1:1/", "agents", ROUNDELAY_URL="ws://127.0.0.1:2/").exception
    assert isinstance(failed, ConnectError)
    assert "ws://127.0.0.1:1/" in str(failed)


def test_the_script_finds_tools_where_one_stands_as_a_node_does(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "shop_of_this_test.py").write_text(
        'def sell() -> str:\n    """Sell."""\n    return "sold"\n', encoding="utf-8"
    )
    (tmp_path / "agents" / "ann.yaml").write_text(
        "id: ann\ninstruction: Sell.\ntools: ['shop_of_this_test:sell']\nmodel: {rules: [{do: [{say: Sold.}]}]}\n",
        encoding="utf-8",
    )
    # -P: without the folder in the import path, like the installed script
    command = [
        sys.executable,
        "-P",
        "-c",
        "from roundelay.cli import main; main()",
        "agent",
        "try",
        "agents/ann.yaml",
        "Hi",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Sold." in done.stdout
