"""Who the command line is to a hub when nobody was named."""

from __future__ import annotations

import getpass
import re

READER_ID = "roundelay-cli"
"""Who looks around: a service, since another person would change whom broadcasts are for, and so what prompts may hold."""


def login_id() -> str:
    """The login user's name, made an id: a person's, in the conversation."""
    try:
        name = getpass.getuser().lower()
    except (OSError, KeyError):  # a user without a name
        name = ""
    return re.sub(r"[^a-z0-9._-]+", "-", name).lstrip("._-")[:64] or "person"
