"""Rules about the people who must approve the calls of one tool, or of all tools of an agent.

`ApprovalRule` is the rule of one tool. The agent's `AgentPolicy` provides the values of its empty fields;
`policy.find_rule` combines the rule and the policy. This module is pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from roundelay.network.frames import is_id

from .options import InFile, Seconds, check_fields

MAX_APPROVERS = 32
"""Maximum number of approver names."""


def check_approver(name: str) -> str:
    """Return the name of an approver. Raises `ValueError` for a name that is neither an id nor a role."""
    role = name.removeprefix("role:")
    if not (role if role != name else is_id(name)):
        raise ValueError(f"must be the id of a person, or role:NAME for a role of the page `rights`, not {name!r}")
    return name


Approver = Annotated[str, AfterValidator(check_approver)]
Approvers = Annotated[Collection[str], InFile(Annotated[tuple[Approver, ...], Field(max_length=MAX_APPROVERS)])]
ApprovalsNeeded = Annotated[int, Field(ge=1, le=MAX_APPROVERS)]


@dataclass(frozen=True, slots=True)
class ApprovalRule:
    """Approval rule of one tool. The agent's policy provides the values of fields that are None or empty."""

    approvers: Approvers = ()
    approvals_needed: ApprovalsNeeded | None = None
    escalate_to: Approvers = ()
    requester_may_approve: bool | None = None
    approval_timeout_s: Seconds | None = None

    def __post_init__(self) -> None:
        """Refuse a rule that could never be fulfilled. Raises `ValueError`."""
        check_fields(self)
        check_enough(self.approvers, self.approvals_needed or 1, self.escalate_to)


@dataclass(frozen=True, slots=True)
class EffectiveRule:
    """Complete rule for one call. Without ``approvers``, people who read the thread and operators may approve."""

    approvers: tuple[str, ...]
    needed: int
    escalate_to: tuple[str, ...]
    requester_may_approve: bool
    timeout_s: float


def check_enough(approvers: Collection[str], needed: int, escalate_to: Collection[str]) -> None:
    """Raise `ValueError` if a rule names fewer people than the number of required approvals."""
    named = {*approvers, *escalate_to}
    if approvers and len(named) < needed and not any(":" in it for it in named):
        people = "person" if len(named) == 1 else "people"
        raise ValueError(
            f"approvals_needed is {needed}, and approvers and escalate_to name {len(named)} {people}: name more people, "
            "or need fewer approvals"
        )


DEFAULT_RULE = ApprovalRule()
"""Rule of a tool that names none. Shared, because each check of a rule takes 0.1 ms."""
