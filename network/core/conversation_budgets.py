"""Loops that are stopped: by the budget of a conversation, and by that of answers without a cause. Pure; part of step
6.

*Of a conversation.* Its root's *first parties* are its sender and whom it names: its recipient, or those in its
``requires_response``. They may use all of the budget. A *party* is also whom a party addressed in it: wrote to
directly, or named in ``requires_response``. So nobody becomes one by reading along. Of the budget an eighth is kept for
the first parties. A further party uses at most half of it, somebody who is no party at most a quarter, and all of those
together at most half: whoever answers what it was not asked cannot use up the conversation of others.

*Without a cause* a message is its own root, so no conversation's budget bounds an agent that answers what it is given,
again and again, and names no cause. What is counted of an agent is each message without a cause that it sends after a
message came to it since the last that counted. So an agent that only sends, or only reads, counts nothing, however much
it is. A person who speaks to the agent sets the count to nothing. What was said is marked where it goes to: at the
recipient, once for all broadcasts, once for each channel; so a message costs a look or two, however many it goes to.
`note` does the marking, in memory, after the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from roundelay.network.config import Limits
from roundelay.network.errors import LoopStopped

from .rows import MessageHead
from .tables import ConversationBudget
from .visibility import parties

# The counters of one `ConversationBudget`, and what of the whole each may reach:
#
#   parties   { ann: 9, bob: 7,   cat: 5, dan: 0 }      first = (ann, bob): all of it. cat, dan: 1/2 each
#   others    { eve: 2, "": 3 }                         1/4 each, 1/2 together; "" is all beyond `MAX_SPENDERS`
#   messages   26                                       the sum of both
#
# All but `first` together: 7/8. Nobody is in both tables: whom a party addresses goes over to `parties` with its
# count, and nobody goes back. The whole is `max_root_messages`, once more for each time that the conversation was let
# go on. Where the ledger lost a budget, none knows whose it was: `began_by` is empty, `messages` is counted from
# there on, and no share is asked for.

MAX_SPENDERS = 256
"""So many are counted by name in one conversation; further ones count together, as one who is no party."""


class BudgetExceeded(LoopStopped):
    """`LoopStopped`, with the message that would have been one too many.

    ``limit`` is the field of `Limits` that ends it, and ``bound`` tells its uses apart. ``used_by`` has sent most of
    what was used, ``used`` messages. ``told`` is the sentence for people.
    """

    def __init__(
        self, sentence: str, head: MessageHead, limit: str, bound: str, used_by: str, used: int, told: str
    ) -> None:
        super().__init__(sentence)
        self.notice = told
        self.head = head
        self.limit = limit
        self.bound = bound
        self.used_by = used_by
        self.used = used


def start_budget(root: MessageHead, named: Iterable[str] = ()) -> ConversationBudget:
    """The budget of a conversation of which nothing is stored but its root, which names these."""
    talk = parties(root) if root.kind in ("direct", "mod") else (root.sender_id,)
    first = tuple(dict.fromkeys((*talk, *named)))[:MAX_SPENDERS]
    return ConversationBudget(
        1, root.seq, began_by=first[0], first=first, parties=dict.fromkeys(first, 0) | {first[0]: 1}
    )


def charge_budget(
    limits: Limits, budget: ConversationBudget, head: MessageHead, spender: str, addressed: Iterable[str]
) -> ConversationBudget:
    """Count a message against its root's budget, for ``spender``; whom a party has ``addressed`` in it is one.
    Raises `BudgetExceeded`."""
    most = limits.max_root_messages + budget.extra_messages
    most_hops = limits.max_hops + budget.extra_hops
    if budget.messages >= most:
        raise _stop(budget, head, "max_root_messages", "messages", f"has used its {most} messages")
    if head.hops > most_hops:
        raise _stop(budget, head, "max_hops", "hops", f"has gone {most_hops} hops")
    if budget.began_by and spender not in budget.first:
        _check_share(budget, head, spender, most)
    known, others = budget.parties, budget.others
    if spender in known:
        known = {**known, spender: known[spender] + 1}
        for name in addressed:
            if name not in known and len(known) < MAX_SPENDERS:
                known[name] = others.get(name, 0)
                others = {it: count for it, count in others.items() if it != name}
    else:
        name = spender if spender in others or len(others) < MAX_SPENDERS else ""
        others = {**others, name: others.get(name, 0) + 1}
    return msgspec.structs.replace(
        budget, messages=budget.messages + 1, last_seq=head.seq, parties=known, others=others
    )


def _check_share(budget: ConversationBudget, head: MessageHead, spender: str, most: int) -> None:
    """Refuse what is more than one who is no first party may use, or all of these together."""
    is_party = spender in budget.parties
    used = budget.parties[spender] if is_party else budget.others.get(spender, budget.others.get("", 0))
    alone = max(1, most // (2 if is_party else 4))
    if used >= alone:
        text = f"has used {alone} of its {most} messages for {spender} alone, the most that it may"
        raise _stop(budget, head, "max_root_messages", "share", text)
    outside = sum(budget.others.values())
    if not is_party and outside >= max(1, most // 2):
        text = f"has used {outside} of its {most} messages for those whom nobody in it addressed, as many as they may"
        raise _stop(budget, head, "max_root_messages", "share", text)
    guests = outside + sum(count for name, count in budget.parties.items() if name not in budget.first)
    if guests >= most - most // 8:
        text = f"has used {guests} of its {most} messages, and the rest is kept for those between whom it began"
        raise _stop(budget, head, "max_root_messages", "share", text)


def _stop(budget: ConversationBudget, head: MessageHead, limit: str, bound: str, why: str) -> BudgetExceeded:
    used_by, used = find_top_sender(budget)
    most_by = f", {used} of them by {used_by}" if used_by else ""
    sentence = (
        f"The conversation from message {head.root} {why} ({limit}); {budget.messages} messages are stored in "
        f"it{most_by}. A person in it, or an operator, goes on with network.resume_root, root {head.root}; "
        f"limits.{limit} in the node's file allows more."
    )
    told = (
        f"The conversation that began with #{head.root} has stopped: it {why}{most_by}. Type /resume {head.root} in "
        f"chat to let it go on; limits.{limit} in the node's file allows more."
    )
    return BudgetExceeded(sentence, head, limit, bound, used_by, used, told)


def find_top_sender(budget: ConversationBudget) -> tuple[str, int]:
    """Who has sent most of a conversation's messages, and how many; by the id among equals."""
    counts: Mapping[str, int] = {**budget.others, **budget.parties}
    return max(sorted(counts.items()), key=lambda item: item[1], default=("", 0))


# The marks of one agent; seqs grow to the right.
#
#   Heard      given, shared    4 . . . 8 . . . . 13 . . .     the newest message that came to it: step 8 sets it
#              people           . 5 . . . . . . . . . . .      the newest of a person: likewise
#   Uncaused   since, last      . . |6 . . 9 . . . . . . .     the head before its first answer that counts, and the
#                                                              newest that does: step 6 sets them
#
# Its next message without a cause counts if `given` or `shared` is above `last`. The count begins anew if `people` is
# above `since`. Several answers in one batch count once: the first one moves `last`, and what step 6 sees of `RecentMessages`
# is from before the batch. Both are in memory alone, and begin empty together: a hub that starts, or that reopens its
# ledger, makes a new `State`.
