"""Everything that differs between Linux, macOS and Windows, with a fallback for each.

The rest of the product calls these functions and contains no code for a specific operating system. A test refuses
`fcntl`, `/proc` and similar names in other modules. docs/operations.md ("Operating systems") says what each fallback
costs and where it is tested. Nothing here keeps state. Only `sync_descriptor` and `lock_descriptor` wait.
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
"""Flags for `os.open`: child processes do not inherit the descriptor, and Windows does not translate line ends."""

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""Flag for `os.open`: refuse a symbolic link. On Windows only administrators can create symbolic links."""

_FLOCK = "hhqqi4x"
"""C's ``struct flock`` on 64-bit Linux: type, whence, start, length, pid."""


# --- files


def sync_descriptor(descriptor: int) -> None:
    """Wait until a file's content is on the disk. Raises `OSError`.

    On macOS `fsync` only hands the data to the drive, which may still lose it from its cache in a power cut.
    F_FULLFSYNC waits for the drive (fsync(2) of macOS). File systems without F_FULLFSYNC get `fsync`.
    """
    if sys.platform == "darwin":
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the list of names in a folder is on the disk. Raises `OSError`.

    Windows cannot open a folder for syncing. NTFS writes names to its own journal.
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
    """Lock a file for this process until the descriptor is closed. Without ``wait``, raises `BlockingIOError` if
    another process has locked the file. Raises `OSError` if the file system has no locks.

    On Windows the lock is on one byte beyond any possible end of the file, so that other processes can still read the
    content.
    """
    if sys.platform == "win32":
        os.lseek(descriptor, 0x7FFFFFFF, os.SEEK_SET)
        while True:
            try:
                # LK_LOCK gives up after ten tries, one a second.
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EDEADLK):
                    raise
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "locked by another process") from error
        os.lseek(descriptor, 0, os.SEEK_SET)
    else:
        # `flock`, not a POSIX lock: closing any other descriptor of the file would drop a POSIX lock.
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


def try_record_lock(descriptor: int) -> None:
    """Take the kind of lock that SQLite uses. Raises `OSError` if the file system does not support it."""
    if sys.platform != "win32":
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def has_open_file_locks() -> bool:
    """Return whether the system supports locks that belong to a descriptor instead of a process (Linux only)."""
    if sys.platform == "linux":
        return hasattr(fcntl, "F_OFD_GETLK")
    return False


def share_range(descriptor: int, first: int, size: int) -> None:
    """Take a shared lock on a range of bytes. The lock belongs to the descriptor. Does nothing on systems without such
    locks."""
    if sys.platform == "linux" and has_open_file_locks():
        shared = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, first, size, 0)
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, shared)


def is_range_locked(descriptor: int, first: int, size: int) -> bool:
    """Return whether this process or another one has locked a range of bytes. True if the system cannot say."""
    if sys.platform == "linux" and has_open_file_locks():
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, first, size, 0)
        try:
            answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, request)
        except OSError:  # SQLite needs more from the file system, and will report the problem
            return True
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    return True


def is_read_only(path: Path) -> bool:
    """Return whether the file system of a path is mounted read-only. False on Windows, which cannot say."""
    if sys.platform == "win32":
        return False
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def set_mode(descriptor: int, mode: int) -> None:
    """Set the permissions of an open file. Does nothing on Windows, where a new file inherits the rights of its
    folder."""
    if sys.platform != "win32":
        os.fchmod(descriptor, mode)


# --- processes


class ProcessFacts(NamedTuple):
    """Information from the system about a running process."""

    name: str
    parent: int
    started: str
    """Start of the process, in the system's own format. Only for comparisons on the same machine and boot."""


def read_process(pid: int) -> ProcessFacts | None:
    """Return the system's information about a process. None if the process does not exist or has ended, and on
    Windows."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None if Path("/proc/self/stat").exists() else _ask_ps(pid)
    # Up to the last bracket: the name of a process may contain spaces and brackets.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return ProcessFacts(name, int(fields[1]), fields[19]) if fields[0] not in "ZX" else None


def _ask_ps(pid: int) -> ProcessFacts | None:
    if sys.platform == "win32":
        return None
    import subprocess  # imported here and below, because loading it takes longer than the rest of this module

    command = ["ps", "-o", "ppid=,lstart=,comm=", "-p", str(pid)]
    try:
        words = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False).stdout.split()
    except (OSError, subprocess.SubprocessError):  # a small container may have no ps
        return None
    return ProcessFacts(Path(" ".join(words[6:])).name, int(words[0]), " ".join(words[1:6])) if len(words) > 6 else None


def is_process_alive(pid: int) -> bool:
    """Return whether a process of this machine runs. On Windows this reads the exit code, because signal 0 would end
    the process."""
    if sys.platform == "win32":
        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return False
        code = ctypes.c_ulong()
        ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return code.value == 259  # STILL_ACTIVE
    try:
        # Signal 0 only checks. A refused permission proves that the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_process(pid: int) -> None:
    """End a process at once, by SIGKILL or, on Windows, TerminateProcess. Raises `ProcessLookupError` if the process
    has already ended."""
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def can_fork() -> bool:
    """Return whether processes of this program may be forked. Only on Linux: macOS's own libraries may crash in a
    forked process, and Windows has no fork."""
    return sys.platform == "linux"


def fork_process() -> int:
    """Fork this process. Return the child's id, and 0 in the child. Only where `can_fork`, and without other
    threads."""
    return os.fork()


def end_with_parent(parent: int) -> None:
    """End this forked process by SIGKILL when its parent ends, even while C code holds the interpreter.

    ``parent`` is the id of the parent, read before the fork: the parent may end before this call. Does nothing outside
    Linux, where `can_fork` is false.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # a Python without ctypes, or a C library without prctl
            import ctypes

            ctypes.CDLL(None).prctl(1, ctypes.c_ulong(signal.SIGKILL), *[ctypes.c_ulong(0)] * 3)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            kill_process(os.getpid())


