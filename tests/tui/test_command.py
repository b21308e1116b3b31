"""Tests of the command `roundelay tui`: its errors where it cannot run, and that other commands do not load its
dependencies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.announced import announced_node
from tests.support.command import run
from tests.support.terminals import command_at_terminal

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Nothing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "textual":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "textual" else found(name, *rest)
from roundelay.cli import main
main(["tui"])
"""


def test_without_textual_it_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2  # the same exit code as for other missing extras
    assert "pip install 'roundelay[tui]'" in done.stderr
    assert "Traceback" not in done.stderr


async def test_in_a_pipe_it_names_the_chat() -> None:
    done = await run("tui", code=2)
    assert "roundelay tui needs a terminal. In a pipe, use roundelay chat." in done.err


def test_other_commands_load_no_textual(tmp_path: Path) -> None:
    loads = "import sys, roundelay.cli, roundelay.terminal.converse, roundelay.live_activity; print('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loads], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"


async def test_a_byte_that_is_no_text_does_not_end_the_screen(tmp_path: Path) -> None:
    async with (
        announced_node(tmp_path),
        command_at_terminal("tui", "--as", "mia", "--to", "broadcast", shows="to broadcast") as it,
    ):
        it.type(b"caf\xe9 noir")  # a paste of Latin-1 text
        await it.shows("caf� noir")
        it.type("\r")
        await it.shows(r"mia → broadcast\s+.*caf� noir")
        it.type("\x11")
        async with asyncio.timeout(20):
            assert await it.process.wait() == 0


async def test_who_is_asked_to_end_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    async with announced_node(tmp_path), command_at_terminal("tui", "--as", "mia", shows="Nothing has been") as it:
        assert not it.is_as_before()
        it.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await it.process.wait() == 143
        assert it.is_as_before()
        await it.told("\x1b[?1049l")  # the terminal has left the alternate screen


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_shows_lines_alone_is_told_of_the_chat(term: str) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "roundelay", "tui"]
    done = subprocess.run(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "TERM": term},
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 2
    assert f"TERM={term}" in done.stderr
    assert "roundelay chat" in done.stderr
