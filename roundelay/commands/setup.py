"""``roundelay demo``, ``init``, ``config`` and ``completion``: try Roundelay, and set it up."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundelay.commands import output
from roundelay.commands.node import pick_file
from roundelay.commands.options import debug_option, json_option
from roundelay.network.extras import name_command

if TYPE_CHECKING:
    from roundelay.nodes.starter import Provider


@click.command()
@click.argument("question", required=False)
@click.option(
    "--model",
    metavar="NAME",
    help="A real model instead of the script: an OpenAI-compatible one, or local for a small one on this machine.",
)
@click.option("--base-url", metavar="URL", help="Base URL of the model (default: the OpenAI API).")
@click.option("--serve", is_flag=True, help="Keep running afterwards, for `roundelay chat`.")
@click.option("--web", is_flag=True, help="Keep running afterwards, and print a link to the page.")
@click.option("--kill", metavar="AGENT", help="Kill this agent in the middle; it resumes its work.")
@debug_option
def demo(
    question: str | None, model: str | None, base_url: str | None, serve: bool, web: bool, kill: str | None
) -> None:
    """Watch three agents and a person answer one QUESTION on a node. The demo needs no API key and no network."""
    from roundelay.demo.play import run_demo

    click.get_current_context().exit(
        run_demo(question, model=model, base_url=base_url, serve=serve, web=web, kill=kill)
    )


@click.command(short_help="Write the files of a first node, agents and a test.")
@click.argument("folder", required=False, default=".", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--template",
    type=click.Choice(("hello", "support-desk", "research-team", "coding-agents", "game")),
    help="The team to start with (default: hello, one agent).",
)
@click.option(
    "--provider",
    type=click.Choice(("none", "openai", "anthropic", "gemini", "mistral", "ollama", "other")),
    help="Provider of the model; none: the agents follow rules (default).",
)
@click.option("--model", metavar="NAME", help="The model's name at the provider.")
@click.option("--base-url", metavar="URL", help="The server's address, with --provider other.")
@click.option("--agent", metavar="NAME", help="The name of the agent, with the template hello.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing, and use the defaults.")
@debug_option
def init(
    folder: Path,
    template: str | None,
    provider: str | None,
    model: str | None,
    base_url: str | None,
    agent: str | None,
    yes: bool,
) -> None:
    """Write a commented roundelay.yaml and agents into FOLDER; templates also write a test. Existing files are never
    overwritten.

    At a terminal the command asks for the model, the agent's name, and where you want to talk. Each answer can also be
    given as an option.
    """
    from roundelay.nodes import starter

    talks_on_page = True
    # Ask no questions if any option was given: the user has already decided, and a script must not hang at a question.
    is_asked = not yes and all(it is None for it in (template, provider, model, base_url, agent)) and _is_at_terminal()
    if is_asked:
        provider, model, base_url = _ask_provider()
        default = starter.name_agent(starter.HELLO, None if provider == "none" else starter.PROVIDERS["openai"])
        agent = click.prompt("Name of your first agent", default=default, value_proc=_check_agent)
        place = click.prompt(
            "Where will you talk to it? Both always work; this chooses the next step to show",
            type=click.Choice(("page", "terminal")),
            default="page",
        )
        talks_on_page = place == "page"
    template = template or starter.HELLO
    if agent is not None and template != starter.HELLO:
        raise click.UsageError(f"--agent is only for the template hello. The template {template} names its agents.")
    chosen = _choose_provider(provider or "none", model, base_url)
    try:
        written = starter.write_starter(folder, template, agent=agent, provider=chosen, command=name_command(folder))
    except FileExistsError as error:
        raise click.ClickException(
            f"{error.filename} exists already and nothing was written; choose another folder: "
            f"{name_command(Path.cwd())} init FOLDER"
        ) from error
    except starter.AgentIdError as error:
        raise click.UsageError(str(error)) from error
    for path in written:
        click.echo(f"Wrote {path}")
    first = agent or starter.name_agent(template, chosen)
    command = name_command(folder)
    steps = [f"cd {shlex.quote(str(folder))}"] if folder != Path() else []
    # Skip the step that sets the key if the key is already set.
    if chosen is not None and chosen.key and not os.environ.get(chosen.key):
        steps.append(f"export {chosen.key}=...   # your key at {chosen.title}, in the terminal of the next commands")
    if chosen is not None:
        steps.append(f"{command} doctor   # checks that the model answers")
    steps.append(f"{command} up   # prints a link: it opens the page in a browser and logs you in, once")
    if not talks_on_page or not is_asked:
        steps.append(f"{command} chat --to {first}   # in another terminal")
    tests = [path.name for path in written if path.name.endswith(".scenario.yaml")]
    steps += [f"{command} scenario run {name}   # a test of the team, without a model" for name in tests]
    click.echo("Next:")
    for step in steps:
        click.echo(f"  {step}")
    click.echo(f'Write to {first}, for example: "{starter.TEMPLATES[template].first_words}"')


def _is_at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _ask_provider() -> tuple[str, str | None, str | None]:
    """Ask for the provider. For an unlisted server, also ask for its address and model."""
    from roundelay.nodes.starter import PROVIDERS

    names = ["none", *PROVIDERS, "other"]
    titles = ["no model yet: the agent follows rules", *(it.title for it in PROVIDERS.values())]
    titles.append("another server with OpenAI's API")
    click.echo("Which model?")
    for number, title in enumerate(titles, 1):
        click.echo(f"  {number}  {title}")
    number = click.prompt("Number", type=click.IntRange(1, len(names)), default=1)
    name = names[number - 1]
    if name == "none":
        return name, None, None
    base_url = click.prompt("The server's address, such as http://127.0.0.1:8000/v1") if name == "other" else None
    default = PROVIDERS[name].model if name in PROVIDERS else None
    return name, click.prompt("Name of the model", default=default), base_url


def _check_agent(name: str) -> str:
    from roundelay.nodes.starter import AgentIdError, check_agent_id

    try:
        return check_agent_id(name)
    except AgentIdError as error:
        raise click.UsageError(str(error)) from error  # makes click ask again


def _choose_provider(name: str, model: str | None, base_url: str | None) -> Provider | None:
    """Return the provider to write into the files. Raises `click.UsageError` for options that contradict each other."""
    from roundelay.nodes.starter import PROVIDERS, Provider

    if base_url is not None and name != "other":
        raise click.UsageError("--base-url is only for --provider other.")
    # The name is written into YAML without quotes, where other characters could end the value.
    if model is not None and not re.fullmatch(r"[\w./:@+-]+", model):
        raise click.UsageError(f"{model!r} cannot be a model's name. It may contain letters, digits and . / : @ + - _")
    if name == "none":
        if model is not None:
            raise click.UsageError("--model needs a --provider.")
        return None
    if name != "other":
        return PROVIDERS[name]._replace(model=model or PROVIDERS[name].model)
    if base_url is None or model is None:
        raise click.UsageError("--provider other needs --base-url and --model.")
    if not re.fullmatch(r"https?://[^\s'\"{}#]+", base_url):
        raise click.UsageError(
            f"{base_url!r} is not a valid address. Write it as http://HOST:PORT/v1 or https://HOST/v1."
        )
    # A server on this machine rarely needs a key, and a reference to a missing variable would stop the agent from
    # starting.
    return Provider(base_url, model, base_url, "" if _is_loopback(base_url) else "OPENAI_API_KEY")


def _is_loopback(url: str) -> bool:
    from urllib.parse import urlsplit

    from roundelay.network.home import is_loopback

    return is_loopback(urlsplit(url).hostname or "")


@click.group()
def config() -> None:
    """Show the configuration of a node."""


@config.command(short_help="Show every value that a node started here would use.")
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--origin", is_flag=True, help="Show where each value comes from.")
@json_option
@debug_option
def show(file: Path | None, origin: bool, as_json: bool) -> None:
    """Show every value that a node started here with FILE would use. With --origin, also show where each value comes
    from.
    """
    from roundelay.display.text import sanitize
    from roundelay.network.config import flat_values, resolve_config

    found, origins = resolve_config(pick_file(file), os.environ, {})
    values = flat_values(found)
    rows = [(name, _show_value(value), origins[name]) for name, value in values.items()]
    rows.append(("agents", f"{len(found.agents)} declared", origins["agents"]))
    values["agents"] = [_name_agent(node.plain()) for node in found.agents]
    if origin:
        shown: dict[str, object] = {name: {"value": it, "origin": origins[name]} for name, it in values.items()}
        output.show(shown, output.draw_table(("NAME", "VALUE", "ORIGIN"), rows), as_json=as_json)
    else:
        output.show(values, lambda _: [f"{name}: {sanitize(value)}" for name, value, _ in rows], as_json=as_json)


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the script that completes commands in SHELL.

    To activate completion in bash, run: eval "$(roundelay completion bash)". In fish: roundelay completion fish |
    source
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None  # click's class for this shell
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "roundelay", "_ROUNDELAY_COMPLETE").source())


def _name_agent(agent: object) -> str:
    """Return the path of an agent's file, or the id of an agent that the node file itself declares."""
    return str(agent.get("id")) if isinstance(agent, dict) else str(agent)


def _show_value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
