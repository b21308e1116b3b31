"""Write the first files of a new user for `roundelay init`: a node, a team from a template, and a test of the team.

The templates are the folders in `starters/`. Their agents follow rules, so they work without a model. If the user
chooses a provider, a model replaces the rules, and the rules move into the scenario, so that the test needs no API key.
Either all files are written or none. No file is overwritten.
"""

from __future__ import annotations

import errno
import os
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

from roundelay.network.core.reserved_ids import describe_reserved

STARTERS = Path(__file__).with_name("starters")

HELLO = "hello"
"""Name of the template with a single agent, whose name the user chooses."""

RULES_NOTE = """\
# Without a model: the first rule that fits gives the answer. Texts are templates over the message.
# With a model: replace `rules` by `openai: {name: gpt-4o-mini}`, or run `roundelay init` with --provider in a new folder.
"""

MODEL_NOTE = """\
# The model, on any server with OpenAI's API. `roundelay doctor` checks that it answers and calls tools.
"""


class Template(NamedTuple):
    """Summary of a template, the agent that people write to, and an example of a first message."""

    summary: str
    agent: str
    first_words: str


TEMPLATES = {
    HELLO: Template("one agent", "", "Hello!"),
    "support-desk": Template(
        "a desk that asks a clerk and refunds with your approval", "desk", "Please refund order 12"
    ),
    "research-team": Template("a lead, a finder with a folder of notes, and a critic", "lead", "What about Yixing?"),
    "coding-agents": Template("a planner, a coder and a reviewer on one folder", "planner", "greeting.txt: Hello"),
    "game": Template("a host and a guesser of numbers", "host", "play"),
}


class Provider(NamedTuple):
    """Model server with an OpenAI-compatible API. ``base_url`` is empty for OpenAI. ``key`` is the variable of the API
    key, or empty for a server without a key."""

    title: str
    model: str
    base_url: str = ""
    key: str = ""

    def describe(self) -> str:
        """Return the `model` section of an agent's file."""
        lines = ["model:", "  openai:", f"    name: {self.model}"]
        lines += [f"    base_url: {self.base_url}"] if self.base_url else []
        lines += [f"    api_key_env: {self.key}"] if self.key else []
        return "\n".join(lines) + "\n"


