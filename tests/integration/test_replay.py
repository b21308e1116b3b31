"""Tests of replays: a recorded run can be replayed exactly, and each change is reported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.agent_tools import agent_tool, remote_handoff
from roundelay.agents.middleware import Middleware
from roundelay.agents.models.model import (
    ModelDelta,
    ModelError,
    ModelReply,
    ModelRequest,
    OnDelta,
    ToolMessage,
    UserMessage,
)
from roundelay.agents.models.scripted import Answer, ScriptedModel, broadcast, call, finish, say, send
from roundelay.agents.models.tape import NamedModel
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.runner import AgentRunner
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import ToolContext, tool
from roundelay.app import Network
from roundelay.network.config import Limits, Role
from roundelay.network.core.rows import Row
from roundelay.network.frames import RecordFrame, encode
from roundelay.runs.recording import Recording
from roundelay.runs.replay import ReplayOptions, ReplayReport, replay
from tests.support.agents import Person, cancel, make_runner
from tests.support.recorded import edit, record, written


def results(request: ModelRequest) -> list[str]:
    return [it.content for it in request.messages if isinstance(it, ToolMessage)]


def incoming(request: ModelRequest) -> str:
    return str(request.messages[1].content).partition("<incoming_message")[2]


def never(request: ModelRequest) -> Answer:
    raise AssertionError("a model was asked in a replay")


async def play(recording: Recording, *runners: AgentRunner, **options: Any) -> ReplayReport:
    """Run the replay in a thread, because it has its own event loop."""
    return await asyncio.to_thread(replay, recording, runners, ReplayOptions(**options))


async def plays_as_it_was(recording: Recording, *runners: AgentRunner, **options: Any) -> ReplayReport:
    report = await play(recording, *runners, **options)
    assert [str(it) for it in report.differences] == []
    assert report.rows == len(recording.rows)
    return report


# -- a support desk, each change of which is reported


@tool(idempotent=True)
def look_up(order: int) -> str:
    """Look an order up."""
    return f"Order {order}: 40 EUR, paid"


@tool(name="look_up", idempotent=True)
def look_up_better(order: int) -> str:
    """Look an order up, better."""
    raise AssertionError("a tool was run in a replay")


@tool(idempotent=True)
def cancel_order(order: int) -> str:
    """Cancel an order."""
    raise AssertionError("a tool was run in a replay")


def work_at_desk(request: ModelRequest) -> Answer:
    done = results(request)
    if 'sender="finance"' in incoming(request):
        return finish() if done else send("mia", "You get 40 EUR.")
    if "Refund" not in incoming(request):
        return say("You are welcome.")
    return [call("look_up", order=12), send("finance", "Refund 40 EUR?"), finish()][len(done)]


def approve(request: ModelRequest) -> Answer:
    return finish() if results(request) else send("desk", "Approved.")


class SetModel(ScriptedModel):
    def __init__(self, script: Any, settings: Mapping[str, object]) -> None:
        super().__init__(script, name="small")
        self.settings = settings


FULL = AgentPolicy(prompt="full")


@dataclass(frozen=True)
class Desk:
    """Parameters of the desk, which a replay may change."""

    instruction: str = "You refund orders, kindly."
    tools: Sequence[Any] = (look_up,)
    model: Any = None
    policy: AgentPolicy | None = FULL
    visibility: Any = "people"
    template: Path | None = None

    def make(self) -> list[AgentRunner]:
        model = self.model or NamedModel("small", {"temperature": 0.5})
        desk = SimpleAgentRunner(
            "desk", instruction=self.instruction, model=model, tools=self.tools, policy=self.policy,
            visibility=self.visibility, template=self.template,
        )  # fmt: skip
        return [desk, make_runner("finance", approve)]


async def refund(network: Network, people: dict[str, Person]) -> None:
    mia = people["mia"]
    await mia.client.send_text("desk", "Good morning")
    await mia.hear()
    await mia.client.broadcast("The shop is open", exclude_agent_ids=["finance"])
    await mia.client.send_text("desk", "Refund order 12, please")
    while (await mia.hear()).text != "You get 40 EUR.":
        continue
    assert (await mia.ask("desk", "Thanks")).text == "You are welcome."


@pytest.fixture
async def refunded(tmp_path: Path) -> Recording:
    desk = Desk(model=SetModel(work_at_desk, {"temperature": 0.5}))
    return await record(tmp_path / "refund.db", desk.make(), refund)


async def test_a_run_plays_again_as_it_was_without_a_model(refunded: Recording) -> None:
    report = await plays_as_it_was(refunded, *Desk().make())
    assert report.messages == sum(row.type == "message" for row in refunded.rows)
    assert report.turns == sum(row.label == "model_reply" for row in refunded.rows)
    assert report.played == ("desk", "finance")
    assert report.notes == ()


async def test_an_agent_without_a_runner_is_played_from_the_log(refunded: Recording) -> None:
    report = await plays_as_it_was(refunded, Desk().make()[0])
    assert (report.played, report.recorded) == (("desk",), ("finance",))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (Desk(instruction="You refund orders, coldly."), 'message 0 (system): line 1 has changed; it is now: "You refund orders, coldly.'),
        (Desk(instruction="You refund orders, kindly.\nNever say no."), 'message 0 (system): a line more at line 2: "Never say no."'),
        (Desk(tools=(look_up, cancel_order)), 'the tool "cancel_order" was added'),
        (Desk(tools=()), 'the tool "look_up" is missing'),
        (Desk(tools=(look_up_better,)), 'the description or the parameters of the tool "look_up" have changed'),
        (Desk(model=NamedModel("large", {"temperature": 0.5})), 'the model was "small" and is now "large"'),
        (Desk(model=NamedModel("small", {"temperature": 0.9})), 'the setting "temperature" of model "small" has changed'),
        (Desk(model=NamedModel("small")), 'the setting "temperature" of model "small" is missing'),
        (Desk(policy=AgentPolicy(max_turns=3, prompt="full")), 'has changed; it is now: "Turn 1 of 3."'),
        (Desk(visibility="current"), "contains other messages: without #"),
        (Desk(policy=AgentPolicy(per_thread=1, prompt="full")), "contains other messages: without #"),
    ],
    ids=[
        "word", "line", "tool-added", "tool-gone", "tool-changed", "model-name", "setting", "setting-gone", "policy", "visibility",
        "window",
    ],
)  # fmt: skip
async def test_a_change_of_an_agent_is_named(refunded: Recording, changed: Desk, named: str) -> None:
    report = await play(refunded, *changed.make())
    (difference,) = report.differences
    assert named in difference.text
    assert difference.agent_id == "desk"
    assert report.rows < len(refunded.rows)


async def test_a_changed_template_is_named(refunded: Recording, tmp_path: Path) -> None:
    from roundelay.templates import CONVERSATION, read_template

    template = tmp_path / "mine.jinja"
    template.write_text(read_template(CONVERSATION).replace("The threads above", "All threads above"), encoding="utf-8")
    report = await play(refunded, *Desk(template=template).make())
    assert '"All threads above are the context' in report.differences[0].text


def change_message(text: str, to: str) -> Callable[[Row, dict[str, Any]], dict[str, Any] | None]:
    return lambda row, body: {**body, "content": to} if row.type == "message" and body["content"] == text else None


async def test_another_word_of_a_person_is_named(refunded: Recording) -> None:
    changed = edit(refunded, change_message("Refund order 12, please", "Refund order 13, please"))
    report = await play(changed, *Desk().make())
    assert 'it is now: "<content>Refund order 13, please</content>"' in report.differences[0].text


async def test_another_order_of_messages_is_named(refunded: Recording) -> None:
    texts = {"Good morning": "Thanks", "Thanks": "Good morning"}

    def swap(row: Row, body: dict[str, Any]) -> dict[str, Any] | None:
        return (
            {**body, "content": texts[body["content"]]} if row.type == "message" and body["content"] in texts else None
        )

    report = await play(edit(refunded, swap), *Desk().make())
    assert 'it is now: "<content>Thanks</content>"' in report.differences[0].text
    assert report.differences[0].turn == 1


async def test_another_reply_is_named_where_it_leads_to_another_message(refunded: Recording) -> None:
    def improve(row: Row, body: dict[str, Any]) -> dict[str, Any] | None:
        if row.label == "model_reply" and body["reply"]["text"] == "You are welcome.":
            return {**body, "reply": {**body["reply"], "text": "You are not welcome."}}
        return None

    report = await play(edit(refunded, improve), *Desk().make())
    assert 'desk to mia is another text: was "...You are welcome.", is "...You are not welcome."'.replace(
        "...", ""
    ) in str(report.differences[0])


async def test_another_result_of_a_tool_is_named_where_it_enters_the_prompt(refunded: Recording) -> None:
    def improve(row: Row, body: dict[str, Any]) -> dict[str, Any] | None:
        is_it = row.label == "tool_result" and body["tool"] == "look_up"
        return {**body, "content": "Order 12: nothing"} if is_it else None

    report = await play(edit(refunded, improve), *Desk().make())
    assert 'message 3 (tool) has changed; it is now: "Order 12: nothing"' in report.differences[0].text
    assert report.differences[0].turn == 2


async def test_an_agent_that_reacts_to_more_is_named(tmp_path: Path) -> None:
    def announce(request: ModelRequest) -> Answer:
        return finish() if results(request) else broadcast("The shop is open")

    def greet(request: ModelRequest) -> Answer:
        return say("Good morning")

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.send_text("crier", "Announce it")
        await people["mia"].hear()
        await people["mia"].ask("guest", "Hello")

    def make(**options: Any) -> list[AgentRunner]:
        return [make_runner("crier", announce), make_runner("guest", greet, **options)]

    recording = await record(tmp_path / "log.db", make(), talk)
    await plays_as_it_was(recording, *make())
    report = await play(recording, *make(react_to="all"))
    assert 'guest reacts to #8 ("The shop is open" of crier) now, but did not react in the recording' in str(
        report.differences[0]
    )


async def test_a_message_that_nobody_sends_any_more_is_named(refunded: Recording) -> None:
    def drop(row: Row, body: dict[str, Any]) -> dict[str, Any] | None:
        if row.label != "model_reply" or not body["reply"]["tool_calls"]:
            return None
        if body["reply"]["tool_calls"][0]["name"] != "send_text_message" or body["agent"] != "finance":
            return None
        return {**body, "reply": {**body["reply"], "text": "nothing", "tool_calls": []}}

    report = await play(edit(refunded, drop), *Desk().make())
    (difference,) = report.differences
    assert "finance" in difference.text
    assert difference.agent_id == "finance"


async def test_lenient_tells_other_prompts_and_plays_on(refunded: Recording) -> None:
    report = await play(refunded, *Desk(instruction="You refund orders, coldly.").make(), is_lenient=True)
    assert report.rows == len(refunded.rows)
    assert len(report.differences) == sum(row.label == "model_reply" and row.actor == "desk" for row in refunded.rows)
    assert not report.is_same


# -- replays of everything that agents can do


async def records(recording: Recording, label: str) -> int:
    return sum(row.label == label for row in recording.rows)


def asks(request: ModelRequest) -> Answer:
    return (
        say(results(request)[0])
        if results(request)
        else call("ask", agent_ids=["expert", "nobody"], text="What do you think?")
    )


async def ask_chief(network: Network, people: dict[str, Person]) -> None:
    await people["mia"].ask("chief", "Find out")


async def test_questions_and_answers_play_again(tmp_path: Path) -> None:
    def make(script: Any, other: Any) -> list[AgentRunner]:
        return [make_runner("chief", script), make_runner("expert", other)]

    recording = await record(tmp_path / "log.db", make(asks, lambda request: say("I think so")), ask_chief)
    assert any(row.label == "waiting" for row in recording.rows)
    await plays_as_it_was(recording, *make(never, never))


async def test_a_question_that_nobody_answered_in_time_plays_again_at_once(tmp_path: Path) -> None:
    def impatient(request: ModelRequest) -> Answer:
        if results(request):
            return say(results(request)[0])
        return call("ask", agent_ids=["expert"], text="Are you there?", timeout_s=0.3)

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await network.join("expert")
        await ask_chief(network, people)

    recording = await record(tmp_path / "log.db", [make_runner("chief", impatient)], talk)
    await plays_as_it_was(recording, make_runner("chief", never))


async def test_what_was_said_while_somebody_waited_takes_no_time_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait ends as recorded, although all events during it happen at once in the replay."""

    def impatient(request: ModelRequest) -> Answer:
        if results(request):
            return say(results(request)[0])
        return call("ask", agent_ids=["expert"], text="Are you there?", timeout_s=1.0)

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await network.join("expert")
        await people["mia"].client.send_text("chief", "Find out")
        waiting = await written(network, lambda row: row.label == "waiting")
        began = waiting.at
        while (await people["mia"].client.send_text("expert", "Hello?")).seq:
            newest = (await network.hub.ledger.rows(network.hub.state.head - 1, 1))[0]
            if newest.at > began + 800:
                break
            await network.hub.wait_beyond(newest.seq, 0.2)
        await people["mia"].hear()

    recording = await record(tmp_path / "log.db", [make_runner("chief", impatient)], talk)
    monkeypatch.setattr("roundelay.runs.replay.PATIENCE_S", 0.05)
    await plays_as_it_was(recording, make_runner("chief", never))


