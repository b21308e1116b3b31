"""The servers under measurement: a node, or a relay of relays.py, each a process of its own; and what can be read of it from outside.

Owns: how a node is configured for a measurement, its start and end, its memory and its figures. Stands under every measurement;
measures nothing itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import pin_process
from wire import LoadError

HERE = Path(__file__).resolve().parent
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
DEFAULT_NODE = (sys.executable, "-m", "roundelay", "up")

# Rates that no run reaches: what is measured is the hub, not its brakes. Everything else is as a user finds it.
HUB_CONFIG = """\
name: bench
host: 127.0.0.1
port: 0
db: {db}
durability: {durability}
limits:
  sends_per_s: 10000000
  root_messages_per_s: 10000000
"""


@dataclass(frozen=True)
class Subject:
    """One server under measurement."""

    name: str
    durability: str | None = None  # of the hub; None: a relay of relays.py

    def build_command(self, directory: Path, node: Sequence[str], db: Path | None = None) -> list[str]:
        if self.durability is None:
            return [sys.executable, str(HERE / "relays.py"), self.name]
        config = directory / "node.yaml"
        config.write_text(HUB_CONFIG.format(db=db or directory / "bench.db", durability=self.durability))
        return [*node, str(config)]


@dataclass(frozen=True)
class Bench:
    """What every measurement needs to know: how a node is started, where files may be made, which cores the servers have."""

    node: Sequence[str]
    scratch: Path
    server_cores: frozenset[int]  # empty: not pinned

    @contextlib.contextmanager
    def start(self, subject: Subject, db: Path | None = None) -> Iterator[tuple[str, int]]:
        """The subject's URL and process id; it keeps its files in a folder of its own, or a database that is already there."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            command = subject.build_command(Path(folder), self.node, db)
            with start_server(command, self.server_cores, Path(folder)) as started:
                yield started


@contextlib.contextmanager
def start_server(
    command: Sequence[str], cores: frozenset[int] = frozenset(), home: Path | None = None
) -> Iterator[tuple[str, int]]:
    """The server's URL and process id, once it has printed its ready line; it is ended on the way out."""
    # Nothing of the user's gets in, and no note of this node reaches the user's other commands.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDELAY_")}
    environment |= {"PYTHONUNBUFFERED": "1"} | ({"ROUNDELAY_HOME": str(home)} if home is not None else {})
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            pin_process(process.pid, cores)
            assert process.stdout is not None
            line = ""
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not (found := re.search(r"(?:ws|http)s?://[^\s\"]+", line)):
                line = process.stdout.readline()
                if not line or time.monotonic() > deadline_s:
                    raise LoadError(f"no ready line from: {' '.join(command)}")
            yield found[0], process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def read_figure(url: str, name: str) -> float:
    """One figure of a hub, from its ``/metrics``."""
    with urllib.request.urlopen(url.replace("ws", "http", 1) + "metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.search(rf"^roundelay_{name} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise LoadError(f"the hub has no figure {name}")
    return float(found[1])


def read_memory_kb(pid: int) -> float:
    """What process ``pid`` holds resident, in KiB. 0.0 where the system cannot tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return float(next((line.split()[1] for line in lines if line.startswith("VmRSS:")), 0))
