"""Tests of agents in YAML: the allowed content, and the line that an error names."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.agents.models.model import ModelRequest, UserMessage
from roundelay.agents.models.openai_model import OpenAIModel
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.policy import GrowingWindow
from roundelay.agents.team import AgentSpec, build_runner, load_agents
from roundelay.network.config import load_yaml
from roundelay.network.errors import ConfigError

ANN = """
id: ann
description: Adds numbers
instruction: You add numbers.
tags: [maths]
model:
  openai: {name: small, base_url: 'http://127.0.0.1:1/v1', tool_mode: json_schema, stream: true, settings: {temperature: 0}}
tools: [team_tools:add]
channels: [dev, ops]
react_to: all
visibility: strict
on_text: nudge
limits: {max_turns: 6, tool_timeout_s: 2.5}
"""

BOB = """
id: bob
instruction: You greet.
model:
  rules:
    - do: [{say: 'hello {{ sender }}'}]
"""


@pytest.fixture(autouse=True)
def import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("team_tools", None)


def write(tmp_path: Path, text: str, name: str = "team.yaml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
    return path


def write_tools(tmp_path: Path) -> None:
    code = '''
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        def answer(request):
            return "42"

        def untyped(a):
            return a

        def finish() -> str:
            """Clash with everybody's tool."""
            return ""

        number = 3
    '''
    write(tmp_path, code, "team_tools.py")


def indent(agent: str) -> str:
    return "".join(f"    {line}\n" for line in agent.strip().splitlines()).replace("    id:", "  - id:", 1)


def test_an_agent_with_everything(tmp_path: Path) -> None:
    write_tools(tmp_path)
    [spec] = load_agents(write(tmp_path, ANN))
    runner = build_runner(spec, url="ws://127.0.0.1:1/")
    assert runner.describe_card() == {
        "description": "Adds numbers",
        "tags": ["maths"],
        "visibility": "strict",
        "tools": ["add"],
    }
    assert isinstance(runner.model, OpenAIModel)
    assert (runner.channels, runner.react_to, runner.instruction) == (("dev", "ops"), "all", "You add numbers.")
    assert (runner.policy.max_turns, runner.policy.tool_timeout_s, runner.policy.on_text) == (6, 2.5, "nudge")
    assert runner.policy.per_thread == GrowingWindow(10, 30)


def test_several_agents_in_a_file_inline_or_by_path(tmp_path: Path) -> None:
    write(tmp_path / "more", BOB, "bob.yaml")
    path = write(tmp_path, f"agents:\n{indent(ANN)}  - more/bob.yaml\n")
    assert [(spec.id, spec.path.name, spec.line) for spec in load_agents(path)] == [
        ("ann", "team.yaml", 2),
        ("bob", "bob.yaml", 1),
    ]


def test_the_agents_of_a_nodes_file(tmp_path: Path) -> None:
    write(tmp_path, BOB, "bob.yaml")
    root = load_yaml(write(tmp_path, f"port: 0\nagents:\n{indent(ANN)}  - bob.yaml\n"))
    assert isinstance(root.value, dict)
    listed = root.value["agents"].value
    assert isinstance(listed, list)
    assert [spec.id for spec in load_agents(listed)] == ["ann", "bob"]
    assert [spec.id for spec in load_agents(listed[1])] == ["bob"]


async def test_a_script_in_a_file_inline_or_as_a_function(tmp_path: Path) -> None:
    write_tools(tmp_path)
    write(tmp_path, "rules:\n  - do: [{say: from a file}]\n", "rules.yaml")
    request = ModelRequest([UserMessage("hi")])
    for model, expected in (
        ("{script: rules.yaml}", "from a file"),
        ("{script: 'team_tools:answer'}", "42"),
        ("{rules: [{do: [{say: inline}]}]}", "inline"),
    ):
        [spec] = load_agents(write(tmp_path, f"id: a\ninstruction: x\nmodel: {model}\n"))
        built = build_runner(spec).model
        assert isinstance(built, ScriptedModel)
        assert (await built.complete(request)).text == expected


def test_a_template_is_relative_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, "{{ incoming_message.text }}", "own.jinja")
    [spec] = load_agents(write(tmp_path, BOB + "template: own.jinja\n"))
    build_runner(spec)
    [spec] = load_agents(write(tmp_path, BOB + "template: none.jinja\n"))
    with pytest.raises(ConfigError, match=r"none\.jinja: the conversation template cannot be read"):
        build_runner(spec)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("id: Ann Lee\ninstruction: x\nmodel: {rules: []}\n", 1, '"id" must be lower case letters, digits,'),
        (BOB + "chanels: [dev]\n", 6, 'unknown key "chanels"; did you mean "channels"?'),
        (BOB + "limits:\n  max_turn: 3\n", 7, 'unknown key "max_turn"; did you mean "max_turns"?'),
        (BOB + "max_turns: 3\n", 6, 'unknown key "max_turns"; it belongs under "limits"'),
        (BOB + "memory: {max_chars: 2000}\n", 6, 'unknown key "memory"; it belongs under "middleware"'),
        (BOB + "limits: {max_turns: 0}\n", 6, "limits.max_turns"),
        (BOB + "limits: {max_turns: many}\n", 6, "a whole number"),
        (BOB + "react_to: everyone\n", 6, "react_to"),
        (BOB + "channels: [Dev]\n", 6, "channels"),
        (BOB.replace("id: bob", "id: Bob"), 1, "id"),
        (BOB.replace("id: bob\n", ""), 1, "id"),
        (BOB.replace("instruction: You greet.\n", ""), 1, "instruction"),
        ("id: a\ninstruction: x\nmodel: {}\n", 3, "exactly one of openai, script, rules, local"),
        ("id: a\ninstruction: x\nmodel:\n  openai: {name: x}\n  script: y.yaml\n", 3, "exactly one of"),
        ("id: a\ninstruction: x\nmodel:\n  openai:\n    name: x\n    base_ur: y\n", 6, 'did you mean "base_url"?'),
        ("id: a\ninstruction: x\nmodel:\n  openai: {name: x, api_key: secret}\n", 4, "api_key"),
        (
            "id: a\ninstruction: x\nmodel:\n  rules:\n    - when: {frm: mia}\n      do: [{say: x}]\n",
            5,
            'did you mean "from"?',
        ),
        (f"agents:\n{indent(BOB)}{indent(BOB)}", 7, 'the agent "bob" is already defined in'),
        (f"agents:\n{indent(BOB)}name: x\n", 7, 'unknown key "name" beside "agents"'),
        ("agents: bob.yaml\n", 1, "must be a list"),
        ("agents: []\n", 1, "must be a list"),
        ("agents:\n  - none.yaml\n", 2, "does not exist"),
        ("agents:\n  - team.yaml\n", None, "in a circle"),
        ("", 1, "must be a mapping"),
        ("- id: ann\n", 1, "must be a mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int | None, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_agents(path)
    assert words in str(refused.value)
    assert refused.value.path is not None
    assert (Path(refused.value.path).name, refused.value.line) == ("team.yaml", line)


@pytest.mark.parametrize(
    ("addition", "line", "words"),
    [
        ("tools:\n  - team_tools:add\n  - team_tools:subtract\n", 8, "'team_tools:subtract' cannot be loaded"),
        ("tools: [team_tools]\n", 6, "package.module:function"),
        ("tools: ['team_tools:number']\n", 6, "not a function"),
        ("tools: ['team_tools:untyped']\n", 6, "annotate it"),
        ("tools: ['team_tools:add', 'team_tools:add']\n", 6, "Two tools are named add"),
        ("tools: ['team_tools:finish']\n", 6, "Two tools are named finish"),
    ],
)
def test_a_wrong_tool_is_refused_with_its_line(tmp_path: Path, addition: str, line: int, words: str) -> None:
    write_tools(tmp_path)
    [spec] = load_agents(write(tmp_path, BOB + addition))
    with pytest.raises(ConfigError) as refused:
        build_runner(spec)
    assert words in str(refused.value)
    assert "bob" in str(refused.value)
    assert refused.value.line == line


def test_a_module_that_is_not_found_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "lacking_tools.py").write_text("import a_package_that_is_not_there\n")
    for name, is_told in ("nowhere_tools", True), ("lacking_tools", False):
        [spec] = load_agents(write(tmp_path, BOB + f"tools: ['{name}:add']\n"))
        with pytest.raises(ConfigError, match="No module named") as refused:
            build_runner(spec)
        assert ("it is looked for in " in str(refused.value)) == is_told
        assert (f"{tmp_path}, and among the installed packages" in str(refused.value)) == is_told


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("{openai: {name: gpt, api_key_env: TEAM_TEST_KEY}}", "TEAM_TEST_KEY"),
        ("{script: 'team_tools:none'}", "cannot be loaded"),
        ("{script: nonsense}", "package.module:function"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    write_tools(tmp_path)
    monkeypatch.delenv("TEAM_TEST_KEY", raising=False)
    [spec] = load_agents(write(tmp_path, f"id: a\ninstruction: x\nmodel: {model}\n"))
    with pytest.raises(ConfigError) as refused:
        build_runner(spec)
    assert words in str(refused.value)
    assert refused.value.line == 3


def test_reading_imports_no_tool(tmp_path: Path) -> None:
    write(tmp_path, "raise SystemExit", "team_tools.py")
    [spec] = load_agents(write(tmp_path, BOB + "tools: ['team_tools:add']\n"))
    assert isinstance(spec, AgentSpec)
    assert "team_tools" not in sys.modules


def test_a_model_may_have_others_to_fall_back_to(tmp_path: Path) -> None:
    text = """
id: bob
instruction: x
on_new_message: inject
limits: {max_same_calls: 2, max_depth: 1, approval_timeout_s: 60}
model:
  openai: {name: big, base_url: 'http://127.0.0.1:1/v1'}
  fallback:
    openai: {name: small, base_url: 'http://127.0.0.1:1/v1'}
    fallback: {rules: []}
"""
    [spec] = load_agents(write(tmp_path, text))
    runner = build_runner(spec)
    assert runner.model.name == "big or small or rules"
    policy = runner.policy
    assert (policy.on_new_message, policy.max_same_calls, policy.max_depth, policy.approval_timeout_s) == (
        "inject", 2, 1, 60,
    )  # fmt: skip


def test_a_fallback_alone_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be exactly one of"):
        load_agents(write(tmp_path, "id: bob\ninstruction: x\nmodel:\n  fallback: {rules: []}\n"))


@pytest.mark.parametrize(
    ("model", "url"),
    [
        ("{anthropic: {name: claude-sonnet-4-5}}", "https://api.anthropic.com/v1/"),
        ("{gemini: gemini-2.5-flash}", "https://generativelanguage.googleapis.com/v1beta/openai/"),
        ("{ollama: {model: qwen3}}", "http://127.0.0.1:11434/v1"),
        ("{provider: mistral, name: mistral-small}", "URL"),
        ("{azure_openai: {}}", "https://RESOURCE.openai.azure.com/openai/v1/"),
        ("gpt-4o-mini", "URL"),
        ("claude-sonnet-4-5", "https://api.anthropic.com/v1/"),
        ("{groq: {name: x}, fallback: {rules: []}}", "URL"),
        ("{rules: [], fallback: {cohere: {name: x}}}", "URL"),
    ],
)
def test_a_providers_name_is_answered_with_where_its_server_goes(tmp_path: Path, model: str, url: str) -> None:
    (tmp_path / "desk.yaml").write_text(f"id: desk\ninstruction: x\nmodel: {model}\n")
    with pytest.raises(ConfigError, match="Any server with OpenAI's API goes under openai: ") as caught:
        load_agents(tmp_path / "desk.yaml")
    assert f"{{name: MODEL, base_url: {url}, api_key_env: VARIABLE}}" in str(caught.value)
    assert "desk.yaml:3" in str(caught.value)


def test_a_mistyped_key_of_a_model_still_gets_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "desk.yaml").write_text("id: desk\ninstruction: x\nmodel: {opanai: {name: m}}\n")
    with pytest.raises(ConfigError, match='unknown key "opanai"; did you mean "openai"'):
        load_agents(tmp_path / "desk.yaml")


def test_a_file_changes_the_rules_of_a_models_server(tmp_path: Path) -> None:
    agent = "{id: x, instruction: x, model: {openai: {name: m, base_url: 'http://127.0.0.1:1/v1', rules: %s}}}"
    spec = load_agents(write(tmp_path, agent % "{provider: mistral, stream_usage: true}"))[0]
    model = build_runner(spec).model
    assert isinstance(model, OpenAIModel)
    assert (model.rules.call_ids, model.rules.notes, model.rules.stream_usage) == ("nine", "in_results", True)
    for rules, told in (
        ("{note: as_user}", "note"),
        ("{provider: mistrall}", "provider"),
        ("{call_ids: 9}", "call_ids"),
    ):
        with pytest.raises(ConfigError, match=rf"team\.yaml:1: .*{told}"):
            load_agents(write(tmp_path, agent % rules))
