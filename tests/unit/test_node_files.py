"""Tests of files and output of commands about nodes: first files, log lines, and errors of a hub's address."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from roundelay.network.errors import ConnectError
from roundelay.nodes.hub_http import get_from_hub
from roundelay.nodes.logs import ProcessLog, log_to_stderr
from roundelay.nodes.starter import write_starter


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for logger in (logging.getLogger(), logging.getLogger("roundelay")):
        monkeypatch.setattr(logger, "handlers", list(logger.handlers))
        monkeypatch.setattr(logger, "level", logger.level)


def test_first_files_are_written_both_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "agents").write_text("a file, where a folder is to be")
    with pytest.raises(FileExistsError):
        write_starter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["agents"]


def test_what_raised_in_a_log_line_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("warning")
    try:
        raise ValueError("a\x1b]0;owned\x07b\n\tc")
    except ValueError:
        logging.getLogger("tests.logs").warning("a tool failed", exc_info=True, extra={"agent_id": "a\x9bb"})
    said = capsys.readouterr().err
    head, *trace = said.rstrip("\n").split("\n")
    assert head.endswith(r"a tool failed agent_id='a\x9bb'")
    assert trace[-2:] == [r"ValueError: a\x1b]0;owned\x07b", "    c"]


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example"])
def test_an_address_that_can_be_no_hosts_is_a_failure_to_connect(host: str) -> None:
    with pytest.raises(ConnectError, match="hub at"):
        get_from_hub(f"ws://{host}:1/", "/healthz")


def test_a_line_of_json_is_one_object_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("debug", "json")
    logging.getLogger("openai").debug("a library's: a prompt")
    logging.getLogger("openai").warning("a library's warning")
    try:
        raise ValueError("a\x1b]0;owned\x07b")
    except ValueError:
        extra = {"agent_id": "a\x9bb", "level": "mine", "path": Path("x")}
        logging.getLogger("roundelay.test").debug("it\nfailed", exc_info=True, extra=extra)
    log = ProcessLog("json")
    log.write("a\u202eb")
    log.forward("ann", '{"at": "t", "level": "error", "message": "m", "seq": 3}')
    log.forward("ann", "printed\x1b")
    lines = capsys.readouterr().err.splitlines()
    assert not any(char in line for line in lines for char in "\x1b\x9b\u202e")
    library, own, said, passed, printed = map(json.loads, lines)
    assert (library["level"], library["logger"]) == ("warning", "openai")
    assert own | {"at": 0, "exception": own["exception"].splitlines()[-1]} == {
        "at": 0,
        "level": "debug",
        "logger": "roundelay.test",
        "message": "it\nfailed",
        "agent_id": "a\x9bb",
        "path": "x",
        "exception": "ValueError: a\x1b]0;owned\x07b",
    }
    assert (said["level"], said["message"]) == ("warning", "a\u202eb")
    assert passed == {"at": "t", "level": "error", "message": "m", "seq": 3, "process": "ann"}
    assert (printed["logger"], printed["message"], printed["process"]) == ("output", "printed\x1b", "ann")
