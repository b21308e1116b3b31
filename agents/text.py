"""Functions for texts that go to a model, the ledger or a reader. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME_CHARS = 64
"""Maximum characters of a tool's name on OpenAI-compatible servers."""


def replace_surrogates(text: str) -> str:
    """Join surrogate pairs, which JSON escapes may leave as two separate surrogates. Replace a lone surrogate with a
    question mark, because frames must not contain lone surrogates.
    """
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "replace").decode("utf-8")


def replace_all_surrogates(texts: Iterable[str]) -> list[str]:
    """Replace surrogates in each text."""
    return [replace_surrogates(text) for text in texts]


def strip_code_fence(text: str) -> str:
    """Return a text without the code fence that models often put around JSON."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = re.sub(r"\A[a-zA-Z0-9]*\n", "", text[3:-3])
        text = text.removeprefix("json")
    return text


def write_stopped(text: str, by: str) -> str:
    """Return the partial text of a stopped answer, with a last line that names the person who stopped it. An open code
    block is closed, so that the last line is not displayed as code.
    """
    if not text.strip():
        return f"Stopped by {by}."
    fences = re.findall(r"^ {0,3}(`{3,}|~{3,})", text, re.MULTILINE)
    closing = f"\n{fences[-1]}" if len(fences) % 2 else ""
    kept = text.lstrip("\n").rstrip()
    return f"{kept}{closing}\n\nStopped by {by}."


def tool_name(text: str) -> str:
    """Return ``text`` as a tool name that model servers accept."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", text)[:MAX_NAME_CHARS]


def handoff_name(agent_id: str) -> str:
    """Return the name of the tool that hands the conversation over to an agent."""
    return tool_name(f"hand_over_to_{agent_id}")
