"""Identity of a coding agent in the network. Each running process of a host in a project is one participant.

The names are stored in the user's own folder. The first process in a project is ``claude-myproject``. A second process
at the same time is ``claude-myproject-2``. After a process has ended, a later process takes over its name and its
messages. A host starts its hooks and its MCP server as separate processes. The hooks and the server find the host
process among their ancestor processes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from roundelay.network.durable_files import describe_os_error, make_folder, publish_file
from roundelay.network.errors import ConfigError, ConnectError
from roundelay.network.home import find_url, find_user_folder, home, running_nodes
from roundelay.network.platforms import CLOSE_ON_EXEC, is_reader_gone, lock_descriptor, read_process

from .hosts import WAKE, Host

MAX_CHARS = 40
"""Maximum length of the project's name in a participant id."""
_WRAPPERS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "env", "timeout", "nice", "nohup"})
"""Programs that may run between a host and the process that the host starts."""


class HostProcess(NamedTuple):
    """Running process of a host, such as Claude Code. The start time distinguishes the process from a later process
    with the same process id.
    """

    pid: int
    started: str

    @property
    def is_alive(self) -> bool:
        process = read_process(self.pid)
        return process is not None and process.started == self.started


class NameHolder(Struct, frozen=True):
    """The process that uses a name, or that used it last."""

    host: str
    project: str
    pid: int
    started: str
    url: str = ""
    """URL of the hub that the process reached last."""

    @property
    def is_running(self) -> bool:
        return HostProcess(self.pid, self.started).is_alive


def find_host_process() -> HostProcess:
    """Return the host process that started this process, directly or through a shell. Raises `ConnectError` if the host
    has ended, because this process then belongs to the process that adopts orphans.
    """
    pid, process = os.getppid(), read_process(os.getppid())
    # Stop at children of process 1. If the host has ended, the search would otherwise reach init and mistake init for
    # the host.
    while process is not None and process.parent > 1 and process.name.lstrip("-") in _WRAPPERS:
        pid, process = process.parent, read_process(process.parent)
    # Check the reader after the search. While this process's output has a reader, the process that was found is the
    # host.
    if process is None or is_reader_gone(sys.stdout.fileno()):
        raise ConnectError("The program that started this has ended.")
    return HostProcess(pid, process.started)


def find_own_process() -> HostProcess:
    """Return the process that runs this code."""
    process = read_process(os.getpid())
    return HostProcess(os.getpid(), process.started if process is not None else "")


def find_project(host: Host, start: Path) -> Path:
    """Return the project that contains a folder. The project is the nearest parent that contains the host's
    configuration folder, or the folder itself if there is none.

    The user's home, its parents and the root are not projects. A host's folder in one of these folders applies to all
    projects.
    """
    here = start.resolve()
    shared = {Path(here.anchor)}
    with suppress(ConfigError):  # the user has no home folder
        above = find_user_folder().resolve()
        shared |= {above, *above.parents}
    for folder in (here, *here.parents):
        if folder in shared:
            break
        if (folder / host.folder).is_dir():
            return folder
    return here


def claim_name(host: Host, project: Path, process: HostProcess) -> str:
    """Return the participant id of a host process in a project. Repeated calls return the same id. Raises `ConfigError`
    like `list_names`. After an error, the names are unchanged.
    """
    with _locked(home() / "bridge" / "names.lock"):
        names, place = list_names(), show_path(project)
        own = [(name, holder) for name, holder in names.items() if (holder.host, holder.project) == (host.name, place)]
        for name, holder in own:
            if (holder.pid, holder.started) == process:
                return name
        free = [name for name, holder in own if not holder.is_running]
        # Use the shortest free name, which is the project's oldest. Other participants know this name, and messages may
        # wait under it.
        name = min(free, key=lambda name: (len(name), name)) if free else _make_name(host, project, names)
        names[name] = NameHolder(host.name, place, *process, url=names[name].url if name in names else "")
        write_private(home() / "bridge" / "names.json", names)
        return name


def list_names() -> dict[str, NameHolder]:
    """Return all names that hosts of this user have used. Raises `ConfigError` if the file cannot be read. Without the
    file, a project could get the name and the messages of another project.
    """
    path = home() / "bridge" / "names.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, NameHolder])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}, which contains the names of participants, is invalid ({error}). Restore it from a backup, or "
            "move it away. Without it, new names are chosen, and a project may get the former name of another project."
        ) from error


def find_hub(agent_id: str, chosen: str | None = None) -> str:
    """Return the URL of a participant's hub: ``chosen``, or the URL that `find_url` finds. If no node runs on this
    machine, return the hub that the participant reached last.
    """
    if chosen or os.environ.get("ROUNDELAY_URL") or running_nodes():
        return chosen or find_url()
    holder = list_names().get(agent_id)
    return holder.url if holder is not None and holder.url else find_url()


def remember_hub(agent_id: str, url: str) -> None:
    """Store the URL of the hub that a participant has reached."""
    if list_names()[agent_id].url == url:
        return
    with _locked(home() / "bridge" / "names.lock"):
        names = list_names()
        names[agent_id] = msgspec.structs.replace(names[agent_id], url=url)
        write_private(home() / "bridge" / "names.json", names)


def make_card(host: Host, project: Path) -> dict[str, object]:
    """Return the card of a bridged host. The field `reads` of the card shows whether a message wakes the host."""
    reads = "when it is woken" if is_woken(host) else "at its next turn"
    return {"description": f"{host.title} in the project {show_path(Path(project.name))}", "reads": reads}


def is_woken(host: Host) -> bool:
    """Return whether this process belongs to a host that the bridge wakes when it is idle."""
    return host.can_be_woken and os.environ.get(WAKE) == "1"


def show_path(path: Path) -> str:
    """Return a path as text. Bytes that are not valid UTF-8 are shown as escape codes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def write_private(path: Path, value: Any) -> None:
    """Write a value as JSON to a file that only the user can read. The write is atomic."""
    make_folder(path.parent)
    # Include the process id in the name of the temporary file, so that two processes never write to the same file.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | CLOSE_ON_EXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(value))
    publish_file(draft, path, replaces=True)


def _make_name(host: Host, project: Path, names: dict[str, NameHolder]) -> str:
    slug = re.sub(r"[^a-z0-9._]+", "-", project.name.lower()).strip("-._")[:MAX_CHARS].strip("-._") or "project"
    base = f"{host.name}-{slug}"
    number, name = 1, base
    while name in names:
        number, name = number + 1, f"{base}-{number + 1}"
    return name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    make_folder(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        # Closing the descriptor releases the lock, even if the process is killed. A stale lock is impossible.
        lock_descriptor(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
