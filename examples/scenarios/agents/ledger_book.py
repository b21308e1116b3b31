"""The tool of the finance agent: it books a refund, once."""

from roundelay import tool

BOOKED: list[str] = []


@tool(once=True)
def book_refund(order: str, amount_eur: int) -> str:
    """Book a refund of an order."""
    BOOKED.append(order)
    return f"booked {amount_eur} EUR for order {order}"
