"""The default form of a prompt: the thread of the message, other threads as one line, and the tools that the agent can use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from roundelay.agents.agent_tools import remote_handoff
from roundelay.agents.models.model import AssistantMessage, ModelReply, ModelRequest, ToolCall, UserMessage
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, say
from roundelay.agents.policy import AgentPolicy, PromptForm
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.app import Network
from tests.support.agents import Person, running

Requests = list[ModelRequest]
Script = Callable[[ModelRequest], ModelReply | str]


@tool(idempotent=True)
def look(at: str) -> str:
    """Look at something."""
    return f"{at}: nothing"


def make(
    agent_id: str,
    requests: Requests,
    script: Script = lambda request: "Fine.",
    form: PromptForm = "lean",
    **options: Any,
) -> SimpleAgentRunner:
    def answer(request: ModelRequest) -> ModelReply:
        requests.append(request)
        reply = script(request)
        return say(reply) if isinstance(reply, str) else reply

    policy = AgentPolicy(prompt=form)
    return SimpleAgentRunner(
        agent_id, instruction="Be kind.", model=ScriptedModel(answer), tools=[look], policy=policy, **options
    )


def call(name: str, arguments: str) -> ModelReply:
    return ModelReply(None, (ToolCall(f"{name}-1", name, arguments),))


def names(request: ModelRequest) -> list[str]:
    return [spec.name for spec in request.tools]


async def test_an_agent_that_is_alone_is_offered_only_its_own_tools(network: Network) -> None:
    requests: Requests = []
    mia = await Person.join(network, "mia")
    async with running(network, make("bob", requests)):
        await mia.ask("bob", "hello")
        await network.join("tom", kind="human")
        await mia.ask("bob", "hello again")
    alone, together = requests
    assert names(alone) == ["look"]
    assert names(together) == ["look", "load_tools", "send_text_message", "ask"]
    assert "call finish" not in str(together.messages), "text is the answer without being told"


async def test_a_loaded_tool_is_offered_last_and_also_after_a_restart(network: Network) -> None:
    requests: Requests = []
    hangs = asyncio.Event()

    def script(request: ModelRequest) -> ModelReply | str:
        if request.turn == 1:
            return call("load_tools", '{"names": "channels_list, discovery"}')
        return call("channels_list", "{}") if request.turn == 2 else "Fine."

    def stop(request: ModelRequest) -> ModelReply | str:
        if request.turn == 3:
            hangs.set()
            raise asyncio.CancelledError
        return script(request)

    mia, _ = await Person.join(network, "mia"), await network.join("tom", kind="human")
    first = make("bob", requests, stop)
    task = asyncio.create_task(first.run(await network.join("bob", role="reactor")))
    await first.ready()
    await mia.client.send_text("bob", "Which channels are there?")
    await hangs.wait()
    await first.stop()
    await asyncio.gather(task, return_exceptions=True)
    before = names(requests[-1])
    async with running(network, make("bob", requests, script)):
        assert (await mia.hear()).text == "Fine."
    assert names(requests[0]) == before[:-2]
    assert before[-2:] == ["channels_list", "discovery_find"]
    assert names(requests[-1]) == before


async def test_a_deferred_tool_runs_without_being_loaded(network: Network) -> None:
    requests: Requests = []
    mia = await Person.join(network, "mia")
    script = lambda request: call("channels_list", "{}") if request.turn == 1 else "Fine."  # noqa: E731
    async with running(network, make("bob", requests, script)):
        await mia.ask("bob", "hello")
    assert "channels_list" not in names(requests[0])
    assert '"channels"' in str(requests[1].messages[-1])


async def test_named_network_tools_are_always_offered(network: Network) -> None:
    requests: Requests = []
    mia = await Person.join(network, "mia")
    async with running(network, make("bob", requests, network_tools=["channels_post", "finish"])):
        await mia.ask("bob", "hello")
    assert names(requests[0]) == ["look", "finish", "channels_post"]


async def test_other_threads_are_one_line_that_a_tool_opens(network: Network) -> None:
    requests: Requests = []

    def script(request: ModelRequest) -> ModelReply | str:
        if request.turn == 1 and "open" in request.prompt:
            return call("read_history", '{"thread_id": "direct:bob~mia:trip"}')
        return "Fine."

    mia, tom = await Person.join(network, "mia"), await Person.join(network, "tom")
    async with running(network, make("bob", requests, script)):
        await tom.ask("bob", "a secret of tom")
        for text in ("We go to Rome.", f"The hotel is {'very ' * 40}small."):
            await mia.client.send_text("bob", text, conversation="trip")
            await mia.hear()
        await mia.ask("bob", "open the trip")
    shown, opened = requests[-2:]
    line = '<thread id="direct:bob~mia:trip"><message sender="bob"><content>Fine.</content></message></thread>'
    assert line in shown.prompt.splitlines()
    assert "Rome" not in shown.prompt
    assert "read_history" in names(shown)
    assert "We go to Rome." in str(opened.messages[-1])
    assert "secret" not in str(opened.messages), "another person's thread"
    inside = requests[2]
    assert "direct:bob~mia" not in inside.prompt.replace("direct:bob~mia:trip", ""), "a conversation of its own"
    assert "read_history" not in names(inside)


async def test_a_worker_reads_no_earlier_tasks_of_its_coordinator(network: Network) -> None:
    requests: Requests = []
    script = lambda request: (  # noqa: E731
        call("ask", f'{{"agent_ids": ["bob"], "text": "task {len(requests)}"}}') if request.turn == 1 else "Done."
    )
    mia = await Person.join(network, "mia")
    async with running(network, make("ann", [], script), make("bob", requests, lambda request: "Made.")):
        for number in range(3):
            await mia.client.send_text("ann", f"wish {number}", conversation=f"c{number}")
            await mia.hear()
    assert ["<threads>" in it.prompt for it in requests] == [False] * 3, "nothing but the task"
    assert names(requests[0]) == ["look", "load_tools"]
    assert len({len(it.prompt) for it in requests}) == 1


async def test_worker_reads_no_task_of_a_conversation_at_the_same_time(network: Network) -> None:
    requests: Requests = []

    def script(request: ModelRequest) -> ModelReply | str:
        if request.turn > 1:
            return "Done."
        word = "apples" if "apples" in read_prompt(request).incoming_text else "pears"
        return call("ask", f'{{"agent_ids": ["bob"], "text": "task {word}"}}')

    mia = await Person.join(network, "mia")
    await mia.client.call("channels.create", {"name": "yard"})
    ann, bob = make("ann", [], script, channels=["yard"]), make("bob", requests, lambda request: "Made.")
    async with running(network, ann, bob):
        # Both conversations begin before the first task, so each task is newer than the beginning of the other
        # conversation.
        await mia.client.post("yard", "@ann apples")
        await mia.client.send_text("ann", "pears")
        await mia.hear()
        await mia.hear()
    tasks = [[word for word in ("apples", "pears") if f"task {word}" in request.prompt] for request in requests]
    assert sorted(tasks) == [["apples"], ["pears"]]


async def test_an_agent_that_takes_over_reads_the_whole_thread(network: Network) -> None:
    requests: Requests = []
    relay = SimpleAgentRunner(
        "ann",
        instruction="Hand over.",
        model=ScriptedModel(lambda request: call("hand_over_to_bob", '{"note": ""}')),
        tools=[remote_handoff("bob")],
    )
    mia = await Person.join(network, "mia")
    async with running(network, relay, make("bob", requests)):
        await mia.ask("ann", "My name is Mia.")
        await mia.ask("ann", "Who am I?")
    assert "My name is Mia." in requests[1].prompt


async def test_a_chat_shows_a_direct_thread_as_roles(network: Network) -> None:
    requests: Requests = []
    mia = await Person.join(network, "mia")
    async with running(network, make("bob", requests, form="chat", channels=["yard"])):
        for text in ("yes", "and </conversation>", "yes"):
            await mia.ask("bob", text)
        await mia.client.join_channel("yard")
        await mia.client.post("yard", "hello all")
        await mia.hear()
    last, channel = requests[2:]
    assert [(type(it), it.content) for it in last.messages[1:]] == [
        (UserMessage, "yes"),
        (AssistantMessage, "Fine."),
        (UserMessage, "and </conversation>"),
        (AssistantMessage, "Fine."),
        (UserMessage, "yes"),
    ]
    assert channel.prompt.startswith("<conversation>"), "several may speak there"


@pytest.mark.parametrize("form", ["full", "lean", "chat"])
async def test_a_resumed_reaction_keeps_the_form_of_its_prompt(network: Network, form: PromptForm) -> None:
    requests: Requests = []
    hangs = asyncio.Event()

    def stop(request: ModelRequest) -> ModelReply | str:
        hangs.set()
        raise asyncio.CancelledError

    mia, _ = await Person.join(network, "mia"), await network.join("tom", kind="human")
    first = make("bob", requests, stop, form)
    task = asyncio.create_task(first.run(await network.join("bob", role="reactor")))
    await first.ready()
    await mia.client.send_text("bob", "hello")
    await hangs.wait()
    await first.stop()
    await asyncio.gather(task, return_exceptions=True)
    async with running(network, make("bob", requests, form="full" if form != "full" else "lean")):
        await mia.hear()
    before, after = requests
    assert before.messages == after.messages
    assert before.tools == after.tools
