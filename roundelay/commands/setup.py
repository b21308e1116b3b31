"""To begin with: the demo, the first files, what the configuration is, completion for the shell."""

from __future__ import annotations

import os
from pathlib import Path

import click

from roundelay.commands import output
from roundelay.commands.node import pick_file
from roundelay.commands.options import debug_option, json_option


@click.command()
@click.argument("question", required=False)
@click.option(
    "--model",
    metavar="NAME",
    help="A real model instead of the script: any OpenAI-compatible one; local: a small one on this machine.",
)
@click.option("--base-url", metavar="URL", help="Where the model is (default: the OpenAI API).")
@click.option("--serve", is_flag=True, help="Stay up afterwards, to go on with `roundelay chat`.")
@click.option("--web", is_flag=True, help="Stay up afterwards, and print a link to the page.")
@click.option("--kill", metavar="AGENT", help="Kill this agent in the middle; it goes on where it was.")
@debug_option
def demo(
    question: str | None, model: str | None, base_url: str | None, serve: bool, web: bool, kill: str | None
) -> None:
    """Watch a node, three agents and a person solve one QUESTION. Needs no key and no network."""
    from roundelay.demo.play import run_demo

    click.get_current_context().exit(
        run_demo(question, model=model, base_url=base_url, serve=serve, web=web, kill=kill)
    )


@click.command(short_help="Write a first roundelay.yaml and an example agent.")
@click.argument("folder", required=False, default=".", type=click.Path(path_type=Path, file_okay=False))
@debug_option
def init(folder: Path) -> None:
    """Write a commented roundelay.yaml and an example agent into FOLDER. Never overwrites."""
    from roundelay.nodes.starter import write_starter

    try:
        written = write_starter(folder)
    except FileExistsError as error:
        raise click.ClickException(
            f"{error.filename} is there already and nothing was written; choose another folder: roundelay init FOLDER"
        ) from error
    for path in written:
        click.echo(f"Wrote {path}")
    where = "" if folder == Path() else f"cd {folder} && "
    click.echo(f"Next: {where}roundelay up, which prints a link: it opens the page in a browser and logs you in, once.")
    click.echo("Or talk in another terminal: roundelay chat --to echo")


@click.group()
def config() -> None:
    """Look at the configuration."""


@config.command(short_help="Show every value that holds for a node here.")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--origin", is_flag=True, help="Say of each value where it comes from.")
@json_option
@debug_option
def show(file: Path | None, origin: bool, as_json: bool) -> None:
    """Show every value that holds for a node with FILE here, and with --origin why."""
    from roundelay.network.config import flat_values, resolve_config
    from roundelay.terminal.text import clean

    found, origins = resolve_config(pick_file(file), os.environ, {})
    values = flat_values(found)
    rows = [(name, _show_value(value), origins[name]) for name, value in values.items()]
    rows.append(("agents", f"{len(found.agents)} declared", origins["agents"]))
    values["agents"] = [_name_agent(node.plain()) for node in found.agents]
    if origin:
        shown: dict[str, object] = {name: {"value": it, "origin": origins[name]} for name, it in values.items()}
        output.show(shown, output.draw_table(("NAME", "VALUE", "ORIGIN"), rows), as_json=as_json)
    else:
        output.show(values, lambda _: [f"{name}: {clean(value)}" for name, value, _ in rows], as_json=as_json)


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion for SHELL.

    Put it into effect with: eval "$(roundelay completion bash)", in fish: roundelay completion fish | source
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # one of click's own
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "roundelay", "_ROUNDELAY_COMPLETE").source())


def _name_agent(agent: object) -> str:
    """An agent as the file declares it: the path of its own file, or the id of one that is described in place."""
    return str(agent.get("id")) if isinstance(agent, dict) else str(agent)


def _show_value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
