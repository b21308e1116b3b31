"""Ids that follow from where they stand, so that whoever goes on with a reaction, on any machine, finds them again."""

from __future__ import annotations

import hashlib


def reaction_id(agent_id: str, trigger: int, epoch: str) -> str:
    """Give the id of an agent's reaction to a message, the same on every machine."""
    return digest("reaction", agent_id, trigger, epoch)


def derived_id(reaction: str, path: str, turn: int, call: int | str) -> str:
    """Give the id of what a call of a reaction sends: its ``message_id`` and ``call_id``."""
    return digest("call", reaction, path, turn, call)


def digest(*parts: str | int) -> str:
    """Give 128 bits of SHA-256 of these, in hexadecimal digits."""
    return hashlib.sha256("\x1f".join(map(str, parts)).encode()).hexdigest()[:32]
