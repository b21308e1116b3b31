"""Shared memory between a node and a process of agents, with a heartbeat and the current work of each agent.

The process writes, and the node reads. The memory remains readable after a crash and while the process hangs, so that
the node can find the agents that may have caused it. A write needs no system call.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path

_HEARTBEAT, _CULPRIT = struct.Struct("<Q"), struct.Struct("<I")
_CULPRIT_AT, _STATES_AT = 8, 16


class Work(IntEnum):
    """Current work of an agent."""

    IDLE = 0
    REACTS = 1
    """The agent is starting, or reacts to a message."""
    CALLS = 2
    """A tool of the agent is running."""
    LOADS = 3
    """The agent's code is being imported."""


_WORKS = frozenset(Work)


class WorkBoard:
    """Heartbeat of a process, and the current work of its agents. The node and the process use the same slot for an
    agent."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    @classmethod
    def create(cls, path: Path, slots: int) -> WorkBoard:
        """Create the file of a board, or clear an existing file."""
        path.write_bytes(bytes(_STATES_AT + slots))
        return cls(path)

    def beat(self) -> None:
        _HEARTBEAT.pack_into(self._memory, 0, self.heartbeat + 1)

    @property
    def heartbeat(self) -> int:
        """Number of heartbeats so far, about one per second; 0 before the first."""
        return int(_HEARTBEAT.unpack_from(self._memory, 0)[0])

    def set_work(self, slot: int, work: Work) -> None:
        self._memory[_STATES_AT + slot] = work

    def get_work(self, slot: int) -> Work:
        value = self._memory[_STATES_AT + slot]
        # A crash with memory corruption may have overwritten the board. In that case the running code is unknown.
        return Work(value) if value in _WORKS else Work.CALLS

    def blame(self, slot: int) -> None:
        """Record that the agent in this slot blocks the event loop."""
        _CULPRIT.pack_into(self._memory, _CULPRIT_AT, slot + 1)

    @property
    def blamed(self) -> int | None:
        """Slot of the agent that blocks the event loop, or None if the process did not record one."""
        slot = int(_CULPRIT.unpack_from(self._memory, _CULPRIT_AT)[0]) - 1
        return slot if slot >= 0 else None

    def close(self) -> None:
        self._memory.close()
