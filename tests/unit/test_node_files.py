"""What commands about nodes write and print: first files, log lines, what a hub at an address says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from roundelay.network.errors import ConnectError
from roundelay.nodes.hub_http import get_from_hub
from roundelay.nodes.logs import log_to_stderr
from roundelay.nodes.starter import write_starter


def test_first_files_are_written_both_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "agents").write_text("a file, where a folder is to be")
    with pytest.raises(FileExistsError):
        write_starter(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["agents"]


def test_what_raised_in_a_log_line_drives_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)
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
