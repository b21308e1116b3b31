"""Texts that the loop itself writes, for the model and for people who get no answer. This module is pure."""

from __future__ import annotations

NO_TEXT = "(no reply)"
EMPTY_REPLY = "Your reply was empty."
REPLY_TOO_LARGE = "Your reply was too large to be kept and was dropped. Say it shorter, or in several steps."
NOT_KEPT = "You were interrupted, and what you wrote last was not kept and not sent. Write it again."
WITHHELD = "The provider's filter withheld your reply. Say it in other words."
CUT = "Your reply was cut off at its limit of length and was not sent. Give all of it again, shorter."
CUT_EMPTY = "Your reply was cut off at its limit of length before it said anything. Think less, and answer at once."
CUT_HERE = "[cut off here: the reply reached its limit of length]"
NUDGE = "Nobody has read this: your text reaches nobody by itself."

ANSWER = (
    "Your answer is the text that you write without calling a tool: it is sent to {to} and ends your work. "
    "Call the tools that you need before it, and do not send the answer by a tool as well."
)
ANSWERED = (
    "You have written to the incoming thread by a tool. Text that you write without calling one is sent there, too."
)
ANSWER_BY_TOOL = "Text without a tool call reaches nobody. Send your answer by a tool that sends messages."
NOBODY_WAITS = "Nobody waits for an answer, and text without a tool call reaches nobody. Act by calling tools."
OR_FINISH = "If nothing is left to do or to say, call finish."
CLOSING = "Write your answer now, as plain text: it is sent as it is."
CLOSING_UNSENT = "Write in plain text how far you have come: that is recorded and sent to nobody."

BLOCKED = "I could not answer: what I had to say did not pass a check that it has to pass."

REPORTED = "{agent_id} cannot answer right now; the operator has been notified."
"""Answer to people after a fault that the operators' inbox lists."""

UNKNOWN_OUTCOME = (
    "The agent was interrupted while this call was running. Whether it took effect is unknown, and it was not "
    "repeated. "
    "Find out before you call it again."
)
ARGUMENTS_LOST = "Not run: the agent was interrupted, and the arguments of this call were not kept. Call it again."


def explain_answering(
    on_text: str,
    *,
    is_lean: bool,
    is_sent: bool,
    is_over: bool,
    is_inside: bool,
    has_spoken: bool,
    has_tools: bool,
    can_finish: bool,
) -> str:
    """Return the instruction that tells the model which of its texts is the answer. A lean prompt contains this
    instruction only where a model would not guess the rule.

    ``is_over`` means that the turn has no tools. ``is_inside`` means that another agent called this agent as a tool.
    """
    if is_lean and is_sent and on_text != "nudge" and not has_tools:
        return ""  # without tools, the model can write nothing but text
    if is_over:
        return CLOSING if is_sent else CLOSING_UNSENT
    if not is_sent:
        rule = NOBODY_WAITS
    elif on_text == "nudge":
        rule = ANSWER_BY_TOOL
    elif has_spoken and not is_inside:
        rule = ANSWERED
    elif is_lean:
        return ""  # models answer in plain text without an instruction
    else:
        rule = ANSWER.format(to="whoever gave you this task" if is_inside else "the incoming thread")
    return f"{rule} {OR_FINISH}" if can_finish else rule


def explain_empty(is_withheld: bool, is_too_large: bool, is_cut: bool) -> str:
    """Return why the loop ignores a reply that has neither text nor calls."""
    if is_withheld:
        return WITHHELD
    if is_too_large:
        return REPLY_TOO_LARGE
    return CUT_EMPTY if is_cut else EMPTY_REPLY
