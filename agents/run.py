"""What the parts of a driver share: one run, a reaction or an agent inside of one, with its journal and who listens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .events import OnEvent
from .journal import Journal
from .reaction import Reaction
from .records import Recorded
from .replies import Replies
from .tools import ToolContext

MakeContext = Callable[[str, int], ToolContext]
"""Gives the context of a call, by its derived id and its turn: who calls, for which message."""


@dataclass(slots=True)
class Run:
    """One run. ``pieces`` numbers what streams, in one order with the runs inside of it."""

    reaction: Reaction
    journal: Journal
    make_context: MakeContext
    emit: OnEvent
    replies: Replies | None = None
    pieces: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    recorded: Recorded = field(default_factory=Recorded)
    is_inside_held: bool = False
    """Whether a run around this one holds its text back."""
    live_turn: int = 0
    """The last turn in which anything was done rather than replayed."""

    @property
    def is_held(self) -> bool:
        """Whether what its model writes is reviewed before anybody reads it."""
        return self.is_inside_held or self.reaction.withholds

    @property
    def id(self) -> str:
        return self.journal.reaction

    @property
    def path(self) -> str:
        return self.journal.path
