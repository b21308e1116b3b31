"""Tests of differences between operating systems: one module contains them, with working fallbacks."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roundelay.network import durable_files, platforms

ROOT = Path(__file__).parents[2]
FOLDERS = ("roundelay", "network", "agents", "mods", "templates", "web", "interop", "adapters")

SYSTEM_SPECIFIC = re.compile(
    r"^\s*(?:import|from) (?:fcntl|resource|termios|tty|uvloop|msvcrt|pwd|grp)\b|/proc/|sys\.platform|os\.name\b"
    r"|os\.(?:fork|fchmod|statvfs|O_CLOEXEC|O_NOFOLLOW|fsync|getuid|geteuid|killpg)\b|os\.kill\(|add_signal_handler"
    r"|SIGHUP|CLOCK_BOOTTIME|select\.poll",
    re.MULTILINE,
)
# The schema worker is started by its path and imports nothing of the package, so that it starts fast and knows no
# secrets.
EXEMPT = {"network/platforms.py", "agents/features/schema_worker.py"}


def test_no_other_module_knows_an_operating_system() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.relative_to(ROOT).as_posix() not in EXEMPT
        for match in SYSTEM_SPECIFIC.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set(), "put it into network/platforms.py, with a fallback"


class FakeFcntl:
    """macOS's `fcntl`, which records its calls."""

    F_FULLFSYNC = 51

    def __init__(self, error: OSError | None = None) -> None:
        self.calls: list[int] = []
        self._error = error

    def fcntl(self, descriptor: int, command: int) -> None:
        self.calls.append(command)
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, OSError(errno.ENOTSUP, "not on this file system")])
def test_a_file_on_macos_waits_for_the_drive_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    fake, synced = FakeFcntl(error), []
    monkeypatch.setattr(platforms, "fcntl", fake)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "fsync", synced.append)
    durable_files.save_new(tmp_path / "file", b"content")
    assert set(fake.calls) == {FakeFcntl.F_FULLFSYNC}
    assert len(synced) == (0 if error is None else len(fake.calls))
    assert (tmp_path / "file").read_bytes() == b"content"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, "no folders")

    monkeypatch.setattr(os, "fsync", refuse)
    platforms.sync_folder(tmp_path)


def test_a_disk_that_fails_to_sync_a_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="the disk is gone"):
        platforms.sync_folder(tmp_path)


HOLD = "import os, sys; from roundelay.network import platforms as p; p.lock_descriptor(os.open(sys.argv[1], os.O_RDWR)); print('locked', flush=True); sys.stdin.read()"


def test_a_locked_file_is_refused_until_its_holder_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError):
            platforms.lock_descriptor(descriptor)
        holder.kill()
    platforms.lock_descriptor(descriptor, wait=True)
    os.close(descriptor)


def test_a_process_is_described_with_and_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    own = platforms.read_process(os.getpid())
    assert own is not None
    assert own.parent == os.getppid()
    by_ps = platforms._ask_ps(os.getpid())
    assert by_ps is None or by_ps.parent == os.getppid()  # a small container has no ps
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert platforms.read_process(ended.pid) is None
    assert not platforms.is_process_alive(ended.pid)
    assert platforms.is_process_alive(os.getpid())
    monkeypatch.setenv("PATH", "")
    assert platforms._ask_ps(os.getpid()) is None


async def test_a_signal_reaches_its_handler_where_the_loop_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", refuse)
    received = asyncio.Event()
    with platforms.handle_signals([signal.SIGUSR1], received.set):
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(received.wait(), 10)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_nohup_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in platforms.list_stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (
        signal.SIGTERM in platforms.list_stop_signals()
    )  # SIGINT is ignored if a shell started the tests in the background


CORE_SUITES = ("tests/contract/test_ledger.py", "tests/contract/test_operations.py", "tests/integration/test_up.py")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_core_suites_hold_with_the_fallbacks(tmp_path: Path) -> None:
    """The tests of the core run as on a system without Linux features, including their own processes."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support" / "portable"), str(ROOT)])
    }
    probe = "from roundelay.network import platforms as p; print(p.find_loop_factory(), p.read_process(1), p.boot_id() == '')"
    seen = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.startswith("None ")
    assert seen.stdout.endswith(" True\n")
    # The package is imported before pytest can rewrite the assertions of its plugin.
    warning = "-Wignore::pytest.PytestAssertRewriteWarning"
    command = [sys.executable, "-m", "pytest", "-q", "-x", warning, f"--basetemp={tmp_path / 'suites'}", *CORE_SUITES]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\d+ passed", done.stdout)
