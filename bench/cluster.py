"""Cost of a shared log compared with one durable node (FULL): throughput, latency, the lag of a follower, and the
duration of a takeover.

    ./dev bench cluster [--quick] [--rounds 5] [--json FILE] [--postgres postgres://USER:PASSWORD@HOST/DATABASE]

A node leads on one NATS server or on three, with or without a follower. Each round measures each subject once, with new
processes. A ratio compares two values of the same round. One sender first keeps a window of messages in flight, and
then sends one message at a time (load.py verifies every message).

The duration of a takeover is the time from the `kill -9` of the leader until the follower is ready. The lag is the time
from `stored` at the leader to the delivery to a reader of the follower. The same process observes both times. The time
to catch up is the time to transfer the leader's messages into an empty database, minus the time of a start without
messages. NATS syncs each record (`always`) or uses its default. With --postgres, the benchmark also measures a leader
whose log is in that database. The tables roundelay_bench_* are left in the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nats
import nats.errors
from load import Fleet, Participant
from machine import describe_machine, measure_fdatasync, read_process_cpu_s
from report import Results, make_parser, pick_size, tell, tell_results
from servers import DEFAULT_NODE, HUB_CONFIG, start_server
from table import Line
from wire import LoadError, encode_masked_frame, encode_send, make_message_id

SIZE_BYTES, WINDOW = 200, 1024
TO = "agent:receiver-000"
SINGLE = "one node, FULL"
POSTGRES = "leader, PostgreSQL"


@dataclass(frozen=True)
class OnNats:
    """A leader whose log is on NATS servers, optionally with a follower on the same machine, and the bounds of its
    results. ``sync`` is the sync interval of the servers.
    """

    servers: int
    sync: str
    has_follower: bool
    rate: float | None
    wait: float | None


ON_NATS = {
    "leader, always": OnNats(1, "always", False, 0.6, 2.5),
    "leader, default": OnNats(1, '"2m"', False, None, None),
    "and a follower": OnNats(1, "always", True, 0.5, None),
    "three servers": OnNats(3, "always", False, 0.45, 4.5),
    "three, a follower": OnNats(3, "always", True, 0.4, None),
}


@dataclass(frozen=True)
class Size:
    rounds: int
    messages: int
    latency_messages: int
    followed_messages: int
    """Number of messages that a follower must catch up with."""
    lag_s: int
    takeovers: int
    """Number of takeovers in each round."""


SIZES = {
    "full": Size(5, 40_000, 1_000, 100_000, 15, 4),
    "quick": Size(1, 4_000, 200, 10_000, 3, 1),
    "tiny": Size(1, 300, 50, 300, 1, 1),
}
LAG_RATES = (300, 3_000)
"""Messages per second, sent at a steady pace, at which the lag is measured."""


@dataclass(frozen=True)
class Sample:
    messages_per_s: float
    stored_p50_us: float
    node_cpu_us: float
    others_busy: float
    """Use of the machine by other processes, including NATS, in cores."""


@dataclass(frozen=True)
class Following:
    """Results of one follower on the machine of the leader."""

    leader_per_s: float
    caught_up_per_s: float
    rebuilt_per_s: float
    lag_ms: dict[int, list[float]]
    """Median, 99th percentile and maximum of the lag in ms, by the number of messages sent per second."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def nats_servers(folder: Path, sync: str, count: int = 1) -> Iterator[str]:
    """Start NATS servers, and yield the address of a log on them."""
    ports, routes = [free_port() for _ in range(count)], [free_port() for _ in range(count)]
    others = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in routes)
    with contextlib.ExitStack() as stack:
        for port, route in zip(ports, routes, strict=True):
            store = f'jetstream {{ store_dir: "{folder}/nats-{port}", sync_interval: {sync} }}'
            cluster = f'cluster {{ name: bench, listen: "127.0.0.1:{route}", routes: [{others}] }}' if count > 1 else ""
            config = folder / f"nats-{port}.conf"
            config.write_text(f'server_name: "n{port}"\nlisten: "127.0.0.1:{port}"\n{store}\n{cluster}\n')
            command = [Path(sys.executable).with_name("nats-server"), "-c", config]
            server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.kill)
        asyncio.run(wait_until_chosen([f"nats://127.0.0.1:{port}" for port in ports]))
        yield f"nats://{','.join(f'127.0.0.1:{port}' for port in ports)}/bench?replicas={count}"


