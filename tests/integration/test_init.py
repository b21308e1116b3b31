"""Tests of `roundelay init`: its files work at once, with rules and with a model, and it asks three questions on a
terminal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from roundelay.agents.team import build_runner, load_agents
from roundelay.commands import setup
from roundelay.nodes.starter import HELLO, PROVIDERS, STARTERS, TEMPLATES, make_files, write_starter
from tests.support.forks import run_roundelay

TEAMS = sorted(set(TEMPLATES) - {HELLO})


def init(folder: Path, *options: str, answers: str = "") -> Result:
    return CliRunner().invoke(setup.init, [str(folder), *options], input=answers)


def read_tree(folder: Path) -> dict[str, str]:
    return {it.relative_to(folder).as_posix(): it.read_text() for it in folder.rglob("*") if it.is_file()}


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_is_at_terminal", lambda: True)


def test_every_template_is_offered() -> None:
    assert sorted(it.name for it in STARTERS.iterdir() if it.is_dir()) == sorted(TEMPLATES)
    [option] = [it for it in setup.init.params if it.name == "template"]
    assert set(option.type.choices) == set(TEMPLATES)  # type: ignore[attr-defined]
    [option] = [it for it in setup.init.params if it.name == "provider"]
    assert set(option.type.choices) == {"none", "other", *PROVIDERS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("provider", [None, *PROVIDERS])
def test_the_scenarios_of_all_templates_hold(tmp_path: Path, provider: str | None) -> None:
    """With a provider, the test needs no key, and calls no model."""
    if provider not in (None, "ollama"):
        # The files differ only in the model. The test reads these files, but does not run them.
        for template in TEAMS:
            for name, text in make_files(template, "ann", PROVIDERS[provider]).items():
                assert "MODEL\n" not in text
                assert "SCRIPTED\n" not in text
                if name.startswith("agents/") and name.endswith(".yaml"):
                    assert f"name: {PROVIDERS[provider].model}\n" in text
                    assert "rules:" not in text
        return
    for template in TEAMS:
        write_starter(tmp_path / template, template, provider=PROVIDERS[provider] if provider else None)
    scenarios = sorted(map(str, tmp_path.rglob("*.scenario.yaml")))
    assert len(scenarios) == len(TEAMS)
    for scenario in scenarios:
        done = run_roundelay("scenario", "run", scenario, cwd=Path(scenario).parent)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@pytest.mark.parametrize("provider", ["none", "mistral"])
def test_the_agents_of_a_template_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, provider: str
) -> None:
    written = init(tmp_path, "--template", template, "--provider", provider)
    assert written.exit_code == 0, written.output
    monkeypatch.setenv("MISTRAL_API_KEY", "x" * 32)
    monkeypatch.syspath_prepend(tmp_path / "agents")
    for module in (tmp_path / "agents").glob("*.py"):  # an earlier test may have imported another module of this name
        monkeypatch.delitem(sys.modules, module.stem, raising=False)
    declared = yaml.safe_load((tmp_path / "roundelay.yaml").read_text())["agents"]
    for name in declared:
        [agent] = load_agents(tmp_path / name)
        assert f"{agent.id}.yaml" == Path(name).name
        build_runner(agent)
    if provider == "mistral":
        assert "export MISTRAL_API_KEY=" in written.output
        assert "roundelay doctor" in written.output


def test_nothing_is_written_over_and_nothing_is_half_written(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "shop.py").write_text("mine")
    refused = init(tmp_path, "--template", "support-desk")
    assert refused.exit_code == 1
    assert "shop.py exists already and nothing was written" in refused.output
    assert read_tree(tmp_path) == {"agents/shop.py": "mine"}


def test_a_link_that_leads_nowhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").symlink_to(tmp_path / "elsewhere")
    assert init(tmp_path).exit_code == 1
    assert not (tmp_path / "elsewhere").exists()


def test_three_questions_lead_to_an_agent_with_a_model(tmp_path: Path, at_terminal: None) -> None:
    number = [*PROVIDERS].index("ollama") + 2
    asked = init(tmp_path, answers=f"{number}\nllama3.2\nmax\nterminal\n")
    assert asked.exit_code == 0, asked.output
    agent = read_tree(tmp_path)["agents/max.yaml"]
    assert "id: max\n" in agent
    assert "    name: llama3.2\n    base_url: http://127.0.0.1:11434/v1\n" in agent
    assert "roundelay chat --to max" in asked.output


def test_enter_takes_the_defaults(tmp_path: Path, at_terminal: None) -> None:
    asked = init(tmp_path, answers="\n\n\n")
    assert asked.exit_code == 0, asked.output
    assert set(read_tree(tmp_path)) == {"roundelay.yaml", "agents/echo.yaml"}
    assert "opens the page" in asked.output


def test_a_name_that_cannot_be_is_asked_for_again(tmp_path: Path, at_terminal: None) -> None:
    asked = init(tmp_path, answers="\nMax Power\nno\neverybody\nmax\n\n")
    assert asked.exit_code == 0, asked.output
    assert "'Max Power' cannot be an agent's name" in asked.output
    assert "'no' cannot be an agent's name: it means something else in YAML" in asked.output
    assert "'everybody' cannot be an agent's name" in asked.output
    assert "agents/max.yaml" in read_tree(tmp_path)


def test_another_server_is_asked_for_its_address(tmp_path: Path, at_terminal: None) -> None:
    number = len(PROVIDERS) + 2
    asked = init(tmp_path, answers=f"{number}\nhttps://models.example/v1\nbig\n\n\n")
    assert asked.exit_code == 0, asked.output
    agent = read_tree(tmp_path)["agents/ann.yaml"]
    assert "    name: big\n    base_url: https://models.example/v1\n    api_key_env: OPENAI_API_KEY\n" in agent


def test_an_option_or_yes_asks_nothing(tmp_path: Path, at_terminal: None) -> None:
    assert init(tmp_path / "a", "--yes").exit_code == 0
    assert init(tmp_path / "b", "--agent", "max").exit_code == 0
    assert "agents/max.yaml" in read_tree(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--template", "game", "--agent", "max"), "--agent is only for the template hello"),
        (("--model", "big"), "--model needs a --provider"),
        (("--provider", "openai", "--base-url", "http://x/v1"), "--base-url is only for --provider other"),
        (("--provider", "other", "--model", "big"), "needs --base-url and --model"),
        (("--provider", "other", "--model", "big", "--base-url", "ftp://x"), "is not a valid address"),
        (("--provider", "other", "--model", "big", "--base-url", "http://x/v1 #y"), "is not a valid address"),
        (("--provider", "openai", "--model", "big: {name"), "cannot be a model's name"),
        (("--agent", "a: b"), "cannot be an agent's name"),
        (("--agent", "../x"), "cannot be an agent's name"),
    ],
)
def test_options_that_cannot_be_write_nothing(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    refused = init(tmp_path, *options)
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())
    assert read_tree(tmp_path) == {}


def test_next_steps_begin_with_dev_in_a_clone_that_dev_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "  roundelay up " in init(tmp_path / "a").output
    monkeypatch.setenv("ROUNDELAY_DEV", "1")
    dev = os.path.relpath(Path(__file__).parents[2] / "dev", tmp_path / "b")
    assert f"  {dev} roundelay up " in init(tmp_path / "b").output


@pytest.mark.parametrize("template", [name for name, it in TEMPLATES.items() if it.agent])
def test_the_agent_that_people_write_to_is_the_first_of_its_node(tmp_path: Path, template: str) -> None:
    """`roundelay up` suggests the first agent for a conversation."""
    assert init(tmp_path, "--template", template).exit_code == 0
    declared = yaml.safe_load((tmp_path / "roundelay.yaml").read_text())["agents"]
    assert declared[0] == f"agents/{TEMPLATES[template].agent}.yaml"
