"""What attacks cost those who do nothing wrong: two participants exchange messages, quietly, under each attack of `attacks`, and after it.

    ./dev bench attacks [--quick] [--only NAME ...] [--json FILE]

Each attack has a node of its own, as a user finds it, and is a process of its own. A message's time counts from when it was due, not from
when it could be sent. The bound is P9's: what the hub holds stays below what it held when it was quiet, and 256 MB.
"""

from __future__ import annotations

import argparse
import json
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from attacks import ATTACKS, MAX_ATTACK_S, Attack
from bare import Bare
from machine import pin_process, split_cores
from report import tell
from servers import DEFAULT_NODE, HERE, read_memory_kb, start_server
from wire import LoadError

MESSAGES_PER_S = 50
"""Of the pair. Its sender is a person: an agent's rate would hold up what an attack has delayed."""
LATE_S = 60.0
"""How long a message of the pair may take at all."""
BOUND_MB = 256
CONFIG = """\
name: bench
port: 0
db: {db}
durability: full
"""


@dataclass(frozen=True)
class Phase:
    """One stretch of the pair's messages: milliseconds from when each was due until it was delivered, and the node's memory meanwhile."""

    messages: int
    p50_ms: float
    p99_ms: float
    worst_ms: float
    refused: int
    """How often the sender was told to send the same again later."""
    peak_mb: float
    last_mb: float


@dataclass(frozen=True)
class Harm:
    """One attack's line."""

    name: str
    what: str
    quiet: Phase
    attacked: Phase
    after: Phase

    @property
    def is_bounded(self) -> bool:
        return self.attacked.peak_mb <= self.quiet.last_mb + BOUND_MB


