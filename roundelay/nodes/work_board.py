"""Memory that a node shares with a process of agents: a heartbeat, and what each agent does now.

The process writes, the node reads. The memory is still readable after a crash, and while the process hangs. It shows
then which agents may be at fault. A write costs no system call.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path

_HEARTBEAT, _CULPRIT = struct.Struct("<Q"), struct.Struct("<I")
_CULPRIT_AT, _STATES_AT = 8, 16


class Work(IntEnum):
    """What an agent does."""

    IDLE = 0
    REACTS = 1
    """The agent starts, or reacts to a message."""
    CALLS = 2
    """A tool of the agent runs."""
    LOADS = 3
    """The agent's code is being imported."""


_WORKS = frozenset(Work)


class WorkBoard:
    """Heartbeat and work of the agents of one process. An agent has the same slot in both processes."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, slots: int) -> WorkBoard:
        """Create the file, or clear it."""
        path.write_bytes(bytes(_STATES_AT + slots))
        return cls(path)

    def beat(self) -> None:
        _HEARTBEAT.pack_into(self._memory, 0, self.heartbeat + 1)

    @property
    def heartbeat(self) -> int:
        """Number of rounds of the process's event loop, about one per second. 0 before the first."""
        return int(_HEARTBEAT.unpack_from(self._memory, 0)[0])

    def set_work(self, slot: int, work: Work) -> None:
        self._memory[_STATES_AT + slot] = work

    def get_work(self, slot: int) -> Work:
        value = self._memory[_STATES_AT + slot]
        # A crash by a wild pointer may have overwritten the board. Whose code runs is unknown then.
        return Work(value) if value in _WORKS else Work.CALLS

    def blame(self, slot: int) -> None:
        """Record that this agent blocks the event loop."""
        _CULPRIT.pack_into(self._memory, _CULPRIT_AT, slot + 1)

    @property
    def blamed(self) -> int | None:
        """Slot of the agent that blocks the event loop, if the process could tell."""
        slot = int(_CULPRIT.unpack_from(self._memory, _CULPRIT_AT)[0]) - 1
        return slot if slot >= 0 else None

    def close(self) -> None:
        self._memory.close()