async def wait_until_chosen(urls: list[str]) -> None:
    """Wait until the servers accept a stream that all of them store."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with contextlib.suppress(nats.errors.Error, OSError, asyncio.TimeoutError):
            async with await nats.connect(urls, allow_reconnect=False, error_cb=_pass_over) as client:
                await client.jetstream(timeout=2).add_stream(name="probe", num_replicas=len(urls))
                return
        await asyncio.sleep(0.1)
    raise LoadError("the NATS servers did not start")


async def _pass_over(error: Exception) -> None:
    """Ignore errors of a server that is not running yet, because the client retries."""


def node_command(folder: Path, name: str, log: str | None, port: int = 0) -> list[str]:
    config = folder / f"{name}.yaml"
    # A shared log provides the durability. With full, the node would check that the NATS servers sync.
    durability = "normal" if log else "full"
    text = HUB_CONFIG.format(db=folder / f"{name}.db", durability=durability).replace("port: 0", f"port: {port}")
    config.write_text(text + (f"log: {log}\n" if log else ""))
    return [*DEFAULT_NODE, str(config)]


def name_network(postgres: str) -> str:
    """Return the address of an unused log in this database."""
    return f"{postgres}?network=bench_{secrets.token_hex(8)}"


def measure(subject: str, size: Size, scratch: Path, postgres: str) -> Sample:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        on_nats = ON_NATS.get(subject)
        log = None if on_nats is None else stack.enter_context(nats_servers(folder, on_nats.sync, on_nats.servers))
        if subject == POSTGRES:
            log = name_network(postgres)
        url, pid = stack.enter_context(start_server(node_command(folder, "a", log), home=folder))
        if on_nats is not None and on_nats.has_follower:
            assert log is not None
            start_follower(stack, folder, log, free_port())
        fleet = stack.enter_context(Fleet(url, 1, names_stored=True))
        fleet.send_pipelined(max(size.messages // 10, 20), to=TO, size_bytes=SIZE_BYTES, window=WINDOW)
        cpu_s = read_process_cpu_s(pid)
        done = fleet.send_pipelined(size.messages, to=TO, size_bytes=SIZE_BYTES, window=WINDOW)
        cpu_s = read_process_cpu_s(pid) - cpu_s
        latency = fleet.send_one_by_one(size.latency_messages, to=TO, size_bytes=SIZE_BYTES)
    others_s = done.machine_cpu_s - cpu_s - done.generator_cpu_s
    return Sample(
        done.messages_per_s, latency.stored_p50_us, cpu_s / size.messages * 1e6, max(0.0, others_s / done.elapsed_s)
    )


def start_follower(stack: contextlib.ExitStack, folder: Path, log: str, port: int) -> None:
    """Start a second node, and wait until it follows the leader."""
    other = subprocess.Popen(
        node_command(folder, "b", log, port), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    stack.callback(other.wait)
    stack.callback(other.kill)
    assert other.stderr is not None
    while "follows" not in (line := other.stderr.readline()):
        if not line:
            raise LoadError("the follower did not start")


def measure_following(size: Size, scratch: Path) -> Following:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        log = stack.enter_context(nats_servers(folder, "always"))
        url, _ = stack.enter_context(start_server(node_command(folder, "a", log), home=folder))
        fleet = stack.enter_context(Fleet(url, 1, names_stored=True))
        count = size.followed_messages
        led = fleet.send_pipelined(count, to=TO, size_bytes=SIZE_BYTES, window=WINDOW)
        with contextlib.ExitStack() as first:
            caught_s = _time(lambda: start_follower(first, folder, log, free_port()))
        port = free_port()
        caught_s -= _time(lambda: start_follower(stack, folder, log, port))
        lags = {rate: measure_lag(fleet, f"ws://127.0.0.1:{port}/?read_only=1", rate, size.lag_s) for rate in LAG_RATES}
        command = [sys.executable, "-m", "roundelay", "cluster", "rebuild", "--log", log, "--json"]
        done = subprocess.run([*command, "--db", folder / "c.db"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise LoadError(done.stderr)
    sent = count + sum(LAG_RATES) * size.lag_s
    return Following(led.messages_per_s, count / caught_s, sent / json.loads(done.stdout)["seconds"], lags)


def _time(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_lag(fleet: Fleet, follower: str, rate: int, seconds: int) -> list[float]:
    """Return the delay from `stored` to the delivery at the follower in ms: median, 99th percentile and maximum."""
    count, (at_leader,) = rate * seconds, fleet.receivers
    reader = Participant.join(follower, at_leader.agent_id, counted=(b'{"type":"deliver"',))
    ids = [make_message_id() for _ in range(count)]
    frames = [encode_masked_frame(encode_send(it, TO, b"x" * SIZE_BYTES, SIZE_BYTES), b"abcd") for it in ids]
    came: dict[Participant, list[float]] = {it: [] for it in (fleet.sender, at_leader, reader)}
    with contextlib.closing(reader), selectors.DefaultSelector() as selector:
        for participant in came:
            selector.register(participant.socket, selectors.EVENT_READ, participant)
        for participant in (fleet.sender, at_leader):
            participant.forget()
        while reader.read():  # skip messages that the follower delivers from earlier runs
            pass
        reader.forget()
        began = time.perf_counter()
        sent = 0
        while min(map(len, came.values())) < count:
            now = time.perf_counter()
            if now - began > seconds + 30:
                raise LoadError(f"of {count} messages {len(came[reader])} arrived at the follower")
            due = min(count, int((now - began) * rate) + 1)
            if sent < due:
                fleet.sender.socket.sendall(b"".join(frames[sent:due]))
                sent = due
            for key, _ in selector.select(max(0.0, began + sent / rate - now) if sent < count else 1.0):
                participant = key.data
                if participant.read():
                    news = participant.received - len(came[participant])
                    came[participant] += [time.perf_counter()] * news
                    if participant is not fleet.sender:
                        participant.ack_if_due()
        at_leader.ack()
        shown = [json.loads(it)["message"]["message_id"].encode() for it in reader.read_frames()]
        if shown != ids:
            raise LoadError("the follower did not show what was sent")
    lags = sorted((b - a) * 1000 for a, b in zip(came[fleet.sender], came[reader], strict=True))
    return [lags[count // 2], lags[int(count * 0.99)], lags[-1]]


def measure_takeover(scratch: Path, postgres: str = "") -> float:
    """Return the time in seconds from the leader's death until the follower is ready. The log is on NATS, unless a
    PostgreSQL database is given.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        log = name_network(postgres) if postgres else stack.enter_context(nats_servers(folder, "always"))
        port = free_port()
        leader = subprocess.Popen(node_command(folder, "a", log), stdout=subprocess.PIPE, text=True)
        stack.callback(leader.wait)
        stack.callback(leader.kill)
        assert leader.stdout is not None
        if "ready" not in leader.stdout.readline():
            raise LoadError("the leader did not start")
        start_follower(stack, folder, log, port)
        leader.kill()
        began = time.perf_counter()
        while time.perf_counter() - began < 30:
            with contextlib.suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1).close()
                return time.perf_counter() - began
            time.sleep(0.01)
    raise LoadError("no follower took over within 30 s")


