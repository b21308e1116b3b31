"""Budgets of conversations: the number of messages in total and for each participant. Part of step 6. Pure.

The *first parties* of a conversation are the sender of its root and the participants whom the root names: its
recipient, or the ids in ``requires_response``. They may use the whole budget. Everybody whom a party addresses
directly, or names in ``requires_response``, becomes a *party* too. Reading messages makes nobody a party. One eighth of
the budget is reserved for the first parties. Each other party may use at most half of the budget. A participant who is
not a party may use at most a quarter, and all such participants together at most half. So participants who answer
without being asked cannot use up the budget of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped

from .rows import MessageHead
from .tables import ConversationBudget
from .visibility import parties

# The counters of one `ConversationBudget`, and the part of the budget that each participant may use:
#
#   parties   { ann: 9, bob: 7,   cat: 5, dan: 0 }      first = (ann, bob): all of it. cat, dan: 1/2 each
#   others    { eve: 2, "": 3 }                         1/4 each, 1/2 together; "" counts all beyond `MAX_SPENDERS`
#   messages   26                                       the sum of both
#
# All but `first` together may use 7/8. Nobody is in both tables: a participant whom a party addresses moves to
# `parties` with its count and stays there. The budget is `max_root_messages`. Each time the conversation is resumed,
# the budget grows by the same number. If the ledger lost a budget, its owner is unknown. Then `began_by` is empty,
# `messages` starts at the loss, and no part is limited. Guessing an owner would let a stranger claim the conversation.

MAX_SPENDERS = 256
"""Maximum number of participants that one conversation counts by name. All others share one count."""


class BudgetExceeded(LoopStopped):
    """`LoopStopped`, with the message that would have exceeded the limit.

    ``limit`` is a field of `Limits`, and ``bound`` distinguishes the uses of that field. ``used_by`` sent the most
    counted messages, ``used`` is their number. ``notice`` is the sentence for people.
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
    """Return the budget of a new conversation, which consists only of its root. The root names these participants."""
    talkers = parties(root) if root.kind in ("direct", "mod") else (root.sender_id,)
    first = tuple(dict.fromkeys((*talkers, *named)))[:MAX_SPENDERS]
    return ConversationBudget(
        1, root.seq, began_by=first[0], first=first, parties=dict.fromkeys(first, 0) | {first[0]: 1}
    )


def charge_budget(
    limits: Limits, budget: ConversationBudget, head: MessageHead, spender: str, addressed: Iterable[str]
) -> ConversationBudget:
    """Charge a message to its conversation for ``spender``. If the spender is a party, the participants in
    ``addressed`` become parties. Raises `BudgetExceeded`."""
    most = limits.max_root_messages + budget.extra_messages
    most_hops = limits.max_hops + budget.extra_hops
    # Check before counting: a refused message must not use up budget.
    if budget.messages >= most:
        raise _stop(budget, head, "max_root_messages", "messages", f"has used its {most} messages")
    if head.hops > most_hops:
        raise _stop(budget, head, "max_hops", "hops", f"has gone {most_hops} hops")
    if budget.began_by and spender not in budget.first:
        _check_share(budget, head, spender, most)
    parties, others = budget.parties, budget.others
    if spender in parties:
        # Copy the dicts: the budget is a frozen value, which the committed state may share.
        parties = {**parties, spender: parties[spender] + 1}
        for name in addressed:
            if name not in parties and len(parties) < MAX_SPENDERS:
                # The count moves to the other table. Starting from 0 would give the participant a second share.
                parties[name] = others.get(name, 0)
                others = {other_id: count for other_id, count in others.items() if other_id != name}
    else:
        name = spender if spender in others or len(others) < MAX_SPENDERS else ""
        others = {**others, name: others.get(name, 0) + 1}
    return msgspec.structs.replace(
        budget, messages=budget.messages + 1, last_seq=head.seq, parties=parties, others=others
    )


def _check_share(budget: ConversationBudget, head: MessageHead, spender: str, most: int) -> None:
    """Refuse a message beyond the part of one participant, or beyond the part of everybody but the first parties."""
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
    """Return the participant who sent the most messages of a conversation, and their number. In a tie the first id
    wins."""
    counts: Mapping[str, int] = {**budget.others, **budget.parties}
    return max(sorted(counts.items()), key=lambda item: item[1], default=("", 0))
