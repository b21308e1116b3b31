"""Tests of `keep: {prompt: true}`: the exact prompt is recorded within bounds and by the data policy, and is shown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.journal import describe_prompt, fit_prompt
from roundelay.agents.models.model import ModelRequest, SystemMessage, UserMessage
from roundelay.agents.team import build_runner, load_agents
from roundelay.app import Network
from roundelay.runs.node_source import LiveSource
from roundelay.runs.reactions import describe_record
from roundelay.runs.why import explain
from roundelay.runs.why_text import describe_steps
from tests.support.agents import Heard, Person, running
from tests.support.fake_openai import FakeOpenAI, calls, text


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened


def write_agent(folder: Path, base_url: str, more: str) -> Path:
    file = folder / "desk.yaml"
    file.write_text(
        f"id: desk\ninstruction: Be brief.\nmodel: {{openai: {{name: m, base_url: '{base_url}'}}}}\nprompt: full\n"
        f"keep: {{prompt: true}}\n{more}"
    )
    return file


async def talk(network: Network, file: Path) -> tuple[Person, int, list[dict[str, Any]]]:
    """Ask the agent once. Return the seq of the answer and the records of its reaction."""
    [spec] = load_agents(file)
    heard = Heard()
    mia = await Person.join(network, "mia")
    async with running(network, build_runner(spec, on_event=heard)):
        answer = await mia.ask("desk", "What is the secret word, teapot?")
        [end] = await heard.finished()
    return mia, answer.seq, await mia.records(end.reaction)


async def test_the_prompt_is_what_the_server_was_sent_and_is_shown(network: Network, tmp_path: Path) -> None:
    async with FakeOpenAI([calls([("discovery_find", {"query": "mia"})]), text("Tea.")]) as server:
        mia, seq, records = await talk(network, write_agent(tmp_path, server.base_url, ""))
        sent = [it["messages"] for it in server.requests]
    prompts = [it["body"] for it in records if it["kind"] == "prompt"]
    assert [it["turn"] for it in prompts] == [1, 2]
    for kept, messages in zip(prompts, sent, strict=True):
        told = [(it["role"], it["text"]) for it in kept["parts"]]
        assert told == [(it["role"], it["content"] or "") for it in messages]
        assert kept["is_cut"] is False
        assert "discovery_find" in kept["tools"]
    assert any(it["role"] == "tool" and it["tool"] == "discovery_find" for it in prompts[1]["parts"])
    shown = "\n".join(describe_steps(await explain(LiveSource(mia.client), seq)))
    assert "The exact prompt of that turn:" in shown
    assert "Be brief." in shown
    [first] = [describe_record(it) for it in records if it["kind"] == "prompt" and it["body"]["turn"] == 1]
    assert "[system]" in first
    assert "teapot" in first


async def test_nothing_is_kept_unless_it_is_asked_for(network: Network, tmp_path: Path) -> None:
    async with FakeOpenAI([text("Tea.")]) as server:
        file = write_agent(tmp_path, server.base_url, "")
        file.write_text(file.read_text().replace("prompt: true", "prompt: false"))
        *_, records = await talk(network, file)
    assert "prompt" not in {it["kind"] for it in records}


async def test_the_data_policy_holds_for_prompts_too(network: Network, tmp_path: Path) -> None:
    policy = "middleware: [{data_policy: {text: true, results: false, redact: ['teapot']}}]\n"
    async with FakeOpenAI([calls([("discovery_find", {"query": "mia"})]), text("Tea.")]) as server:
        *_, records = await talk(network, write_agent(tmp_path, server.base_url, policy))
    kept = json.dumps([it["body"] for it in records if it["kind"] == "prompt"])
    assert "teapot" not in kept
    assert "Be brief." in kept
    [result] = [
        it for record in records if record["kind"] == "prompt" for it in record["body"]["parts"] if it["role"] == "tool"
    ]
    assert "mia" not in result["text"]


@pytest.mark.parametrize("char", ["a", "\u00e9", "\U0001f600", "\x00", '"'])
def test_a_prompt_beyond_a_record_is_cut_and_says_so(char: str) -> None:
    messages = (SystemMessage(char * 400_000), UserMessage("The end."))
    prompt = fit_prompt(describe_prompt(ModelRequest(messages, (), "auto", "desk", "r", 1)), 262_144)
    assert prompt.is_cut
    assert prompt.parts[1].text == "The end."
    written = {"parts": [[it.role, it.text] for it in prompt.parts]}
    assert len(json.dumps(written, ensure_ascii=False).encode()) < 262_144


def test_a_prompt_of_very_many_messages_keeps_the_newest() -> None:
    messages = tuple(UserMessage(f"message {number} " + "x" * 60) for number in range(5_000))
    prompt = fit_prompt(describe_prompt(ModelRequest(messages, (), "auto", "desk", "r", 1)), 262_144)
    assert prompt.is_cut
    assert prompt.parts[-1].text.startswith("message 4999")
