"""Tests that Python code and an agent file get the same error for invalid middleware options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.features.attachments import Attachments
from roundelay.agents.features.budget import Budget, TokenLimits
from roundelay.agents.features.context_engine import ContextEngine
from roundelay.agents.features.few_shot import Example, ExampleCall, FewShot
from roundelay.agents.features.forced_tools import ForcedTools
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.long_results import LongResults
from roundelay.agents.features.many_results import ManyResults
from roundelay.agents.features.mcp_servers import McpServers
from roundelay.agents.features.prompt_budget import PromptBudget
from roundelay.agents.features.references import References
from roundelay.agents.models.tokens import Price, Prices
from roundelay.agents.team import build_runner, load_agents
from roundelay.network.errors import ConfigError

MADE: dict[str, Any] = {
    "attachments": Attachments,
    "budget": Budget,
    "context": ContextEngine,
    "few_shot": FewShot,
    "forced_tools": lambda tools: ForcedTools(*tools),
    "fragments": Fragments,
    "long_results": LongResults,
    "many_results": ManyResults,
    "mcp": McpServers,
    "prompt_budget": PromptBudget,
    "references": References,
}
SAID = {"user": "hi", "answer": "hello"}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("budget", {"tokens": {"dya": 1000}}, 'unknown key "dya"; did you mean "day"?'),
    ("budget", {"tokens": {"month": 1000}}, 'unknown key "month"; known here: day, reaction, root, turn'),
    ("budget", {"tokens": 5000}, '"tokens" must be a mapping (`key: value` lines), not 5000'),
    ("budget", {"tokens": [5000]}, '"tokens" must be a mapping (`key: value` lines), not [5000]'),
    ("budget", {"tokens": {"day": "5000"}}, '"tokens.day" must be a whole number, not "5000"'),
    ("budget", {"tokens": {"day": True}}, '"tokens.day" must be a whole number, not true'),
    ("budget", {"tokens": {"day": 2.5}}, '"tokens.day" must be a whole number, not 2.5'),
    ("budget", {"tokens": {"day": 0}}, '"tokens.day" must be greater than or equal to 1, not 0'),
    ("budget", {"tokens": {}}, "tokens limits nothing: set at least one of turn, reaction, root, day"),
    ("budget", {"usd": {"day": None}}, "usd limits nothing: set at least one of turn, reaction, root, day"),
    ("budget", {"usd": {"day": -1}}, '"usd.day" must be greater than 0, not -1'),
    ("budget", {}, "must set tokens or usd"),
    ("budget", {"tokens": {"turn": 500}}, "reserve (1000) must be less than the 500 tokens for a turn: lower it"),
    ("budget", {"tokens": {"day": 9000}, "reserve": -1}, '"reserve" must be greater than or equal to 0, not -1'),
    ("budget", {"usd": {"day": 1}, "prices": {"m": {"input": 1}}}, '"prices.m.output" is missing'),
    ("budget", {"usd": {"day": 1}, "prices": {"m": 3}}, '"prices.m" must be a mapping (`key: value` lines), not 3'),
    ("context", {"max_tokens": "9000"}, '"max_tokens" must be a whole number, not "9000"'),
    ("context", {"max_tokens": 199}, '"max_tokens" must be greater than or equal to 200, not 199'),
    ("context", {"max_tokens": 900, "reserve_tokens": 900}, "reserve_tokens must be less than max_tokens (900)"),
    ("context", {"max_tokens": 900, "layouts": []}, '"layouts" must have at least 1 item'),
    ("context", {"max_tokens": 900, "layouts": "full"}, '"layouts" must be a list (`- item` lines), not "full"'),
    (
        "context",
        {"max_tokens": 900, "summary_tokens": 900},
        "summary_tokens must be less than the maximum of a request (450)",
    ),
    ("prompt_budget", {"max_tokens": 50}, '"max_tokens" must be greater than or equal to 100, not 50'),
    ("prompt_budget", {"max_tokens": 500, "per_thread": 600}, "per_thread must be at most max_tokens (500)"),
    (
        "prompt_budget",
        {"max_tokens": 500, "per_message": 501},
        "per_message must be at most the tokens of a thread (500)",
    ),
    ("long_results", {"max_chars": 99}, '"max_chars" must be greater than or equal to 100, not 99'),
    ("long_results", {"max_chars": 900, "max_kept_chars": 800}, "max_kept_chars must be at least max_chars (900)"),
    ("long_results", {"max_total_chars": 1000}, "max_total_chars must be at least max_kept_chars (1000000)"),
    ("many_results", {"more_than": -1}, '"more_than" must be greater than or equal to 0, not -1'),
    ("many_results", {"more_than": None}, '"more_than" must be a whole number, not null'),
    ("fragments", {"limit": 0}, '"limit" must be greater than or equal to 1, not 0'),
    ("fragments", {"max_chars": "8000"}, '"max_chars" must be a whole number, not "8000"'),
    ("references", {"max_chars": 10}, '"max_chars" must be greater than or equal to 100, not 10'),
    ("references", {"in_text": "no"}, '"in_text" must be true or false, not "no"'),
    ("few_shot", {"examples": [SAID], "models": "gpt-*"}, '"models" must be a list (`- item` lines), not "gpt-*"'),
    ("few_shot", {"examples": []}, '"examples" must have at least 1 item'),
    ("few_shot", {"examples": [{**SAID, "calls": [{"tool": "look up"}]}]}, '"examples.1.calls.1.tool"'),
    ("forced_tools", {"tools": []}, "forces nothing: name tools"),
    ("forced_tools", {"tools": ["add", 3]}, '"tools.2" must be text, not 3; put it in quotes'),
    ("attachments", {"takes": "image"}, '"takes" must be a list (`- item` lines), not "image"'),
    ("attachments", {"takes": ["video"]}, '"takes.1"'),
    ("attachments", {"takes": ["image"], "most": 65}, '"most" must be less than or equal to 64, not 65'),
    ("attachments", {"takes": ["image"], "max_bytes": 0}, '"max_bytes" must be greater than or equal to 1, not 0'),
    ("mcp", {"servers": {}}, '"servers" must have at least 1 item'),
    ("mcp", {"servers": {"shop": {"comand": "x"}}}, 'unknown key "comand"; did you mean "command"?'),
    ("mcp", {"servers": {"shop": {}}}, "a server has either a command or a url"),
]


def refuse_in_file(name: str, options: dict[str, Any], folder: Path) -> str:
    """Return the error for the file, without the position in the file."""
    file = folder / "bob.yaml"
    listed = json.dumps([{name: options}])
    file.write_text(f"id: bob\ninstruction: Help.\nmodel: {{rules: []}}\nmiddleware: {listed}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_agents(file)
    said = caught.value.message.partition(" (1 more, on line")[0]
    return said.replace(f'"middleware.1.{name}.', '"').replace(f'"middleware.1.{name}" ', "")


@pytest.mark.parametrize(("name", "options", "told"), WRONG, ids=lambda it: it if isinstance(it, str) else None)
def test_wrong_options_are_refused_in_python_as_in_a_file(
    tmp_path: Path, name: str, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        MADE[name](**options)
    whose, _, said = str(caught.value).partition(": ")
    assert whose == (MADE[name].__name__ if isinstance(MADE[name], type) else "ForcedTools")
    assert told in said
    assert said.partition(" (1 more")[0] == refuse_in_file(name, options, tmp_path)


def test_a_budget_of_a_dict_is_a_budget() -> None:
    """Earlier versions treated a dict as no limit."""
    made = [
        Budget(tokens={"day": 5000}, prices=Prices({"m": Price(input=1, output=2)})),
        Budget(tokens=TokenLimits(day=5000), prices=Prices({"m": {"input": 1, "output": 2}})),  # type: ignore[dict-item]
    ]
    assert made[0].describe() == made[1].describe()


def test_a_file_and_a_program_may_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "bob.yaml"
    for name, options in {
        "budget": {"tokens": {"day": 5000}, "usd": {"day": 0.5}, "prices": {"m": {"input": 1, "output": 2}}},
        "context": {"max_tokens": 900},
        "long_results": {"max_chars": 100, "max_kept_chars": 400, "max_total_chars": 1000},
        "many_results": {"more_than": 0},
        "few_shot": {"examples": [SAID]},
        "forced_tools": {"tools": ["add"]},
        "attachments": {"takes": ["image", "text/csv"]},
        "mcp": {"servers": {"shop": {"command": "true"}}},
    }.items():
        file.write_text(
            f"id: bob\ninstruction: Help.\nmodel: {{rules: []}}\nmiddleware: {json.dumps([{name: options}])}\n",
            encoding="utf-8",
        )
        [spec] = load_agents(file)
        build_runner(spec)
        if name != "few_shot":
            MADE[name](**options)
    FewShot([Example("hi", "hello", [ExampleCall("add", {"a": 1})])])
