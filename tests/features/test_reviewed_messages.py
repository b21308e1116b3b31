"""Tests that every message to the person who asked is reviewed, however it is sent: as the answer, with a network
tool, with the agent's own tool, or after a handoff. The prompt says which text is the answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool
from roundelay.agents.features.evaluations import Evaluations, Grounding, Rule
from roundelay.agents.features.postprocessors import Postprocessors
from roundelay.agents.features.references import References
from roundelay.agents.features.structured import StructuredAnswer
from roundelay.agents.loop_texts import BLOCKED
from roundelay.agents.middleware import Answer, Around
from roundelay.agents.models.model import Model
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.policy import AgentPolicy, OnText
from roundelay.agents.reaction_ids import reaction_id
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.agents.tool_client import ToolClient
from roundelay.agents.tools import Output, ToolContext, tool
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from roundelay.network.frames import StoredFrame
from tests.support import loops
from tests.support.agents import Heard, Person, Provider, running, until_recorded
from tests.support.fake_openai import Reply, text
from tests.support.loops import Body, Records, by_turn, results_of, survives_kills, system_of, tools_of, use

RHINE = {"id": "1", "title": "Rivers of Europe", "text": "The Rhine is 1,233 km long."}
NO_PROMISES = Rule("no_promises", "guarantee", "Promise nothing.", forbids=True)


@tool(idempotent=True)
def search() -> Output:
    """Look it up."""
    return Output("Found.", {"references": [RHINE]})


@tool(idempotent=True)
async def tell(context: ToolContext, text: str) -> str:
    """Tell who asked."""
    await context.client.reply(cast("Any", context.trigger), text)
    return "Told."


@tool(idempotent=True)
async def tell_by_data(context: ToolContext, text: str) -> str:
    """Tell who asked, in a message with data."""
    await context.client.send(f"agent:{context.trigger.sender_id}", {"text": text, "n": 1})
    return "Told."


def sign(answer: str, around: Around) -> Answer:
    return Answer(f"{answer} (bob)", {"signed": True})


def checks(*rules: Rule, blocking: tuple[str, ...] = ()) -> Evaluations:
    return Evaluations(rules or [NO_PROMISES], blocking=blocking)


WAYS = {
    "send_text_message": lambda text: {"target_agent_id": "mia", "text": text},
    "broadcast_text_message": lambda text: {"text": text},
    "channels_post": lambda text: {"name": "dev", "text": text},
    "tell": lambda text: {"text": text},
    "tell_by_data": lambda text: {"text": text},
}


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_tool_sends_to_who_asked_is_reviewed_like_the_answer(network: Network, way: str) -> None:
    """References, evaluations and postprocessors process the message, and the model gets the finding. The person gets
    only the good message.
    """
    script = by_turn(
        use(("search", {})),
        use((way, WAYS[way]("I guarantee 1,233 km [9]."))),
        use((way, WAYS[way]("It is 1,233 km [1][9]."))),
        use(("finish", {"reason": "said"})),
    )
    async with Provider(script) as provider:
        layers = [References(), checks(), Postprocessors(sign)]
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), tools=[search, tell, tell_by_data], middleware=layers,
            channels=["dev"],
        )  # fmt: skip
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.client.call("channels.join", {"name": "dev"})
            heard = await mia.ask("bob", "How long is it?")
            said = [it.text for it in (await mia.client.history(heard.thread_id)).messages if it.sender_id == "bob"]
    assert said == [heard.text] == ["It is 1,233 km [1]. (bob)" + ("\nn: 1" if way == "tell_by_data" else "")]
    assert "Not sent. Promise nothing." in results_of(provider.requests[2])[1]
    if way != "channels_post":  # this operation takes no metadata
        assert (heard.metadata or {})["signed"] is True
        assert [it["n"] for it in (heard.metadata or {})["sources"]] == [1]


async def test_a_message_to_who_asked_has_the_form_of_a_structured_answer(network: Network) -> None:
    said = [use(("send_text_message", {"target_agent_id": "mia", "text": it})) for it in ("three", "3")]
    async with Provider(by_turn(*said, use(("finish", {"reason": "said"})))) as provider:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[StructuredAnswer(int)])
        async with running(network, bob):
            heard = await (await Person.join(network, "mia")).ask("bob", "How many?")
    assert (heard.text, heard.metadata) == ("3", {"structured": 3})
    assert "Not sent. Your answer does not match the schema" in results_of(provider.requests[1])[0]


async def test_what_an_agent_in_a_call_sends_to_who_asked_passes_the_guards_of_its_caller(network: Network) -> None:
    def script(body: Body) -> Reply:
        is_inside = "helper" in system_of(body)
        done = len(results_of(body))
        if is_inside:
            return by_turn(use(("tell", {"text": "We guarantee it."})), use(("tell", {"text": "Perhaps."})), "told")(
                body
            )
        return use(("helper", {"task": "Tell mia."})) if not done else use(("finish", {"reason": "done"}))

    async with Provider(script) as provider:
        helper = Agent("helper", "You are the helper.", provider.model(), [tell])
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), tools=[agent_tool(helper)], middleware=[checks()]
        )
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            assert (await mia.ask("bob", "Will it?")).text == "Perhaps."


async def test_what_goes_to_somebody_else_is_not_reviewed(network: Network) -> None:
    script = by_turn(use(("send_text_message", {"target_agent_id": "ann", "text": "I guarantee it."})), "Done.")
    async with Provider(script) as provider:
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[checks()])
        ann = await Person.join(network, "ann")
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("bob", "Tell ann.")
            assert (await ann.hear()).text == "I guarantee it."


async def test_a_reviewed_message_is_sent_once_and_as_it_was_reviewed_after_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A judge is asked once per text, and its cost counts in the reaction."""
    sent: dict[str, Any] = {}

    class Hub:
        async def send(self, to: str, content: Any, *, message_id: str, **options: Any) -> Any:
            assert sent.setdefault(message_id, content) == content, "a message was repeated with another text"
            return StoredFrame(message_id=message_id, seq=8, thread_id="direct:bob~mia")

    def make_context(call_id: str, turn: int) -> ToolContext:
        client = ToolClient(cast("Any", Hub()), call_id, loops.TRIGGER.seq, askers=["mia"])
        return ToolContext("bob", "r1", turn, call_id, loops.TRIGGER, client)

    def script(body: Body) -> Reply:
        if tools_of(body) == ["verdict"]:
            is_good = "perhaps" in str(body["messages"][1]["content"])
            problems = [] if is_good else ["it is too sure"]
            return use(("verdict", {"is_grounded": is_good, "problems": problems}), usage=(5, 1))
        said = [
            use(("look", {})),
            *(use(("send_text_message", {"target_agent_id": "mia", "text": it})) for it in ("surely", "perhaps")),
        ]
        return by_turn(*said, use(("finish", {"reason": "said"})))(body)

    @tool(idempotent=True)
    def look() -> str:
        """Look."""
        return "seen"

    def make(model: Model) -> Agent:
        layers = [Evaluations([Grounding()]), Postprocessors(sign)]
        return Agent("bob", "", model, [look, *communication_tools()], middleware=layers)

    def answered(records: Records) -> int:
        return len(records.bodies("model_reply")) + len(records.bodies("review"))

    monkeypatch.setattr(loops, "make_context", make_context)
    async with Provider(script) as provider:
        whole = await survives_kills(provider, make, answered=answered)
    assert list(sent.values()) == ["perhaps (bob)"]
    first, second = whole.records.bodies("review")
    assert [(it["call"], it["send"], it["correction"] is None) for it in (first, second)] == [
        (0, 1, False),
        (0, 1, True),
    ]
    assert (
        whole.end.usage.prompt_tokens
        - sum(it["reply"]["usage"]["prompt_tokens"] for it in whole.records.bodies("model_reply"))
        == 10
    )


