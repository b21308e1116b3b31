"""``roundelay scenario``: run tests for teams of agents, in a simulation or against a live network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands.options import debug_option, json_option, run, silence_logs
from roundelay.commands.output import print_json, terminal_indent

if TYPE_CHECKING:
    from roundelay.testing.file import Scenario
    from roundelay.testing.run import ScenarioResult

FAILED = 1


@click.group()
def scenario() -> None:
    """Run and check scenarios, which are tests for teams of agents in YAML."""


@scenario.command("run")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Seed to use instead of the seed in the file.")
@click.option(
    "--seeds",
    type=click.IntRange(1, 100_000),
    metavar="N",
    help="Run each scenario with N seeds, starting with the seed in the file. The first failure is shown.",
)
@click.option("--live", metavar="URL", help="Run against this network in real time.")
@click.option(
    "--token",
    metavar="TOKEN",
    envvar="ROUNDELAY_TOKEN",
    help="An operator's token for --live, if the node is on another machine.",
)
@click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write JUnit XML to this file."
)
@click.option(
    "--ledger",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the run's ledger to this file as JSON lines.",
)
@click.option("--update-tapes", is_flag=True, help="Ask the agents' own models, and record their replies on new tapes.")
@click.option("--real-models", is_flag=True, help="Let agents ask real models, which costs money and varies.")
@json_option
@debug_option
def run_command(
    files: tuple[Path, ...],
    seed: int | None,
    seeds: int | None,
    live: str | None,
    token: str | None,
    junit: Path | None,
    ledger: Path | None,
    update_tapes: bool,
    real_models: bool,
    as_json: bool,
) -> None:
    """Run the scenarios in FILES. The exit code is 1 if a scenario fails."""
    from roundelay.display.text import sanitize_lines
    from roundelay.network.durable_files import replace_file
    from roundelay.testing.file import load_scenario
    from roundelay.testing.report import describe_result, to_json, to_junit
    from roundelay.testing.run import run_live_scenario, run_scenario

    if live is not None and (seed, seeds) != (None, None):
        raise click.UsageError("--live runs in real time, without a seed.")
    if live is not None and update_tapes:
        raise click.UsageError("--update-tapes cannot be combined with --live.")
    silence_logs()
    # Read all files before the first run, so that a mistake in the last file is reported at once.
    scenarios = [load_scenario(file) for file in files]
    results: list[ScenarioResult] = []
    for it in scenarios:
        if live is not None:
            runs = [run(run_live_scenario(it, live, token=token, allows_real_models=real_models))]
        else:
            runs = [
                run_scenario(it, seed=number, allows_real_models=real_models, updates_tapes=update_tapes)
                for number in _choose_seeds(it, seed, seeds)
            ]
        results += runs
        if not as_json:
            failed = [result for result in runs if not result.passed]
            click.echo("\n".join(sanitize_lines(describe_result((failed or runs)[0]))))
            if len(runs) > 1:
                click.echo(f"      {len(runs) - len(failed)} of {len(runs)} seeds passed{_list_seeds(failed)}")
    if as_json:
        print_json(to_json(results), terminal_indent())
    if junit is not None:
        with replace_file(junit) as report:
            report.write(to_junit(results))
    if ledger is not None:
        with replace_file(ledger) as log:
            log.writelines(result.ledger.decode() for result in results)
    if not all(result.passed for result in results):
        raise SystemExit(FAILED)


def _choose_seeds(it: Scenario, seed: int | None, seeds: int | None) -> range:
    first = it.head.seed if seed is None else seed
    return range(first, first + (seeds or 1))


def _list_seeds(failed: list[ScenarioResult]) -> str:
    if not failed:
        return ""
    shown = ", ".join(str(result.seed) for result in failed[:10])
    return f"; these failed: {shown}" + (" and more" if len(failed) > 10 else "")
