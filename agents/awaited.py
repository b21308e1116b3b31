"""Whether an answer can still come: what the hub knows of a question, asked now and then while a call waits for the reply.

Used by `replies`. Only what is certain ends a wait early: whoever was asked is no participant any more, the question is
a dead letter, or the very reaction to it has ended. A reply is stored before its reaction ends, so who then looks for
it and finds none waits in vain: the hub has refused it, at the limit of the conversation for example, or it was never
made. Of programs that keep no records nothing is known, and they are waited for to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from roundelay.network.errors import ConnectError, RoundelayError

from .ids import reaction_id
from .retry import retry_later

if TYPE_CHECKING:
    from roundelay.network.client import NetworkClient

FIRST_LOOK_S, LAST_LOOK_S = 2.0, 300.0
"""How long to wait before the first look, and between two at most; each is twice as long as the one before."""


async def find_hopeless(client: NetworkClient, questions: Mapping[str, int]) -> dict[str, str]:
    """Give who will send no answer but what is stored by now, and why: of those to whom these questions (seqs) were
    put."""
    found: dict[str, str] = {}
    for agent_id, seq in questions.items():
        try:
            status = await retry_later(partial(client.call, "network.message_status", {"seq": seq}))
        except ConnectError:
            raise
        except RoundelayError:
            continue  # an older hub, or a message that is not kept any more: nothing is known
        own = reaction_id(agent_id, seq, client.welcome.network.epoch)
        for recipient in status["recipients"]:
            if recipient["agent_id"] == agent_id and (why := _explain(recipient, own)):
                found[agent_id] = why
    return found


def _explain(recipient: Mapping[str, object], own: str) -> str:
    """Say why no answer will come; empty if one may."""
    if recipient["state"] == "removed":
        return "it was removed from the network."
    if recipient["state"] == "dead":
        return "it failed to take the question, again and again, and does not get it any more."
    ended = recipient.get("reaction_status")
    if recipient.get("reaction") == own and ended not in (None, "open"):
        return f"its work on the question has ended ({ended}), and no answer came of it."
    return ""
