"""The ``network.*`` operations that every hub has (docs/protocol.md), each a plain function, listed here by who may
call it.

The first argument of a function is what it is given: a `ChangeSet` where it changes something, in `apply`, or a
`Reading`, which is awaited. The others are the operation's own; the first paragraph of the docstring is its
description. Where one shows more to operators than to others, or others' things, the function itself says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from inspect import iscoroutinefunction
from typing import Any

from roundelay.network.core.mod import Mod, Operation, make_operation

from . import (
    conversation,
    explaining,
    inbox,
    memories,
    node_agents,
    operators,
    reactions,
    read_state,
    receiving,
    searching,
    views,
)

FOR_EVERYBODY: tuple[Callable[..., Any], ...] = (
    conversation.cancel,
    conversation.give,
    conversation.info,
    conversation.list_agents,
    conversation.list_threads,
    conversation.message_status,
    conversation.resume_root,
    conversation.take,
    conversation.watch,
    explaining.cost_report,
    explaining.effects,
    explaining.explain,
    explaining.work,
    read_state.mark,
    inbox.dismiss,
    inbox.inbox,
    operators.dead_letters,
    operators.drop_dead_letter,
    operators.quotas,
    operators.retry_dead_letter,
    reactions.approvals,
    reactions.approvers,
    reactions.costs,
    reactions.decide,
    reactions.open_reactions,
    reactions.records,
    reactions.spent,
    reactions.usage,
    receiving.acknowledge,
    receiving.nack,
    receiving.receive,
    memories.memory,
    searching.search,
    views.history,
    views.impact,
    views.why,
    views.window,
)
FOR_OPERATORS: tuple[Callable[..., Any], ...] = (
    operators.create_login,
    operators.create_token,
    operators.list_tokens,
    operators.log,
    operators.remove,
    operators.resume_agent,
    operators.revoke_token,
    operators.rows,
    operators.status,
    operators.stopped,
    node_agents.control_agent,
    node_agents.node_agents,
)


@cache
def network_operations() -> tuple[Operation, ...]:
    """All of them, as a mod's are made of its methods."""
    return tuple(
        make_operation("network", it, is_change=not iscoroutinefunction(it), is_for_operators=it in FOR_OPERATORS)
        for it in (*FOR_EVERYBODY, *FOR_OPERATORS)
    )


def list_operations(mods: Iterable[Mod]) -> dict[str, Operation]:
    """Every operation of a hub with these mods, by its name on the wire."""
    own = [operation for mod in mods for operation in mod.operations()]
    return {operation.op: operation for operation in (*network_operations(), *own)}
