"""Tests of the prompts and replies of a model as small as the local one, with a fake server.
tests/integration/test_local_model.py uses the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from roundelay.agents.models import local
from roundelay.agents.models.local import NOTHING, LocalModel
from roundelay.agents.models.small_chat import remove_echoes
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.app import Network
from tests.support.agents import Person, running
from tests.support.fake_openai import FakeOpenAI, Reply, text


class Llama(FakeOpenAI):
    """A server that also accepts llama.cpp's parameters."""

    def _refuse(self, method: str, path: str, headers: Mapping[str, str], body: dict[str, Any]) -> Reply | None:
        return super()._refuse(method, path, headers, {key: it for key, it in body.items() if key != "grammar"})


class Engine:
    """Stand-in for `LocalServer` with a fake provider and without model weights."""

    name, api_key = "tiny", "key"
    replies: list[Reply]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.provider = Llama(list(self.replies))
        self.base_url = ""

    async def __aenter__(self) -> Engine:
        await self.provider.__aenter__()
        self.base_url = self.provider.base_url
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.provider.__aexit__(None, None, None)


@pytest.fixture
async def model(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncIterator[LocalModel]:
    monkeypatch.setattr(Engine, "replies", [text(it) for it in request.param], raising=False)
    monkeypatch.setattr(local, "LocalServer", Engine)
    async with LocalModel() as made:
        yield made


async def ask(network: Network, model: LocalModel, *said: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the answers to a person's messages, and the server's requests."""
    runner = SimpleAgentRunner("guide", instruction="You are guide.", model=model)
    mia = await Person.join(network, "mia")
    async with running(network, runner):
        answers = [(await mia.ask("guide", it)).text for it in said]
    engine: Any = model._server
    return answers, [dict(it) for it in engine.provider.requests]


@pytest.mark.parametrize("model", [["Hello, I can help.", "It is blue."]], indirect=True)
async def test_it_reads_a_plain_chat_and_is_offered_no_tools(network: Network, model: LocalModel) -> None:
    answers, requests = await ask(network, model, "Good morning!", "Which colour has the sky?")
    assert answers == ["Hello, I can help.", "It is blue."]
    short = "You are a small language model. Answer the last message in one or two short sentences."
    assert requests[1]["messages"] == [
        {"role": "system", "content": f"You are guide.\n{short}"},
        {"role": "user", "content": "Good morning!"},
        {"role": "assistant", "content": "Hello, I can help."},
        {"role": "user", "content": "Which colour has the sky?"},
    ]
    assert requests[1]["model"] == "tiny"
    assert not {"tools", "response_format"} & requests[1].keys()


ECHO = "My cat is called Tom and likes fish."


@pytest.mark.parametrize(
    ("model", "answer"),
    [([ECHO, "What a nice cat!"], "What a nice cat!"), ([ECHO, ECHO.upper()], NOTHING)],
    indirect=["model"],
)
async def test_a_persons_own_words_never_come_back(network: Network, model: LocalModel, answer: str) -> None:
    answers, requests = await ask(network, model, ECHO)
    assert answers == [answer]
    assert [it.get("temperature") for it in requests] == [None, 0.9]


@pytest.mark.parametrize(
    ("reply", "said", "kept"),
    [
        ("Hello! I can help.", "hello", "I can help."),
        ("You said: I like the sea.", "I like the sea", ""),
        ("the sea is deep", "Is it so that the sea is deep?", ""),
        ("Hi. I am Bob.", "Hi. I am Bob.", ""),
        ("Tom.", "My cat is called Tom. What is its name?", "Tom."),
        ("It is deep. It is deep. It is deep.", "Tell me of it", "It is deep."),
        ("One. Two. Three. Four.", "Count", "One. Two. Three."),
        ("...", "What?", ""),
    ],
)
def test_what_is_kept_of_a_reply(reply: str, said: str, kept: str) -> None:
    assert remove_echoes(reply, [said]) == kept


def test_what_it_said_before_is_left_out_beside_something_new() -> None:
    before = ["Yes. I can help."]
    assert remove_echoes("It is blue. I can help.", ["Which colour?"], before) == "It is blue."
    assert remove_echoes("I can help.", ["Can you?"], before) == "I can help."


def test_a_reply_that_broke_off_ends_with_a_whole_sentence() -> None:
    assert remove_echoes("The sea is deep. It has many", ["Go on"], is_cut=True) == "The sea is deep."
    assert remove_echoes("The sea has many", ["Go on"], is_cut=True) == "The sea has many"