async def test_an_approval_plays_again(tmp_path: Path) -> None:
    @tool(needs_approval=True)
    def wipe() -> str:
        """Wipe everything."""
        ran.append(1)
        return "wiped"

    ran: list[int] = []

    def script(request: ModelRequest) -> Answer:
        return say(f"It is {results(request)[0]}") if results(request) else call("wipe")

    async def talk(network: Network, people: dict[str, Person]) -> None:
        asked = await people["mia"].ask("chief", "Clean up")
        await people["mia"].client.reply(asked, "/approve always")
        assert (await people["mia"].hear()).text == "It is wiped"
        assert (await people["mia"].ask("chief", "Clean up again")).text == "It is wiped", "it is not asked again"

    recording = await record(tmp_path / "log.db", [make_runner("chief", script, tools=[wipe])], talk)
    report = await plays_as_it_was(recording, make_runner("chief", never, tools=[wipe]))
    assert (report.played, report.notes) == (("chief",), ()), "its word for later calls is a record of its own"
    assert ran == [1, 1]


async def test_approvals_of_approvers_and_operators_play_again(tmp_path: Path) -> None:
    """The approvers are recorded. A replay has no rights file, and asks the same people."""

    def wipe(name: str, **rule: Any) -> Any:
        @tool(name=name, **rule)
        def wipe_it() -> str:
            """Wipe everything."""
            return f"{name} is done"

        return wipe_it

    tools = [
        wipe("both", approvers=["role:chiefs"], approvals_needed=2),
        wipe("late", approvers=["mia"], escalate_to=["zoe"], approval_timeout_s=0.05),
        wipe("free", needs_approval=True),
    ]

    def script(request: ModelRequest) -> Answer:
        name = next(it for it in ("both", "late", "free") if f"use {it}" in incoming(request))
        return say(f"It is so: {results(request)[0]}") if results(request) else call(name)

    async def hear(person: Person, begins: str) -> Any:
        while not (it := await person.hear()).text.startswith(begins):
            continue
        return it

    async def talk(network: Network, people: dict[str, Person]) -> None:
        tom, mia, zoe = (people[name] for name in ("tom", "mia", "zoe"))
        await tom.client.send_text("chief", "use both")
        for person in (mia, zoe):
            await person.client.reply(await hear(person, "May I call both"), "/approve")
        await hear(tom, "It is so: both is done")
        await tom.client.send_text("chief", "use late")
        await zoe.client.reply(await hear(zoe, "May I call late"), "/deny no")
        await hear(tom, "It is so: Not run: zoe denied it: no")
        await tom.client.send_text("chief", "use free")
        request = await hear(tom, "May I call free")
        while not [it for it in (await mia.client.call("network.inbox"))["items"] if it["seq"] == request.seq]:
            pass
        await mia.client.call("network.decide", {"seq": request.seq, "decision": "/approve"})
        await hear(tom, "It is so: free is done")

    everything: Any = {"send": ["*"], "call": ["*"]}
    rights = {"chiefs": Role(ids=("mia", "zoe"), **everything), "rest": Role(ids=("tom", "chief"), **everything)}
    runner = make_runner("chief", script, tools=tools)
    recording = await record(tmp_path / "log.db", [runner], talk, people=("tom", "mia", "zoe"), rights=rights)
    report = await plays_as_it_was(recording, make_runner("chief", never, tools=tools))
    assert (report.played, report.notes) == (("chief",), ())


