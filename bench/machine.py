"""Facts about the machine and the measured process, for the interpretation of a result.

Owns the description with each result, the fdatasync probe and the CPU clock of another process. Never runs inside a
timed section.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Set
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("websockets", "uvloop", "msgspec", "pydantic", "aiosqlite", "openai", "jinja2")


@dataclass(frozen=True)
class MachineFacts:
    cpu_model: str
    cores: int
    kernel: str
    python: str
    libraries: dict[str, str]
    filesystem: str
    fdatasync_p50_us: float
    fdatasync_p99_us: float


def describe_machine(directory: Path) -> MachineFacts:
    """Describe the machine. The disk facts are those of the file system with `directory`."""
    p50_us, p99_us = measure_fdatasync(directory)
    return MachineFacts(
        cpu_model=_read_cpu_model(),
        cores=os.cpu_count() or 1,
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        libraries={name: _find_version(name) for name in LIBRARIES},
        filesystem=_find_filesystem(directory),
        fdatasync_p50_us=p50_us,
        fdatasync_p99_us=p99_us,
    )


def measure_fdatasync(directory: Path, writes: int = 200) -> tuple[float, float]:
    """Return (p50, p99) in microseconds of a 4 KiB append and its fdatasync, like a write-ahead log."""
    # macOS has no fdatasync in `os`, and its fsync does not reach the platter: the numbers there flatter the disk.
    synchronise = getattr(os, "fdatasync", os.fsync)
    page = os.urandom(4096)
    times_us: list[float] = []
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(writes):
            file.write(page)
            started = time.perf_counter_ns()
            synchronise(file.fileno())
            times_us.append((time.perf_counter_ns() - started) / 1000)
    times_us.sort()
    return round(statistics.median(times_us), 1), round(times_us[int(writes * 0.99)], 1)


def read_process_cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of all threads of process `pid`; 0.0 if the system cannot report
    them."""
    if sys.platform != "linux":
        return 0.0
    # The kernel's id of another process's CPU clock (clock_getcpuclockid(3)): nanoseconds, where /proc/PID/stat has
    # ticks of 10 ms, which is a tenth of the shortest run here.
    return time.clock_gettime((~pid << 3) | 2)


def list_process_tree(pid: int) -> list[int]:
    """Return a process and all processes below it. Only the process itself if the system cannot report them."""
    try:
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(below for ids in children for child in ids for below in list_process_tree(int(child)))]


def read_tree_memory_kb(pid: int) -> float:
    """Return the memory of a process and all processes below it in KiB. Memory that several processes share counts
    once (the proportional set size). 0.0 if the system cannot report it."""
    total = 0.0
    for below in list_process_tree(pid):
        try:
            lines = Path(f"/proc/{below}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += float(next((line.split()[1] for line in lines if line.startswith("Pss:")), 0))
    return total


def read_written_bytes(pid: int) -> int:
    """Return the bytes that process `pid` wrote to files on a disk, each page once; 0 if the system cannot report
    them."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)


def read_machine_cpu_s() -> float:
    """Return the CPU seconds of all cores, including those taken by the hypervisor; 0.0 if the system cannot report
    them."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def split_cores() -> tuple[set[int], set[int]]:
    """Return the cores of the servers and that of the load generator, the last one. Both are empty if nothing can be
    pinned.

    Otherwise the kernel moves two processes that wake each other to one core. They then alternate, and a server that
    answers each message separately reaches only three quarters of its speed.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set(), set()
    cores = sorted(os.sched_getaffinity(0))
    return (set(cores[:-1]), {cores[-1]}) if len(cores) > 1 else (set(), set())


def pin_process(pid: int, cores: Set[int]) -> None:
    """Keep a process (0: this one) and all its threads on these cores. Without cores, change nothing."""
    if cores:
        os.sched_setaffinity(pid, cores)


def _read_cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _find_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _find_filesystem(directory: Path) -> str:
    """Return the type of the innermost mount with `directory`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = directory.resolve()
    holding = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"
