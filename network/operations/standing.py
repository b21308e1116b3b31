"""The standing of an agent in a conversation: the answers that it owes, the participants for whom it waits, and the
rest of the budget. ``network.window`` adds the standing to the messages of a prompt if it is not empty.

This module mainly uses tables in memory. It reads heads and the budget from the ledger only if there is something to
show, so an ordinary prompt needs no additional reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from roundelay.network.config import Limits
from roundelay.network.core.open_items import OpenDelivery
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.tables import ConversationBudget, LookupRequest, OpenReaction, Question
from roundelay.network.core.usage import total_usage

from .reading import Reading

log = logging.getLogger(__name__)


class PromptAdmission(Protocol):
    """The rule that decides which messages may enter the prompt for ``trigger``. Implemented by `views.View`."""

    trigger: MessageHead | None
    required: frozenset[str]

    @property
    def shows_own_thread_alone(self) -> bool: ...

    async def load(self, heads: Iterable[MessageHead]) -> None: ...

    async def shows(self, head: MessageHead | None) -> bool: ...


MAX_SHOWN = 3
"""Maximum number of entries in each part of a standing: owed answers, awaited participants, and sentences from mods."""
LOW_SHARE = 4
"""Divisor of the budget. A prompt shows the rest of the budget if at most 1/4 of the messages or of the tokens is
left."""


async def describe_standing(reading: Reading, view: PromptAdmission) -> dict[str, Any]:
    """Return the standing of the caller at the view's trigger. It includes only messages before the trigger that may
    enter the prompt."""
    trigger = view.trigger
    assert trigger is not None, "a standing has a trigger"
    state, caller = reading.hub.state, reading.origin.agent_id
    owed: dict[int, int] = {}
    for reaction in state.reactions_of(caller).values():
        head = reaction.trigger_head
        # An answer is owed only to a direct message or to a message from a person.
        if head.seq < trigger.seq and (head.kind == "direct" or head.sender_kind == "human"):
            owed[head.seq] = reaction.at
    awaited: dict[int, tuple[int, list[str]]] = {}
    for key, value in state.open_in(trigger.root).items():
        match value:
            case OpenDelivery() if value.sender_id == caller and value.thread_id.startswith("direct:"):
                seq, since, names = int(key.partition(" ")[2]), value.at, [*value.waiting, *value.answers]
            case OpenReaction() if value.trigger_head.sender_id == caller and value.trigger_head.kind == "direct":
                seq, since, names = value.trigger, value.at, [value.agent_id]
            case Question() if value.sender_id == caller:
                agent_id, _, text = key.partition(" ")[2].partition("/")
                seq, since, names = int(text), value.at, [agent_id]
            case _:
                continue
        if seq < trigger.seq:
            awaited[seq] = since, names
    found: dict[str, Any] = {}
    if owed or awaited:
        heads = await reading.hub.ledger.heads({*owed, *awaited})
        await view.load(heads.values())
        shown = [seq for seq in sorted(heads) if await view.shows(heads[seq])]
        owes = [{"to": heads[seq].sender_id, "seq": seq, "since": owed[seq]} for seq in shown if seq in owed]
        waits = [
            {"for": name, "seq": seq, "since": awaited[seq][0]}
            for seq in shown
            if seq in awaited
            for name in awaited[seq][1]
        ]
        found |= {"owes": owes[:MAX_SHOWN]} if owes else {}
        found |= {"waits": waits[:MAX_SHOWN]} if waits else {}
    if not view.shows_own_thread_alone and (lines := _ask_mods(reading, trigger, view.required)):
        found["lines"] = lines
    limits = reading.hub.limits
    # Read the budget only if it may be nearly used up. A conversation cannot have more messages than the log has rows
    # since its root. But a few messages can use any number of tokens.
    is_long = trigger.seq - trigger.root >= limits.max_root_messages - limits.max_root_messages // LOW_SHARE
    if is_long or limits.max_root_tokens is not None:
        budget = await _find_budget(reading, trigger.root)
        found |= _describe_rest(budget, limits) if budget is not None else {}
    return found


def _describe_rest(budget: ConversationBudget, limits: Limits) -> dict[str, int]:
    """Return the rest of the budget if at most 1/`LOW_SHARE` of its messages or tokens is left."""
    messages = limits.max_root_messages + budget.extra_messages - budget.messages
    is_low = messages <= limits.max_root_messages // LOW_SHARE
    used = total_usage(budget.spent)
    tokens = used.prompt_tokens + used.completion_tokens
    rest = {"tokens_used": tokens} if tokens else {}
    if limits.max_root_tokens is not None:
        left = limits.max_root_tokens * (1 + budget.resumed) - tokens
        is_low = is_low or left <= limits.max_root_tokens // LOW_SHARE
        rest = {"tokens_left": max(0, left)}
    return {"messages_left": max(0, messages), **rest} if is_low else {}


def _ask_mods(reading: Reading, trigger: MessageHead, listeners: frozenset[str]) -> list[str]:
    lines: list[str] = []
    for mod in reading.hub.mods:
        if mod.overrides("standing"):
            try:
                lines += mod.standing(msgspec.structs.replace(reading, mod_id=mod.id), trigger, listeners)
            # Continue without this mod's sentences, because an incomplete prompt is better than none.
            except Exception:
                log.exception("a mod's standing hook failed", extra={"mod": mod.id})
    return lines[:MAX_SHOWN]


async def _find_budget(reading: Reading, root: int) -> ConversationBudget | None:
    cold = (await reading.hub.ledger.lookup(LookupRequest(set(), set(), {("root", str(root))}))).cold
    budget: ConversationBudget | None = cold.get(("root", str(root)))
    return budget