async def test_messages_read_in_the_middle_play_again(tmp_path: Path) -> None:
    started, told = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        started.set()
        await told.wait()
        return "done"

    def script(request: ModelRequest) -> Answer:
        return say(f"{len(request.messages)} messages") if results(request) else call("work")

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.send_text("chief", "Work")
        await started.wait()
        await people["mia"].client.send_text("chief", "And hurry")
        told.set()
        await people["mia"].hear()

    policy = AgentPolicy(on_new_message="inject")
    recording = await record(tmp_path / "log.db", [make_runner("chief", script, tools=[work], policy=policy)], talk)
    assert any(row.label == "new_messages" for row in recording.rows)
    await plays_as_it_was(recording, make_runner("chief", never, tools=[work], policy=policy))


async def test_agents_inside_of_agents_play_again(tmp_path: Path) -> None:
    def make(outer: Any, inner: Any) -> AgentRunner:
        helper = Agent("helper", "You help.", ScriptedModel(inner))
        return make_runner("chief", outer, tools=[agent_tool(helper)])

    def outer(request: ModelRequest) -> Answer:
        return (
            say(results(request)[0]) if results(request) else [call("helper", task="one"), call("helper", task="two")]
        )

    recording = await record(
        tmp_path / "log.db", [make(outer, lambda request: say(f"done {len(request.messages)}"))], ask_chief
    )
    await plays_as_it_was(recording, make(never, never))
    changed = make_runner("chief", never, tools=[agent_tool(Agent("helper", "You help well.", ScriptedModel(never)))])
    report = await play(recording, changed)
    assert "helper (inside of call 1.0) asks its model something else: message 0 (system): line 1" in str(
        report.differences[0]
    )