# --- blocking checks


@pytest.mark.parametrize("blocking", [(), ("no_promises",)])
@pytest.mark.parametrize("by_tool", [True, False])
async def test_what_never_passes_goes_out_marked_or_is_blocked(
    network: Network, by_tool: bool, blocking: tuple[str, ...]
) -> None:
    """The message is marked or blocked after the last attempt. Attempts of messages and of the answer are counted
    together.
    """
    say = (
        use(("send_text_message", {"target_agent_id": "mia", "text": "I guarantee it."}))
        if by_tool
        else "I guarantee it."
    )
    async with Provider(by_turn(say, say, say, "I guarantee it.")) as provider:
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), middleware=[checks(blocking=blocking)],
            policy=AgentPolicy(max_corrections=1, max_turns=4),
        )  # fmt: skip
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            heard = await mia.ask("bob", "Will it?")
    assert (heard.metadata or {})["failed_checks"] == ["no_promises"]
    assert heard.text == (BLOCKED if blocking else "I guarantee it.")
    if by_tool and blocking:
        told = [it for it in results_of(provider.requests[3]) if it.startswith("tool: Not sent")]
        assert told == [
            "tool: Not sent. Promise nothing.",
            *["tool: Not sent, and there are no further tries: no_promises: Promise nothing."] * 2,
        ]


def test_who_blocks_is_set_in_the_agents_file_and_has_to_be_a_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'unknown check "kind" in blocking. Known checks: no_promises'):
        checks(blocking=("kind",))
    path = tmp_path / "bob.yaml"
    path.write_text(
        "id: bob\ninstruction: x\nmodel: {rules: []}\nmiddleware:\n"
        "- evaluations: {checks: {plain: {regex: '[*]', forbids: true}}, always: [plain], blocking: [kind]}\n"
    )
    with pytest.raises(ConfigError, match=r"bob\.yaml:5.*unknown check \"kind\""):
        build_runner(load_agents(path)[0])


# --- after a handoff


