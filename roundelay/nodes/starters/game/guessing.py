"""Tools of the guessing game. The secret number depends on the first message, so every replay has the same number."""

import hashlib

from roundelay import ToolContext, tool


@tool(idempotent=True)
def guess(context: ToolContext, number: int, low: int = 1, high: int = 100) -> str:
    """Guess the secret number between low and high. The result is "too low", "too high" or a hit."""
    digest = hashlib.sha256(context.trigger.message_id.encode()).hexdigest()
    secret = int(digest, 16) % 100 + 1
    if number == secret:
        return f"The number is {number}."
    if number < secret:
        low, word = number + 1, "low"
    else:
        high, word = number - 1, "high"
    return f"{number} is too {word}. Guess {(low + high) // 2}, from {low} to {high}."
