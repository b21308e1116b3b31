"""Tests of the features of the third seed's runner: custom templates, ignored senders, and a subclass with setup and
cleanup.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.loop_texts import ANSWER_BY_TOOL, CLOSING
from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.scripted import ScriptedModel, finish, say, send
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.app import Network
from tests.support.agents import Person, make_runner, running

TEMPLATE = """
<conversation>
{% for thread_id, thread in message_threads.items() %}{% for message in thread.messages[-10:] %}
<message sender="{{ message.sender_id }}">{{ message.content }}</message>
{% endfor %}{% endfor %}
<incoming_message sender="{{ incoming_message.sender_id }}">{{ incoming_message.content }}</incoming_message>
</conversation>

Please respond to the incoming message based on the context provided. You have access to tools that you can use if needed.
In each step, you MUST either:
1. Call a tool to perform an action, or
2. Use the finish tool when you've completed all necessary actions.

If you don't need to use any tools, use the finish tool directly.
"""


async def ask_with_template(folder: Path, script: Any, **policy: Any) -> tuple[str, list[ModelRequest]]:
    (folder / "own.jinja").write_text(TEMPLATE, encoding="utf-8")
    asked: list[ModelRequest] = []

    def answer(request: ModelRequest) -> Any:
        asked.append(request)
        return script(request)

    runner = make_runner("bob", answer, template=folder / "own.jinja", policy=AgentPolicy(**policy))
    async with Network.open() as network, running(network, runner):
        return (await (await Person.join(network, "mia")).ask("bob", "How is it?")).text, asked


@pytest.mark.parametrize(
    "script", [lambda _: say("Fine."), lambda it: send("mia", "Fine.") if it.turn == 1 else finish("sent")]
)
async def test_a_prompt_of_ones_own_is_not_contradicted(script: Any, tmp_path: Path) -> None:
    told, asked = await ask_with_template(tmp_path, script, prompt="full")
    assert told == "Fine."
    for request in asked:
        said = "\n".join(str(it.content) for it in request.messages)
        assert "you MUST either" in said
        assert "without calling a tool" not in said
        assert request.messages[-1].content.endswith(f"Turn {request.turn} of 30.")  # type: ignore[union-attr]


async def test_the_last_turn_and_a_chosen_rule_are_told_all_the_same(tmp_path: Path) -> None:
    _, asked = await ask_with_template(tmp_path, lambda _: say("Fine."), max_turns=1)
    assert str(asked[0].messages[-1].content).endswith(CLOSING)
    _, asked = await ask_with_template(
        tmp_path, lambda it: send("mia", "Fine.") if it.turn == 1 else finish("sent"), on_text="nudge"
    )
    assert ANSWER_BY_TOOL in str(asked[0].messages[-1].content)


async def test_ignored_senders_wake_nobody_and_are_read_as_context(tmp_path: Path) -> None:
    (tmp_path / "bob.yaml").write_text(
        "id: bob\ninstruction: x\nreact_to: all\nchannels: [dev]\nignored_sender_ids: [noisy, 'build-*']\n"
        "model: {rules: [{do: [{say: 'Heard {{ text }}'}]}]}\n", encoding="utf-8",
    )  # fmt: skip
    prompts: list[str] = []

    def answer(request: ModelRequest) -> str:
        prompts.append(request.prompt)
        return "Fine."

    [spec] = load_agents(tmp_path / "bob.yaml")
    runner = build_runner(spec, model=ScriptedModel(answer))
    assert runner.ignored_sender_ids == ("noisy", "build-*")
    async with Network.open() as network:
        mia, noisy, build = (
            await Person.join(network, "mia"),
            await network.join("noisy"),
            await network.join("build-7"),
        )
        async with running(network, runner):
            for client in (noisy, build, mia.client):
                await client.join_channel("dev")
            await noisy.post("dev", "Noise @bob")
            await build.post("dev", "Build 7 failed")
            await noisy.send_text("bob", "A secret for bob")
            await mia.client.post("dev", "How is it?")
            while (heard := await mia.hear()).sender_id != "bob":
                pass
    assert heard.text == "Fine."
    [prompt] = prompts
    assert "Noise @bob" in prompt
    assert "Build 7 failed" in prompt


def test_a_text_in_place_of_the_list_is_refused() -> None:
    with pytest.raises(TypeError, match="ignored_sender_ids"):
        make_runner("bob", lambda _: "Fine.", ignored_sender_ids="noisy")


class Ready(SimpleAgentRunner):
    """Runner with setup and cleanup, like the seed's agents."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__("bob", instruction="x", model=ScriptedModel(lambda _: say(", ".join(self.told))))
        self.told: list[str] = []
        self._fails = fails

    async def setup(self) -> None:
        self.told.append(f"setup at {self.client.welcome.network.name}")
        if self._fails:
            raise LookupError("no database")

    def teardown(self) -> None:  # type: ignore[override]
        self.told.append(f"teardown {self.client.agent_id}")


async def test_setup_comes_before_the_first_message_and_teardown_after_the_last() -> None:
    runner = Ready()
    async with Network.open() as network:
        mia = await Person.join(network, "mia")
        async with running(network, runner):
            assert (await mia.ask("bob", "How is it?")).text == "setup at roundelay"
        assert runner.told == ["setup at roundelay", "teardown bob"]
        async with running(network, runner):
            pass
    assert runner.told == ["setup at roundelay", "teardown bob"] * 2


async def test_a_setup_that_fails_ends_the_run_and_cleans_up() -> None:
    runner = Ready(fails=True)
    async with Network.open() as network:
        client = await network.join("bob", role="reactor", card=runner.describe_card())
        with pytest.raises(LookupError, match="no database"):
            await runner.run(client)
    assert runner.told == ["setup at roundelay", "teardown bob"]