@pytest.mark.parametrize(("returns", "asks"), [("to_person", 1), ("never", 2), ("to_caller", 1)])
async def test_after_a_handoff_the_guards_of_both_hold(network: Network, returns: Any, asks: int) -> None:
    """With ``never``, both guards hold for later messages too. Format and additions come from the agent that answers."""

    def script(body: Body) -> Reply:
        told = str(body["messages"])
        if "the desk" in system_of(body):
            is_back = "It said: " in told
            return use(("give_answer", {"answer": 3})) if is_back else use(("hand_over_to_bills", {"note": ""}))
        corrections = ["Promise nothing." in told, "Name no prices." in told]
        return text(["I guarantee it.", "It costs 3 EUR.", "Perhaps."][sum(corrections)])

    no_prices = Rule("no_prices", "EUR", "Name no prices.", forbids=True)
    async with Provider(script) as provider:
        bills = Agent("bills", "You do the bills.", provider.model(), middleware=[checks(no_prices)])
        bob = SimpleAgentRunner(
            "bob", instruction="You are the desk.", model=provider.model(), handoffs=[Handoff(bills, returns=returns)],
            middleware=[checks(), StructuredAnswer(int), Postprocessors(sign)],
        )  # fmt: skip
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            heard = [(await mia.ask("bob", "Will it?")).text for _ in range(asks)]
    assert set(heard) == ({"3 (bob)"} if returns == "to_caller" else {"Perhaps."})


# --- the text of the prompt


@pytest.mark.parametrize(
    ("on_text", "waits", "says"),
    [
        ("auto", True, "Your answer is the text that you write without calling a tool: it is sent to the incoming thread"),
        ("auto", False, "Nobody waits for an answer, and text without a tool call reaches nobody."),
        ("reply", False, "Your answer is the text that you write without calling a tool: it is sent to the incoming thread"),
        ("nudge", True, "Text without a tool call reaches nobody. Send your answer by a tool"),
        ("nudge", False, "Nobody waits for an answer, and text without a tool call reaches nobody."),
        ("record", True, "Nobody waits for an answer, and text without a tool call reaches nobody."),
    ],
)  # fmt: skip
async def test_the_prompt_says_which_text_is_the_answer_as_on_text_has_it(
    network: Network, on_text: OnText, waits: bool, says: str
) -> None:
    """The last turn has no tools, so its prompt does not mention any."""
    async with Provider(by_turn(use(("search", {})), "It is so.")) as provider:
        policy = AgentPolicy(on_text=on_text, max_turns=2, prompt="full")
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), tools=[search], policy=policy)
        ann = await Person.join(network, "ann") if waits else Person(await network.join("ann"))
        async with running(network, bob):
            sent = await ann.client.send_text("bob", "How long?")
            reaction = reaction_id("bob", sent.seq, ann.client.welcome.network.epoch)
            await until_recorded(await Person.join(network, "mia"), reaction, "finished")
            history = await ann.history("direct:ann~bob")
    first, last = (str(body["messages"][-1]["content"]) for body in provider.requests)
    assert says in first
    assert "call finish" in first
    assert not [it for it in ("call", "tool that", "finish") if it in last.partition("no tools any more.")[2]]
    is_sent = ("bob", "It is so.") in history
    assert ("it is sent as it is" in last) is is_sent
    assert is_sent is (on_text == "reply" or (waits and on_text != "record"))


async def test_who_declines_an_answer_that_is_reviewed_says_none_of_its_models_words(network: Network) -> None:
    def script(body: Body) -> Reply:
        if "You are ann" in system_of(body):
            return (
                use(("ask", {"agent_ids": ["bob"], "text": "Will it?", "timeout_s": 9}))
                if not results_of(body)
                else use(("finish", {"reason": "x"}))
            )
        return use(("finish", {"reason": "I guarantee nothing."}))

    async with Provider(script) as provider:
        heard = Heard()
        ann = SimpleAgentRunner("ann", instruction="You are ann.", model=provider.model(), on_event=heard)
        bob = SimpleAgentRunner("bob", instruction="x", model=provider.model(), middleware=[checks()])
        async with running(network, bob, ann):
            mia = await Person.join(network, "mia")
            await mia.client.send_text("ann", "Will it?")
            await heard.finished()
    assert results_of(provider.requests[-1]) == ['<declined sender="bob">there is no answer</declined>']


async def test_a_request_for_approval_of_who_is_reviewed_says_nothing_but_what_is_decided_on(network: Network) -> None:
    @tool(needs_approval=True)
    def pay(to: str) -> str:
        """Pay."""
        return f"paid to {to}"

    def script(body: Body) -> Reply:
        return text("Done.") if results_of(body) else use(("pay", {"to": "ann"}), text="I guarantee it is right.")

    async with Provider(script) as provider:
        bob = SimpleAgentRunner(
            "bob", instruction="x", model=provider.model(), tools=[pay], middleware=[checks(blocking=("no_promises",))]
        )
        async with running(network, bob):
            mia = await Person.join(network, "mia")
            request = await mia.ask("bob", "Pay.")
            assert 'May I call pay with {"to": "ann"}?' in request.text
            assert "guarantee" not in request.model_dump_json()
            await mia.client.reply(cast("Any", request), "/approve")
            assert (await mia.hear()).text == "Done."
