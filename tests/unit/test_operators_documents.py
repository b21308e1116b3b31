"""Tests that the pages about the command line and operations describe everything that exists, and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from roundelay.app import Network
from roundelay.cli import cli
from roundelay.network.cluster.shared_log import LogStatus
from roundelay.network.config import Limits, NodeConfig, flat_values, resolve_config
from roundelay.network.hub.metrics import list_log_metrics
from tests.support.pages import read_pages

ROOT = Path(__file__).parents[2]
CLI = read_pages("cli")
OPERATIONS = read_pages("operations")
OPTION = re.compile(r"--[a-z][a-z-]*")


def find_commands(command: click.Command = cli, path: str = "roundelay") -> Iterator[tuple[str, click.Command]]:
    """Yield every executable command with the words that call it."""
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name, inner in command.commands.items():
            yield from find_commands(inner, f"{path} {name}")
    elif not command.hidden or f"# {path}\n" in CLI:  # the program itself starts hidden commands; hosts run some
        yield path, command


COMMANDS = dict(find_commands())
SECTIONS: dict[str, str] = dict(re.findall(r"^##+ (roundelay .+)\n((?:(?!^##?).*\n)*)", CLI, re.MULTILINE))
[COMMON] = re.findall(r"^## Options of many commands\n((?:(?!^##?).*\n)*)", CLI, re.MULTILINE)


def find_section(path: str) -> str:
    """Return the command's own section, or the section of its group."""
    return path if path in SECTIONS else path.rpartition(" ")[0]


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    assert set(SECTIONS) == {find_section(path) for path in COMMANDS}


@pytest.mark.parametrize("path", COMMANDS)
def test_a_section_names_its_commands_arguments_and_options_and_has_an_example(path: str) -> None:
    section = find_section(path)
    text, command = SECTIONS[section], COMMANDS[path]
    assert re.search(rf"^\$ (?:.* )?{path}\b", text, re.MULTILINE), "an example"
    known: set[str] = set()
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            known |= {*parameter.opts, *parameter.secondary_opts}
            if not parameter.hidden:
                for name in (*parameter.opts, *parameter.secondary_opts):
                    assert f"`{name}" in text + COMMON, f"{path} {name}"
        else:
            assert (parameter.metavar or str(parameter.name)).upper() in text
    others = (it for other in COMMANDS if find_section(other) == section for it in COMMANDS[other].params)
    known |= {name for it in others for name in (*it.opts, *it.secondary_opts)}
    assert set(OPTION.findall(text)) - set(OPTION.findall(COMMON)) <= known, "nothing that is not there"


def test_options_of_many_commands_are_options() -> None:
    options = {name for command in (cli, *COMMANDS.values()) for it in command.params for name in it.opts}
    assert set(OPTION.findall(COMMON)) <= options


def read_table(page: str) -> dict[str, list[str]]:
    """Return the cells of a page's table by first column. A row with several names counts for each name."""
    text = (ROOT / f"docs/operations/{page}.md").read_text(encoding="utf-8")
    rows = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name: cells[1:] for cells in rows for name in re.findall(r"`([^`]+)`", cells[0])}


def test_limits_are_those_of_the_model_with_their_defaults() -> None:
    table = read_table("limits")
    defaults = {name: None if cells[0] == "none" else int(cells[0]) for name, cells in table.items()}
    assert defaults == Limits().model_dump()


def test_metrics_are_those_that_are_given_out() -> None:
    async def read() -> dict[str, float]:
        async with Network.open() as network:
            return network.hub.view.figures()

    of_a_log = [it.name for it in list_log_metrics(LogStatus(True, "", 0, 0.0, "lab", "full"))]
    assert [name for name in read_table("monitoring") if name.startswith("roundelay_")] == [
        f"roundelay_{name}" for name in [*asyncio.run(read()), *of_a_log]
    ]


def test_configuration_fields_are_those_of_the_model() -> None:
    fields = [name for name in flat_values(NodeConfig()) if not name.startswith("limits.")]
    assert sorted(read_table("configuration")) == sorted([*fields, "limits.*", "quotas", "rights", "agents"])


def test_yaml_blocks_are_a_nodes(tmp_path: Path) -> None:
    for text in re.findall(r"```yaml\n(.*?)```", OPERATIONS, re.DOTALL):
        (tmp_path / "roundelay.yaml").write_text(text, encoding="utf-8")
        assert resolve_config(tmp_path / "roundelay.yaml", {}, {})[0] != NodeConfig()
