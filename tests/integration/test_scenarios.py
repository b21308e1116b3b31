"""Tests of scenarios: the effect of each step, and each expectation, which must hold or fail as intended."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from roundelay.agents.models.scripted import ScriptedModel, finish, send
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.cli import cli
from roundelay.network.errors import ConfigError
from roundelay.testing import ScenarioResult, make_scenario, run_scenario
from roundelay.testing.report import describe_result, list_failures, to_json

DESK = [
    {"when": {"from": "mia", "contains": "refund"}, "do": [{"send": {"to": "finance", "text": "refund: {{ text }}"}}, {"finish": "asked"}]},
    {"when": {"from": "finance"}, "do": [{"send": {"to": "mia", "text": "{{ text }}"}}, {"finish": "done"}]},
    {"when": {"from": "mia", "contains": "count"}, "do": [{"tool": "channels_list"}, {"tool": "channels_members", "args": {"name": "pay"}}]},
]  # fmt: skip
FINANCE = [{"when": {"from": "desk"}, "do": [{"send": {"to": "desk", "text": "Approved, 40 EUR"}}, {"finish": "done"}]}]
REFUND = {"as": "mia", "to": "desk", "send": "refund order 12"}


def run(
    *expected: Any, steps: list[Any] | None = None, seed: int = 7, path: Path = Path("it.yaml"), **head: Any
) -> ScenarioResult:
    plain = {
        "scenario": "under test",
        "agents": {"desk": {"script": DESK}, "finance": {"script": FINANCE}},
        "people": ["mia", "boss"],
        "threads": {"pay": {"members": ["boss", "finance"]}},
        "steps": steps if steps is not None else [REFUND, {"wait": "idle"}],
        "expect": list(expected) or [{"no_dead_letters": True}],
        **head,
    }
    return run_scenario(make_scenario(plain, path), seed=seed)


def texts(result: ScenarioResult) -> list[str]:
    return [f"{it.sender_id} -> {it.to.removeprefix('agent:')}: {it.text}" for it in result.record.messages]


def failure_of(result: ScenarioResult) -> str:
    assert result.failure is not None
    return f"{result.failure.what.removeprefix('step ')}: {result.failure.reason}"


# --- steps


def test_variables_and_saved_messages_go_into_texts() -> None:
    steps = [
        {"set": {"order": 12, "things": ["tea", "milk"]}},
        {"as": "mia", "to": "boss", "send": "{{ greeting }}, order {{ order }} of {{ things | join(' and ') }}", "save": "first"},
        {"as": "boss", "reply_to": "first", "send": "you said: {{ first.text }}"},
        {"as": "mia", "to": "boss", "send": {"order": "{{ order }}"}},
        {"wait": "idle"},
    ]  # fmt: skip
    result = run(steps=steps, vars={"greeting": "Hello"})
    assert texts(result) == [
        "mia -> boss: Hello, order 12 of tea and milk",
        "boss -> mia: you said: Hello, order 12 of tea and milk",
        "mia -> boss: order: 12",
    ]
    assert result.record.messages[1].reply_to == result.record.messages[0].seq


LOG = {"call": "network.log", "args": {"after": 0, "limit": 1}}


def test_whoever_takes_part_has_its_own_rights_and_operators_are_named() -> None:
    """Otherwise, a scenario could not test rights, because everybody in it would be an operator."""
    who: dict[str, Any] = {
        "people": ["mia", "boss"],
        "services": ["crm", "audit"],
        "programs": ["bot"],
        "operators": ["boss", "audit"],
    }
    steps: list[Any] = [{"as": name, **LOG, "refused": "forbidden"} for name in ("mia", "crm", "bot")]
    steps += [{"as": name, **LOG} for name in ("boss", "audit")]
    steps += [{"as": name, "to": "mia", "send": "hello"} for name in ("crm", "bot")]
    result = run({"message": {"to": "mia", "count": 2}}, steps=steps, **who)
    assert result.passed, describe_result(result)
    assert [it.sender_kind for it in result.record.messages] == ["service", "agent"]


def test_what_an_agent_said_is_waited_for_kept_and_replied_to() -> None:
    steps = [
        REFUND,
        {"wait": {"message": {"from": "desk", "to": "mia"}}, "save": "answer"},
        {"as": "mia", "reply_to": "answer", "send": "{{ answer.text }}? Thanks, {{ answer.sender_id }}."},
    ]
    result = run(steps=steps)
    *_, answer, reply = result.record.messages
    assert (reply.text, reply.reply_to) == ("Approved, 40 EUR? Thanks, desk.", answer.seq)


def test_steps_depend_on_what_is_so_by_now() -> None:
    """Conditions may use variables and every kind of expectation."""
    asks = {"as": "mia", "to": "desk", "send": "refund order {{ n }}"}
    says = {"as": "mia", "to": "boss", "send": "{{ n }}"}
    is_paid = {"count": {"from": "desk", "to": "mia", "contains": "EUR", "at_least": 3}}
    steps = [
        {"repeat": {"times": 9, "var": "n", "until": is_paid, "steps": [asks, {"wait": "idle"}]}},
        {"if": "n == 3", "then": [says], "else": [{"as": "boss", "to": "mia", "send": "no"}]},
        {"if": {"never": {"from": "desk"}}, "then": [says], "else": [{"as": "boss", "to": "mia", "send": "yes"}]},
        {
            "if": {"mod": {"op": "channels.members", "args": {"name": "pay"}, "contains": {"members": ["mia"]}}},
            "then": [says],
        },
    ]
    result = run({"count": {"from": "mia", "to": "desk", "exactly": 3}}, steps=steps)
    assert result.passed, describe_result(result)
    assert texts(result)[-2:] == ["mia -> boss: 3", "boss -> mia: yes"]


def test_a_message_goes_to_several_and_to_all_but_some() -> None:
    listen = [{"when": {"from": "mia"}, "do": [{"say": "here"}]}]
    steps = [
        {"as": "mia", "to": ["a", "boss"], "send": "you two", "save": "both"},
        {"as": "mia", "to": "broadcast", "exclude": ["{{ out }}"], "send": "all but {{ out }}, {{ both | length }}"},
        {"wait": "idle"},
    ]
    agents = {name: {"script": listen} for name in ("a", "b")}
    expected = [
        {"count": {"of": "reactions", "agent": "a", "exactly": 2}},
        {"never_in_prompt": {"agent": "b", "text": "all but"}},
    ]
    result = run(*expected, steps=steps, agents=agents, threads={}, vars={"out": "b"})
    assert result.passed, describe_result(result)
    assert texts(result)[:3] == ["mia -> a: you two", "mia -> boss: you two", "mia -> broadcast: all but b, 2"]


SHOP = """\
from roundelay import ToolContext, tool