def run(size: Size, rounds: int, postgres: str) -> Results:
    subjects = (SINGLE, *ON_NATS, *([POSTGRES] if postgres else []))
    samples: dict[str, list[Sample]] = {name: [] for name in subjects}
    takeovers: list[float] = []
    postgres_takeovers: list[float] = []
    disk: list[float] = []
    following: list[Following] = []
    with tempfile.TemporaryDirectory(prefix="roundelay-bench-", dir=Path.cwd()) as made:
        scratch = Path(made)
        for number in range(rounds):
            disk.append(measure_fdatasync(scratch)[0])
            turn = number % len(subjects)
            for subject in subjects[turn:] + subjects[:turn]:
                sample = measure(subject, size, scratch, postgres)
                samples[subject].append(sample)
                tell(
                    f"{subject:<17} {sample.messages_per_s:>8,.0f}/s  stored p50 {sample.stored_p50_us:6.0f} us  "
                    f"node {sample.node_cpu_us:5.1f} us CPU  others {sample.others_busy:4.0%}"
                )
            following.append(it := measure_following(size, scratch))
            tell(f"a follower: catches up at {it.caught_up_per_s:,.0f}/s (the leader did {it.leader_per_s:,.0f}/s)")
            tell(f"rebuild {it.rebuilt_per_s:,.0f}/s; lag (p50, p99, maximum) {_show_lags(it)}")
            takeovers += [measure_takeover(scratch) for _ in range(size.takeovers)]
            if postgres:
                postgres_takeovers.append(measure_takeover(scratch, postgres))
                tell(f"takeover, PostgreSQL {postgres_takeovers[-1]:.2f} s")
            tell(f"takeover {max(takeovers[-size.takeovers :]):.2f} s at most; fdatasync p50 {disk[-1]:.0f} us")
        machine = asdict(describe_machine(scratch))
    return {
        "machine": machine,
        "fdatasync_p50_us": disk,
        "takeover_s": takeovers,
        "postgres_takeover_s": postgres_takeovers,
        "following": [asdict(it) for it in following],
        "samples": {name: [asdict(it) for it in found] for name, found in samples.items()},
        "table": [asdict(line) for line in list_lines(samples, following, takeovers, postgres_takeovers)],
    }