async def test_a_handoff_plays_again(tmp_path: Path) -> None:
    def make(first: Any, second: Any) -> AgentRunner:
        return make_runner(
            "chief", first, handoffs=[Handoff(Agent("clerk", "You are a clerk.", ScriptedModel(second)))]
        )

    def hand_over(request: ModelRequest) -> Answer:
        return call("hand_over_to_clerk", note="please")

    recording = await record(tmp_path / "log.db", [make(hand_over, lambda request: say("A clerk am I"))], ask_chief)
    await plays_as_it_was(recording, make(never, never))


async def test_a_remote_handoff_plays_again(tmp_path: Path) -> None:
    def make(first: Any, second: Any) -> list[AgentRunner]:
        return [make_runner("chief", first, tools=[remote_handoff("clerk")]), make_runner("clerk", second)]

    def hand_over(request: ModelRequest) -> Answer:
        return call("hand_over_to_clerk", note="please")

    recording = await record(tmp_path / "log.db", make(hand_over, lambda request: say("Here you are")), ask_chief)
    await plays_as_it_was(recording, *make(never, never))


async def test_channels_and_what_mods_do_play_again(tmp_path: Path) -> None:
    def make(script: Any) -> list[AgentRunner]:
        return [make_runner("chief", script, channels=["dev", "ops"]), make_runner("other", script, channels=["dev"])]

    def script(request: ModelRequest) -> Answer:
        done = results(request)
        if "Tell dev" not in incoming(request):
            return say("noted") if "deploys" in incoming(request) else finish()
        return [call("channels_list"), call("channels_post", name="dev", text="mia deploys"), say("told")][len(done)]

    async def talk(network: Network, people: dict[str, Person]) -> None:
        mia = people["mia"].client
        await mia.call("channels.create", {"name": "secret", "topic": "none", "history": "members"})
        await mia.call("channels.join", {"name": "dev"})
        await mia.call("channels.set_topic", {"name": "dev", "topic": "code"})
        await mia.call("channels.leave", {"name": "secret"})
        await mia.call("channels.create", {"name": "den", "access": "closed"})
        for op in ("invite", "remove", "invite"):
            await mia.call(f"channels.{op}", {"name": "den", "agent_id": "other"})
        await people["guest"].client.call("channels.join", {"name": "secret"})
        await mia.call("channels.remove", {"name": "secret", "agent_id": "guest"})
        await mia.call("channels.invite", {"name": "den", "agent_id": "guest"})
        await people["guest"].client.call("channels.join", {"name": "den"})
        await mia.call("channels.set_owner", {"name": "den", "agent_id": "guest"})
        await people["guest"].client.call("channels.set_access", {"name": "den", "access": "invite"})
        await mia.send_text("chief", "Tell dev")
        while (await people["mia"].hear()).text != "told":
            continue
        await mia.post("dev", "@other deploys")
        while (await people["mia"].hear()).text != "noted":
            continue

    recording = await record(tmp_path / "log.db", make(script), talk, people=("mia", "guest"))
    await plays_as_it_was(recording, *make(never))
    await plays_as_it_was(recording, make(never)[1])
    await plays_as_it_was(recording)