@tool(needs_approval=True)
def refund(context: ToolContext, order: str, eur: int) -> str:
    \"\"\"Refund an order.\"\"\"
    context.state["orders"][order]["refunded"] = eur
    context.state["left"] -= eur
    return f"refunded {eur}"
"""
CLERK = {
    "tools": ["scenario_shop:refund"],
    "script": [
        {"when": {"from": "mia"}, "do": [{"tool": "refund", "args": {"order": "{{ text }}", "eur": 40}}]},
        {"when": {"after": "refund"}, "do": [{"say": "{{ result }}"}]},
    ],
}
ORDERS = {"orders": {"x1": {"refunded": 0}, "x2": {"refunded": 0}}, "left": 200}


def test_calls_are_decided_and_the_state_of_the_tools_is_each_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scenario_shop.py").write_text(SHOP, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    steps = [
        {"as": "mia", "to": "desk", "send": "x1"},
        {"as": "mia", "decide": {"edit": {"order": "x1", "eur": "{{ 20 + 5 }}"}, "tool": "refund", "agent": "desk"}},
        {"wait": "idle"},
        {"as": "mia", "to": "desk", "send": "x2"},
        {"as": "mia", "decide": {"deny": "no {{ state.left }}"}},
        {"wait": "idle"},
        {
            "if": "state.left == 175",
            "then": [{"as": "mia", "to": "desk", "send": "x2"}, {"as": "mia", "decide": {"approve": "thread"}}],
        },
        {"wait": "idle"},
        {"as": "mia", "to": "desk", "send": "x2"},  # the thread is already approved
        {"wait": "idle"},
    ]
    expected = [
        {"state": {"path": "orders.x1.refunded", "equals": 25}},
        {"state": {"changed": ["orders.x1.refunded", "orders.x2.refunded", "left"]}},
        {"state": {"contains": {"left": 95}}},
        {"message": {"from": "desk", "to": "mia", "contains": "mia denied it: no 175"}},
        {"state": {"changed": ["left"]}},
        {"state": {"changed": ["orders.x1.refunded", "orders.x2.refunded", "left", "orders.x3"]}},
    ]
    agents = {"desk": CLERK}
    for _ in range(2):  # no state of the first run remains
        result = run(*expected, steps=steps, agents=agents, threads={}, people=["mia"], state=ORDERS)
        assert [it.holds for it in result.verdicts] == [True] * 4 + [False] * 2, describe_result(result)
        assert "orders.x1.refunded changed too" in result.verdicts[4].found
        assert result.verdicts[5].found == "orders.x3 did not change"


def test_a_thread_is_taken_over_and_given_back() -> None:
    steps = [
        {"as": "mia", "take": "desk"},
        REFUND,
        {"as": "mia", "send": "never mind", "to": "desk"},
        {"wait": "idle"},
        {"if": {"never": {"from": "desk"}}, "then": [{"as": "mia", "to": "boss", "send": "it is quiet"}]},
        {"as": "boss", "give": "direct:desk~mia", "refused": "unknown_message"},
        {"as": "mia", "give": "desk"},
        {"wait": {"until": "idle", "at_most": "5m"}},
        {"as": "boss", "take": "pay"},
        {"as": "boss", "take": "channel:pay"},
        {"as": "mia", "take": "pay", "refused": "unknown_message"},
    ]
    agents = {"desk": {"script": [{"do": [{"say": "I am back"}]}]}, "finance": {"script": FINANCE}}
    result = run(
        {"message": {"from": "desk", "to": "mia", "contains": "I am back", "count": 1}}, steps=steps, agents=agents
    )
    assert result.passed, describe_result(result)
    assert texts(result)[2:] == ["mia -> boss: it is quiet", "desk -> mia: I am back"]


NODE = """\
limits: {max_hops: 1}
visibility: strict
rights:
  team: {kinds: [human], send: [desk], call: ['network.*']}
  desk: {ids: [desk], send: ['*'], call: ['network.*']}
