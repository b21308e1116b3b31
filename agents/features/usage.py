"""What models used: each call by its record, and sums of them by agent, model, thread, root, reaction, turn, call or
day. Pure.

A call is one record of the ledger, as ``network.usage`` gives it: a reply, of an agent that runs inside of a call too;
a review; and the end of a reaction, which tells what no other record told. `roundelay cost` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, get_args

from pydantic import BaseModel

from roundelay.agents.models.model import Usage

from .prices import Prices

By = Literal["agent", "model", "thread", "root", "reaction", "turn", "call", "day"]
GROUPS: tuple[By, ...] = get_args(By)


class UsedCall(BaseModel):
    """One record that tells of tokens. ``path`` is empty but for an agent inside of a call."""

    seq: int
    at: int
    kind: str
    agent_id: str
    reaction: str
    path: str = ""
    turn: int | None = None
    model: str = ""
    usage: Usage = Usage()
    tools: list[str] = []
    thread_id: str | None = None
    root: int | None = None


@dataclass(slots=True)
class Total:
    """A sum. ``unpriced``: models whose price is not known; ``cost`` is that of the others."""

    calls: int = 0
    usage: Usage = field(default_factory=Usage)
    tools: int = 0
    cost: Decimal = Decimal(0)
    unpriced: set[str] = field(default_factory=set)

    def add(self, call: UsedCall, prices: Prices) -> None:
        is_reply = call.kind == "model_reply"
        self.calls += is_reply
        self.usage += call.usage
        self.tools += len(call.tools)
        if not call.usage.prompt_tokens and not call.usage.completion_tokens:
            return
        cost = prices.cost(call.model, call.usage) if call.model else None
        if cost is None:
            self.unpriced.add(call.model)
        else:
            self.cost += cost


class Reader:
    """Reads the pages of ``network.usage`` of one agent, oldest first. It remembers of each open reaction what was told
    of it."""

    def __init__(self) -> None:
        self._told: dict[str, Usage] = {}

    def read(self, page: Mapping[str, Any]) -> Iterator[UsedCall]:
        """Give the calls of a page. Of the end of a reaction, only what it tells beyond its replies and reviews;
        nothing for none."""
        places = page["reactions"]
        for written in page["calls"]:
            place = places.get(written["reaction"], {})
            try:
                call = UsedCall(
                    **{**written, "agent_id": page["agent_id"]},
                    thread_id=place.get("thread_id"),
                    root=place.get("root"),
                )
            except ValueError:  # another program's, of its own shape
                continue
            if call.kind != "finished":
                self._told[call.reaction] = self._told.get(call.reaction, Usage()) + call.usage
                yield call
                continue
            rest = _subtract(call.usage, self._told.pop(call.reaction, Usage()))
            if rest != Usage():
                yield call.model_copy(update={"usage": rest})


def _subtract(total: Usage, told: Usage) -> Usage:
    return Usage(
        max(0, total.prompt_tokens - told.prompt_tokens),
        max(0, total.completion_tokens - told.completion_tokens),
        max(0, total.cached_tokens - told.cached_tokens),
        max(0, total.reasoning_tokens - told.reasoning_tokens),
    )


def add_up(calls: Iterable[UsedCall], by: By, prices: Prices, totals: dict[tuple[str, ...], Total]) -> None:
    """Add calls to the sums of their groups, by their names (`HEADS`). A record of the loop's own that used nothing (a
    review that asked no model) makes no group."""
    for call in calls:
        if call.kind != "model_reply" and not call.tools and call.usage == Usage():
            continue
        group = tuple(_NAMES[head](call) for head in HEADS[by])
        totals.setdefault(group, Total()).add(call, prices)


HEADS: dict[By, tuple[str, ...]] = {
    "agent": ("agent", "model"),
    "model": ("model",),
    "thread": ("thread", "agent", "model"),
    "root": ("root", "agent", "model"),
    "reaction": ("reaction", "agent", "model"),
    "turn": ("reaction", "agent", "turn", "model"),
    "call": ("record", "agent", "turn", "model"),
    "day": ("day", "agent", "model"),
}
"""What the names of a group are."""

_NAMES: dict[str, Callable[[UsedCall], str]] = {
    "agent": lambda it: it.agent_id,
    "model": lambda it: it.model or "-",
    "thread": lambda it: it.thread_id or "-",
    "root": lambda it: f"#{it.root}" if it.root is not None else "-",
    "reaction": lambda it: it.reaction,
    "turn": lambda it: f"{it.turn or '-'}{f' [{it.path}]' if it.path else ''}",
    "record": lambda it: f"#{it.seq}",
    "day": lambda it: f"{datetime.fromtimestamp(it.at / 1000, UTC):%Y-%m-%d}",
}
