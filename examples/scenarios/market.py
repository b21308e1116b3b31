"""The tools of two bargaining agents. The bids are in the state of the run."""

from roundelay import ToolContext, tool


@tool(once=True)
def raise_to(context: ToolContext, eur: int, limit_eur: int) -> str:
    """Increase the bid by this amount, up to the limit."""
    context.state["bid"] = min(context.state["bid"] + eur, limit_eur)
    return f"I bid {context.state['bid']} EUR."


@tool(once=True)
def lower_to(context: ToolContext, eur: int, limit_eur: int) -> str:
    """Reduce the asking price by this amount, down to the limit."""
    context.state["price"] = max(context.state["price"] - eur, limit_eur)
    return f"I ask for {context.state['price']} EUR."


@tool(once=True)
def accept_below(context: ToolContext, limit_eur: int) -> str:
    """Accept the asking price, if it is within the limit."""
    return _close(context, context.state["price"]) if context.state["price"] <= limit_eur else "It is too much."


@tool(once=True)
def accept_above(context: ToolContext, limit_eur: int) -> str:
    """Accept the bid, if it is within the limit."""
    return _close(context, context.state["bid"]) if context.state["bid"] >= limit_eur else "It is too little."


def _close(context: ToolContext, eur: int) -> str:
    context.state["deal"] = eur
    return f"Deal at {eur} EUR."
