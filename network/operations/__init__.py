"""The ``network.*`` operations of every hub (docs/protocol.md). Each operation is a plain function. The lists in this
module define who may call it.

The first argument of an operation is its context. Operations that change something receive a `ChangeSet` and run in
`apply`. All other operations are coroutines and receive a `Reading`. The remaining arguments are the arguments of the
call. The first paragraph of the docstring is the operation's description for clients. If an operation shows more to
operators than to other callers, it checks the caller itself.
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
    open_items,
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
    open_items.open_items,
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
    conversation.screens,
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
    operators.control_agent,
    operators.node_agents,
)


@cache
def network_operations() -> tuple[Operation, ...]:
    """Return all ``network.*`` operations, built in the same way as the operations of mods."""
    return tuple(
        make_operation(
            "network", function, is_change=not iscoroutinefunction(function), is_for_operators=function in FOR_OPERATORS
        )
        for function in (*FOR_EVERYBODY, *FOR_OPERATORS)
    )


def list_operations(mods: Iterable[Mod]) -> dict[str, Operation]:
    """Return all operations of a hub that uses ``mods``, by their names in the wire protocol."""
    own = [operation for mod in mods for operation in mod.operations()]
    return {operation.op: operation for operation in (*network_operations(), *own)}