class Pair:
    """Two participants, one writing to the other at a fixed rate, and one selector over both."""

    def __init__(self, url: str, pid: int, owner_token: str) -> None:
        self._pid = pid
        self._receiver = Bare(url, "innocent-receiver")
        self._sender = Bare(url, "innocent-sender", kind="human", token=owner_token)
        self._selector = selectors.DefaultSelector()
        for one in (self._sender, self._receiver):
            one.watch()
            self._selector.register(one.socket, selectors.EVENT_READ, one)
        self._sent = 0

    def exchange(self, is_over: Callable[[], bool]) -> Phase:
        """Messages until it is over, and until the last of them has arrived. Raises `LoadError` when one does not."""
        due_s: dict[str, float] = {}
        again: list[tuple[float, str]] = []
        times_ms: list[float] = []
        memory_mb: list[float] = []
        refused = 0
        next_s = look_s = time.perf_counter()
        is_ending = False
        while not is_ending or due_s:
            now_s = time.perf_counter()
            is_ending = is_ending or is_over()
            while not is_ending and now_s >= next_s:
                self._sent += 1
                message_id = f"innocent-{self._sent}"
                due_s[message_id] = next_s
                self._send(message_id)
                next_s += 1 / MESSAGES_PER_S
            for at_s, message_id in [it for it in again if it[0] <= now_s]:
                again.remove((at_s, message_id))
                self._send(message_id)
            if now_s >= look_s:
                memory_mb.append(read_memory_kb(self._pid) / 1024)
                look_s = now_s + 0.02
            if due_s and now_s - min(due_s.values()) > LATE_S:
                raise LoadError(f"a message took more than {LATE_S:.0f} s: {len(due_s)} are on their way")
            for key, _ in self._selector.select(0.005):
                for frame in key.data.take():
                    if frame["type"] == "deliver":
                        message = frame["message"]
                        if message["sender_id"] == self._sender.agent_id:
                            arrived_s = time.perf_counter()
                            times_ms.append((arrived_s - due_s.pop(message["content"])) * 1000)
                        key.data.say(type="ack", seq=message["seq"])
                    elif frame["type"] == "error":
                        if "retry_after_ms" not in frame:
                            raise LoadError(f"{key.data.agent_id} was refused: {frame}")
                        refused += 1
                        again.append((time.perf_counter() + frame["retry_after_ms"] / 1000, frame["message_id"]))
        times_ms.sort()
        return Phase(
            len(times_ms),
            times_ms[len(times_ms) // 2],
            times_ms[int(len(times_ms) * 0.99)],
            times_ms[-1],
            refused,
            max(memory_mb),
            memory_mb[-1],
        )

    def _send(self, message_id: str) -> None:
        to = f"agent:{self._receiver.agent_id}"
        self._sender.say(type="send", message_id=message_id, to=to, content=message_id)

    def close(self) -> None:
        self._selector.close()
        self._sender.close()
        self._receiver.close()


def measure(attack: Attack, node: Sequence[str], *, quiet_s: float, after_s: float) -> Harm:
    """Run one attack against a new node. Raises `LoadError`."""
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as folder:
        config = Path(folder) / "node.yaml"
        config.write_text(CONFIG.format(db=Path(folder) / "bench.db"))
        server_cores, own_cores = split_cores()
        pin_process(0, own_cores)
        with start_server([*node, str(config)], frozenset(server_cores), Path(folder)) as (url, pid):
            command = [sys.executable, str(HERE / "attacks.py"), attack.name, url]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
                try:
                    pair = Pair(url, pid, (Path(folder) / "bench.db.owner").read_text().strip())
                    return _measure(attack, attacker, pair, quiet_s, after_s)
                finally:
                    attacker.kill()


def _measure(attack: Attack, attacker: subprocess.Popen[str], pair: Pair, quiet_s: float, after_s: float) -> Harm:
    assert attacker.stdin is not None
    assert attacker.stdout is not None
    if attacker.stdout.readline() != "prepared\n":
        raise LoadError(f"{attack.name} could not be prepared (see above)")
    quiet = pair.exchange(_after(quiet_s))
    attacker.stdin.write("go\n")
    attacker.stdin.flush()
    attacked = pair.exchange(_ends_in(attacker, 2 * MAX_ATTACK_S))
    if attacker.poll() != 0:
        raise LoadError(f"{attack.name} failed (see above), or did not end")
    after = pair.exchange(_after(after_s))
    pair.close()
    return Harm(attack.name, attack.what, quiet, attacked, after)


def _after(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end_s


def _ends_in(process: subprocess.Popen[str], seconds: float) -> Callable[[], bool]:
    is_late = _after(seconds)
    return lambda: process.poll() is not None or is_late()


def format_harms(harms: Sequence[Harm]) -> str:
    """The one table."""
    heads = (
        "attack",
        "RSS quiet",
        "peak",
        "after",
        "p99 quiet",
        "attacked",
        "ratio",
        "worst quiet",
        "attacked",
        "after",
        "refused",
    )
    shown = ["{:<20}{:>10}{:>8}{:>8}  {:>10}{:>10}{:>7}  {:>12}{:>10}{:>8}{:>9}".format(*heads)]
    for it in harms:
        ratio = it.attacked.p99_ms / it.quiet.p99_ms
        shown.append(
            f"{it.name:<20}{it.quiet.last_mb:>7.0f} MB{it.attacked.peak_mb:>8.0f}{it.after.last_mb:>8.0f}  "
            f"{it.quiet.p99_ms:>7.1f} ms{it.attacked.p99_ms:>10.1f}{ratio:>7.1f}  "
            f"{it.quiet.worst_ms:>9.1f} ms{it.attacked.worst_ms:>10.1f}{it.after.worst_ms:>8.1f}{it.attacked.refused:>9}"
            f"  {'ok' if it.is_bounded else f'MISSED: more than quiet + {BOUND_MB} MB'}"
        )
    return "\n".join([*shown, "", *(f"{it.name}: {it.what}" for it in harms)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter before and after each attack")
    parser.add_argument("--only", action="append", default=[], choices=ATTACKS, help="this attack; may be repeated")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.add_argument("--node", metavar="COMMAND", help="starts a node from a config file; default: roundelay up")
    options = parser.parse_args()
    node = shlex.split(options.node) if options.node else DEFAULT_NODE
    quiet_s, after_s = (1.0, 1.0) if options.quick else (5.0, 5.0)
    harms: list[Harm] = []
    for name in options.only or ATTACKS:
        tell(f"{name}: {ATTACKS[name].what}")
        try:
            harms.append(measure(ATTACKS[name], node, quiet_s=quiet_s, after_s=after_s))
        except LoadError as error:
            sys.exit(f"the measurement failed: {error}")
    print(format_harms(harms))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(harm) for harm in harms], indent=2) + "\n")


if __name__ == "__main__":
    main()
