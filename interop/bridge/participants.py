"""Identity of a coding agent: one participant per project and running process of a host.

The names are stored in the user's own folder. The first process in a project is ``claude-myproject``. A second process
at the same time is ``claude-myproject-2``. A later process takes over the name and the messages of a process that has
ended. A host starts its hooks and its MCP server as separate processes, and they both find the host among their
ancestors.
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
"""Maximum length of a project's name in an id."""
_WRAPPERS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "env", "timeout", "nice", "nohup"})
"""Programs that may run between a host and the process that it starts."""


class HostProcess(NamedTuple):
    """A process of a host. The start time distinguishes it from a later process with the same id."""

    pid: int
    started: str

    @property
    def is_alive(self) -> bool:
        process = read_process(self.pid)
        return process is not None and process.started == self.started


class NameHolder(Struct, frozen=True):
    """The process that has a name, or had it last."""

    host: str
    project: str
    pid: int
    started: str
    url: str = ""
    """URL of the last hub that the process reached."""

    @property
    def is_running(self) -> bool:
        return HostProcess(self.pid, self.started).is_alive


def find_host_process() -> HostProcess:
    """Return the host that started this process, possibly through a shell. Raises `ConnectError` if the host has
    ended: the process that adopts orphans is not the host.
    """
    pid, process = os.getppid(), read_process(os.getppid())
    # Stop at children of process 1. After the host has ended, the search would otherwise reach init and treat it as the
    # host.
    while process is not None and process.parent > 1 and process.name.lstrip("-") in _WRAPPERS:
        pid, process = process.parent, read_process(process.parent)
    # Check this after the search. While the output has a reader, the process found is the right host.
    if process is None or is_reader_gone(sys.stdout.fileno()):
        raise ConnectError("The program that started this has ended.")
    return HostProcess(pid, process.started)


def find_own_process() -> HostProcess:
    """This process."""
    process = read_process(os.getpid())
    return HostProcess(os.getpid(), process.started if process is not None else "")


def find_project(host: Host, start: Path) -> Path:
    """Return the project of a folder: the nearest parent with the host's own folder, or else the folder itself.

    The user's home, its parents and the root are not projects, because a host's folder there applies to all
    projects.
    """
    here = start.resolve()
    shared = {Path(here.anchor)}
    with suppress(ConfigError):  # a user without a home folder
        above = find_user_folder().resolve()
        shared |= {above, *above.parents}
    for folder in (here, *here.parents):
        if folder in shared:
            break
        if (folder / host.folder).is_dir():
            return folder
    return here


def claim_name(host: Host, project: Path, process: HostProcess) -> str:
    """Return the participant id of a host's process in a project. Repeated calls return the same id. Raises
    `ConfigError` like `list_names`, and in that case changes nothing.
    """
    with _locked(home() / "bridge" / "names.lock"):
        names, place = list_names(), show_path(project)
        own = [(name, holder) for name, holder in names.items() if (holder.host, holder.project) == (host.name, place)]
        for name, holder in own:
            if (holder.pid, holder.started) == process:
                return name
        free = [name for name, holder in own if not holder.is_running]
        # The shortest free name is the oldest name of the project. Others know it, and messages may wait for it.
        name = min(free, key=lambda name: (len(name), name)) if free else _make_name(host, project, names)
        names[name] = NameHolder(host.name, place, *process, url=names[name].url if name in names else "")
        write_private(home() / "bridge" / "names.json", names)
        return name


def list_names() -> dict[str, NameHolder]:
    """Return all names that this user's hosts have had. Raises `ConfigError` if the file cannot be read. Without the
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
            f"{path}, the file of names, is broken ({error}). Restore it from a backup. Or move it away: then names are "
            "chosen again, and a project may get the former name of another one."
        ) from error


def find_hub(agent_id: str, chosen: str | None = None) -> str:
    """Return the hub of a participant: the chosen hub, or the hub that `find_url` finds. Without a node on this
    machine, return the hub that the participant reached last.
    """
    if chosen or os.environ.get("ROUNDELAY_URL") or running_nodes():
        return chosen or find_url()
    holder = list_names().get(agent_id)
    return holder.url if holder is not None and holder.url else find_url()


def remember_hub(agent_id: str, url: str) -> None:
    """Store the hub that a participant has reached."""
    if list_names()[agent_id].url == url:
        return
    with _locked(home() / "bridge" / "names.lock"):
        names = list_names()
        names[agent_id] = msgspec.structs.replace(names[agent_id], url=url)
        write_private(home() / "bridge" / "names.json", names)


def make_card(host: Host, project: Path) -> dict[str, object]:
    """Return the card of a bridged host. Its `reads` tells senders whether a message wakes the host."""
    reads = "when it is woken" if is_woken(host) else "at its next turn"
    return {"description": f"{host.title} in the project {show_path(Path(project.name))}", "reads": reads}


def is_woken(host: Host) -> bool:
    """Return whether this process was started for a host that is woken when it is idle."""
    return host.can_be_woken and os.environ.get(WAKE) == "1"


def show_path(path: Path) -> str:
    """Return a path as text. Bytes that are not UTF-8 are shown as escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def write_private(path: Path, value: Any) -> None:
    """Write a value as JSON to a private file, atomically."""
    make_folder(path.parent)
    # Include the process id in the name, so that two processes never write to the same draft.
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
        # Closing the descriptor releases the lock, even if the process is killed. No stale lock can remain.
        lock_descriptor(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
