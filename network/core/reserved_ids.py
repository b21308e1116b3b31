"""Reserved ids: words that mean a role, an address or the network itself, and ids that look like another id.

People see a sender's id on a screen, and models see it in a prompt. Both could mistake ``desk-`` for ``desk``. So
confusing ids cannot be registered by first use (`joining`). An operator can still create a token for such an id. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

NETWORK = "network"
"""Id under which the hub itself writes to participants. No mod can have this id, and operators cannot assign it to a
participant."""
IS_THE_HUB = "is the sender of the hub's own messages, so nobody can have it"
OWN_IDS = "roundelay-"
"""Prefix of the ids of the network's own tools, such as the command line tool."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "model", "human"})
"""Names of roles in requests to models, and in transcripts on which models were trained."""
PLACES = frozenset({"broadcast", "everyone", "everybody", "anyone", "all", "here", "channel", "mod"})
"""Words that, as an id, would mean everyone, or something other than a participant."""
POWERS = frozenset({"hub", "network", "operator", "owner", "admin", "administrator", "root", "roundelay"})
NOBODY = frozenset({"none", "nobody", "null"})

_SEPARATORS = re.compile("[._-]+")
_CONFUSABLE = str.maketrans({"0": "o", "1": "l", "i": "l", "m": "rn", "w": "vv"})


def skeleton(agent_id: str) -> str:
    """Return the skeleton of an id. Two ids with the same skeleton look alike. The rules follow the idea of confusable
    characters in Unicode UTS #39."""
    return _SEPARATORS.sub("-", agent_id.translate(_CONFUSABLE)).removesuffix("-")


MAX_EXACT_LENGTH = 3
"""Maximum length in characters of reserved words whose look-alikes are allowed. For example, ``a11`` could be one of
many agents that a program numbers."""
_WORDS = sorted(ROLES | PLACES | POWERS | NOBODY)
_RESERVED = {skeleton(word): word for word in _WORDS if len(word) > MAX_EXACT_LENGTH}
_SHORT = {word: word for word in _WORDS if len(word) <= MAX_EXACT_LENGTH}
_OWN = skeleton(OWN_IDS)


def describe_reserved(agent_id: str, mods: Collection[str]) -> str | None:
    """Return a clause that says what an id could be mistaken for if the id is reserved or looks like a reserved id.
    Return None for other ids. ``mods`` are the ids of the hub's mods."""
    looks = skeleton(agent_id)
    if looks.startswith(f"{_OWN}-"):
        return f"passes for one of the network's own tools, whose ids begin with {OWN_IDS}"
    word = _RESERVED.get(looks) or _SHORT.get(agent_id)
    if word is not None:
        meaning = "means a role, an address or the network itself"
        return meaning if word == agent_id else f"passes for {word}, which {meaning}"
    mod = next((mod_id for mod_id in mods if skeleton(mod_id) == looks), None)
    return None if mod is None else f"{'is' if mod == agent_id else 'passes for'} the mod {mod}"
