"""Console blocks with ``<!-- runs on a node -->`` above them run on a node, and print what the page shows.

All blocks of a page share one node with the people mia (an operator, who types), ann and bob, the channels dev and
launch, the agent echo, messages up to number 24, and a backup. Numbers differ between runs: a number that the page shows as output is replaced in the page's later commands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from tests.examples.test_code_blocks import ROOT, find_commands, find_pages
from tests.support.command import invoke

MODS = ("channels", "discovery", "files", "messages", "notes", "polls", "tasks", "timers")
MARK = "<!-- runs on a node -->\n"
PAGES = [str(page.relative_to(ROOT)) for page in find_pages() if MARK in page.read_text(encoding="utf-8")]
VARIES = re.compile(r"[\w-]{43}|\d{4}-\d\d-\d\d[T ][\d:+]+|f-[0-9a-f]+-[0-9a-f]+|\d+")
NUMBER = re.compile(r"f-[0-9a-f]+-[0-9a-f]+|\b\d+\b")


def read_steps(page: str) -> list[tuple[str, list[str]]]:
    """Return each command line of the marked blocks, with the output below it."""
    source = (ROOT / page).read_text(encoding="utf-8")
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(rf"^{MARK}```console\n(.*?)^```$", source, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line.removeprefix("$ "), []))
            else:
                steps[-1][1].append(line)
    return steps


async def prepare(url: str, token: str, folder: Path) -> None:
    (folder / "plan.md").write_text("# Plan\n\n## Risks\nNone.\n", encoding="utf-8")
    for name in ("mia", "ann", "bob"):
        async with NetworkClient(name, url, kind="human", token=token) as client:
            for channel in ("dev", "launch"):
                await client.join_channel(channel)
    async with NetworkClient("mia", url, kind="human", token=token) as mia:
        await mia.broadcast("Good morning")
        async with NetworkClient("echo", url):
            await mia.send_text("echo", "What is new?")
        while (await mia.post("dev", "The invoice 4711 is here.")).seq < 24:
            pass
    (folder / "backups").mkdir()
    await invoke("backup", folder / "backups" / "monday.db", cwd=folder, ROUNDELAY_URL=url, ROUNDELAY_TOKEN=token)


def test_several_pages_run_on_a_node() -> None:
    assert len(PAGES) > 4
    assert all(read_steps(page) for page in PAGES)


@pytest.mark.parametrize("page", PAGES)
async def test_console_blocks_print_what_the_page_shows(page: str, tmp_path: Path) -> None:
    config = NodeConfig(port=0, db=tmp_path / "roundelay.db", durability="normal", mods=MODS)
    async with serve(config) as node:
        await prepare(node.url, node.owner_token, tmp_path)
        found: dict[str, str] = {}
        for line, shown in read_steps(page):
            typed = re.match(r"echo (.+?) \|", line)
            stdin = "".join(f"{word}\n" for word in shlex.split(typed[1])) if typed else ""
            [words] = find_commands(line)
            words = [NUMBER.sub(lambda it: found.get(it[0], it[0]), word) for word in words[1:]]
            done = await invoke(
                *words, stdin=stdin, cwd=tmp_path,
                ROUNDELAY_URL=node.url, ROUNDELAY_TOKEN=node.owner_token, ROUNDELAY_AS="mia",
            )  # fmt: skip
            if shown:
                assert [VARIES.sub("N", it) for it in done.lines] == [VARIES.sub("N", it) for it in shown]
                found.update(zip(NUMBER.findall("\n".join(shown)), NUMBER.findall(done.out), strict=True))
