"""Tests of the rule that divides a conversation's budget among its participants."""

from __future__ import annotations

import pytest

from roundelay.network.config import Limits
from roundelay.network.core.conversation_budgets import MAX_SPENDERS, BudgetExceeded, charge_budget, start_budget
from roundelay.network.core.rows import MessageHead
from roundelay.network.core.tables import ConversationBudget

LIMITS = Limits(max_root_messages=64, max_hops=1000)


def head(seq: int, sender: str, to: str, hops: int = 1) -> MessageHead:
    kind = "direct" if to.startswith("agent:") else "broadcast"
    return MessageHead(
        seq=seq, sender_id=sender, sender_kind="agent", kind=kind, to=to, thread_id="t", root=1, hops=hops, label=1
    )


def use_up(
    budget: ConversationBudget, sender: str, to: str = "broadcast"
) -> tuple[ConversationBudget, int, BudgetExceeded]:
    for count in range(1000):
        try:
            addressed = (to[6:],) if to.startswith("agent:") else ()
            budget = charge_budget(LIMITS, budget, head(2, sender, to), sender, addressed)
        except BudgetExceeded as error:
            return budget, count, error
    raise AssertionError


def test_a_stranger_has_a_quarter_and_all_strangers_a_half() -> None:
    budget = start_budget(head(1, "mia", "broadcast"))
    counts = []
    for name in ("a", "b", "c"):
        budget, count, error = use_up(budget, name)
        counts.append(count)
        assert error.bound == "share"
    assert counts == [16, 16, 0]
    budget, count, error = use_up(budget, "mia")
    assert (count, error.bound, error.used_by) == (64 - 32 - 1, "messages", "mia")


def test_a_party_has_a_half_and_all_but_the_first_seven_eighths() -> None:
    budget = start_budget(head(1, "mia", "agent:bob", 0))
    for name in ("a", "b"):
        budget = charge_budget(LIMITS, budget, head(2, "bob", f"agent:{name}"), "bob", (name,))
    budget, a, _ = use_up(budget, "a")
    budget, b, _ = use_up(budget, "b")
    assert (a, b) == (32, 24)
    budget, bob, error = use_up(budget, "bob")
    assert (bob, error.bound) == (64 - 56 - 2 - 1, "messages")


def test_a_stranger_makes_nobody_a_party_and_answering_one_neither() -> None:
    budget = start_budget(head(1, "mia", "broadcast"))
    budget = charge_budget(LIMITS, budget, head(2, "x", "agent:y"), "x", ("y",))
    assert set(budget.parties) == {"mia"}
    budget = charge_budget(LIMITS, budget, head(3, "mia", "broadcast"), "mia", ())
    assert set(budget.parties) == {"mia"}
    budget = charge_budget(LIMITS, budget, head(4, "mia", "agent:x"), "mia", ("x",))
    assert (budget.parties, budget.others) == ({"mia": 3, "x": 1}, {})


def test_what_is_kept_of_a_conversation_is_bounded() -> None:
    budget = start_budget(head(1, "mia", "broadcast"), [f"p{number}" for number in range(1000)])
    limits = Limits(max_root_messages=1_000_000)
    for number in range(600):
        budget = charge_budget(limits, budget, head(2, f"x{number}", "broadcast"), f"x{number}", ())
        budget = charge_budget(limits, budget, head(2, "mia", f"agent:y{number}"), "mia", (f"y{number}",))
    assert (len(budget.first), len(budget.parties), len(budget.others)) == (
        MAX_SPENDERS, MAX_SPENDERS, MAX_SPENDERS + 1,
    )  # fmt: skip
    assert sum(budget.others.values()) == 600


@pytest.mark.parametrize("sender", ["mia", "bob", "x"])
def test_where_what_was_counted_is_lost_nobody_is_held_to_a_share(sender: str) -> None:
    _, count, error = use_up(ConversationBudget(1, 1), sender)
    assert (count, error.bound) == (63, "messages")
