"""`discovery`: finds participants by the skills on their cards."""

from __future__ import annotations

import re
from itertools import islice
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from roundelay.network.core.state import State
from roundelay.network.core.tables import Participant
from roundelay.network.mod import Mod, Reading, operation
from roundelay.network.operations.paging import take_page

_WORD = re.compile(r"\w+")
_WEIGHTS = {"tags": 3, "tools": 2, "description": 1}


class _Index(Struct, frozen=True):
    """Parsed card of a participant, with the words of each part of the card."""

    source: Raw | UnsetType
    card: dict[str, Any]
    words: dict[str, set[str]]


class CardIndex:
    """Search index over the cards of all participants."""

    def __init__(self) -> None:
        # Parse each card once: parsing takes 40 us per card, and a search blocks the hub's loop. The cache has one
        # entry per participant.
        self._indexes: dict[str, _Index] = {}

    def rank(self, state: State, query: str, asking: str) -> list[tuple[str, int, dict[str, Any]]]:
        """Return the ids, scores and cards of the participants that match a query, best match first. The asking
        participant is left out."""
        words = {word.lower() for word in _WORD.findall(query)}
        scored = []
        for participant in state.participants():
            index = self._get_index(participant)
            # A word of the query scores once for each part of the card that contains the word.
            score = sum(weight * len(words & index.words[part]) for part, weight in _WEIGHTS.items())
            if score and participant.agent_id != asking:
                scored.append((participant.agent_id, score, index.card))
        return sorted(scored, key=lambda match: (-match[1], match[0]))

    def _get_index(self, participant: Participant) -> _Index:
        index = self._indexes.get(participant.agent_id)
        # Compare by identity. A changed card is a new object, and comparing bytes would cost as much as parsing.
        if index is None or index.source is not participant.card:
            index = self._indexes[participant.agent_id] = _read_card(participant)
        return index


class Discovery(Mod):
    """Search the cards of participants."""

    id = "discovery"

    def __init__(self) -> None:
        self._cards = CardIndex()

    @operation("read")
    async def find(
        self,
        reading: Reading,
        *,
        query: Annotated[str, Meta(min_length=1, max_length=500, description="What you need, in a few words.")],
        limit: Annotated[int, Meta(ge=1, le=100)] = 10,
        online: bool | None = None,
    ) -> dict[str, Any]:
        """Find participants whose card matches your query in tags, tools or description, best match first."""
        state, is_online = reading.hub.state, reading.hub.is_online
        best = (
            {
                "agent_id": agent_id,
                "kind": state.everyone[agent_id].kind,
                "state": "online" if is_online(agent_id) else "offline",
                "card": card,
                "score": score,
            }
            for agent_id, score, card in self._cards.rank(state, query, reading.origin.agent_id)
            if online in (None, is_online(agent_id))
        )
        page, _ = take_page(islice(best, limit), limit, reading.hub.limits.max_result_bytes)
        return {"participants": page}


def _read_card(participant: Participant) -> _Index:
    card = msgspec.json.decode(participant.card) if participant.card is not UNSET else {}
    card = card if isinstance(card, dict) else {}
    words = {part: _list_words(card.get(part)) for part in _WEIGHTS}
    words["tags"] |= {participant.agent_id, *_list_words(participant.agent_id)}  # the id counts as a tag
    return _Index(participant.card, card, words)


def _list_words(value: object) -> set[str]:
    if isinstance(value, str):
        return {word.lower() for word in _WORD.findall(value)} | set(value.lower().replace("_", " ").split())
    if isinstance(value, list):
        return set().union(*(_list_words(item) for item in value))
    return set()
