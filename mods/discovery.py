"""`discovery`: find participants by what their card says that they can do."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from roundelay.network.mod import Mod, Reading, operation
from roundelay.network.state import Participant

_WORD = re.compile(r"\w+")
_WEIGHTS = {"tags": 3, "tools": 2, "description": 1}


class Discovery(Mod):
    """Search the cards that participants show when they join."""

    id = "discovery"

    @operation("read")
    async def find(
        self,
        reading: Reading,
        *,
        query: Annotated[str, Meta(min_length=1, max_length=500, description="What you need done, in a few words.")],
        limit: Annotated[int, Meta(ge=1, le=100)] = 10,
        online: bool | None = None,
    ) -> dict[str, Any]:
        """Find participants whose card speaks of what you need: tags, tools or description. The best match comes first."""
        words = {word.lower() for word in _WORD.findall(query)}
        found = []
        for participant in reading.hub.state.participants():
            is_online = reading.hub.is_online(participant.agent_id)
            if online not in (None, is_online) or participant.agent_id == reading.origin.agent_id:
                continue
            card = _read_card(participant)
            score = _score(words, participant.agent_id, card)
            if score:
                found.append((-score, participant.agent_id, participant.kind, is_online, card))
        found.sort(key=lambda match: match[:2])
        return {
            "participants": [
                {
                    "agent_id": agent_id,
                    "kind": kind,
                    "state": "online" if is_online else "offline",
                    "card": card,
                    "score": -score,
                }
                for score, agent_id, kind, is_online, card in found[:limit]
            ]
        }


def _read_card(participant: Participant) -> dict[str, Any]:
    if participant.card is UNSET:
        return {}
    card = msgspec.json.decode(participant.card)
    return card if isinstance(card, dict) else {}


def _score(words: set[str], agent_id: str, card: dict[str, Any]) -> int:
    """Each word of the query counts once per part of the card that has it, tags most; the id counts as a tag."""
    parts = {"tags": {agent_id.lower(), *_words(agent_id)}, "tools": set(), "description": set()}
    for part in parts:
        parts[part] |= _words(card.get(part))
    return sum(weight for part, weight in _WEIGHTS.items() for word in words if word in parts[part])


def _words(value: object) -> set[str]:
    if isinstance(value, str):
        return {word.lower() for word in _WORD.findall(value)} | set(value.lower().replace("_", " ").split())
    if isinstance(value, list):
        return set().union(*(_words(item) for item in value))
    return set()
