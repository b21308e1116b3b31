"""Which messages a model reads for a trigger: the window that the hub allows, bounded and ordered for the prompt.

Stands between the runner and `prompt`. What an agent may see is decided by the hub (``network.window``, under the
agent's visibility); this module only leaves out. `select_threads` is pure, `build_context` asks the hub.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from roundelay.network.messages import BaseMessage, MessageThread

from .inbox import Visibility
from .message_filter import ALL, MessageFilter
from .policy import AgentPolicy
from .retry import retry_later

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient


async def build_context(
    client: NetworkClient, trigger: BaseMessage, policy: AgentPolicy, visibility: Visibility
) -> dict[str, MessageThread]:
    """Read the conversation that the agent may see for this trigger, as it stood at the trigger: threads in the
    prompt's order.

    ``visibility`` holds whatever the card of the connection says: the hub admits what both allow.
    """
    chosen = policy.message_filter
    most = policy.max_threads
    per_thread = chosen.count_to_ask(policy.per_thread) + 1  # one more: the trigger is shown apart from its thread
    window = await retry_later(
        lambda: client.window(trigger.seq, threads=most, per_thread=per_thread, visibility=visibility)
    )
    return select_threads(
        window.threads, trigger, max_threads=most, per_thread=policy.per_thread, chosen=chosen, reader=client.agent_id
    )


def select_threads(
    threads: Iterable[MessageThread],
    trigger: BaseMessage,
    *,
    max_threads: int,
    per_thread: int,
    chosen: MessageFilter = ALL,
    reader: str = "",
) -> dict[str, MessageThread]:
    """Bound and order threads for the prompt of ``trigger``, which is left out of them; threads left empty are dropped.

    Messages that ``chosen`` does not admit are left out as well, and not counted among those omitted.

    The order is by newest message, the trigger's thread last, a function of the ledger alone: threads that rest stay
    where they are, in front, so that prompts of one conversation begin alike and providers' caches hold.
    """
    kept: list[MessageThread] = []
    for thread in threads:
        most = chosen.count_for(thread.thread_id, per_thread)
        others = [it for it in thread.messages if it.seq != trigger.seq and chosen.admits(it, reader)]
        if others and most:
            shown = others[-most:]
            omitted = thread.omitted + len(others) - len(shown)
            kept.append(MessageThread(thread_id=thread.thread_id, messages=shown, omitted=omitted))
    kept.sort(key=lambda thread: (thread.thread_id == trigger.thread_id, thread.messages[-1].seq))
    return {thread.thread_id: thread for thread in kept[-max_threads:]}


def keep_recorded(
    threads: Mapping[str, MessageThread], trigger: BaseMessage, manifest: Collection[int]
) -> dict[str, MessageThread]:
    """Leave out what was not in the prompt when it was first made: a resumed reaction reads nothing that it had not
    read before."""
    known = set(manifest)
    kept = [
        MessageThread(
            thread_id=thread.thread_id,
            messages=[message for message in thread.messages if message.seq in known],
            omitted=thread.omitted,
        )
        for thread in threads.values()
    ]
    return select_threads(kept, trigger, max_threads=len(kept) or 1, per_thread=len(known) or 1)


def list_manifest(threads: Iterable[MessageThread], trigger: BaseMessage) -> list[int]:
    """Give the seqs of these messages and the trigger, ascending."""
    return sorted({trigger.seq, *(message.seq for thread in threads for message in thread.messages)})