async def test_what_the_hub_refuses_now_is_told(refunded: Recording) -> None:
    nobody = edit(refunded, lambda row, body: {**body, "to": "agent:nobody"} if row.type == "message" else None)
    report = await play(nobody)
    assert "the hub refuses it now (unknown_recipient: Nobody is registered as 'nobody'" in str(report.differences[0])


async def test_a_model_that_failed_fails_again(tmp_path: Path) -> None:
    class Broken:
        name = "broken"

        async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
            raise ModelError("Out of credit.", reason="quota")

    def make(model: Any) -> AgentRunner:
        return SimpleAgentRunner("chief", instruction="You fail.", model=model)

    recording = await record(tmp_path / "log.db", [make(Broken())], ask_chief)
    await plays_as_it_was(recording, make(NamedModel("broken")))


async def test_a_prompt_that_was_shortened_plays_again(tmp_path: Path) -> None:
    class Small:
        name = "small"

        async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
            if "an old story" in str(request.messages[1].content):
                raise ModelError("Too long.", reason="context_too_long")
            return ModelReply("Short enough")

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.broadcast("an old story")
        await ask_chief(network, people)

    def make(model: Any) -> AgentRunner:
        return SimpleAgentRunner("chief", instruction="Be short.", model=model, react_to="mentions")

    async def quiet(network: Network, people: dict[str, Person]) -> None:
        await talk(network, people)

    recording = await record(tmp_path / "log.db", [make(Small())], quiet)
    await plays_as_it_was(recording, make(NamedModel("small")))
    changed = SimpleAgentRunner("chief", instruction="Be long.", model=NamedModel("small"))
    report = await play(recording, changed)
    assert 'message 0 (system): line 1 has changed; it is now: "Be long."' in str(report.differences[0])


