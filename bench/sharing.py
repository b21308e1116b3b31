"""Share of a request that repeats the previous request, its tokens, and the growth of the ledger in a long
conversation.

    ./dev bench sharing [--quick] [--json FILE]

An agent in this process reacts to one person sixty times: in one thread, in five threads in turn, or in twenty threads
by Zipf's law. A provider caches the beginning of a prompt up to the first difference. The messages of consecutive
requests are therefore compared, including the system message. The tools are left out, because a provider puts them
first and they stay the same. No time is measured. docs/performance.md has the table, and docs/costs.md explains how to
reduce costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path

from loops import INSTRUCTION
from report import tell

from roundelay.agents import AgentPolicy, SimpleAgentRunner
from roundelay.agents.models.model import ModelReply, ModelRequest, OnDelta, ToolCall
from roundelay.agents.models.tokens import count_request, estimate_tokens
from roundelay.agents.tools import tool
from roundelay.app import Network
from roundelay.network.client import AnyMessage

REACTIONS = 60
WAYS = ("one thread", "five threads in turn", "twenty threads by Zipf's law")
_SAID = "Message {}: the delivery of Monday came without the papers for customs, and the driver says that no one asked him for them."
_ANSWER = (
    "Noted, as number {}. The papers are on their way to you; the customs office has them too, and knows of the delay."
)

CALLS, CONVERSATION_CHARS = 100, 800_000
"""Number of calls and size of the long reaction: about 200,000 tokens of tool results, at 4 characters per token."""


@dataclass(frozen=True)
class Shared:
    """Mean values for one order of threads: the percentage of a request that repeats the previous request, and
    estimated tokens.
    """

    way: str
    shared: float
    messages: float
    """Number of tokens in the messages, including cached ones."""
    fresh: float
    """Number of tokens that no cache can contain."""
    tools: float


@dataclass(frozen=True)
class Growth:
    """Sizes of one reaction with ``calls`` model calls in bytes: of its requests, of its content, and of the ledger's
    growth.
    """

    calls: int
    requests: int
    said: int
    ledger: int


class Listener:
    """A model that answers every request with text, and stores all requests."""

    name = "listener"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.requests.append(request)
        return ModelReply(_ANSWER.format(len(self.requests)))


class Reader:
    """A model that calls a tool in each turn except the last, and adds up the size of its requests."""

    name = "reader"

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self.sent = 0

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        self.sent += len(json.dumps([_plain(it) for it in request.messages]))
        if request.turn < self._calls:
            return ModelReply(None, (ToolCall(f"c{request.turn}", "read_page", json.dumps({"number": request.turn})),))
        return ModelReply("All of it is read.")


def choose_threads(way: str, reactions: int) -> list[int]:
    """Return the thread of each message."""
    if way == WAYS[0]:
        return [0] * reactions
    if way == WAYS[1]:
        return [number % 5 for number in range(reactions)]
    return random.Random(7).choices(range(20), [1 / rank for rank in range(1, 21)], k=reactions)


async def measure_sharing(way: str, reactions: int, policy: AgentPolicy | None = None) -> Shared:
    """Let an agent answer messages in the threads of this order, and compare its requests."""
    model = Listener()
    newest: dict[int, AnyMessage] = {}  # the last answer in each thread, to which the next message replies
    async with Network.open() as network:
        asker = await network.join("asker", kind="human")
        await asker.join_channel("desk")
        runner = SimpleAgentRunner("keeper", instruction=INSTRUCTION, model=model, channels=["desk"], policy=policy)
        client = await network.join("keeper", role="reactor", card=runner.describe_card())
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(client))
            await runner.ready()
            answers = asker.deliveries()
            for number, thread in enumerate(choose_threads(way, reactions)):
                said = _SAID.format(number)
                await (asker.reply(newest[thread], said) if thread in newest else asker.post("desk", said))
                answer = await anext(answers)
                newest[thread] = answer.message
                await answer.ack()
            await runner.stop()
    written = [json.dumps([_plain(it) for it in request.messages]) for request in model.requests]
    shares = [_count_shared(one, other) / len(other) for one, other in pairwise(written)]
    messages = [count_request(it.messages, (), estimate_tokens) for it in model.requests]
    fresh = [round(count * (1 - share)) for count, share in zip(messages[1:], shares, strict=True)]
    tools = count_request((), model.requests[-1].tools, estimate_tokens)
    mean = statistics.mean
    return Shared(way, round(mean(shares) * 100, 1), round(mean(messages)), round(mean(fresh)), tools)


async def measure_growth(calls: int, chars: int) -> Growth:
    """Let an agent read a long text page by page in one reaction. The ledger is in a file."""

    @tool(idempotent=True)
    def read_page(number: int) -> str:
        """Read a page of the text."""
        return f"Page {number}: {_fill(chars // calls)}"

    model = Reader(calls)
    policy = AgentPolicy(max_turns=calls, max_same_calls=calls)
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as folder:
        path = Path(folder) / "ledger.db"
        async with Network.open(path) as network:
            asker = await network.join("asker", kind="human")
            runner = SimpleAgentRunner("keeper", instruction=INSTRUCTION, model=model, tools=[read_page], policy=policy)
            client = await network.join("keeper", role="reactor", card=runner.describe_card())
            async with asyncio.TaskGroup() as group:
                group.create_task(runner.run(client))
                await runner.ready()
                await asker.send_text("keeper", "Read all of it.")
                await (await anext(asker.deliveries())).ack()
                await runner.stop()
        return Growth(calls, model.sent, chars, path.stat().st_size)


def _fill(chars: int) -> str:
    words = ("customs", "papers", "driver", "delivery", "Monday", "office", "warehouse", "pallet")
    return " ".join(islice(cycle(words), chars // 8))[:chars].ljust(chars, ".")


def _plain(message: object) -> dict[str, object]:
    return {"role": type(message).__name__, "content": getattr(message, "content", None)}


def _count_shared(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def describe(shared: Sequence[Shared], growth: Growth) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| messages come | shared with the request before | tokens of messages | of these fresh | tokens of tools |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(f"| {it.way} | {it.shared:.0f}% | {it.messages:,.0f} | {it.fresh:,.0f} | {it.tools:,.0f} |" for it in shared),
        "",
        f"One reaction of {growth.calls} model calls, {growth.said:,} characters read: its requests have {growth.requests:,} bytes together, "
        f"and the ledger grows by {growth.ledger:,}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a run of a few seconds, whose values are not reliable")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    reactions, calls = (12, 10) if options.quick else (REACTIONS, CALLS)
    shared = []
    for way in WAYS:
        tell(f"{reactions} reactions: {way}")
        shared.append(asyncio.run(measure_sharing(way, reactions)))
    tell(f"one reaction of {calls} model calls")
    growth = asyncio.run(measure_growth(calls, CONVERSATION_CHARS * calls // CALLS))
    if options.json is not None:
        kept = {"sharing": [asdict(it) for it in shared], "growth": asdict(growth)}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(describe(shared, growth))


if __name__ == "__main__":
    main()