def end_after_parent(parent: int) -> None:
    """End this process 12 seconds after its parent, even while C code holds the interpreter. Until then it can stop by
    itself, at the end of its input.

    ``parent`` is the id of the parent, which the parent has passed on: it may have ended before this call. Does nothing
    outside Linux.
    """
    if sys.platform == "linux":
        with suppress(ImportError, OSError, AttributeError):  # as in `end_with_parent`
            import ctypes

            library = ctypes.CDLL(None)
            # The handler is the C function `alarm`, so it needs no interpreter. Its argument is the signal's number, which
            # is 12. The alarm ends the process.
            handler = ctypes.cast(library.alarm, ctypes.c_void_p)
            library.signal(ctypes.c_int(signal.SIGUSR2), handler)
            library.prctl(1, ctypes.c_ulong(signal.SIGUSR2), *[ctypes.c_ulong(0)] * 3)  # PR_SET_PDEATHSIG
            # Another parent that lives is a wrapper around this interpreter.
            if not is_process_alive(parent):
                library.alarm(ctypes.c_uint(signal.SIGUSR2))


def lead_session() -> None:
    """Leave the terminal's process group, so that Ctrl-C there does not reach this process."""
    os.setsid()


def signal_process(pid: int, number: int) -> None:
    """Send a signal to a process. Raises `ProcessLookupError` if the process has already ended."""
    os.kill(pid, number)


def name_process(name: str) -> None:
    """Set the name of this process that ``ps -o comm`` shows, up to 15 bytes. Only on Linux."""
    with suppress(OSError):
        Path("/proc/self/comm").write_bytes(name.encode()[:15])


HANG_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
"""Signal that a node sends to a process to ask what blocks its event loop. None on Windows."""


def find_process_age_s() -> float:
    """Return the time since this process started, in seconds. Without /proc, return the CPU time of the process, which
    is less."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):
            # The system rounds the start time down to whole ticks, so assume the next tick. Otherwise a hook that
            # starts right after another hook has printed would seem to run at the same time.
            ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19]) + 1
            return max(seconds_since_boot() - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    return time.process_time()


def is_reader_gone(descriptor: int) -> bool:
    """Return whether the reading end of a pipe is closed. False on Windows, where only a write can find out."""
    if sys.platform == "win32":
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def seconds_since_boot() -> float:
    """Return a time in seconds that never jumps. It includes the time that the machine sleeps on Linux and Windows, but
    not on macOS."""
    if sys.platform == "win32":
        return time.monotonic()
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def boot_id() -> str:
    """Return an id of the current boot of this machine. Empty if the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if sys.platform == "darwin":
        import subprocess

        with suppress(OSError, subprocess.SubprocessError):
            command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
            return subprocess.run(command, capture_output=True, text=True, timeout=2, check=True).stdout.strip()
    return ""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, if the system allows it: each connection needs a file.
    Return the new limit."""
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(OSError, ValueError):  # macOS reports "unlimited" but accepts less
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                soft = hard
        return soft if soft != resource.RLIM_INFINITY else sys.maxsize
    return sys.maxsize  # on Windows, sockets are not files


def has_desktop() -> bool:
    """Return whether a browser window opened by this process would appear on the user's screen. False over SSH, and on
    Linux without a display."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform in ("win32", "darwin") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


# --- signals and the event loop


def list_stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a process to stop. SIGHUP is left out under `nohup`, which ignores the signal, and on
    Windows. SIGBREAK exists only on Windows."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handle_signals(numbers: Sequence[signal.Signals], handler: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Call ``handler`` in the running event loop for each of the signals. Yields a function that removes the handlers,
    so that the next signal has its default effect.

    Event loops on Windows have no signal handlers. On Windows, a handler of the `signal` module wakes the loop.
    """
    import asyncio  # imported here, because the worker that checks schemas does not need it

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
    """Return uvloop's factory if uvloop is installed (never on Windows). None means Python's own event loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# --- sockets


def count_unsent(sock: socket.socket) -> int:
    """Return the number of bytes in a socket's send queue. 0 if the system cannot say: then only pings detect a peer
    that reads nothing."""
    if sys.platform != "win32" and hasattr(termios, "TIOCOUTQ"):
        with suppress(OSError, AttributeError, ValueError):  # closed
            (queued,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
            return int(queued)
    return 0
