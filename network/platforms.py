"""All code that differs between Linux, macOS and Windows, with a fallback for each system.

The rest of the product calls these functions and contains no code for a specific operating system. A test refuses
`fcntl`, `/proc` and similar names in other modules. docs/operations.md ("Operating systems") describes what each
fallback costs and where it is tested. This module keeps no state.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio

if sys.platform == "win32":
    import ctypes
    import msvcrt
else:
    import fcntl
    import resource
    import termios

CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open` that keep child processes from inheriting the descriptor, and Windows from translating line
ends."""

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Flag for `os.open` that refuses symbolic links. 0 on Windows, where only administrators can create such links."""

_FLOCK = "hhqqi4x"
"""Format of C's ``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""


# --- files


def sync_descriptor(descriptor: int) -> None:
    """Wait until a file's content is on the disk. Raises `OSError`.

    On macOS, `fsync` only hands the data to the drive, which may still lose its cache in a power cut. F_FULLFSYNC waits
    until the drive has written the data (fsync(2) of macOS). If a file system lacks F_FULLFSYNC, `fsync` is used.
    """
    if sys.platform == "darwin":
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the list of names in a folder is on the disk. Raises `OSError`.

    On Windows, this function does nothing: Windows cannot sync a folder, and NTFS writes names to its own journal.
    """
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY | CLOSE_ON_EXEC)
    try:
        sync_descriptor(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def lock_descriptor(descriptor: int, *, wait: bool = False) -> None:
    """Lock a file for this process until the descriptor is closed. If another process has locked the file, wait, or
    raise `BlockingIOError` if ``wait`` is false. Raises `OSError` if the file system has no locks.

    On Windows, a locked byte cannot be read by other processes. So the lock is on one byte beyond any possible end of
    the file.
    """
    if sys.platform == "win32":
        os.lseek(descriptor, 0x7FFFFFFF, os.SEEK_SET)
        while True:
            try:
                # LK_LOCK fails after ten attempts, one per second, so this loop repeats it.
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EDEADLK):
                    raise
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "locked by another process") from error
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        # Use `flock`, not a POSIX lock: closing any other descriptor of the same file would release a POSIX lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def try_record_lock(descriptor: int) -> None:
    """Acquire a POSIX record lock, the kind of lock that SQLite uses. Raises `OSError` if the file system does not
    support such locks."""
    if sys.platform != "win32":
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def has_open_file_locks() -> bool:
    """Return whether the system supports locks that belong to a descriptor instead of a process. Only Linux supports
    such locks."""
    if sys.platform == "linux":
        return hasattr(fcntl, "F_OFD_GETLK")
    return False


def share_range(descriptor: int, first: int, size: int) -> None:
    """Acquire a shared lock on a range of a file's bytes. The lock belongs to the descriptor. This function does
    nothing on systems without such locks."""
    if sys.platform == "linux" and has_open_file_locks():
        shared = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, first, size, 0)
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, shared)


def is_range_locked(descriptor: int, first: int, size: int) -> bool:
    """Return whether any process has locked a range of a file's bytes. True if the system cannot determine this."""
    if sys.platform == "linux" and has_open_file_locks():
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, first, size, 0)
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
        except OSError:  # SQLite will report the file system's problem, because it needs more kinds of locks
            return True
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    return True


def is_read_only(path: Path) -> bool:
    """Return whether the file system of a path is mounted read-only. Always false on Windows, which cannot report
    this."""
    if sys.platform == "win32":
        return False
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def set_mode(descriptor: int, mode: int) -> None:
    """Set the permissions of an open file. On Windows, this does nothing: a new file has the permissions of its
    folder."""
    if sys.platform != "win32":
        os.fchmod(descriptor, mode)


# --- processes


class ProcessFacts(NamedTuple):
    """Information from the system about a running process."""

    name: str
    parent: int
    started: str
    """Start time of the process in the system's own format. Compare it only with times of the same machine and boot."""


def read_process(pid: int) -> ProcessFacts | None:
    """Return the system's information about a process, or None if the process does not run. Always None on Windows."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _ask_ps(pid)
    # Split at the last bracket, because the name of a process may contain spaces and brackets.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessFacts(name, int(fields[1]), fields[19]) if fields[0] not in "ZX" else None


def _ask_ps(pid: int) -> ProcessFacts | None:
    if sys.platform == "win32":
        return None
    import subprocess  # imported only when needed, because it loads more slowly than the rest of this module

    command = ["ps", "-o", "ppid=,lstart=,comm=", "-p", str(pid)]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False).stdout.split()
    except (OSError, subprocess.SubprocessError):  # a small container may have no ps
        return None
    return ProcessFacts(Path(" ".join(words[6:])).name, int(words[0]), " ".join(words[1:6])) if len(words) > 6 else None


def is_process_alive(pid: int) -> bool:
    """Return whether a process on this machine runs. On Windows, this function reads the exit code of the process,
    because signal 0 would end the process there."""
    if sys.platform == "win32":
        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return False
        code = ctypes.c_ulong()
        ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return code.value == 259  # STILL_ACTIVE
    try:
        # Signal 0 is not delivered: it only checks that the process exists. A refused permission also proves this.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_process(pid: int) -> None:
    """End a process at once with SIGKILL or, on Windows, with TerminateProcess. Raises `ProcessLookupError` if the
    process has already ended."""
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def can_fork() -> bool:
    """Return whether this program may fork its processes. True only on Linux: macOS's own libraries may crash in a
    forked process, and Windows has no fork."""
    return sys.platform == "linux"


def fork_process() -> int:
    """Fork this process. Return the child's process id, or 0 in the child. Requires `can_fork`, and a process without
    other threads."""
    return os.fork()


def end_with_parent(parent: int) -> None:
    """Let the system kill this forked process when its parent ends, even while C code blocks the interpreter.

    ``parent`` is the parent's process id, read before the fork, because the parent may end before this call. On other
    systems than Linux, this function does nothing, because `can_fork` is false there.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, or a C library without prctl
            import ctypes

            ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            kill_process(os.getpid())


