"""What is done to text on its way to a model, the ledger or a reader. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_NAME_CHARS = 64
"""Of a tool's name, as OpenAI-compatible servers take it."""


def replace_surrogates(text: str) -> str:
    """Join halves of characters, which JSON escapes bring apart where a text comes in pieces, and replace a half that
    stays alone by a question mark: no frame may hold one."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        return joined.encode("utf-8", "replace").decode("utf-8")


def replace_all_surrogates(texts: Iterable[str]) -> list[str]:
    """The same of several texts."""
    return [replace_surrogates(it) for it in texts]


def strip_code_fence(text: str) -> str:
    """Give a text without the fence that models like to put around JSON, if there is one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = re.sub(r"\A[a-zA-Z0-9]*\n", "", text[3:-3])
        text = text.removeprefix("json")
    return text


def write_stopped(text: str, by: str) -> str:
    """Write what is left of an answer that somebody has stopped: the text so far, and by whom. A code block that was
    under way is closed, so that the last line is not read as code."""
    if not text.strip():
        return f"Stopped by {by}."
    fences = re.findall(r"^ {0,3}(`{3,}|~{3,})", text, re.MULTILINE)
    closing = f"\n{fences[-1]}" if len(fences) % 2 else ""
    kept = text.lstrip("\n").rstrip()
    return f"{kept}{closing}\n\nStopped by {by}."


def tool_name(text: str) -> str:
    """Give a name that servers take for a tool."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", text)[:MAX_NAME_CHARS]


def handoff_name(agent_id: str) -> str:
    """Give the name of the tool that hands over to an agent."""
    return tool_name(f"hand_over_to_{agent_id}")
