"""What goes to the model: CPU of rendering a long conversation, and how much of a prompt is that of the reaction before.

A provider's cache holds the beginning of a prompt, up to its first difference, so that only what comes after it is paid in full. What is
compared are the first requests of consecutive reactions, as an OpenAI-compatible server gets them; the tools, which such a server puts in
front, are left out of the shares, for they are the same each time and would only flatter them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from typing import Any

from loops import INSTRUCTION
from servers import Bench, Subject
from table import Line
from wire import LoadError, make_token

from roundelay import NetworkClient, SimpleAgentRunner
from roundelay.agents.features.prompt_budget import PromptBudget
from roundelay.agents.models.model import ChatMessage, ModelReply, ModelRequest, OnDelta
from roundelay.agents.prompt import ConversationPrompt
from roundelay.network.messages import DirectMessage, MessageThread

THREADS, PER_THREAD = 20, 10
BUDGET = 6000  # tokens, about half of what they are
HUB = Subject("hub normal", "normal")
AGENT_ID, ASKER_ID = "keeper", "asker"
TIMEOUT_S = 30.0
_TEXT = (
    "The delivery of Monday came without the papers for customs, and the driver says that <no one> asked him for them. "
)


class Rendering:
    """Milliseconds of CPU to render the conversation prompt of 20 threads of 10 messages, in jinja's sandbox; and to choose among them by a
    budget that leaves half of them out."""

    name = "prompt"

    def __init__(self, times: int) -> None:
        self._times = times
        self._ms: list[float] = []
        self._choosing_ms: list[float] = []
        self._chars = 0
        self._chosen = 0

    def run_round(self, number: int) -> str:
        threads = {thread.thread_id: thread for thread in map(_make_thread, range(THREADS))}
        incoming = _make_message(THREADS - 1, PER_THREAD)
        prompt = ConversationPrompt()
        self._chars = len(prompt.render(threads, incoming.thread_id, incoming))
        started_s = time.process_time()
        for _ in range(self._times):
            prompt.render(threads, incoming.thread_id, incoming)
        self._ms.append((time.process_time() - started_s) / self._times * 1000)
        budget = PromptBudget(BUDGET)
        started_s = time.process_time()
        for _ in range(self._times):
            chosen, _incoming = budget.select_messages(threads, incoming)
        self._choosing_ms.append((time.process_time() - started_s) / self._times * 1000)
        self._chosen = sum(len(it.messages) for it in chosen.values())
        return f"{self._ms[-1]:.2f} ms CPU for {self._chars:,} characters"

    def lines(self) -> list[Line]:
        title = f"rendering {THREADS} threads of {PER_THREAD} messages"
        chosen = f"{self._chosen} of {THREADS * PER_THREAD} messages"
        return [
            Line("rendering", title, self._ms, 3.0, None, True, "ms", f"{self._chars:,} characters"),
            Line("prompt_budget", "choosing among them by a budget", self._choosing_ms, None, None, True, "ms", chosen),
        ]

    def details(self) -> dict[str, Any]:
        return {"characters": self._chars, "ms": self._ms, "choosing_ms": self._choosing_ms}


def _make_thread(number: int) -> MessageThread:
    messages = [_make_message(number, place) for place in range(PER_THREAD)]
    return MessageThread(thread_id=messages[0].thread_id, messages=[*messages])


def _make_message(number: int, place: int) -> DirectMessage:
    seq = number * (PER_THREAD + 1) + place + 1
    other = f"colleague-{number:02d}"
    sender, to = (other, AGENT_ID) if place % 2 == 0 else (AGENT_ID, other)
    text = _TEXT * 2 if place % 3 == 0 else _TEXT
    return DirectMessage(
        seq=seq, message_id=f"m{seq}", sender_id=sender, sender_kind="agent", to=f"agent:{to}",
        thread_id=f"direct:{other}~{AGENT_ID}", root=1, hops=0, sent_at=0, content={"text": f"{seq}: {text}"},
    )  # fmt: skip


class _Listener:
    """A model that answers every request with a text, and keeps what it was asked."""

    name = "listener"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.requests.append(request)
        return ModelReply(f"Noted, as number {len(self.requests)}. The papers are on their way to you.")


class Prefix:
    """Percent of a prompt that is the beginning of the next one, over consecutive reactions in one thread."""

    name = "prefix"

    def __init__(self, bench: Bench, reactions: int) -> None:
        self._bench = bench
        self._reactions = reactions
        self._shares: list[list[float]] = []

    def run_round(self, number: int) -> str:
        with self._bench.start(HUB) as (url, _pid):
            pairs = itertools.pairwise(asyncio.run(_converse(url, self._reactions)))
        self._shares.append([_count_shared(*pair) / len(pair[0]) * 100 for pair in pairs])
        return f"{statistics.mean(self._shares[-1]):.0f}% shared by {self._reactions} reactions"

    def lines(self) -> list[Line]:
        means = [statistics.mean(shares) for shares in self._shares]
        steps = ", ".join(f"{share:.0f}" for share in self._shares[-1])
        title = f"prompt shared with the one before, {self._reactions} reactions"
        return [Line("prefix", title, means, unit="%", beside=f"one after the other: {steps}")]

    def details(self) -> dict[str, Any]:
        return {"reactions": self._reactions, "percent": self._shares}


async def _converse(url: str, reactions: int) -> list[str]:
    """Let an agent react to so many messages of one participant; gives the messages of its requests as JSON."""
    model = _Listener()
    runner = SimpleAgentRunner(AGENT_ID, instruction=INSTRUCTION, model=model, url=url, token=make_token(AGENT_ID))
    async with asyncio.TaskGroup() as group:
        group.create_task(runner.run())
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await runner.ready()
                await _ask(url, reactions)
        except TimeoutError:
            raise LoadError(f"the agent answered {len(model.requests)} of {reactions} messages") from None
        finally:
            await runner.stop()
    if len(model.requests) != reactions:
        raise LoadError(f"{reactions} reactions asked the model {len(model.requests)} times")
    return [json.dumps([_plain(it) for it in request.messages]) for request in model.requests]


async def _ask(url: str, messages: int) -> None:
    """Write to the agent and wait for its answer, so often."""
    async with NetworkClient(ASKER_ID, url, token=make_token(ASKER_ID)) as client:
        answers = client.deliveries()
        for number in range(messages):
            await client.send_text(AGENT_ID, f"Message {number}. {_TEXT}", requires_response=True)
            await (await anext(answers)).ack()


def _plain(message: ChatMessage) -> dict[str, object]:
    return {"role": type(message).__name__, "content": message.content}


def _count_shared(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
