"""`discovery`: find participants by what their card says that they can do."""

from __future__ import annotations

import re
from heapq import nsmallest
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from roundelay.network.core.tables import Participant
from roundelay.network.mod import Mod, Reading, operation
from roundelay.network.operations.paging import take_page

_WORD = re.compile(r"\w+")
_WEIGHTS = {"tags": 3, "tools": 2, "description": 1}


class _Index(Struct, frozen=True):
    """What one card says: as it is shown, and its words by part."""

    source: Raw | UnsetType
    card: dict[str, Any]
    words: dict[str, set[str]]


class Discovery(Mod):
    """Search the cards that participants show when they join."""

    id = "discovery"

    def __init__(self) -> None:
        # A card is read once: a search stops the hub's loop while it runs, 40 us a card when it reads them. One entry a
        # participant.
        self._indexes: dict[str, _Index] = {}

    @operation("read")
    async def find(
        self,
        reading: Reading,
        *,
        query: Annotated[str, Meta(min_length=1, max_length=500, description="What you need done, in a few words.")],
        limit: Annotated[int, Meta(ge=1, le=100)] = 10,
        online: bool | None = None,
    ) -> dict[str, Any]:
        """Find participants whose card speaks of what you need: tags, tools or description. The best match comes
        first."""
        words = {word.lower() for word in _WORD.findall(query)}
        found = []
        for participant in reading.hub.state.participants():
            is_online = reading.hub.is_online(participant.agent_id)
            if online not in (None, is_online) or participant.agent_id == reading.origin.agent_id:
                continue
            index = self._index(participant)
            # each word of the query counts once per part that has it
            score = sum(weight * len(words & index.words[part]) for part, weight in _WEIGHTS.items())
            if score:
                found.append((-score, participant.agent_id, participant.kind, is_online, index.card))
        best = (
            {
                "agent_id": agent_id,
                "kind": kind,
                "state": "online" if is_online else "offline",
                "card": card,
                "score": -score,
            }
            for score, agent_id, kind, is_online, card in nsmallest(limit, found, key=lambda match: match[:2])
        )
        return {"participants": take_page(best, limit, reading.hub.limits.max_result_bytes)[0]}

    def _index(self, participant: Participant) -> _Index:
        found = self._indexes.get(participant.agent_id)
        if found is None or found.source is not participant.card:
            found = self._indexes[participant.agent_id] = _read_card(participant)
        return found


def _read_card(participant: Participant) -> _Index:
    card = msgspec.json.decode(participant.card) if participant.card is not UNSET else {}
    card = card if isinstance(card, dict) else {}
    words = {part: _words(card.get(part)) for part in _WEIGHTS}
    words["tags"] |= {participant.agent_id, *_words(participant.agent_id)}  # the id counts as a tag
    return _Index(participant.card, card, words)


def _words(value: object) -> set[str]:
    if isinstance(value, str):
        return {word.lower() for word in _WORD.findall(value)} | set(value.lower().replace("_", " ").split())
    if isinstance(value, list):
        return set().union(*(_words(item) for item in value))
    return set()
