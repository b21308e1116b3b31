"""Tests of hooks that are coroutines: they are awaited, and hooks that would never run are refused when the agent is
created.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import BaseModel

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.features.data_policy import DataPolicy
from roundelay.agents.features.fragments import Fragments
from roundelay.agents.features.references import References
from roundelay.agents.middleware import Middleware, middleware_of
from roundelay.agents.models.fallback import FallbackModel
from roundelay.agents.models.model import Model, ModelError, ToolCall, Usage
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.agents.values import AfterTool, End, ToolArgumentsError, TurnState
from tests.support.agents import Provider
from tests.support.loops import Loop, by_turn, results_of, survives_kills, tools_of, use

paid: list[int] = []


@tool(idempotent=True)
def pay(amount: int = 1) -> str:
    """Pay."""
    paid.append(amount)
    return f"paid {amount}"


@pytest.fixture(autouse=True)
def nothing_paid() -> None:
    paid.clear()


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same hook as a coroutine that waits for something."""

    @functools.wraps(function)
    async def wait(*given: Any) -> Any:
        await asyncio.sleep(0)
        return function(*given)

    return wait


class Asked(BaseModel):
    amount: int


async def run(policy: AgentPolicy | None = None, *layers: Middleware, replies: Any = None) -> tuple[Loop, Provider]:
    script = replies or (use(("pay", {"amount": 5}), text="I pay."), "Done.")
    async with Provider(by_turn(*script)) as provider:
        loop = Loop(Agent("bob", "", provider.model(), (pay,), policy or AgentPolicy(), middleware=layers))
        loop.end = await loop.drive()  # type: ignore[attr-defined]
        return loop, provider


Make = Callable[[str, Callable[..., Any]], dict[str, Any]]
PLACES: list[Any] = [
    pytest.param(lambda name, hook: {"policy": AgentPolicy(**{name: hook})}, id="policy"),
    pytest.param(lambda name, hook: {"layers": [middleware_of(**{name: hook})]}, id="middleware"),
]
WAYS: list[Any] = [pytest.param(lambda hook: hook, id="plain"), pytest.param(later, id="async")]


async def run_with(place: Make, name: str, hook: Callable[..., Any], **options: Any) -> tuple[Loop, Provider]:
    made = place(name, hook)
    return await run(made.get("policy"), *made.get("layers", ()), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("given", [True, End("Not without mia.")])
async def test_a_guard_holds(place: Make, way: Any, given: Any) -> None:
    loop, provider = await run_with(place, "process_tool_calls", way(lambda state, calls: given))
    assert (paid, len(provider.requests)) == ([], 1)
    assert loop.end.answer == ("I pay." if given is True else "Not without mia.")  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["no", 1, {"allowed": False}, object()])
async def test_a_guard_that_gives_something_else_lets_nothing_through(way: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"process_tool_calls|lambda.* must give an End, True, False or None"):
        await run(AgentPolicy(process_tool_calls=way(lambda state, calls: given)))
    assert paid == []


async def test_a_guard_that_never_ends_is_stopped_and_lets_nothing_through() -> None:
    async def guard(state: TurnState, calls: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match=r"guard took longer than 0\.05 s"):
        await run(AgentPolicy(process_tool_calls=guard, hook_timeout_s=0.05))
    assert paid == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
async def test_the_other_hooks_are_awaited(place: Make, way: Any) -> None:
    told: list[str] = []

    def tell(state: TurnState, calls: Any) -> None:
        told.extend(it.name for it in calls)

    _, provider = await run_with(place, "should_continue", way(lambda state: False))
    assert [tools_of(it) for it in provider.requests] == [[]]
    loop, _ = await run_with(place, "calculate_usage", way(lambda state, reply: Usage(7, 3)))
    assert loop.end.usage == Usage(14, 6)  # type: ignore[attr-defined]
    _, provider = await run_with(place, "after_tool", way(lambda state, call, result: AfterTool("kept quiet")))
    assert results_of(provider.requests[-1]) == ["kept quiet"]
    said = way(lambda state, reason: "Pay first." if state.turn == 1 else None)
    _, provider = await run_with(place, "on_no_tool_calls", said, replies=("Hm.", "Done."))
    assert "Pay first." in json.dumps(provider.requests[1])
    start = way(lambda: {"limit": 9})
    made = place("initial_state", start)
    seen: list[object] = []
    looks = middleware_of(prepare=way(lambda state, step: seen.append(state.values["limit"]) or step))
    await run(made.get("policy"), *made.get("layers", ()), looks)
    assert seen == [9, 9]
    if "policy" in made:
        await run(AgentPolicy(on_tools_selected=way(tell)))
        assert told == ["pay"]
        _, provider = await run(AgentPolicy(should_send_tools=way(lambda state: False)), replies=("Done.",))
        assert tools_of(provider.requests[0]) == []
        _, provider = await run(AgentPolicy(choose_tool=way(lambda state: "pay" if state.turn == 1 else None)))
        assert provider.requests[0]["tool_choice"]["function"]["name"] == "pay"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, 5), ("", 1), ('{"amount": 7}', 7), ({"amount": 7}, 7), ({}, 1), (Asked(amount=7), 7),
        (MappingProxyType({"amount": 7}), 7),
    ],
)  # fmt: skip
async def test_arguments_are_given_as_text_or_object_or_left(way: Any, given: Any, expected: int) -> None:
    await run(AgentPolicy(preprocess_arguments=way(lambda state, call: given)))
    assert paid == [expected]