@pytest.mark.parametrize("streamed", ["", "Once upon a"])
async def test_a_stopped_reaction_is_stopped_again(tmp_path: Path, streamed: str) -> None:
    asked = asyncio.Event()

    class Slow:
        name = "slow"

        async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
            if on_delta is not None:
                on_delta(ModelDelta(streamed))
            asked.set()
            return await asyncio.get_running_loop().create_future()

    async def talk(network: Network, people: dict[str, Person]) -> None:
        mia = people["mia"]
        await mia.client.send_text("chief", "Take your time")
        await asked.wait()
        await cancel(mia.client, thread_id="direct:chief~mia")
        await written(network, lambda row: row.label == "finished")

    def make(model: Any) -> AgentRunner:
        return SimpleAgentRunner("chief", instruction="Be slow.", model=model)

    recording = await record(tmp_path / "log.db", [make(Slow())], talk)
    said = [msgspec.json.decode(row.data)["content"] for row in recording.rows if row.type == "message"]
    assert said == ["Take your time", f"{streamed}\n\nStopped by mia.".strip()]
    await plays_as_it_was(recording, make(NamedModel("slow")))


async def test_a_tool_is_not_run_again_and_what_it_sent_is_said_again(tmp_path: Path) -> None:
    ran: list[int] = []

    @tool
    async def notify(context: ToolContext) -> str:
        """Tell everybody."""
        ran.append(1)
        await context.client.broadcast("first")
        await context.client.send_text("mia", "second")
        return f"told {len(ran)}"

    def script(request: ModelRequest) -> Answer:
        return say(results(request)[0]) if results(request) else call("notify")

    recording = await record(tmp_path / "log.db", [make_runner("chief", script, tools=[notify])], ask_and_hear_three)
    await plays_as_it_was(recording, make_runner("chief", never, tools=[notify]))
    assert ran == [1]
    report = await play(recording, make_runner("chief", never, tools=[notify]), run_tools=frozenset({"notify"}))
    assert ran == [1, 1]
    assert 'call 1.0 of chief (notify) has another result: was "told 1", is "told 2"' in str(report.differences[0])


