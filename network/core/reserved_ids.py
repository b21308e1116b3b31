"""Ids that pass for something else: words that mean a role, an address or the network itself, and ids that look like
another.

A person reads a sender's id on a screen, a model reads it in a prompt; neither tells ``desk`` from ``desk-``. Such
ids are not given out by first use (`joining`); an operator can make a token for one. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

NETWORK = "network"
"""Under this id the hub itself writes to participants: no mod has it, and no operator gives it out."""
IS_THE_HUB = "is the sender of what the hub itself writes, so nobody gets it"
OWN_IDS = "roundelay-"
"""What the ids of the network's own tools begin with, the command line's among them."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model", "human"})
"""What the sides of a conversation are called in requests to models, and in the transcripts that models were
trained on."""
PLACES = frozenset({"broadcast", "everyone", "everybody", "anyone", "all", "here", "channel", "mod"})
"""What means somebody else, or several, where an id stands."""
POWERS = frozenset({"hub", "network", "operator", "owner", "admin", "administrator", "root", "roundelay"})
NOBODY = frozenset({"none", "nobody", "null"})

_SEPARATORS = re.compile("[._-]+")
_CONFUSABLE = str.maketrans({"0": "o", "1": "l", "i": "l", "m": "rn", "w": "vv"})


def skeleton(agent_id: str) -> str:
    """What is left of an id for the eye: ids with the same skeleton look alike. After the confusables of Unicode's
    UTS #39."""
    return _SEPARATORS.sub("-", agent_id.translate(_CONFUSABLE)).removesuffix("-")


MAX_EXACT_LENGTH = 3
"""Words of so few letters are reserved as they are, not what looks like them: `a11` is one of many agents that a
program numbers."""
_WORDS = sorted(ROLES | PLACES | POWERS | NOBODY)
_RESERVED = {skeleton(word): word for word in _WORDS if len(word) > MAX_EXACT_LENGTH}
_SHORT = {word: word for word in _WORDS if len(word) <= MAX_EXACT_LENGTH}
_OWN = skeleton(OWN_IDS)


def describe_reserved(agent_id: str, mods: Collection[str]) -> str | None:
    """What a reserved id means, or one that looks like it passes for, as a clause; None for other ids. ``mods`` are
    those of the hub."""
    looks = skeleton(agent_id)
    if looks.startswith(f"{_OWN}-"):
        return f"passes for one of the network's own tools, whose ids begin with {OWN_IDS}"
    word = _RESERVED.get(looks) or _SHORT.get(agent_id)
    if word is not None:
        meaning = "means a role, an address or the network itself"
        return meaning if word == agent_id else f"passes for {word}, which {meaning}"
    mod = next((it for it in mods if skeleton(it) == looks), None)
    return None if mod is None else f"{'is' if mod == agent_id else 'passes for'} the mod {mod}"
