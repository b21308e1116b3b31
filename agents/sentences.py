"""What the loop says to a model whose reply does not carry the work on. Used by `reaction`."""

from __future__ import annotations

NO_TEXT = "(no reply)"
EMPTY_REPLY = "Your reply was empty. Call a tool, or call finish if there is nothing left to do."
REPLY_TOO_LARGE = "Your reply was too large to be kept and was dropped. Say it shorter, or in several steps."
NOT_KEPT = "You were interrupted, and what you wrote last was not kept and not sent. Write it again."
WITHHELD = "The provider's filter withheld your reply. Say it in other words, or call finish."
CUT = "Your reply was cut off at its limit of length and was not sent. Give all of it again, shorter."
CUT_HERE = "[cut off here: the reply reached its limit of length]"
NUDGE = "Text alone reaches nobody. Call a tool to act or to send it, or call finish if there is nothing left to do."
