"""Whether a message costs more on a long ledger than on a short one: the hub's CPU per direct message, with ten times the history.

Each round copies both ledgers of history.py and measures a node on each, one sender to one receiver, pipelined, durability
``normal``. What more participants cost is measured by idle.py, on one node.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from history import History
from load import Fleet
from machine import read_process_cpu_s
from servers import Bench, Subject
from table import Line, median_of

SIZE_BYTES = 200
RECEIVER = "agent:receiver-000"
HUB = Subject("hub normal", "normal")


class LedgerGrowth:
    """CPU per message on the large ledger, over that on the small one."""

    name = "ledger-growth"

    def __init__(self, bench: Bench, history: History, messages: int) -> None:
        self._bench = bench
        self._history = history
        self._messages = messages
        self._cpu_us: dict[str, list[float]] = {"small": [], "large": []}

    def run_round(self, number: int) -> str:
        ledgers = {"small": self._history.small, "large": self._history.large}
        for name in ledgers if number % 2 == 0 else reversed(ledgers):
            with tempfile.TemporaryDirectory(dir=self._bench.scratch) as folder:
                db = Path(folder) / "bench.db"
                shutil.copyfile(ledgers[name], db)
                os.sync()  # else the copy is written out while the node is measured
                self._cpu_us[name].append(self._measure(db))
        return (
            f"{self._history.messages // 10:,} messages in the ledger: {self._cpu_us['small'][-1]:.1f} us CPU each; "
            f"{self._history.messages:,}: {self._cpu_us['large'][-1]:.1f}"
        )

    def _measure(self, db: Path) -> float:
        with self._bench.start(HUB, db) as (url, pid), Fleet(url, 1, names_stored=True) as fleet:
            fleet.send_pipelined(max(self._messages // 4, 50), to=RECEIVER, size_bytes=SIZE_BYTES, window=512)
            cpu_s = read_process_cpu_s(pid)
            fleet.send_pipelined(self._messages, to=RECEIVER, size_bytes=SIZE_BYTES, window=512)
            return (read_process_cpu_s(pid) - cpu_s) / self._messages * 1e6

    def lines(self) -> list[Line]:
        small, large = self._cpu_us["small"], self._cpu_us["large"]
        ratios = [of / to for of, to in zip(large, small, strict=True) if to]
        if not ratios:
            return []
        title = f"CPU per message, {self._history.messages:,} in the ledger / {self._history.messages // 10:,}"
        beside = f"{median_of(large):.1f} us / {median_of(small):.1f} us"
        return [Line("ledger_growth", title, ratios, 1.2, fewer_is_better=True, beside=beside)]

    def details(self) -> dict[str, Any]:
        return {"messages": self._messages, "history": self._history.messages, "cpu_us": self._cpu_us}
