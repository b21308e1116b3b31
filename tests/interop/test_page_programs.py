"""Tests of the programs on pages that call a gateway. The programs run with the address and token of a gateway."""

from __future__ import annotations

import asyncio
import gc
import re
import warnings
from pathlib import Path

import pytest

from roundelay.agents.models.prompt_view import read_prompt
from roundelay.interop.gateway import serve_gateway
from tests.support.agents import make_runner
from tests.support.asked import invite, working
from tests.support.node import running_node
from tests.support.programs import run_program

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(
    r"^<!-- not run: it needs a gateway and a token -->\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAMS = [
    pytest.param(match[1], id=str(page.relative_to(ROOT)))
    for page in sorted((ROOT / "docs").rglob("*.md"))
    for match in PROGRAM.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("text", PROGRAMS)
async def test_program_of_page_prints_the_answer_of_the_agent(text: str) -> None:
    async with asyncio.timeout(30), running_node() as node, serve_gateway(node.url) as url:
        token = await invite(node, "ui")
        bob = make_runner("bob", lambda request: f"I hear {read_prompt(request).incoming_text}")
        async with working(node, bob):
            program, count = re.subn(r"http://127\.0\.0\.1:8701", url, re.sub(r'"ui:[\w-]+"', f'"{token}"', text))
            assert count == 1
            with warnings.catch_warnings():  # the programs do not close their connections before Python ends
                warnings.simplefilter("ignore", ResourceWarning)
                printed = await asyncio.to_thread(run_program, program, "program of a page")
                gc.collect()
    assert "I hear 17 and 23?" in printed


def test_pages_have_programs_for_the_gateway() -> None:
    assert len(PROGRAMS) == 2
