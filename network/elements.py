"""Renders untrusted texts for a model. Each text becomes one element, which the text itself cannot close. Pure.

Prompts, tools of agents and hosts of other protocols all show messages in this form. So a model learns one form, and
invisible characters are removed in one place.
"""

from __future__ import annotations

from .safe_text import sanitize_text


def render_element(tag: str, text: str, **attributes: object) -> str:
    """Return ``text`` inside an element. Attributes with the value None are left out."""
    named = "".join(f' {name}="{escape_attribute(value)}"' for name, value in attributes.items() if value is not None)
    return f"<{tag}{named}>{escape_text(text)}</{tag}>"


def escape_text(text: str) -> str:
    """Escape a text between tags, and remove its invisible characters.

    Quotes stay unchanged, because unescaped quotes are easier to read and cost fewer tokens.
    """
    return sanitize_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_attribute(value: object) -> str:
    """Escape the value of an attribute, between its quotes."""
    return escape_text(str(value)).replace('"', "&#34;").replace("'", "&#39;")
