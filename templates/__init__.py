"""The texts that agents send to their models, as jinja templates beside this file.

`read_template` gives a template's source; rendering (sandbox, escaping) belongs to `roundelay.agents.prompt`. Imports
nothing of ours.
"""

from __future__ import annotations

if __name__ == "templates":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.templates (from roundelay.templates import ...). Under the name "
        "templates it would be a second copy with classes of its own."
    )

from importlib.resources import files

CONVERSATION = "conversation.jinja"
"""The user message of a reaction: ``message_threads``, ``incoming_thread_id`` and ``incoming_message`` as XML."""

SYSTEM = "system.jinja"
"""What `features.prompts` adds to the system message: the date, the tools and how to use them, constraints, custom
instructions."""

USER = "user.jinja"
"""What `features.prompts` adds to the user message, after the conversation: what tools and servers say about their
use."""


def read_template(name: str) -> str:
    """Give the source of a template of this package. Raises `FileNotFoundError` for an unknown name."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
