"""Answer ``network.explain``, ``network.effects``, ``network.work`` and ``network.cost_report`` on the node.

Implements `RunReader`. The command line reads the same values through `why`, `timeline` and `cost`. This module adds
the times, prices and messages that a page needs. The first request imports the modules that need the agents' code, in a
thread, so that a node starts fast.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from roundelay.network.errors import TooLarge

if TYPE_CHECKING:
    from roundelay.agents.models.tokens import Prices
    from roundelay.network.operations.reading import Call, CallSelection, CostGroup
    from roundelay.runs.reading import RecordedReaction
    from roundelay.runs.why import CauseStep

MAX_STEPS = 100
"""Maximum number of messages in one explanation."""
MAX_GROUPS = 1000
"""Maximum number of groups in a cost report, which contains the most expensive groups."""
MAX_S = 10.0
"""Maximum time for one explanation, in seconds. After this time the answer ends with ``next``."""


class NodeRunReader:
    """Explains runs from the records that the caller may see, with the prices that are known in this process."""

    def __init__(self, prices: Prices | None = None) -> None:
        self._prices = prices

    async def explain(self, call: Call, seq: int, max_bytes: int) -> dict[str, Any]:
        """Return the steps from a message up to its root. If not all steps fit, ``next`` names the message at which to
        continue."""
        prices = await self._load_prices()
        from roundelay.runs.hub_source import HubSource
        from roundelay.runs.why import explain_step, pair_with_reactions

        source = HubSource(call)
        page = await call("network.why", {"seq": seq})
        pairs = pair_with_reactions(page["chain"])
        next_seq = None
        if page["has_more"]:
            # The page may end between a message and its reaction, so the next answer starts at the last message.
            next_seq = pairs.pop()[0].seq if len(pairs) > 1 else pairs[0][0].cause
        steps: list[dict[str, Any]] = []
        size, end_s = 0, time.monotonic() + MAX_S
        for message, sent_in in pairs:
            if steps and (len(steps) == MAX_STEPS or time.monotonic() > end_s):
                next_seq = message.seq
                break
            try:
                step = _step_to_json(await explain_step(source, message, sent_in), prices)
            except TooLarge:
                if not steps:
                    raise
                next_seq = message.seq  # the next answer has room for this step
                break
            size += len(msgspec.json.encode(step))
            # Return the first step even if it is too large: otherwise the caller would request the same step forever.
            if steps and size > max_bytes // 2:
                next_seq = message.seq
                break
            steps.append(step)
        answer: dict[str, Any] = {"steps": steps, "has_prices": _has_prices()}
        return answer if next_seq is None else {**answer, "next": next_seq}

    async def list_effects(self, call: Call, seq: int, limit: int, max_bytes: int) -> dict[str, Any]:
        """Return the tree of the messages and reactions that followed from a message."""
        await self._load_prices()
        from roundelay.runs.hub_source import HubSource
        from roundelay.runs.why import follow

        effect = await follow(HubSource(call), seq, limit)
        return {**effect.to_json(), "has_more": effect.has_more}

    async def read_work(self, call: Call, agent_id: str, reaction: str, max_bytes: int) -> dict[str, Any]:
        """Return one reaction with its state, steps, and the calls and reviews in it."""
        prices = await self._load_prices()
        from roundelay.runs.hub_source import HubSource
        from roundelay.runs.work import list_messages, work_to_json

        source = HubSource(call)
        recorded = await source.reaction(agent_id, reaction)
        messages = await source.messages(sorted(list_messages(recorded.work)))
        work = [work_to_json(it, messages) for it in recorded.work]
        return {**reaction_to_json(recorded, prices), "work": work, "has_prices": _has_prices()}

    async def add_up_cost(self, call: Call, by: CostGroup, wanted: CallSelection) -> dict[str, Any]:
        """Return the sums of the selected calls, by group."""
        prices = await self._load_prices()
        from roundelay.runs.cost import CallFilter, read_cost
        from roundelay.runs.hub_source import HubSource

        chosen = CallFilter(wanted.agent_id, wanted.thread_id, wanted.root, since=wanted.since)
        report = (await read_cost(HubSource(call), chosen, by, prices)).to_json()
        groups = report["groups"]
        assert isinstance(groups, list)
        is_cut = len(groups) > MAX_GROUPS
        return {**report, "groups": groups[:MAX_GROUPS], "has_more": is_cut, "has_prices": _has_prices()}

    async def _load_prices(self) -> Prices:
        if self._prices is None:
            self._prices = await asyncio.to_thread(_load)
        return self._prices


def _load() -> Prices:
    """Import the modules and read the price table. Called in a thread, because both would block the hub's event
    loop."""
    import roundelay.runs.cost
    import roundelay.runs.hub_source
    import roundelay.runs.why  # noqa: F401
    from roundelay.agents.models.model import Usage
    from roundelay.agents.models.tokens import Prices

    prices = Prices()
    prices.cost("gpt-4o", Usage(1, 1))  # the first lookup reads the price table
    return prices


def _has_prices() -> bool:
    from roundelay.agents.models.tokens import has_price_table

    return has_price_table()


def reaction_to_json(reaction: RecordedReaction, prices: Prices) -> dict[str, Any]:
    """Return a reaction's state and steps as JSON. Records of another program may contain only the trigger and the
    end."""
    return {
        "trigger": reaction.trigger,
        "thread_id": reaction.thread_id,
        "state": reaction.state,
        "status": reaction.status,
        "turns": reaction.turns,
        "reason": reaction.reason,
        "manifest": list(reaction.manifest),
        "usage": msgspec.to_builtins(reaction.usage),
        "is_readable": reaction.run is not None,
        "started_at": int(reaction.records[0]["at"]) if reaction.records else 0,
        "ended_at": next((int(it["at"]) for it in reaction.records if it["kind"] == "finished"), None),
        "steps": steps_to_json(reaction, prices),
    }


def steps_to_json(reaction: RecordedReaction, prices: Prices) -> list[dict[str, Any]]:
    """Return the steps of a reaction as JSON. Model calls have a cost in dollars (``usd``), which is None if the price
    is unknown."""
    from roundelay.runs.timeline import list_steps

    steps = []
    for step in list_steps(reaction):
        value = step.to_json()
        if step.kind == "model":
            usd = prices.cost(step.details["model"], step.usage) if step.usage is not None else None
            value["usd"] = None if usd is None else float(usd)
        steps.append(value)
    return steps


def _step_to_json(step: CauseStep, prices: Prices) -> dict[str, Any]:
    value = step.to_json()
    if step.reaction is not None:
        # A caller who may not read the records learns only that there was a reaction.
        value["reaction"]["steps"] = [] if step.is_hidden else steps_to_json(step.reaction, prices)
        messages = sorted(step.messages.values(), key=lambda message: message.seq)
        value["messages"] = [message.model_dump(mode="json", exclude_none=True) for message in messages]
    return value
