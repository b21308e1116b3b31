"""The tools of a shop's clerk. Its data is the state of the run; a customer's orders are shown to nobody else."""

from typing import Any

from roundelay import ToolContext, tool
from roundelay.agents.tools import ToolError


def _find(context: ToolContext, order: str) -> dict[str, Any]:
    found: dict[str, Any] | None = context.state["orders"].get(order)
    if found is None or found["customer"] != context.trigger.sender_id:
        raise ToolError(f"There is no order {order} of yours.")
    return found


@tool(idempotent=True)
def find_order(context: ToolContext, order: str) -> str:
    """Look up an order of the customer who asks."""
    return f"{order} is {_find(context, order)['status']}."


@tool(once=True, needs_approval=True)
def cancel_order(context: ToolContext, order: str) -> str:
    """Cancel a pending order, once the customer has said so."""
    _find(context, order)["status"] = "cancelled"
    return f"{order} is cancelled."
