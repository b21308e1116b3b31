"""The command: what it says where it cannot run, and that nothing else loads what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.command import run

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
    assert done.returncode == 1
    assert "pip install 'roundelay[tui]'" in done.stderr
    assert "Traceback" not in done.stderr


async def test_in_a_pipe_it_names_the_chat() -> None:
    done = await run("tui", code=2)
    assert "roundelay tui needs a terminal; in a pipe: roundelay chat" in done.err


def test_other_commands_load_no_textual(tmp_path: Path) -> None:
    loads = (
        "import sys, roundelay.cli, roundelay.terminal.converse, roundelay.under_way; print('textual' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", loads], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
