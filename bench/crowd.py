"""Participants that connect and then say nothing: a process of its own that holds them, and `Crowd`, which has it open them.

    python bench/crowd.py URL PREFIX SOURCE

Reads numbers from its standard input and opens so many more connections, from the address SOURCE; prints how many there are then.
Between those it answers pings. Ends at the end of its input; ends with 1 when a connection is refused or lost.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from load import Participant
from machine import pin_process
from wire import LoadError

HELLOS_TOGETHER = 50
"""How many are under way at once: far below `max_unauthenticated`, and enough that joins share commits."""
MEMBERS_PER_PROCESS = 5_000
COUNTED = (b'{"type":"deliver"',)


@dataclass
class Crowd:
    """Idle participants of one server, in one process or two."""

    url: str
    processes: list[subprocess.Popen[str]]
    size: int = 0

    @classmethod
    @contextlib.contextmanager
    def gather(cls, url: str, most: int, cores: frozenset[int]) -> Iterator[Crowd]:
        """A crowd of nobody, which may grow to ``most``."""
        with contextlib.ExitStack() as stack:
            processes = []
            for number in range(max(1, -(-most // MEMBERS_PER_PROCESS))):
                # One address has fewer free ports than a large crowd needs; only Linux has all of 127.0.0.0/8.
                source = f"127.0.0.{number + 2}" if sys.platform == "linux" else "127.0.0.1"
                command = [sys.executable, str(Path(__file__).resolve()), url, f"idle-{number}", source]
                process = stack.enter_context(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                )
                stack.callback(process.kill)
                pin_process(process.pid, cores)
                processes.append(process)
            yield cls(url, processes)

    def grow(self, size: int) -> None:
        """Return when so many are connected and welcomed. Raises `LoadError` when one is not."""
        more, count = size - self.size, len(self.processes)
        shares = [more // count + (number < more % count) for number in range(count)]
        for process, share in zip(self.processes, shares, strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{share}\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise LoadError(f"not all of {size} idle connections could be opened or kept (see above)")
        self.size = size


def hold(url: str, prefix: str, source: str) -> None:
    """Open and keep connections as the standard input says."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS says unlimited and takes less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    members: list[Participant] = []
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    key.data.read()
                    continue
                line = sys.stdin.readline()
                if not line:
                    return
                wanted = len(members) + int(line)
                while len(members) < wanted:
                    together = min(HELLOS_TOGETHER, wanted - len(members))
                    opened = [_open(url, prefix, source, len(members) + number) for number in range(together)]
                    for member in opened:
                        member.say_hello()
                    for member in opened:
                        member.await_welcome()
                        member.welcome.clear()  # some KB each
                        selector.register(member.socket, selectors.EVENT_READ, member)
                    members += opened
                    for ready, _ in selector.select(0):
                        if ready.data is not None:
                            ready.data.read()
                print(len(members), flush=True)


def _open(url: str, prefix: str, source: str, number: int) -> Participant:
    return Participant(url, f"{prefix}-{number:05d}", counted=COUNTED, source=source)


def main() -> None:
    try:
        hold(*sys.argv[1:4])
    except (LoadError, OSError) as error:
        sys.exit(f"an idle connection failed: {error}")


if __name__ == "__main__":
    main()
