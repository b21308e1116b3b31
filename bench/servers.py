"""Starts and stops the measured servers, and reads their memory and metrics from outside. A server is a node or a relay
of relays.py, and runs as a separate process.

This module also contains the node's configuration for a measurement, but does not measure anything itself.
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

# Set rate limits that no run reaches, so that the hub is measured and not its limits. All other settings are the
# defaults.
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
    """One server that is measured."""

    name: str
    durability: str | None = None  # durability of the hub; None means a relay of relays.py

    def build_command(self, directory: Path, node: Sequence[str], db: Path | None = None) -> list[str]:
        if self.durability is None:
            return [sys.executable, str(HERE / "relays.py"), self.name]
        config = directory / "node.yaml"
        config.write_text(HUB_CONFIG.format(db=db or directory / "bench.db", durability=self.durability))
        return [*node, str(config)]


@dataclass(frozen=True)
class Bench:
    """Settings of every measurement: the command of the node, the folder for files, and the cores of the servers."""

    node: Sequence[str]
    scratch: Path
    server_cores: frozenset[int]  # if empty, servers are not pinned to cores

    @contextlib.contextmanager
    def start(self, subject: Subject, db: Path | None = None) -> Iterator[tuple[str, int]]:
        """Start a subject, and yield its URL and process id. The subject uses a new folder, or an existing database."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            command = subject.build_command(Path(folder), self.node, db)
            with start_server(command, self.server_cores, Path(folder)) as started:
                yield started


@contextlib.contextmanager
def start_server(
    command: Sequence[str], cores: frozenset[int] = frozenset(), home: Path | None = None
) -> Iterator[tuple[str, int]]:
    """Start a server, wait for its ready line, and yield its URL and process id. The server is stopped afterwards."""
    # Isolate the node from the settings of the user, and the user's commands from this node.
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
    """Return the value of one metric of a hub, from ``/metrics``."""
    with urllib.request.urlopen(url.replace("ws", "http", 1) + "metrics", timeout=10) as response:
        text = response.read().decode()
    found = re.search(rf"^roundelay_{name} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise LoadError(f"the hub has no metric {name}")
    return float(found[1])


def read_memory_kb(pid: int) -> float:
    """Return the resident memory of a process in KiB. Return 0.0 if the system cannot report the memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return float(next((line.split()[1] for line in lines if line.startswith("VmRSS:")), 0))