PROVIDERS = {
    "openai": Provider("OpenAI", "gpt-4o-mini", key="OPENAI_API_KEY"),
    "anthropic": Provider("Anthropic", "claude-haiku-4-5", "https://api.anthropic.com/v1/", "ANTHROPIC_API_KEY"),
    "gemini": Provider(
        "Google Gemini",
        "gemini-2.5-flash",
        "https://generativelanguage.googleapis.com/v1beta/openai/",
        "GEMINI_API_KEY",
    ),
    "mistral": Provider("Mistral", "mistral-small-latest", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "ollama": Provider("Ollama on this machine", "qwen3:8b", "http://127.0.0.1:11434/v1"),
}


YAML_WORDS = frozenset({"false", "n", "no", "null", "off", "on", "true", "y", "yes"})
"""Ids that YAML would read as values of another type."""


class AgentIdError(ValueError):
    """Raised for an agent's name that is not a valid id, or that could be mistaken for another participant."""


def write_starter(
    folder: Path,
    template: str = HELLO,
    *,
    agent: str | None = None,
    provider: Provider | None = None,
    command: str = "roundelay",
) -> list[Path]:
    """Write the files of a template and return their paths, with the node's file first.

    ``agent`` names the agent of the template `hello`. The agents of all other templates have fixed names. ``command`` is the name of
    this program in comments. Raises `FileExistsError` before anything is written if one of the files exists. Also
    raises `AgentIdError` and `OSError`.
    """
    files = make_files(template, agent or name_agent(template, provider), provider)
    for name, text in files.items():
        files[name] = _COMMAND.sub(command, text)
        # A broken symbolic link counts as an existing file, because writing through it would create a file elsewhere.
        if os.path.lexists(folder / name):
            raise FileExistsError(errno.EEXIST, "File exists", str(folder / name))
    for name in files:  # create all folders first, so that no file is written if a folder cannot be created
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for name, text in files.items():
            with (folder / name).open(
                "x", encoding="utf-8"
            ) as file:  # create exclusively, because another process may create the same file
                written.append(folder / name)
                file.write(text)
    # Clean up even after Ctrl-C: half a team could not start, and the next `roundelay init` would refuse to overwrite
    # its files.
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


_COMMAND = re.compile(r"(?<![\w./])roundelay(?= (?:up|chat|init|doctor|config|scenario)\b)")
"""Matches commands in the comments of a template."""


def name_agent(template: str, provider: Provider | None) -> str:
    """Return the default name of the agent that people write to."""
    return TEMPLATES[template].agent or ("echo" if provider is None else "ann")


def check_agent_id(name: str) -> str:
    """Return the agent's name if it is valid for a hub and YAML needs no quotes for it. Raises `AgentIdError`."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name):
        raise AgentIdError(
            f"{name!r} cannot be an agent's name. Use up to 63 lowercase letters, digits, '_' or '-', and begin with a "
            "letter."
        )
    # A new node loads these two mods, so their ids are reserved.
    reason = describe_reserved(name, ["channels", "discovery"])
    if name in YAML_WORDS:
        reason = "means something else in YAML"
    if reason is not None:
        raise AgentIdError(f"{name!r} cannot be an agent's name: it {reason}. Choose another name.")
    return name


def make_files(template: str, agent: str, provider: Provider | None) -> dict[str, str]:
    """Return the text of each file of a template by its relative path, with the node's file first.

    Reads the templates and writes nothing. Raises `AgentIdError`.
    """
    check_agent_id(agent)
    folder = STARTERS / template
    files: dict[str, str] = {}
    agents: list[str] = []
    rules: dict[str, str] = {}
    for path in sorted(entry for entry in folder.rglob("*") if entry.is_file() and entry.suffix != ".pyc"):
        name, text = path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        name = name.replace("AGENT", agent)
        if path.suffix == ".yaml" and not path.name.endswith(".scenario.yaml"):
            text = text.replace("AGENT", agent)
            text = text.replace("DESCRIPTION", "Says back what you wrote" if provider is None else "Answers questions")
            text, rules[path.stem.replace("AGENT", agent)] = _choose_model(text, provider)
            agents.append(name)
        files[f"agents/{name}" if path.suffix != ".md" or "/" in name else name] = text
    # commands suggest the first agent of a node, so list this agent first
    first = f"{TEMPLATES[template].agent or agent}.yaml"
    node = (STARTERS / "roundelay.yaml").read_text(encoding="utf-8")
    node = node.replace(
        "AGENTS\n", "".join(f"  - agents/{name}\n" for name in sorted(agents, key=lambda name: name != first))
    )
    scripted = "agents: # their models are not asked\n" + "".join(
        f"  {name}:\n{textwrap.indent(text, '    ')}" for name, text in rules.items()
    )
    return {"roundelay.yaml": node} | {
        _place(name): text.replace("SCRIPTED\n", scripted if provider is not None else "")
        for name, text in files.items()
    }


def _place(name: str) -> str:
    """Return the path at which a template's file is written. Scenarios go next to the node's file, where `roundelay
    scenario run` and pytest look for them.
    """
    return name.removeprefix("agents/") if name.endswith(".scenario.yaml") else name


def _choose_model(text: str, provider: Provider | None) -> tuple[str, str]:
    """Return an agent's file with the chosen model inserted, and the agent's rules separately."""
    before, rest = text.split("MODEL\n")
    match = re.match(r"model:\n(?:  .*\n|\n(?=  ))*", rest)
    # A failure here means that the template in the package is wrong, not the user's input.
    assert match is not None, "a template's rules follow MODEL"
    rules, after = match[0], rest[match.end() :]
    model = RULES_NOTE + rules if provider is None else MODEL_NOTE + provider.describe()
    return before + model + after, rules