def end_after_parent(parent: int) -> None:
    """End this process 12 seconds after its parent ends, even while C code blocks the interpreter. During these
    seconds, the process can stop normally when its input ends.

    ``parent`` is the parent's process id. The parent passes it to this process, because the parent may end before this
    call. On systems other than Linux, this function does nothing.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # as in `end_with_parent`
            import ctypes

            library = ctypes.CDLL(None)
            # The handler is the C function `alarm`, so it needs no interpreter. Its argument is the signal's number,
            # which is 12. The alarm ends the process.
            handler = ctypes.cast(library.alarm, ctypes.c_void_p)
            library.signal(ctypes.c_int(signal.SIGUSR2), handler)
            library.prctl(1, ctypes.c_ulong(signal.SIGUSR2), *[ctypes.c_ulong(0)] * 3)  # PR_SET_PDEATHSIG
            # Do not compare ``parent`` with `os.getppid`: a wrapper around this interpreter may be the direct parent.
            if not is_process_alive(parent):
                library.alarm(ctypes.c_uint(signal.SIGUSR2))


def lead_session() -> None:
    """Make this process the leader of its own session, so that Ctrl-C in the terminal does not interrupt it."""
    os.setsid()


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process. Raises `ProcessLookupError` if the process has already ended."""
    os.kill(pid, number)


def name_process(name: str) -> None:
    """Set the name that ``ps -o comm`` shows for this process, at most 15 bytes. Only Linux supports this."""
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:15])


HANG_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""Signal that a node sends to a process to ask what blocks its event loop. None on Windows."""


def find_process_age_s() -> float:
    """Return the time since this process started, in seconds. Systems without /proc return the CPU time of the process,
    which is shorter."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            # The system rounds the start time down to whole ticks, so add one tick. Otherwise a hook that starts right
            # after another hook has ended would seem to overlap with it.
            ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19]) + 1
            return max(seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return time.process_time()


def is_reader_gone(descriptor: int) -> bool:
    """Return whether the reading end of a pipe is closed. Always false on Windows, where only a failed write shows
    this."""
    if sys.platform == "win32":
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def seconds_since_boot() -> float:
    """Return the time in seconds of a clock that never jumps. On Linux and Windows, but not on macOS, the clock
    continues while the machine sleeps."""
    if sys.platform == "win32":
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return an id of the current boot of this machine, or an empty text if the system provides none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if sys.platform == "darwin":
        import subprocess

        with suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    return ""


def raise_file_limit() -> int:
    """Raise this process's soft limit of open files to the hard limit, and return the new limit. Each connection needs
    one open file."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(OSError, ValueError):  # macOS reports "unlimited" but accepts less
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        return soft if soft != resource.RLIM_INFINITY else sys.maxsize
    return sys.maxsize  # on Windows, sockets are not files


def has_desktop() -> bool:
    """Return whether a browser window that this process opens appears on the user's screen. False over SSH, and on
    Linux without a display."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("win32", "darwin") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


# --- signals and the event loop


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop. Signals that this process ignores are left out, for example SIGHUP
    under `nohup`. Windows has SIGBREAK instead of SIGHUP."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Call ``handler`` in the running event loop when one of the signals arrives. Yield a function that removes the
    handlers, so that the next signal has its default effect.

    Event loops on Windows do not support signal handlers. On Windows, a handler of the `signal` module calls
    ``handler`` through the event loop.
    """
    import asyncio  # imported here, because the process that checks JSON schemas does not need asyncio

    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, object] = {}
    for number in numbers:
        try:
            loop.add_signal_handler(number, handler)
        except (NotImplementedError, AttributeError):
            before[number] = signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))

    def remove() -> None:
        for number in numbers:
            if number in before:
                signal.signal(number, signal.SIG_DFL)
            else:
                loop.remove_signal_handler(number)

    try:
        yield remove
    finally:
        remove()


def find_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop factory, or None for Python's own event loop if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# --- sockets


def count_unsent(sock: socket.socket) -> int:
    """Return the number of bytes in a socket's send queue, or 0 if the system does not report this number. On such
    systems, only pings detect a peer that reads nothing."""
    if sys.platform != "win32" and hasattr(termios, "TIOCOUTQ"):
        with suppress(OSError, AttributeError, ValueError):  # the socket is closed
            (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
            return int(queued)
    return 0