async def ask_and_hear_three(network: Network, people: dict[str, Person]) -> None:
    await people["mia"].client.send_text("chief", "Go")
    for _ in range(3):
        await people["mia"].hear()


async def test_a_run_that_was_interrupted_plays_again(tmp_path: Path) -> None:
    """The runner ends in the middle of a tool, and another runner continues."""
    begun = asyncio.Event()

    @tool
    async def work() -> str:
        """Work for ever."""
        begun.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    def script(request: ModelRequest) -> Answer:
        return say("I do not know") if results(request) else call("work")

    from roundelay.network.ledger.log_file import read_log

    async with Network.open(tmp_path / "log.db") as network:
        mia = await Person.join(network, "mia")
        await mia.client.broadcast("before")
        for attempt in range(2):
            runner = make_runner("chief", script, tools=[work])
            client = await network.join("chief", role="reactor", card=runner.describe_card())
            running = asyncio.create_task(runner.run(client))
            await runner.ready()
            if attempt == 0:
                await mia.client.send_text("chief", "Work")
                await begun.wait()
            else:
                assert (await mia.hear()).text == "I do not know"
            await runner.stop()
            await running
            await client.close()
    recording = Recording(*read_log(tmp_path / "log.db"))
    await plays_as_it_was(recording, make_runner("chief", never, tools=[work]))


async def test_a_recording_that_ends_in_the_middle_plays_to_its_end(refunded: Recording) -> None:
    for length in range(0, len(refunded.rows), 3):
        part = Recording(refunded.head, refunded.rows[:length])
        await plays_as_it_was(part, *Desk().make())


async def test_a_loop_that_was_stopped_is_stopped_again(tmp_path: Path) -> None:
    def polite(other: str) -> Any:
        return lambda request: finish() if results(request) else send(other, "After you")

    async def talk(network: Network, people: dict[str, Person]) -> None:
        await people["mia"].client.send_text("ann", "Begin")
        await written(network, lambda row: row.label == "tool_result" and b"loop_stopped" in row.data)

    def make(script: Callable[[str], Any]) -> list[AgentRunner]:
        return [make_runner("ann", script("bob")), make_runner("bob", script("ann"))]

    few = Limits(max_hops=12)
    recording = await record(tmp_path / "log.db", make(polite), talk, limits=few)
    await plays_as_it_was(recording, *make(lambda other: never), limits=few)


def test_a_log_without_its_beginning_is_refused(tmp_path: Path) -> None:
    from roundelay.network.errors import LedgerError
    from roundelay.network.ledger.log_file import LogHead

    recording = Recording(LogHead(epoch="e", name="n", first_seq=5), [])
    with pytest.raises(LedgerError, match="lost its beginning"):
        replay(recording, [])


async def test_a_plain_function_can_be_run_again(tmp_path: Path) -> None:
    @tool
    def count() -> int:
        """Count."""
        time.sleep(0.05)
        ran.append(1)
        return 7

    ran: list[int] = []

    def script(request: ModelRequest) -> Answer:
        return say(results(request)[0]) if results(request) else call("count")

    recording = await record(tmp_path / "log.db", [make_runner("chief", script, tools=[count])], ask_chief)
    await plays_as_it_was(recording, make_runner("chief", never, tools=[count]), run_tools=frozenset({"count"}))
    assert ran == [1, 1]


async def test_another_channel_is_named(tmp_path: Path) -> None:
    recording = await record(
        tmp_path / "log.db", [make_runner("chief", lambda it: say("yes"), channels=["dev"])], ask_chief
    )
    await plays_as_it_was(recording, make_runner("chief", never, channels=["dev"]))
    report = await play(recording, make_runner("chief", never, channels=["dev", "ops"]))
    assert "channel" in str(report.differences[0])
    assert "ops" in str(report.differences[0])


async def test_who_is_removed_is_removed_again(tmp_path: Path) -> None:
    async def talk(network: Network, people: dict[str, Person]) -> None:
        guest = await Person.join(network, "guest")
        await guest.client.call("channels.create", {"name": "dev"})
        await people["mia"].client.call("channels.join", {"name": "dev"})
        await people["mia"].client.call("network.remove", {"agent_id": "guest"})
        await ask_chief(network, people)

    recording = await record(tmp_path / "log.db", [make_runner("chief", lambda it: say("yes"))], talk)
    assert any(row.type == "removed" for row in recording.rows)
    await plays_as_it_was(recording, make_runner("chief", never))


