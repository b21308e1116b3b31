"""Facts about the machine and about the measured process, which are needed to interpret a result.

This module contains the description that is stored with each result, the fdatasync probe, and the CPU clock of another
process. This code never runs inside a timed section.
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
    """Return a description of the machine. The facts about the disk apply to the file system of `directory`."""
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
    """Return the median and the 99th percentile of the time for a 4 KiB append and its fdatasync, in microseconds. A
    write-ahead log writes in this pattern.
    """
    # Use fsync on macOS, where `os` has no fdatasync. On macOS, fsync does not force the data onto the disk itself, so
    # the measured times are too short.
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
    """Return the CPU seconds of all threads of a process, in user and system mode. Return 0.0 if the system cannot
    report the CPU time.
    """
    if sys.platform != "linux":
        return 0.0
    # Use the kernel's id for the CPU clock of another process (clock_getcpuclockid(3)), which counts nanoseconds.
    # /proc/PID/stat counts ticks of 10 ms, which is a tenth of the shortest run here.
    return time.clock_gettime((~pid << 3) | 2)


def list_process_tree(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants. Return only the process itself if the system cannot
    report its descendants.
    """
    try:
        children = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return [pid]
    return [pid, *(below for ids in children for child in ids for below in list_process_tree(int(child)))]


def read_tree_memory_kb(pid: int) -> float:
    """Return the memory of a process and all its descendants in KiB. Memory that several processes share counts once
    (proportional set size). Return 0.0 if the system cannot report the memory.
    """
    total = 0.0
    for below in list_process_tree(pid):
        try:
            lines = Path(f"/proc/{below}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += float(next((line.split()[1] for line in lines if line.startswith("Pss:")), 0))
    return total


def read_written_bytes(pid: int) -> int:
    """Return the number of bytes that a process wrote to files on a disk. Each memory page counts once. Return 0 if the
    system cannot report the bytes.
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)


def read_machine_cpu_s() -> float:
    """Return the CPU seconds of all cores, including the time that the hypervisor took. Return 0.0 if the system cannot
    report the CPU time.
    """
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def split_cores() -> tuple[set[int], set[int]]:
    """Return the cores for the servers, and the last core for the load generator. Both sets are empty if processes
    cannot be pinned.

    Without pinning, the kernel moves two processes that wake each other to the same core. The two processes then
    alternate, and a server that answers each message separately reaches only three quarters of its speed.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set(), set()
    cores = sorted(os.sched_getaffinity(0))
    return (set(cores[:-1]), {cores[-1]}) if len(cores) > 1 else (set(), set())


def pin_process(pid: int, cores: Set[int]) -> None:
    """Pin a process and all its threads to these cores. The id 0 means this process. Without cores, nothing changes."""
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
    """Return the type of the file system that contains `directory`."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = directory.resolve()
    holding = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]))[1] if holding else "unknown"
