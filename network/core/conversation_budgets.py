"""Budgets of conversations: limits on the total number of messages and on the messages of each participant. Part of
step 6. Pure.

The *first parties* of a conversation are the sender of its root and the participants whom the root names: its
recipient, or the ids in ``requires_response``. First parties may use the whole budget. When a party addresses a
participant directly or names a participant in ``requires_response``, this participant becomes a *party* too. Reading
messages does not make anyone a party. One eighth of the budget is reserved for the first parties. Each other party may
use at most half of the budget. A participant who is not a party may use at most a quarter, and all such participants
together at most half. So participants who answer without being asked cannot use up the budget of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped

from .rows import MessageHead
from .tables import ConversationBudget
from .visibility import parties

# Counters of one `ConversationBudget`, and the part of the budget that each participant may use:
#
#   parties   { ann: 9, bob: 7,   cat: 5, dan: 0 }      first = (ann, bob): the whole budget. cat, dan: 1/2 each
#   others    { eve: 2, "": 3 }                         1/4 each, 1/2 together. The key "" counts all participants
#                                                       beyond `MAX_SPENDERS`
#   messages   26                                       sum of all counts in `parties` and `others`
#
# All participants except `first` may together use 7/8 of the budget. A participant is never in both tables: when a
# party addresses a participant in `others`, the participant moves to `parties` and keeps its count. The budget is
# `max_root_messages`, and each resumption of the conversation adds the same number again.
#
# If the ledger has lost a budget, the owner is unknown. Then `began_by` is empty, `messages` counts only messages after
# the loss, and shares are not limited. If the hub guessed the owner, a stranger could claim the conversation.

MAX_SPENDERS = 256
"""Maximum number of participants that one conversation counts separately. All further participants share one count."""


class BudgetExceeded(LoopStopped):
    """A `LoopStopped` error with the message that would have exceeded the limit.

    ``limit`` is a field of `Limits`. ``bound`` names the check, because several checks use the same field. ``used_by``
    is the participant with the most counted messages, and ``used`` is the number of these messages. ``notice`` is the
    text for people.
    """

    def __init__(
        self, sentence: str, head: MessageHead, limit: str, bound: str, used_by: str, used: int, notice: str
    ) -> None:
        super().__init__(sentence)
        self.notice = notice
        self.head = head
        self.limit = limit
        self.bound = bound
        self.used_by = used_by
        self.used = used


def start_budget(root: MessageHead, named: Iterable[str] = ()) -> ConversationBudget:
    """Return the budget of a new conversation that contains only its root. ``named`` lists the participants that the
    root names."""
    talkers = parties(root) if root.kind in ("direct", "mod") else (root.sender_id,)
    first = tuple(dict.fromkeys((*talkers, *named)))[:MAX_SPENDERS]
    return ConversationBudget(
        1, root.seq, began_by=first[0], first=first, parties=dict.fromkeys(first, 0) | {first[0]: 1}
    )


def charge_budget(
    limits: Limits, budget: ConversationBudget, head: MessageHead, spender: str, addressed: Iterable[str]
) -> ConversationBudget:
    """Charge a message to the budget of its conversation, in the name of ``spender``. If the spender is a party, the
    participants in ``addressed`` become parties. Raise `BudgetExceeded` if a limit is reached."""
    most = limits.max_root_messages + budget.extra_messages
    most_hops = limits.max_hops + budget.extra_hops
    # Check before counting: a refused message must not use up the budget.
    if budget.messages >= most:
        raise _stop(budget, head, "max_root_messages", "messages", f"has used its {most} messages")
    if head.hops > most_hops:
        raise _stop(budget, head, "max_hops", "hops", f"has gone {most_hops} hops")
    if budget.began_by and spender not in budget.first:
        _check_share(budget, head, spender, most)
    parties, others = budget.parties, budget.others
    if spender in parties:
        # Copy the dicts, because the committed state may share this immutable budget.
        parties = {**parties, spender: parties[spender] + 1}
        for name in addressed:
            if name not in parties and len(parties) < MAX_SPENDERS:
                # Move the count to the other table. Starting from 0 would grant the participant a second share.
                parties[name] = others.get(name, 0)
                others = {other_id: count for other_id, count in others.items() if other_id != name}
    else:
        name = spender if spender in others or len(others) < MAX_SPENDERS else ""
        others = {**others, name: others.get(name, 0) + 1}
    return msgspec.structs.replace(
        budget, messages=budget.messages + 1, last_seq=head.seq, parties=parties, others=others
    )


def _check_share(budget: ConversationBudget, head: MessageHead, spender: str, most: int) -> None:
    """Raise `BudgetExceeded` if a message exceeds the share of its sender, or the common share of all participants
    except the first parties."""
    is_party = spender in budget.parties
    used = budget.parties[spender] if is_party else budget.others.get(spender, budget.others.get("", 0))
    alone = max(1, most // (2 if is_party else 4))
    if used >= alone:
        text = f"has used {alone} of its {most} messages for {spender} alone, the maximum for one participant"
        raise _stop(budget, head, "max_root_messages", "share", text)
    outside = sum(budget.others.values())
    if not is_party and outside >= max(1, most // 2):
        text = f"has used {outside} of its {most} messages for participants whom nobody in it addressed, the maximum for them"
        raise _stop(budget, head, "max_root_messages", "share", text)
    guests = outside + sum(count for name, count in budget.parties.items() if name not in budget.first)
    if guests >= most - most // 8:
        text = f"has used {guests} of its {most} messages, and the rest is reserved for those who began it"
        raise _stop(budget, head, "max_root_messages", "share", text)


def _stop(budget: ConversationBudget, head: MessageHead, limit: str, bound: str, why: str) -> BudgetExceeded:
    used_by, used = find_top_sender(budget)
    most_by = f", {used} of them by {used_by}" if used_by else ""
    message = (
        f"The conversation from message {head.root} {why} ({limit}); {budget.messages} messages are stored in "
        f"it{most_by}. A person in it, or an operator, can resume it with network.resume_root, root {head.root}. "
        f"Raise limits.{limit} in the node's file to allow more."
    )
    notice = (
        f"The conversation that began with #{head.root} has stopped: it {why}{most_by}. Type /resume {head.root} in "
        f"chat to resume it. Raise limits.{limit} in the node's file to allow more."
    )
    return BudgetExceeded(message, head, limit, bound, used_by, used, notice)


def find_top_sender(budget: ConversationBudget) -> tuple[str, int]:
    """Return the participant with the most messages in a conversation, and the number of these messages. In a tie, the
    alphabetically first id wins."""
    counts: Mapping[str, int] = {**budget.others, **budget.parties}
    return max(sorted(counts.items()), key=lambda item: item[1], default=("", 0))
