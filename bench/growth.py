"""CPU time of a reaction after 1 and after 10,000 conversations of the same person.

    ./dev bench growth [--past 1,1000,10000] [--reactions 200]

The hub, the agent and the person run in this process, on a ledger in memory. The agent answers at once, without a model
server. Times are medians of process time, so other processes on the machine do not count. docs/costs.md contains the
results.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time

from roundelay.agents import AgentPolicy, SimpleAgentRunner
from roundelay.agents.models.scripted import ScriptedModel, say
from roundelay.agents.policy import PromptForm
from roundelay.app import Network
from roundelay.network.config import Limits

LIMITS = Limits(root_messages_per_s=1_000_000, sends_per_s=1_000_000)
AT_ONCE = 500


async def measure(past: int, reactions: int, form: PromptForm, *, is_new: bool) -> float:
    """Return the median CPU time of one answered message in milliseconds, after ``past`` handled conversations.

    With ``is_new``, each measured message begins a new conversation. Otherwise all measured messages are in the main
    thread.
    """
    async with Network.open(limits=LIMITS) as network:
        async with await network.join("zoe", kind="human") as zoe, await network.join("desk") as handled:
            deliveries = handled.deliveries()
            for start in range(0, past, AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, past))
                await asyncio.gather(*(zoe.send_text("desk", "Hello", conversation=f"past{it}") for it in numbers))
                for _ in numbers:
                    await (await anext(deliveries)).ack()
        # Exclude the ledger from garbage collection. A real ledger is in a file, so the collector would not traverse
        # its rows.
        gc.collect()
        gc.freeze()
        policy = AgentPolicy(prompt=form)
        model = ScriptedModel(lambda request: say("Fine."))
        runner = SimpleAgentRunner("desk", instruction="You answer.", model=model, policy=policy)
        client = await network.join("desk", role="reactor", card=runner.describe_card())
        zoe = await network.join("zoe", kind="human")
        times: list[float] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(client))
            await runner.ready()
            answers = zoe.deliveries()
            for number in range(reactions):
                started_s = time.process_time()
                await zoe.send_text("desk", "Hello", conversation=f"new{number}" if is_new else None)
                await (await anext(answers)).ack()
                times.append((time.process_time() - started_s) * 1000)
            await runner.stop()
    gc.unfreeze()
    return statistics.median(times[reactions // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past", default="1,1000,10000", help="numbers of earlier conversations")
    parser.add_argument("--reactions", type=int, default=200)
    options = parser.parse_args()
    sizes = [int(it) for it in options.past.split(",")]
    for form, is_new in (("lean", True), ("lean", False), ("full", True)):
        times = [asyncio.run(measure(past, options.reactions, form, is_new=is_new)) for past in sizes]
        where = "new conversation" if is_new else "main thread"
        told = ", ".join(f"{past:,}: {ms:.2f} ms" for past, ms in zip(sizes, times, strict=True))
        print(f"{form}, {where}: {told} (ratio {times[-1] / times[0]:.2f})", flush=True)


if __name__ == "__main__":
    main()