async def test_reactions_of_another_epoch_are_played_from_the_log(refunded: Recording) -> None:
    head = msgspec.structs.replace(refunded.head, epoch="another")
    report = await plays_as_it_was(Recording(head, refunded.rows), *Desk().make(), make_runner("ghost", never))
    assert report.turns == 0
    assert (report.played, report.recorded) == ((), ("desk", "finance"))
    assert "desk is played from the log: another program wrote it, or under another epoch" in report.notes
    assert "ghost has no part in the recording" in report.notes


async def test_what_another_program_recorded_plays_again(tmp_path: Path) -> None:
    """Another program's records may have any form, even if their kinds have the project's names."""
    bodies: tuple[Any, ...] = ([1], "x", None, {"path": [], "manifest": 3})

    async def talk(network: Network, people: dict[str, Person]) -> None:
        program = await network.join("program", role="reactor")
        asked = await people["mia"].client.send_text("program", "do it your way")
        await program.record("own", "started", {"trigger": asked.seq, "manifest": "all"}, record_id="s")
        for number, body in enumerate(bodies):
            for kind in ("model_reply", "new_messages", "tool_result"):
                name = f"{kind}-{number}"
                frame = RecordFrame(record_id=name, reaction="own", kind=kind, body=Raw(encode(body)))
                await program._link.ask(f"r:{name}", encode(frame))
        await program.record("own", "finished", {}, record_id="f")

    recording = await record(tmp_path / "other.db", [], talk)
    assert len([row for row in recording.rows if row.type == "record"]) == 2 + 3 * len(bodies)
    assert recording.make_tapes() == {}
    await plays_as_it_was(recording)


async def test_what_middleware_and_reviewers_made_of_it_plays_again(tmp_path: Path) -> None:
    class Summary(Middleware):
        """Middleware that calls a model itself, and changes the request and the reply according to its answer."""

        async def around_model(self, around: Any, request: ModelRequest, proceed: Any) -> ModelReply:
            summary = await around.complete(around.agent.model, replace(request, messages=[UserMessage("Sum up")]))
            reply: ModelReply = await proceed(replace(request, messages=[*request.messages, UserMessage(summary.text)]))
            return replace(reply, text=f"{reply.text} ({summary.text})")

    class Shout(Middleware):
        async def review(self, around: Any, answer: str) -> str:
            made.append(answer)
            return answer.upper()

    made: list[str] = []

    def script(request: ModelRequest) -> Answer:
        if request.messages[-1] == UserMessage("Sum up"):
            return say("short")
        return call("send_text_message", target_agent_id="mia", text="wait") if request.turn == 1 else say("yes")

    heard: list[str] = []

    async def talk(network: Network, people: dict[str, Person]) -> None:
        heard.append((await people["mia"].ask("chief", "Well?")).text)
        heard.append((await people["mia"].hear()).text)

    def make(script: Any) -> AgentRunner:
        return make_runner("chief", script, middleware=[Summary(), Shout()])

    recording = await record(tmp_path / "log.db", [make(script)], talk)
    assert heard == ["WAIT", "YES (SHORT)"]
    report = await plays_as_it_was(recording, make(never))
    assert len(made) == 2, "a reviewer was asked in a replay"
    assert any("Middleware of chief asks a model itself" in note for note in report.notes)


async def test_a_request_that_middleware_makes_is_compared(tmp_path: Path) -> None:
    class Adds(Middleware):
        def __init__(self, text: str) -> None:
            self.text = text

        async def around_model(self, around: Any, request: ModelRequest, proceed: Any) -> ModelReply:
            reply: ModelReply = await proceed(replace(request, messages=[*request.messages, UserMessage(self.text)]))
            return reply

    def make(script: Any, text: str) -> AgentRunner:
        return make_runner("chief", script, middleware=[Adds(text)])

    recording = await record(tmp_path / "log.db", [make(lambda it: say("yes"), "Be quick.")], ask_chief)
    await plays_as_it_was(recording, make(never, "Be quick."))
    report = await play(recording, make(never, "Be slow."))
    assert 'message 2 (user) has changed; it is now: "Be slow."' in str(report.differences[0])
