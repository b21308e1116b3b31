"""Tests that Python and YAML refuse an invalid configuration at once, with its field, its value and the allowed
values.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents import Agent, AgentPolicy, Middleware
from roundelay.agents.agent_tools import remote_agent_tool, remote_handoff
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.policy import AgentLimits, MessageFilter
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.values import ToolError
from roundelay.network.errors import ConfigError

MODEL = ScriptedModel(lambda request: "hello")
TIMES = [name for name in AgentLimits.model_fields if name.endswith("_s")]
COUNTS = [name for name in AgentLimits.model_fields if name not in (*TIMES, "uncounted_tools")]
HEAD = "id: bob\ninstruction: Help.\nmodel: {rules: []}\n"


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 2.5, "3", math.nan, None, [3], -1, 10**7])
def test_a_count_is_a_whole_number_within_its_bounds(tmp_path: Path, name: str, value: Any) -> None:
    if name == "max_tool_calls" and value is None:
        assert AgentPolicy(max_tool_calls=None).max_tool_calls is None
        return
    check_refused(tmp_path, name, value)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [True, "30", None, timedelta(seconds=30), math.nan, 0, -1.0, -math.inf])
def test_a_time_is_a_number_of_seconds(tmp_path: Path, name: str, value: Any) -> None:
    check_refused(tmp_path, name, value)


def check_refused(folder: Path, name: str, value: Any) -> None:
    """Check that Python code and a file get the same error. In a file, None means the default, and a value that is
    not JSON cannot be written.
    """
    with pytest.raises(ValueError, match=rf'^AgentPolicy: ("{name}" must be|{name} is None and must be)') as caught:
        AgentPolicy(**{name: value})
    if value is None or isinstance(value, timedelta) or (isinstance(value, float) and not math.isfinite(value)):
        return
    file = folder / "bob.yaml"
    file.write_text(f"{HEAD}limits: {{{name}: {json.dumps(value)}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_agents(file)
    assert refused.value.message == str(caught.value).removeprefix("AgentPolicy: ").replace('"', '"limits.', 1)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("value", [1, 0.001, 1e308, math.inf])
def test_a_time_may_be_as_long_as_one_likes(name: str, value: Any) -> None:
    assert getattr(AgentPolicy(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"choose_model": MODEL}, "choose_model is .* and must be a function"),
        ({"initial_state": {}}, "initial_state is {} and must be a function"),
        ({"describe_turn": None}, "describe_turn is None and must be a function"),
        ({"describe_turn": "Turn {turn}"}, "describe_turn is .* and must be a function"),
        ({"uncounted_tools": "remember"}, r'"uncounted_tools" must be a list \(`- item` lines\), not "remember"'),
        ({"uncounted_tools": ["note", 3]}, '"uncounted_tools.2" must be text, not 3'),
        ({"on_text": None}, "\"on_text\" must be 'auto', 'reply', 'nudge' or 'record', not null"),
        ({"max_turns": "9" * 1000}, r'"max_turns" must be a whole number, not "9{56}\.\.\.'),
    ],
)
def test_what_is_of_another_kind_is_refused_and_shown_shortly(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=f"^AgentPolicy: {told}"):
        AgentPolicy(**wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"tools": len}, "tools is of the type builtin_function_or_method and must be a list."),
        ({"tools": "mytools:add"}, "tools is of the type str and must be a list."),
        ({"middleware": [Middleware]}, "middleware.0 is the class Middleware and must be a Middleware."),
        ({"middleware": [Middleware(), "budget"]}, "middleware.1 is of the type str and must be a Middleware."),
        ({"middleware": Middleware()}, "middleware is of the type Middleware and must be a list."),
        ({"model": "gpt-4o-mini"}, "its model is of the type str and must be a Model, such as OpenAIModel(...)."),
        ({"model": None}, "its model is of the type NoneType and must be a Model, such as OpenAIModel(...)."),
        (
            {"model": ScriptedModel},
            "its model is the class ScriptedModel and must be a Model, such as OpenAIModel(...).",
        ),
        ({"instruction": None}, "its instruction is of the type NoneType and must be a text or a function."),
        ({"policy": {"max_turns": 3}}, "its policy is of the type dict and must be an AgentPolicy."),
        ({"handoffs": ["ann"]}, "handoffs.0 is of the type str and must be a Handoff or Agent."),
    ],
)
@pytest.mark.parametrize("make", [Agent, SimpleAgentRunner])
def test_an_agent_made_of_the_wrong_things_says_of_which(make: Any, wrong: dict[str, Any], told: str) -> None:
    given = {"instruction": "Help.", "model": MODEL, **wrong}
    with pytest.raises(TypeError) as caught:
        make("bob", **given)
    assert str(caught.value) == f"Agent bob: {told}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"channels": "dev"}, "Agent bob: channels is of the type str and must be a list."),
        ({"tags": "maths"}, "Agent bob: tags is of the type str and must be a list."),
        (
            {"react_to": "everything"},
            "Agent bob: react_to is 'everything' and must be one of mentions, mentions_only, all.",
        ),
        ({"visibility": None}, "Agent bob: visibility is None and must be one of people, strict, all, current."),
    ],
)
def test_a_runner_made_of_the_wrong_things_says_of_which(wrong: dict[str, Any], told: str) -> None:
    """A string is also a sequence of letters. Without the check, an agent would join three channels with one letter
    each.
    """
    with pytest.raises((TypeError, ValueError)) as caught:
        SimpleAgentRunner("bob", instruction="Help.", model=MODEL, **wrong)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"kinds": "direct"}, '"kinds" must be a list (`- item` lines), not "direct"'),
        ({"kinds": ["direct", "dm"]}, "\"kinds.2\" must be 'direct', 'broadcast', 'channel' or 'mod', not \"dm\""),
        ({"senders": "mia"}, '"senders" must be a list (`- item` lines), not "mia"'),
        ({"senders": [""]}, '"senders.1"'),
        ({"exclude_senders": "build-*"}, '"exclude_senders" must be a list (`- item` lines), not "build-*"'),
        ({"per_thread": {"channel:*": "3"}}, '"per_thread.channel:*" must be a whole number, not "3"'),
        ({"per_thread": {"broadcast": True}}, '"per_thread.broadcast" must be a whole number, not true'),
        ({"per_thread": {"broadcast": 500}}, '"per_thread.broadcast" must be less than or equal to 499, not 500'),
        (
            {"per_thread": {"x": {"least": 0, "most": 9}}},
            '"per_thread.x.least" must be greater than or equal to 1, not 0',
        ),
    ],
)
def test_a_filter_that_would_let_nothing_pass_is_refused(tmp_path: Path, wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"^MessageFilter: ") as caught:
        MessageFilter(**wrong)
    said = str(caught.value).removeprefix("MessageFilter: ")
    assert said.startswith(told)
    file = tmp_path / "bob.yaml"
    file.write_text(f"{HEAD}message_filter: {json.dumps(wrong)}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_agents(file)
    assert refused.value.message == said.replace('"', '"message_filter.', 1)


@pytest.mark.parametrize("timeout_s", [math.nan, 0, -1, True, None, "3"])
@pytest.mark.parametrize("make", [remote_handoff, remote_agent_tool])
def test_a_time_to_wait_for_another_agent_is_a_number_of_seconds(make: Any, timeout_s: Any) -> None:
    with pytest.raises(ToolError, match=r"The time to wait for ann, timeout_s, is .* and must be a number of seconds"):
        make("ann", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("max_turns: true", '"limits.max_turns" must be a whole number, not true'),
        ("max_turns: 2.5", '"limits.max_turns" must be a whole number, not 2.5'),
        ("max_turns: null", None),
        ("max_turns: '3'", '"limits.max_turns" must be a whole number, not "3"'),
        ("max_turns: 10000000", '"limits.max_turns" must be less than or equal to 1000000, not 10000000'),
        ("tool_timeout_s: .nan", '"limits.tool_timeout_s" must be'),
        ("tool_timeout_s: .inf", '"limits.tool_timeout_s" must be a number, not ".inf"'),
        ("tool_timeout_s: -1", '"limits.tool_timeout_s" must be greater than 0, not -1'),
        ("tool_timeout_s: true", '"limits.tool_timeout_s" must be a number, not true'),
        ("tool_timeout_s: 1e300", None),
        ("approval_timeout_s: 604800", None),
        ("hook_timeout_s: 5", None),
        ("max_threads: 101", '"limits.max_threads" must be less than or equal to 100, not 101'),
        ("per_thread: 500", '"limits.per_thread" must be less than or equal to 499, not 500'),
        ("per_thread: '3'", '"limits.per_thread" must be a whole number, not "3"'),
        ("per_thread: {least: 2, most: 500}", '"limits.per_thread.most" must be less than or equal to 499, not 500'),
        ("per_thread: {least: 9, most: 9}", '"limits.per_thread" must have least below most, not 9 and 9'),
        ("per_thread: {least: 9, mots: 12}", 'unknown key "mots"; did you mean "most"?'),
        ("per_thread: {least: 9, most: 12}", None),
    ],
)
def test_limits_in_a_file_are_refused_with_their_line(tmp_path: Path, limits: str, told: str | None) -> None:
    file = tmp_path / "bob.yaml"
    file.write_text(f"{HEAD}limits:\n  {limits}\n", encoding="utf-8")
    if told is None:
        [spec] = load_agents(file)
        build_runner(spec)
        return
    with pytest.raises(ConfigError) as caught:
        load_agents(file)
    assert str(caught.value).startswith(f"{file}:5: {told}")
