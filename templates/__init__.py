"""Texts that agents send to their models, as jinja templates in this folder.

`read_template` returns a template's source. `roundelay.agents.prompt` renders the template in a sandbox and escapes all
values. This package imports no other module of the project.
"""

from __future__ import annotations

if __name__ == "templates":  # a clone's folder, found in the current directory
    raise ImportError(
        "Import this package as roundelay.templates (from roundelay.templates import ...). Under the name "
        "templates Python would load a second copy of the package."
    )

from importlib.resources import files

CONVERSATION = "conversation.jinja"
"""User message of a reaction: ``message_threads``, ``incoming_thread_id`` and ``incoming_message`` as XML."""

LEAN = "lean.jinja"
"""Short form of `CONVERSATION`. The additional variable ``listed_threads`` of this template contains the id, sender and
text of each thread that the prompt shows as one line.
"""

SYSTEM = "system.jinja"
"""Text that `features.prompts` adds to the system message: the date, the tools and their instructions, constraints,
and custom instructions.
"""

USER = "user.jinja"
"""Text that `features.prompts` adds to the user message, after the conversation: notes of tools and servers."""


def read_template(name: str) -> str:
    """Return the source of a template of this package. Raises `FileNotFoundError` for an unknown name."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