agents:
  - id: desk
    instruction: You are at the desk.
    model: {openai: {name: gpt-4o-mini}}
"""


def test_a_nodes_file_gives_rights_limits_and_agents(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").write_text(NODE, encoding="utf-8")
    steps = [
        {"as": "mia", "to": "boss", "send": "psst", "refused": "forbidden"},
        {"as": "mia", "to": "desk", "send": "hello"},
        {"wait": "idle"},
    ]
    head: dict[str, Any] = {"node": "roundelay.yaml", "path": tmp_path / "it.scenario.yaml", "threads": {}}
    agents = {"desk": {"model": {"rules": [{"do": [{"say": "hello {{ sender }}"}]}]}}}
    expected = [
        {"message": {"from": "desk", "to": "mia", "contains": "hello mia"}},
        {"prompt": {"agent": "desk", "contains": "You are at the desk."}},
    ]
    result = run(*expected, steps=steps, agents=agents, **head)
    assert result.passed, describe_result(result)
    with pytest.raises(ConfigError, match=r"it.scenario.yaml:1: the agent desk would ask a real model"):
        run(steps=steps, agents={}, **head)
    (tmp_path / "roundelay.yaml").write_text(NODE.replace("send: [desk]", "send: [role:dsk]"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"roundelay.yaml:4: rights.team.send: .*dsk"):
        run(steps=steps, agents=agents, **head)


def test_a_hub_that_is_down_is_named_at_the_step_that_finds_it_so() -> None:
    ask = {"if": {"mod": {"op": "network.info", "as": "mia", "equals": 1}}, "then": [{"wait": "1s"}]}
    assert "the hub did not answer within 60 s; is it down?" in failure_of(run(steps=[{"kill": "hub"}, ask]))
    result = run(steps=[REFUND, {"wait": "idle"}, {"kill": "hub"}, {"as": "mia", "to": "desk", "send": "still there?"}])
    assert "the hub did not answer within 60 s; is it down, or is mia disconnected?" in failure_of(result)
    assert "still there?" in failure_of(result)
    assert texts(result)[0] == "mia -> desk: refund order 12"


def test_steps_repeat_and_run_beside_each_other() -> None:
    inner = [{"as": "{{ who }}", "to": "boss", "send": "{{ who }} {{ n }}"}, {"wait": "10s"}]
    steps = [
        {"repeat": {"each": ["mia"], "var": "who", "steps": [{"repeat": {"times": 3, "var": "n", "steps": inner}}]}},
        {"parallel": [[{"wait": "2s"}, {"as": "boss", "to": "mia", "send": "late"}], {"as": "mia", "to": "boss", "send": "early"}]},
        {"wait": "idle"},
    ]  # fmt: skip
    result = run(steps=steps)
    assert texts(result) == [
        "mia -> boss: mia 1", "mia -> boss: mia 2", "mia -> boss: mia 3", "mia -> boss: early", "boss -> mia: late",
    ]  # fmt: skip
    assert result.record.ended_at - result.record.began_at >= 32_000
    assert result.took_s < 10


def test_a_script_that_fails_fails_the_run_and_says_why() -> None:
    script = [{"do": [{"say": "{{ tex }}"}]}]
    broken = {"desk": {"script": script}, "finance": {"script": FINANCE}}
    result = run({"never": {"to": "mia", "contains": "canary"}}, agents=broken)
    assert not result.passed
    [failure] = list_failures(result)
    assert failure.found.startswith("the model of desk: ")
    assert "'tex' is undefined" in failure.found


def test_a_killed_agent_does_nothing_until_it_is_restarted() -> None:
    steps = [
        {"kill": "finance"},
        REFUND,
        {"wait": "idle"},
        {"set": {"then": "x"}},
        {"wait": "30s"},
        {"restart": "finance"},
        {"wait": "idle"},
    ]
    result = run({"message": {"from": "desk", "to": "mia", "count": 1}}, {"within": {"at_most": "29s", "message": {"from": "finance"}}}, steps=steps)  # fmt: skip
    assert [verdict.holds for verdict in result.verdicts] == [True, False]


@pytest.mark.parametrize(
    "step", [{"restart": "hub"}, {"disconnect": "desk"}, {"restart": "desk"}, {"disconnect": "mia"}]
)
def test_nothing_is_lost_or_doubled_when_something_comes_back(step: Any) -> None:
    for seed in range(5):
        steps = [REFUND, {"wait": {"message": {"from": "desk", "to": "finance"}}}, step, {"wait": "idle"}]
        result = run({"message": {"from": "desk", "to": "mia", "count": 1}}, steps=steps, seed=seed)
        assert result.passed, describe_result(result)


def test_a_killed_hub_takes_nothing_until_it_is_back() -> None:
    steps = [REFUND, {"wait": "20ms"}, {"kill": "hub"}, {"wait": "60s"}, {"restart": "hub"}, {"wait": "idle"}]
    result = run({"message": {"from": "desk", "to": "mia", "count": 1}}, steps=steps)
    assert result.passed, describe_result(result)
    assert result.record.messages[-1].sent_at - result.record.messages[0].sent_at > 50_000


def test_a_hub_that_a_step_has_killed_cannot_be_killed_again() -> None:
    again = {"kill": "hub"}
    result = run(steps=[REFUND, again, {"wait": "1s"}, again])
    assert (
        failure_of(result)
        == 'kill: "hub": simulation: The hub was killed already; a step `restart: hub` starts it again.'
    )
    assert run(steps=[REFUND, again, {"restart": "hub"}, again, {"restart": "hub"}, {"wait": "idle"}]).passed


def test_participants_and_members_come_and_go() -> None:
    steps = [
        {"as": "boss", "in": "pay", "send": "before"},
        {"join": {"who": "mia", "thread": "pay"}},
        {"as": "mia", "in": "pay", "send": "hello"},
        {"leave": {"who": "mia", "thread": "pay"}},
        {"as": "mia", "in": "pay", "send": "still here?", "refused": "forbidden"},
        {"leave": "boss"},
        {"join": "late"},
        {"wait": "idle"},
        {"join": "boss"},
        {"as": "boss", "in": "pay", "send": "back"},
        {"wait": "idle"},
    ]
    agents = {"late": {"script": [], "starts": False}, "finance": {"script": FINANCE}}
    threads = {"pay": {"members": ["boss", "finance", "late"]}}
    result = run({"thread": {"id": "pay", "members": ["boss", "finance", "late"]}}, steps=steps, agents=agents, threads=threads)  # fmt: skip
    assert result.passed, describe_result(result)
    assert texts(result) == ["boss -> channel:pay: before", "mia -> channel:pay: hello", "boss -> channel:pay: back"]


def test_operations_are_called_and_their_values_kept() -> None:
    steps = [
        {"as": "mia", "call": "channels.create", "args": {"name": "tea"}, "save": "made"},
        {"as": "mia", "to": "channel:tea", "send": "in {{ made.channel }}"},
        {"as": "boss", "call": "channels.set_topic", "args": {"name": "nowhere", "topic": "x"}, "refused": "unknown_recipient"},
    ]  # fmt: skip
    assert texts(run(steps=steps)) == ["mia -> channel:tea: in tea"]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"as": "mia", "in": "pay", "send": "x"}, "forbidden"),
        ({"as": "mia", "to": "boss", "send": "{{ nothing }}"}, "nothing"),
        ({"as": "mia", "to": "boss", "send": "{{ 1 / 0 }}"}, "cannot be rendered: division by zero"),
        ({"as": "mia", "to": "boss", "send": "{{ range(1000000000) | list }}"}, "cannot be rendered: Range too big"),
        ({"as": "mia", "to": "boss", "send": "x", "refused": "forbidden"}, "should be refused with forbidden"),
        ({"as": "mia", "reply_to": "nothing", "send": "x"}, "no step has saved a message"),
        ({"wait": {"message": {"from": "boss"}, "at_most": "5s"}}, "no such message came within 5 s"),
        ({"parallel": [{"wait": "1s"}, {"as": "mia", "in": "pay", "send": "x"}]}, "forbidden"),
        ({"as": "finance", "to": "mia", "send": "x"}, "finance has not joined"),
        ({"join": "mia"}, "mia has joined already"),
        ({"if": "missing > 1", "then": [{"wait": "1s"}]}, "'missing' is undefined"),
        (
            {"repeat": {"times": 2, "until": "1 > 2", "steps": [{"wait": "1s"}]}},
            "the condition was still false after 2 times",
        ),
        ({"as": "boss", "decide": {"approve": True, "at_most": "2s"}}, "no such request for approval came within 2 s"),
    ],
)
def test_a_step_that_cannot_be_done_ends_the_run_and_is_named(step: Any, said: str) -> None:
    result = run(steps=[{"kill": "finance"}, step, {"as": "mia", "to": "boss", "send": "never"}])
    assert not result.passed
    assert said in failure_of(result)
    assert "never" not in "".join(texts(result))
    [failure] = list_failures(result)
    assert failure.what.startswith("step ")


def test_an_agent_that_never_was_there_is_not_restarted() -> None:
    agents = {"desk": {"script": DESK, "starts": False}}
    result = run(steps=[{"restart": "desk"}], agents=agents, threads={})
    assert "The agent desk was never started" in failure_of(result)


def test_agents_that_never_come_to_rest_are_named() -> None:
    ping = [
        {"when": {}, "do": [{"send": {"to": "{{ 'b' if agent_id == 'a' else 'a' }}", "text": "ping"}}, {"finish": "x"}]}
    ]
    agents = {"a": {"script": ping}, "b": {"script": ping}}
    steps = [{"as": "mia", "to": "a", "send": "go"}, {"wait": {"until": "idle", "at_most": "3s"}}]
    limits = {"hops": 100_000, "messages": 100_000}
    result = run(steps=steps, agents=agents, threads={}, limits=limits)
    assert "it was not idle within 3 s" in failure_of(result)


def test_an_agent_of_ones_own_takes_the_place_of_a_scripted_one() -> None:
    def make() -> SimpleAgentRunner:
        model = ScriptedModel(lambda request: [send("desk", "Denied"), finish()])
        return SimpleAgentRunner("finance", instruction="x", model=model)

    plain = {
        "scenario": "x", "agents": {"desk": {"script": DESK}, "finance": {"script": FINANCE}}, "people": ["mia"],
        "steps": [REFUND, {"wait": "idle"}], "expect": [{"message": {"to": "mia", "contains": "Denied"}}],
    }  # fmt: skip
    assert not run_scenario(make_scenario(plain)).passed
    assert run_scenario(make_scenario(plain), agents={"finance": make}).passed


def test_the_machines_clock_gives_the_same_conversation() -> None:
    result = run({"order": ["mia -> desk", "desk -> finance", "finance -> desk", "desk -> mia"]}, clock="real")
    assert result.passed, describe_result(result)


# --- expectations

HOLD_AND_FAIL: list[tuple[Any, Any, str]] = [
    ({"message": {"from": "desk", "to": "mia", "contains": "40 eur", "count": 1}}, {"message": {"from": "desk", "to": "mia", "contains": "45 EUR"}}, "nearest: #"),
    ({"message": {"from": "desk", "count": {"at_least": 2, "at_most": 2}}}, {"message": {"from": "desk", "count": 1}}, "2 times, expected 1"),
    ({"message": {"in": "direct:desk~mia", "count": 2}}, {"message": {"in": "pay"}}, "not once"),
    ({"message": {"regex": r"\d+ EUR$"}}, {"message": {"regex": "^EUR"}}, "not once"),
    ({"never": {"from": "boss"}}, {"never": {"from": "desk", "to": "mia"}}, "these: #"),
    ({"count": {"exactly": 4}}, {"count": {"from": "desk", "at_least": 3}}, "2 times"),
    ({"count": {"of": "reactions", "agent": "desk", "exactly": 2}}, {"count": {"of": "reactions", "at_most": 2}}, "3 reactions"),
    ({"count": {"of": "tool_calls", "exactly": 3}}, {"count": {"of": "turns", "exactly": 99}}, "turns, expected 99"),
    ({"order": ["mia -> desk", "desk -> finance: refund order", "desk -> mia: 40"]}, {"order": ["desk -> mia", "mia -> desk"]}, 'no "mia -> desk" (number 2)'),
    ({"within": {"at_most": "5s", "message": {"from": "finance"}, "after": {"from": "mia"}}}, {"within": {"at_most": "1ms", "message": {"from": "finance"}}}, "it took"),
    ({"within": {"at_most": "1m", "message": {"to": "mia"}}}, {"within": {"at_most": "1m", "message": {"from": "boss"}}}, "it never came"),
    ({"thread": {"id": "pay", "members": ["finance", "boss"]}}, {"thread": {"id": "pay", "members": ["boss", "mia"]}}, "finance unexpected; mia missing"),
    ({"tool": {"agent": "desk", "name": "send_text_message", "with": {"target_agent_id": "mia"}, "ok": True, "count": 1}}, {"tool": {"name": "send_text_message", "with": {"text": "45"}}}, "nearest: desk: send_text_message"),
    ({"tool": {"name": "channels_list", "count": 0}}, {"tool": {"name": "channels_list"}}, "not once"),
    ({"prompt": {"agent": "finance", "contains": "refund order 12"}}, {"prompt": {"agent": "finance", "contains": "40 EUR"}}, "no such prompt contains the text"),
    ({"prompt": {"contains": "refund", "when": {"from": "desk"}}}, {"prompt": {"contains": "refund", "when": {"from": "boss"}}}, "read by desk at #"),
    ({"never_in_prompt": {"agent": "finance", "text": "Approved"}}, {"never_in_prompt": {"agent": "desk", "text": "Approved"}}, "read by desk at #"),
    ({"never_in_prompt": {"agent": ["desk", "finance"], "text": "CANARY"}}, {"never_in_prompt": {"agent": ["finance", "desk"], "text": "Approved"}}, "read by desk at #"),
    ({"reaction": {"agent": ["desk", "finance"], "status": "finished"}}, {"cost": {"agent": ["finance", "desk"], "model_calls": {"at_most": 1}}}, "2 model calls"),
    ({"prompts": {"marks": ["refund order", "Approved"], "hold": {"desk": ["refund order", "Approved"], "finance": ["refund order"]}}}, {"prompts": {"marks": ["refund order", "Approved"], "hold": {"finance": [], "desk": ["Approved", "refund order"]}}}, "finance must not hold refund order: read by finance at #"),
    ({"prompts": {"marks": ["Approved"], "hold": {"desk": ["Approved"]}, "when": {"from": "finance"}}}, {"prompts": {"marks": ["Approved"], "hold": {"desk": ["Approved"]}, "when": {"from": "mia"}}}, "desk does not hold Approved"),
    ({"state": {"equals": {}}}, {"state": {"path": "orders.12", "equals": "open"}}, "its value is null"),
    ({"caused_by": {"message": {"from": "desk", "to": "mia"}, "root": "mia"}}, {"caused_by": {"message": {"from": "finance"}, "root": "boss"}}, "goes back to #"),
    ({"caused_by": {"message": {"from": "finance"}, "root": "{{ asker }}"}}, {"message": {"contains": "{{ nothing }}"}}, "'nothing' is undefined"),
    ({"caused_by": {"message": {"from": "finance"}, "root": {"contains": "refund"}}}, {"caused_by": {"message": {"from": "boss"}, "root": "mia"}}, "there is no such message"),
    ({"cost": {"tokens": {"at_most": 5000}, "model_calls": {"exactly": 3}}}, {"cost": {"agent": "desk", "tokens": {"at_most": 10}}}, "tokens, expected at most 10"),
    ({"hops": {"at_most": 3}}, {"hops": {"at_most": 2}}, "the longest chain has 3 hops"),
    ({"reaction": {"agent": "desk", "status": "finished", "count": 2}}, {"reaction": {"agent": "desk", "status": "failed"}}, "finished (asked)"),
    ({"reaction": {"agent": "finance", "reason": "done"}}, {"reaction": {"agent": "finance", "reason": "tired"}}, "not once"),
    ({"mod": {"op": "channels.members", "args": {"name": "pay"}, "contains": {"members": ["boss"]}}}, {"mod": {"op": "channels.members", "args": {"name": "pay"}, "contains": {"members": ["mia"]}}}, '"boss"'),
    ({"quiet": True}, {"quiet": {"from": "boss"}}, "there is no such message"),
    ({"mod": {"op": "network.info", "as": "mia", "contains": {"name": "round"}}}, {"mod": {"op": "network.info", "equals": {}}}, "its value is"),
]  # fmt: skip


def test_unanswered_question_keeps_a_scenario_from_being_quiet() -> None:
    asks = [
        {
            "do": [
                {"send": {"to": "mia", "text": "which one?"}},
                {"tool": "ask", "args": {"agent_ids": ["mia"], "text": "Which?", "timeout_s": 600}},
            ]
        }
    ]
    agents = {"desk": {"script": asks}}
    steps = [{"as": "mia", "to": "desk", "send": "go"}, {"wait": "idle"}]
    result = run({"quiet": True}, steps=steps, agents=agents, threads={})
    assert not result.passed
    assert "waiting for mia" in result.verdicts[0].found
    waits = [*steps, {"wait": {"until": "quiet", "at_most": "5s"}}]
    assert "was not quiet within 5 s" in failure_of(run(steps=waits, agents=agents, threads={}))
    answers = [
        *steps[:1],
        {"wait": {"message": {"contains": "Which?"}}, "save": "question"},
        {"as": "mia", "reply_to": "question", "send": "this"},
    ]
    done = [*answers, {"wait": {"until": "quiet", "at_most": "60s"}}]
    result = run(
        {"quiet": True}, steps=done, agents={"desk": {"script": [*asks, {"do": [{"finish": "ok"}]}]}}, threads={}
    )
    assert result.passed, describe_result(result)


def test_every_kind_of_expectation_is_tried_below() -> None:
    from roundelay.testing.form import Expectation

    assert {next(iter(holds)) for holds, _, _ in HOLD_AND_FAIL} == set(Expectation.model_fields) - {"no_dead_letters"}


@pytest.mark.parametrize(("holds", "fails", "said"), HOLD_AND_FAIL, ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")  # fmt: skip
def test_an_expectation_holds_or_says_what_was_found(holds: Any, fails: Any, said: str) -> None:
    result = run(holds, fails, vars={"asker": "mia"})
    good, bad = result.verdicts
    assert good.holds, good.found
    assert not bad.holds
    assert said in bad.found
    told = describe_result(result)
    assert said in told
    assert "Again: roundelay scenario run it.yaml --seed 7" in told
    assert "desk -> mia: Approved, 40 EUR" in told


@pytest.mark.parametrize(
    ("steps", "op", "said"),
    [
        ([REFUND, {"wait": "idle"}], "network.{{ nothing }}", "'nothing' is undefined"),
        ([REFUND, {"wait": "idle"}, {"kill": "hub"}], "network.info", "the hub did not answer within 60 s"),
    ],
)
def test_an_operation_that_cannot_be_asked_is_named(steps: list[Any], op: str, said: str) -> None:
    result = run({"mod": {"op": op, "as": "mia", "equals": {}}}, steps=steps)
    assert said in failure_of(result)
    assert list_failures(result)[0].what.startswith("step mod: ")


def test_what_was_said_drives_no_terminal() -> None:
    steps = [{"as": "mia", "to": "boss", "send": "a\x1b]0;owned\x07\x9b"}, {"wait": "idle"}]
    result = run({"message": {"from": "boss"}}, steps=steps)
    told = describe_result(result)
    assert r"mia -> boss: a\x1b]0;owned\x07\x9b" in told
    assert told.replace("\n", "").isprintable()


def make_broken() -> SimpleAgentRunner:
    class Broken(SimpleAgentRunner):
        async def react(self, *args: Any) -> Any:
            raise RuntimeError("out of order")

    return Broken("finance", instruction="x", model=ScriptedModel(lambda request: None))


def test_dead_letters_are_listed_of_a_ledgers_file_without_those_taken_back(tmp_path: Path) -> None:
    again = {
        "as": "boss",
        "call": "network.drop_dead_letter",
        "args": {"seq": "{{ lost.seq }}", "agent_id": "finance"},
    }
    steps = [
        {"as": "mia", "to": "finance", "send": "lost", "save": "lost"},
        {"as": "mia", "to": "finance", "send": "kept"},
        {"wait": "1h"},
    ]
    plain: dict[str, Any] = {
        "scenario": "x",
        "agents": {"finance": {"script": []}},
        "people": ["mia", "boss"],
        "operators": ["boss"],
        "expect": [{"message": {"to": "finance", "count": 2}}],
    }
    for last, kept in (([], ["lost", "kept"]), ([again], ["kept"])):
        result = run_scenario(make_scenario({**plain, "steps": [*steps, *last]}), agents={"finance": make_broken})
        assert result.passed, describe_result(result)
        path = tmp_path / "ledger.jsonl"
        path.write_bytes(result.ledger)
        done = CliRunner().invoke(cli, ["dead-letters", "list", "--db", str(path), "--of", "finance", "--json"])
        listed = json.loads(done.output)["dead_letters"]
        texts_by_seq = {it.seq: it.text for it in result.record.messages}
        assert [texts_by_seq[it["seq"]] for it in listed] == kept
        assert {(it["agent_id"], it["attempts"]) for it in listed} == {("finance", 5)}
        assert "RuntimeError: out of order" in listed[0]["reason"]
    done = CliRunner().invoke(cli, ["dead-letters", "list", "--db", str(path), "--of", "mia"])
    assert "There are no dead letters." in done.output


def test_what_comes_nearest_to_a_missing_message_is_told_by_its_text() -> None:
    """The near miss is found despite its late position in the thread and a small difference."""
    said = [*(f"Step {number} is done." for number in range(9)), "Aproved: 40 EUR.", "Bye."]
    steps = [{"as": "boss", "to": "mia", "send": text} for text in said]
    result = run({"message": {"from": "boss", "to": "mia", "contains": "approved: 40 EUR"}}, steps=steps)
    [verdict] = result.verdicts
    assert re.search(r"nearest:\s+#\d+ boss -> mia: Aproved: 40 EUR\.", verdict.found), verdict.found


def test_a_dead_letter_fails_and_is_shown() -> None:
    plain = {
        "scenario": "x", "agents": {"finance": {"script": []}}, "people": ["mia"], "expect": [{"no_dead_letters": True}],
        "steps": [{"as": "mia", "to": "finance", "send": "x"}, {"wait": "idle"}],
    }  # fmt: skip
    assert run_scenario(make_scenario(plain)).passed
    result = run_scenario(make_scenario(plain), agents={"finance": make_broken})
    [verdict] = result.verdicts
    assert not verdict.holds
    assert "RuntimeError: out of order" in verdict.found


def test_an_agent_that_breaks_down_fails_a_run_whose_expectations_hold() -> None:
    def make() -> SimpleAgentRunner:
        class Broken(SimpleAgentRunner):
            async def _end_when_stopped(self) -> None:
                await asyncio.sleep(1)
                raise RuntimeError("out of order")

        return Broken("finance", instruction="x", model=ScriptedModel(lambda request: None))

    plain = {
        "scenario": "x", "agents": {"finance": {"script": []}}, "people": ["mia"], "expect": [{"message": {"from": "mia"}}],
        "steps": [{"as": "mia", "to": "finance", "send": "x"}, {"wait": "2s"}],
    }  # fmt: skip
    result = run_scenario(make_scenario(plain), agents={"finance": make})
    assert [verdict.holds for verdict in result.verdicts] == [True]
    assert not result.passed
    assert "the agent finance crashed: RuntimeError('out of order')" in describe_result(result)


# --- models


def write_agent(tmp_path: Path, model: str) -> Path:
    (tmp_path / "finance.yaml").write_text(
        f"id: finance\ninstruction: You approve.\nmodel:\n  {model}\n", encoding="utf-8"
    )
    return tmp_path / "it.scenario.yaml"


def test_an_agent_file_gets_another_model_and_never_asks_a_real_one_unasked(tmp_path: Path) -> None:
    path = write_agent(tmp_path, "openai: {name: gpt-4o-mini}")
    steps = [REFUND, {"wait": "idle"}]
    desk = {"script": DESK}
    with pytest.raises(ConfigError, match=r"finance would ask a real model.*--real-models"):
        run(steps=steps, path=path, agents={"desk": desk, "finance": {"file": "finance.yaml"}})
    agents = {"desk": desk, "finance": {"file": "finance.yaml", "model": {"rules": FINANCE}}}
    result = run(
        {"message": {"from": "desk", "to": "mia", "contains": "40 EUR"}}, steps=steps, path=path, agents=agents
    )
    assert result.passed, describe_result(result)
    with pytest.raises(ConfigError, match="does not exist"):
        run(steps=steps, path=path, agents={"desk": desk, "finance": {"file": "nothing.yaml"}})
    with pytest.raises(ConfigError, match='has no agent "other"; it has finance'):
        run(steps=[{"wait": "idle"}], path=path, agents={"other": {"file": "finance.yaml"}}, threads={})


def test_tapes_are_made_and_played_and_a_changed_prompt_is_noticed(tmp_path: Path) -> None:
    path = write_agent(tmp_path, f"rules: {FINANCE}".replace("'", '"'))
    agents = {"desk": {"script": DESK}, "finance": {"file": "finance.yaml", "model": {"replay": "tapes/finance.jsonl"}}}
    plain = {
        "scenario": "x", "agents": agents, "people": ["mia"], "steps": [REFUND, {"wait": "idle"}],
        "expect": [{"message": {"from": "desk", "to": "mia", "contains": "40 EUR"}}],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="cannot be read"):
        run_scenario(make_scenario(plain, path))
    taped = run_scenario(make_scenario(plain, path), updates_tapes=True)
    assert taped.passed, describe_result(taped)
    (tmp_path / "finance.yaml").write_text(
        "id: finance\ninstruction: You approve.\nmodel:\n  rules: []\n", encoding="utf-8"
    )
    played = run_scenario(make_scenario(plain, path))
    assert played.passed, describe_result(played)
    assert played.notes == []
    tape = tmp_path / "tapes" / "finance.jsonl"
    lines = tape.read_text(encoding="utf-8")
    tape.write_text(f'{lines}{{"text": "and more"}}\n', encoding="utf-8")
    longer = run_scenario(make_scenario(plain, path))
    assert longer.passed
    assert f"\n  Note: finance did not ask for all of its tape {tape}; turns left: 1" in describe_result(longer)
    assert to_json([longer])["runs"][0]["notes"] == longer.notes
    tape.write_text(lines, encoding="utf-8")
    changed = {**plain, "steps": [{**REFUND, "send": "refund order 13"}, {"wait": "idle"}]}
    drifted = run_scenario(make_scenario(changed, path))
    assert not drifted.passed
    assert "refund order 13" in "".join(drifted.problems)


def test_tokens_have_an_end() -> None:
    result = run({"message": {"from": "mia"}}, limits={"tokens": 40})
    assert not result.passed
    assert "limits.tokens: the models used" in describe_result(result)
    assert {"desk"} == {asked.agent_id for asked in result.record.asked if asked.reply is not None}


def test_faults_of_a_scenario_are_done_and_told() -> None:
    faults = {"drops": 2, "agent_kills": 2, "hub_restarts": 1, "model_failures": 0.2, "within": "3s", "away": "1s"}
    result = run({"message": {"from": "desk", "to": "mia", "count": 1}}, faults=faults)
    assert result.passed, describe_result(result)
    assert len(result.faults) == 5
    assert run(faults=faults).ledger == result.ledger
