"""Rendering of untrusted texts for a model. Each text becomes one element, which the text itself cannot close.

Prompts, agents' tools and gateways to other protocols all render messages in this form. A model therefore sees only one
form, and invisible characters are removed in one place. This module does no IO.
"""

from __future__ import annotations

from .safe_text import sanitize_text


def render_element(tag: str, text: str, **attributes: object) -> str:
    """Return an element that contains the escaped ``text``. Attributes with the value None are left out."""
    named = "".join(f' {name}="{escape_attribute(value)}"' for name, value in attributes.items() if value is not None)
    return f"<{tag}{named}>{escape_text(text)}</{tag}>"


def escape_text(text: str) -> str:
    """Escape the text of an element, and remove its invisible characters.

    Quotes stay unchanged, because they are easier to read unescaped and cost fewer tokens.
    """
    return sanitize_text(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_attribute(value: object) -> str:
    """Escape the value of an attribute that will be put between quotes."""
    return escape_text(str(value)).replace('"', "&#34;").replace("'", "&#39;")
