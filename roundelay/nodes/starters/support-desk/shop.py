"""Tools of the support desk. Replace the dictionary with your own data."""

from roundelay import tool

ORDERS = {
    "12": "a blue teapot, 40 EUR, came back on Monday",
    "13": "two cups, 18 EUR, sent on Friday",
}


@tool(idempotent=True)
def find_order(number: str) -> str:
    """Look up an order by its number."""
    return ORDERS.get(number, "there is no such order")


@tool(needs_approval=True)
def refund(number: str, eur: int) -> str:
    """Refund the price of an order. A person must approve the call."""
    return f"Order {number}: refunded {eur} EUR."
