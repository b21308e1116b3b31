"""Tests of the tool registry: registered tools, the tools that a turn offers, and the report about a disabled tool."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from roundelay.agents.agent import Agent
from roundelay.agents.features.registry import ToolRegistry, ToolSet
from roundelay.agents.models.model import Model
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tools import Output, Tool, ToolContext, tool
from roundelay.agents.values import ToolError, TurnState
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Person, Provider, running
from tests.support.loops import Loop, by_turn, results_of, survives_kills, system_of, tools_of, use


def make(name: str, *, result: str = "", rule: str = "") -> Tool:
    def act() -> str:
        """Act."""
        return result or f"{name} was here"

    return tool(name=name, idempotent=True, selection_rule=rule)(act)


SEARCH, PLOT, REPORT = make("search"), make("plot"), make("report")


def test_tools_are_registered_found_replaced_and_taken_away() -> None:
    registry = ToolRegistry([SEARCH])
    other = make("search", result="another one")
    assert registry.get("search") is SEARCH
    registry.register(PLOT)
    registry.register(other)
    assert registry.get_all() == (other, PLOT)
    registry.unregister("search")
    registry.unregister("never there")
    assert (registry.get("search"), registry.get_all()) == (None, (PLOT,))
    registry.clear()
    assert registry.get_all() == ()
    with pytest.raises(ToolError, match="cannot be named"):
        registry.register(make("finish"))


@pytest.mark.parametrize(
    ("modes", "names"),
    [((), ["search"]), (("data",), ["search", "plot"]), (("data", "research"), ["report"])],
)
def test_a_registry_starts_with_the_default_set_and_those_of_its_modes(
    modes: tuple[str, ...], names: list[str]
) -> None:
    sets = {"default": [SEARCH], "data": ToolSet([PLOT]), "research": ToolSet([REPORT], replaces=True)}
    assert [it.name for it in ToolRegistry(sets=sets, modes=modes).get_all()] == names
    with pytest.raises(ToolError, match=r'Unknown tool set "night". Known sets: data, default, research'):
        ToolRegistry(sets=sets, modes=["night"])


async def test_a_change_during_a_turn_takes_effect_at_the_next_one() -> None:
    registry = ToolRegistry()

    @registry.register
    @tool(idempotent=True)
    def swap() -> str:
        """Make other tools of them."""
        registry.unregister("swap")
        registry.register(PLOT)
        return "swapped"

    script = by_turn(use(("swap", {}), ("plot", {})), use(("plot", {})), "Done.")
    async with Provider(script) as provider:
        end = await Loop(Agent("bob", "", provider.model(), middleware=[registry])).drive()
    assert end.answer == "Done."
    assert [tools_of(body) for body in provider.requests] == [["swap"], ["plot"], ["plot"]]
    assert results_of(provider.requests[1]) == ["swapped", 'There is no tool "plot". The tools are: swap.']
    assert results_of(provider.requests[2])[-1] == "plot was here"


async def test_sets_that_a_result_turns_on_are_there_again_after_a_kill() -> None:
    @tool(idempotent=True)
    def unlock() -> Output:
        """Unlock the data tools."""
        return Output("Unlocked.", {"use_sets": ["data", "a set that is none"]})

    def make_agent(model: Model) -> Agent:
        registry = ToolRegistry([unlock], sets={"data": ToolSet([PLOT])})
        return Agent("bob", "", model, middleware=[registry])

    async with Provider(by_turn(use(("unlock", {})), use(("plot", {})), "Done.")) as provider:
        whole = await survives_kills(provider, make_agent)
    assert [tools_of(body) for body in whole.requests] == [["unlock"], ["unlock", "plot"], ["unlock", "plot"]]
    assert results_of(whole.requests[-1]) == ["Unlocked.", "plot was here"]


async def test_a_set_that_was_turned_on_before_a_handoff_is_nothing_to_a_registry_without_it() -> None:
    @tool(idempotent=True)
    def unlock() -> Output:
        """Unlock the data tools."""
        return Output("Unlocked.", {"use_sets": ["data"]})

    def make_agent(model: Model) -> Agent:
        amy = Agent("amy", "", model, middleware=[ToolRegistry([SEARCH])])
        registry = ToolRegistry([unlock], sets={"data": ToolSet([PLOT])})
        return Agent("bob", "", model, handoffs=[amy], middleware=[registry])

    script = by_turn(use(("unlock", {})), use(("hand_over_to_amy", {"note": "go on"})), "Done.")
    async with Provider(script) as provider:
        whole = await survives_kills(provider, make_agent)
    assert whole.end.answer == "Done."
    assert tools_of(whole.requests[-1]) == ["search"]


async def test_a_replay_trusts_the_records_whatever_is_registered_now() -> None:
    """The second process lacks a tool that the first one has. Recorded results stay, and a missing call gets an
    answer.
    """
    script = by_turn(use(("search", {}), ("plot", {})), "Done.")
    async with Provider(script) as provider:
        model = provider.model()
        first = Loop(Agent("bob", "", model, middleware=[ToolRegistry([SEARCH])]))
        await first.drive()
        again = Loop(Agent("bob", "", model, middleware=[ToolRegistry([PLOT])]), first.records)
        last = [it for it, record in first.records.kept.items() if record["kind"] == "model_reply"][-1]
        del first.records.kept[last]
        await again.drive()
    one, other = provider.requests[1:]
    assert (
        results_of(one) == results_of(other) == ["search was here", 'There is no tool "plot". The tools are: search.']
    )
    assert tools_of(other) == ["plot"]


async def test_a_name_that_is_taken_stays_the_agents_own() -> None:
    registry = ToolRegistry([make("search", result="from the registry")])
    async with Provider(by_turn(use(("search", {})), "Done.")) as provider:
        await Loop(Agent("bob", "", provider.model(), [SEARCH], middleware=[registry])).drive()
    assert tools_of(provider.requests[0]) == ["search"]
    assert results_of(provider.requests[1]) == ["search was here"]


async def test_selection_rules_of_the_offered_tools_stand_in_the_system_message() -> None:
    ruled = [make("search", rule="For what happened after your training."), make("plot")]
    own = make("note", rule="For what has to be remembered.")
    async with Provider(by_turn(use(("search", {})), "Done.")) as provider:
        await Loop(Agent("bob", "Be brief.", provider.model(), [own], middleware=[ToolRegistry(ruled)])).drive()
    section = (
        "# Which tool when\n- note: For what has to be remembered.\n- search: For what happened after your training."
    )
    for body in provider.requests:
        assert system_of(body) == f"Be brief.\n\n{section}"


async def test_a_disabled_tool_is_answered_and_reported_to_the_person() -> None:
    async def is_paid(context: ToolContext) -> bool:
        return context.trigger.sender_id != "mia"

    @tool(idempotent=True, should_use=is_paid)
    def search() -> str:
        """Search."""
        raise AssertionError("it is disabled")

    script = by_turn(use(("search", {}), ("plot", {})), use(("search", {})), "Here is what I know.")
    async with Network.open() as network, Provider(script) as provider:
        runner = SimpleAgentRunner(
            "bob", instruction="Help.", model=provider.model(), middleware=[ToolRegistry([search, PLOT])]
        )
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            answer = await mia.ask("bob", "what is new?")
    assert answer.text == "Here is what I know.\n\n(search is not enabled here, so it was not used.)"
    assert results_of(provider.requests[1]) == ["Not run: search is not enabled here.", "plot was here"]


async def test_a_check_that_raises_or_hangs_is_the_calls_result_and_the_reaction_goes_on() -> None:
    async def hang(context: ToolContext) -> bool:
        await asyncio.Event().wait()
        return True

    def fail(context: ToolContext) -> bool:
        raise ZeroDivisionError("no idea")

    tools = [
        tool(name=name, idempotent=True, timeout_s=0.05, should_use=check)(lambda: "found")
        for name, check in (("slow", hang), ("broken", fail))
    ]
    async with Provider(by_turn(use(("slow", {}), ("broken", {})), "Nothing.")) as provider:
        end = await Loop(Agent("bob", "", provider.model(), middleware=[ToolRegistry(tools)])).drive()
    slow, broken = results_of(provider.requests[1])
    assert "took longer than 0.05 s" in slow
    assert broken == "ZeroDivisionError: no idea"
    assert end.answer == "Nothing."


async def test_middleware_that_cannot_list_its_tools_fails_its_reaction_alone() -> None:
    class Flaky(ToolRegistry):
        is_broken = False

        def list_tools(self, state: TurnState) -> Sequence[Tool]:
            if self.is_broken:
                raise ZeroDivisionError("no list")
            return super().list_tools(state)

    flaky = Flaky([SEARCH])
    async with asyncio.timeout(20), Network.open() as network, Provider(by_turn("Done.")) as provider:
        runner = SimpleAgentRunner("bob", instruction="Help.", model=provider.model(), middleware=[flaky])
        async with running(network, runner):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "one")).text == "Done."
            flaky.is_broken = True
            assert "an error on my side" in (await mia.ask("bob", "two")).text
            flaky.is_broken = False
            assert (await mia.ask("bob", "three")).text == "Done."


async def test_the_report_of_a_disabled_tool_survives_a_kill() -> None:
    never = tool(name="search", idempotent=True, should_use=lambda context: False)(lambda: "found")

    def make_agent(model: Model) -> Agent:
        return Agent("bob", "", model, middleware=[ToolRegistry([never])])

    async with Provider(by_turn(use(("search", {})), "Nothing.")) as provider:
        whole = await survives_kills(provider, make_agent)
    assert whole.end.answer == "Nothing.\n\n(search is not enabled here, so it was not used.)"
    [result] = whole.records.bodies("tool_result")
    assert (result["ok"], result["data"]) == (False, {"disabled": True})


async def test_an_agents_file_has_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = '''
        def search(text: str) -> str:
            """Search."""
            return f"found {text}"

        def plot() -> str:
            """Plot."""
            return "drawn"
    '''
    (tmp_path / "registry_tools.py").write_text(textwrap.dedent(code))
    team = """
        id: bob
        instruction: Help.
        model: {rules: [{do: [{say: hello}]}]}
        middleware:
          - registry: {sets: {default: [registry_tools:search], data: [registry_tools:plot]}, modes: [data]}
    """
    path = tmp_path / "team.yaml"
    path.write_text(textwrap.dedent(team))
    [spec] = load_agents(path)
    async with Provider(by_turn("Hello.")) as provider:
        runner = build_runner(spec, model=provider.model())
        async with Network.open() as network, running(network, runner):
            await (await Person.join(network, "mia")).ask("bob", "hi")
    assert {"search", "plot"} <= set(tools_of(provider.requests[0]))
    assert "search" in str(runner.describe_card()["tools"])

    path.write_text(textwrap.dedent(team).replace("modes: [data]", "modes: [night]"))
    [spec] = load_agents(path)
    with pytest.raises(ConfigError, match=r"team.yaml:6.*unknown tool set night"):
        build_runner(spec)
