"""Every console block runs, in the order of its page, and its output is compared. A block that cannot run says why.

On a page that starts no node, the commands find the network of tests/support/page_world.py. test_tutorial.py plays the
tutorial's pages, and test_skill.py the skill.
"""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from roundelay.network.config import Limits
from tests.examples.test_code_blocks import BLOCKS, TOOLS, Block
from tests.support.consoles import Console, Step, read_console
from tests.support.page_world import NEEDS, NOBODY_ELSE, NODE, World, write_files

GROUPS = {
    "docs/cluster/try.md": ("docs/cluster/operate.md",),
    "docs/cli/connect.md": ("docs/a2a.md", "docs/openai.md"),
    "docs/messages.md": (
        "docs/bridge.md", "docs/cli.md", "docs/costs.md", "docs/interop/http.md", "docs/notes.md", "docs/operations/monitoring.md", "docs/polls.md",
        "docs/protocol/dialogue.md", "docs/tasks.md", "docs/timers.md",
    ),
}  # fmt: skip
"""Pages that run after another page on the same node, because each new network costs 0.2 s of CPU."""
SUPERVISED = {"docs/cli/agents.md"}
"""Pages whose node runs the agents. The test starts this node with ``roundelay up``."""
LIMITS = {"docs/operations/quotas.md": Limits(max_root_messages=5, max_uncaused_answers=5)}
STARTS_NODE = re.compile(r"^\$ (?:.*dev |.*roundelay )?up\b", re.MULTILINE)
FILES = {"id: ann\n": "ann.yaml", "rights:\n": "rights.yaml", "scenario: ": "refund.scenario.yaml"}
"""Files that pages show, by their first words. A page without the file gets the file of another page."""
CONSOLES = [it for it in BLOCKS if it.language in ("console", "sh")]


def list_pages() -> dict[str, list[Block]]:
    """Return the blocks that run, by the page on whose node they run."""
    first = {page: group for group, pages in GROUPS.items() for page in pages}
    found: dict[str, list[Block]] = {}
    for block in sorted(CONSOLES, key=lambda it: it.page in first):
        if block.reason is None:
            found.setdefault(first.get(block.page, block.page), []).append(block)
    return found


PAGES = list_pages()


def write_shown_files(folder: Path, page: str) -> None:
    for start, name in FILES.items():
        shown = [it for it in BLOCKS if it.language == "yaml" and it.text.startswith(start)]
        own = [it for it in shown if it.page == page] or [it for it in shown if name != "ann.yaml"]
        if own:
            (folder / name).write_text(own[0].text, encoding="utf-8")


def test_command_lines_stand_in_console_blocks_only() -> None:
    others = [it for it in BLOCKS if it.language not in ("console", "sh")]
    assert [str(it) for it in others if re.search(r"^\$ ", it.text, re.MULTILINE)] == []


def list_people(page: str, text: str) -> tuple[str, ...]:
    if page in LIMITS:
        return NOBODY_ELSE
    return ("mia", "bob") if "ann.yaml" in text else ("mia", "bob", "ann")


@pytest.mark.parametrize("page", sorted(PAGES))
async def test_console_blocks_print_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write_files(tmp_path)
    (tmp_path / "mytools.py").write_text(TOOLS, encoding="utf-8")
    write_shown_files(tmp_path, page)
    text = "\n".join(block.text for block in PAGES[page])
    async with AsyncExitStack() as stack:
        console = Console(tmp_path, OPENAI_API_KEY="unused")
        stack.push_async_callback(console.close)
        world = World(console, stack)
        if page in SUPERVISED:
            (tmp_path / "roundelay.yaml").write_text(NODE, encoding="utf-8")
            for line in ("roundelay up", "roundelay send desk 'Good morning' --as mia"):
                await console.follow(Step(page, line, [], []))
        elif page == "docs/interop.md":
            (tmp_path / "roundelay.yaml").write_text("interop: {serve: [http]}\n", encoding="utf-8")
        elif not STARTS_NODE.search(text):
            await world.start(LIMITS.get(page, Limits()), list_people(page, text))
        if page in SUPERVISED or world.node.url:
            console.environment["ROUNDELAY_AS"] = "mia"
        names = dict(console.names)
        last = page
        for block in PAGES[page]:
            if block.page != last and block.page != "docs/cluster/operate.md":
                console.names = dict(names)
            last = block.page
            console.folder = tmp_path  # each block is a new terminal
            for step in read_console(str(block), block.text):
                for pattern, make in NEEDS.items():
                    if re.search(pattern, step.line):
                        await make(world)
                await console.follow(step)
