"""CPU time of the hub when a participant returns. The participant has ten channels, and missed 500 of 300,000 messages.

The participant sends its own cursor, so the same return can be repeated. The measurement starts after the WebSocket
handshakes. The result is the CPU time of all threads of the hub's process from `hello` to the last delivery, including
commits and page reads. The reader acknowledges messages like a client, because the window is smaller than the number of
missed messages. Each return is verified: the reader must receive exactly the missed messages, once each, ascending.
"""

from __future__ import annotations

import re
import selectors
import statistics
import time
from typing import Any

from history import READER, History
from load import TIMEOUT_S, Participant
from machine import read_process_cpu_s
from servers import Bench, Subject
from table import Line, median_of
from wire import LoadError

HUB = Subject("hub full", "full")
_SEQ = re.compile(rb'"seq":(\d+)')


class Resume:
    """Measures the milliseconds of CPU time that the hub uses per return."""

    name = "resume"

    def __init__(self, bench: Bench, history: History, returns: int) -> None:
        self._bench = bench
        self._history = history
        self._returns = returns
        self._cpu_ms: list[float] = []
        self._elapsed_ms: list[float] = []

    def run_round(self, number: int) -> str:
        with self._bench.start(HUB, self._history.path) as (url, pid):
            for _ in range(2):  # the first returns read the file into the page cache
                self._come_back(self._open(url))
            readers = [self._open(url) for _ in range(self._returns)]
            cpu_s = read_process_cpu_s(pid)
            elapsed_s = [self._come_back(reader) for reader in readers]
            self._cpu_ms.append((read_process_cpu_s(pid) - cpu_s) / len(readers) * 1000)
        self._elapsed_ms.append(statistics.median(elapsed_s) * 1000)
        return (
            f"{self._history.missed} of {self._history.messages:,} missed: "
            f"{self._cpu_ms[-1]:.1f} ms CPU, {self._elapsed_ms[-1]:.1f} ms until the last is here"
        )

    def _open(self, url: str) -> Participant:
        return Participant(url, READER, counted=(b'{"type":"deliver"',))

    def _come_back(self, reader: Participant) -> float:
        """Join as the reader again, and receive all missed messages. Return the seconds from `hello` to the last
        delivery.
        """
        started_s = time.perf_counter()
        reader.say_hello(self._history.resume)
        reader.await_welcome()
        reader.ack_if_due()  # some deliveries may have arrived with the welcome
        with selectors.DefaultSelector() as selector:
            selector.register(reader.socket, selectors.EVENT_READ)
            while reader.received < self._history.missed:
                if not selector.select(TIMEOUT_S):
                    raise LoadError(f"the return stalled after {reader.received} of {self._history.missed} messages")
                reader.read()
                reader.ack_if_due()
        elapsed_s = time.perf_counter() - started_s
        seqs = [int(match[1]) for frame in reader.read_frames() if (match := _SEQ.search(frame))]
        if len(seqs) != self._history.missed or seqs != sorted(set(seqs)):
            raise LoadError(f"{len(set(seqs))} messages came for {self._history.missed} missed, or not in order")
        reader.close()
        return elapsed_s

    def lines(self) -> list[Line]:
        if not any(self._cpu_ms):
            return []
        title = f"return to {self._history.missed} missed of {self._history.messages:,}, CPU of the hub"
        beside = f"{median_of(self._elapsed_ms):.1f} ms until the last is here"
        return [Line("resume", title, self._cpu_ms, 6.0, 3.0, True, "ms", beside)]

    def details(self) -> dict[str, Any]:
        return {
            "missed": self._history.missed,
            "messages": self._history.messages,
            "returns": self._returns,
            "cpu_ms": self._cpu_ms,
            "elapsed_ms": self._elapsed_ms,
        }