def _show_lags(it: Following) -> str:
    return "; ".join(f"{rate:,}/s: {', '.join(f'{ms:.1f}' for ms in found)} ms" for rate, found in it.lag_ms.items())


def list_lines(
    samples: dict[str, list[Sample]],
    following: Sequence[Following],
    takeovers: Sequence[float],
    postgres_takeovers: Sequence[float],
) -> list[Line]:
    lines = []
    single = samples[SINGLE]
    for name in [it for it in samples if it != SINGLE]:
        rates = [a.messages_per_s / b.messages_per_s for a, b in zip(samples[name], single, strict=True)]
        waits = [a.stored_p50_us / b.stored_p50_us for a, b in zip(samples[name], single, strict=True)]
        rate, wait = (it.rate, it.wait) if (it := ON_NATS.get(name)) is not None else (None, None)
        both = " / ".join(
            f"{statistics.median(it.messages_per_s for it in side):,.0f}/s" for side in (samples[name], single)
        )
        lines.append(Line(f"rate {name}", f"{name} / one node", rates, rate, None, beside=both))
        both = " / ".join(
            f"{statistics.median(it.stored_p50_us for it in side):.0f} us" for side in (samples[name], single)
        )
        lines.append(Line(f"p50 {name}", "  unpipelined p50", waits, wait, None, True, beside=both))
    rates = [it.caught_up_per_s / it.leader_per_s for it in following]
    beside = " / ".join(
        f"{statistics.median(it):,.0f}/s"
        for it in ([it.caught_up_per_s for it in following], [it.leader_per_s for it in following])
    )
    lines.append(Line("catch-up", "a follower's catching up / leader", rates, 1.5, None, beside=beside))
    rates = [it.rebuilt_per_s / it.leader_per_s for it in following]
    beside = f"{statistics.median(it.rebuilt_per_s for it in following):,.0f}/s"
    lines.append(Line("rebuild", "cluster rebuild / leader", rates, None, None, beside=beside))
    for rate in LAG_RATES:
        p50, most = (statistics.median(it.lag_ms[rate][index] for it in following) for index in (0, 2))
        lags = [it.lag_ms[rate][1] for it in following]
        beside = f"p50 {p50:.1f}, most {most:.1f}"
        lines.append(Line(f"lag {rate}", f"follower's lag p99 at {rate:,}/s, ms", lags, 50, None, True, beside=beside))
    lines.append(Line("takeover", "takeover after kill -9, s", list(takeovers), 1.5, None, True))
    lines.append(Line("takeover, most", "  the longest, s", [max(takeovers)], 3.0, None, True))
    if postgres_takeovers:
        lines.append(
            Line("takeover on PostgreSQL", "takeover on PostgreSQL, s", list(postgres_takeovers), None, None, True)
        )
    return lines


def main() -> None:
    parser = make_parser(__doc__, SIZES, quick="one short round", rounds="rounds of everything")
    parser.add_argument("--postgres", default="", metavar="URL", help="also measure a log in this PostgreSQL database")
    options = parser.parse_args()
    size = pick_size(options, SIZES)
    tell_results(
        options, lambda: run(size, options.rounds or size.rounds, options.postgres), lambda it: "", failure=LoadError
    )


if __name__ == "__main__":
    main()