async def test_what_the_seed_does_with_arguments() -> None:
    async def preprocess(state: TurnState, call: ToolCall) -> Mapping[str, object]:
        try:
            return dict(json.loads(call.arguments))
        except ValueError as error:
            raise ToolArgumentsError("The arguments are no JSON.") from error

    _, provider = await run(
        AgentPolicy(preprocess_arguments=preprocess),
        replies=(use(("pay", "{amount")), "Done."),
    )
    assert (paid, results_of(provider.requests[1])) == ([], ["Not run: The arguments are no JSON."])


@pytest.mark.parametrize("given", [[1], 7, object()])
async def test_arguments_of_another_kind_blame_the_hook(given: Any) -> None:
    def repair(state: TurnState, call: ToolCall) -> Any:
        return given

    with pytest.raises(TypeError, match=r"The hook \S*repair gave a (list|int|object) and must give the arguments"):
        await run(AgentPolicy(preprocess_arguments=repair))


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_may_be_chosen_by_its_name(way: Any) -> None:
    policy = AgentPolicy(choose_model=way(lambda state: "gpt-4.1-mini" if state.turn > 1 else None))
    _, provider = await run(policy)
    assert [it["model"] for it in provider.requests] == ["m", "gpt-4.1-mini"]


async def test_of_several_models_the_one_of_that_name_is_asked_and_an_unknown_name_is_told() -> None:
    asked: list[str] = []

    def make(name: str) -> Model:
        class Named:
            def __init__(self) -> None:
                self.name = name

            async def complete(self, request: Any, on_delta: Any = None) -> Any:
                asked.append(name)
                return await ScriptedModel(lambda _: "Done.").complete(request)

        return Named()

    for chosen in ("a", "b"):
        own = FallbackModel(make("a"), make("b"))
        await Loop(Agent("bob", "", own, (), AgentPolicy(choose_model=lambda state, name=chosen: name))).drive()
    assert asked == ["a", "b"]
    for wrong, said in (("c", r"'c' was chosen .* only .*'a', 'b' can be asked"), (7, "A int was chosen as the model")):
        agent = Agent("bob", "", FallbackModel(make("a"), make("b")), (), AgentPolicy(choose_model=lambda _: wrong))  # type: ignore[arg-type,return-value]  # noqa: B023
        with pytest.raises(ModelError, match=said):
            await Loop(agent).drive()


async def test_async_hooks_are_asked_again_and_nothing_differs_after_kills() -> None:
    policy = AgentPolicy(
        initial_state=later(lambda: {"seen": 0}),
        preprocess_arguments=later(lambda state, call: {"amount": 2}),
        after_tool=later(lambda state, call, result: AfterTool(f"{result.content}!")),
        process_tool_calls=later(lambda state, calls: None),
        should_continue=later(lambda state: True),
    )
    async with Provider(by_turn(use(("pay", {"amount": 5})), "Done.")) as provider:
        await survives_kills(provider, lambda model: Agent("bob", "", model, (pay,), policy))


def test_plain_functions_stand_where_coroutines_are_usual() -> None:
    async def answer() -> str | None:
        layers = [
            middleware_of(review=lambda around, answer: answer.upper()),
            middleware_of(around_tool=lambda around, call, proceed: proceed(call)),
            middleware_of(finish_answer=lambda around, answer, is_accepted: f"{answer}!"),
        ]
        loop, _ = await run(None, *layers)
        return str(loop.end.answer)  # type: ignore[attr-defined]

    assert asyncio.run(answer()) == "DONE.!"
    assert paid == [5]


async def coroutine(*given: Any) -> Any:
    return given


def generator(*given: Any) -> Iterator[Any]:
    yield given


async def async_generator(*given: Any) -> AsyncIterator[Any]:
    yield given


class AsyncObject:
    async def __call__(self, *given: Any) -> Any:
        return given


MODEL = ScriptedModel(lambda _: "Done.")
REFUSED: list[Callable[[Any], object]] = [
    lambda hook: AgentPolicy(describe_turn=hook),
    lambda hook: Agent("bob", "", MODEL, middleware=[middleware_of(list_tools=hook)]),
    lambda hook: Agent("bob", "", MODEL, middleware=[middleware_of(list_parts=hook)]),
    lambda hook: Agent("bob", "", MODEL, middleware=[middleware_of(store=hook)]),
    lambda hook: Agent("bob", hook, MODEL),
    lambda hook: Agent("bob", "", MODEL, handoffs=[Handoff(Agent("ann", "", MODEL), history=hook)]),
    lambda hook: SimpleAgentRunner("bob", instruction="", model=MODEL, on_event=hook),
    lambda hook: DataPolicy(calls=hook),
    lambda hook: DataPolicy(results=hook),
    lambda hook: DataPolicy(redact=[hook]),
    lambda hook: Agent("bob", "", MODEL, middleware=[Fragments(rank=hook), References()]),
]


@pytest.mark.parametrize(
    "hook", [coroutine, generator, async_generator, functools.partial(coroutine, 1), AsyncObject()]
)
@pytest.mark.parametrize("make", REFUSED)
def test_what_would_never_be_run_is_refused_when_the_agent_is_made(make: Callable[[Any], object], hook: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"is a (coroutine|generator), which would not be run"):
        make(hook)


@pytest.mark.parametrize("name", ["process_tool_calls", "preprocess_arguments", "after_tool", "should_continue"])
@pytest.mark.parametrize("hook", [generator, async_generator])
def test_a_hook_that_yields_is_refused(name: str, hook: Any) -> None:
    with pytest.raises(ValueError, match=f"The hook {name} is a generator"):
        AgentPolicy(**{name: hook})
    if name != "should_continue":
        with pytest.raises(TypeError, match=f"The hook {name} is a generator"):
            Agent("bob", "", MODEL, middleware=[middleware_of(**{name: hook})])
