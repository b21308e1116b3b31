"""Renders untrusted texts for a model: one element per text, which no text inside it can close. Pure.

Prompts, tools of agents and hosts of other protocols all show messages in this form, so a model learns one form, and one
place removes what people cannot see.
"""

from __future__ import annotations

from .safe_text import sanitize_text


def render_element(tag: str, text: str, **attributes: object) -> str:
    """Return ``text`` inside an element. Attributes that are None are left out."""
    named = "".join(f' {name}="{escape_attribute(value)}"' for name, value in attributes.items() if value is not None)
    return f"<{tag}{named}>{escape_text(text)}</{tag}>"


def escape_text(text: str) -> str:
    """Return a text for a place between tags: escaped, without invisible characters.

    Quotes stay unchanged, which reads better and costs fewer tokens.
    """
    return sanitize_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_attribute(value: object) -> str:
    """Return a value for a place between the quotes of an attribute."""
    return escape_text(str(value)).replace('"', "&#34;").replace("'", "&#39;")
