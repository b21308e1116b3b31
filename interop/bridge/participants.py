"""As whom a coding agent takes part: one participant for each project and each process of a host that runs there.

The names are kept in the user's own folder: the first process in a project is ``claude-myproject``, a second one at the
same time ``claude-myproject-2``, and who comes when one of them has ended takes its name over, with what waits for it.
A host starts its hooks and its MCP server as processes of its own; by their ancestors both find the same host.
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
"""Of a project's name in an id."""
_GO_BETWEENS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "fish", "env", "timeout", "nice", "nohup"})
"""What may stand between a host and what it starts."""


class HostProcess(NamedTuple):
    """A process of a host; its start tells it from a later one of the same number."""

    pid: int
    started: str

    @property
    def is_alive(self) -> bool:
        found = read_process(self.pid)
        return found is not None and found.started == self.started


class NameHolder(Struct, frozen=True):
    """Who has a name, or had it last."""

    host: str
    project: str
    pid: int
    started: str
    url: str = ""
    """The hub that it reached last."""

    @property
    def is_running(self) -> bool:
        return HostProcess(self.pid, self.started).is_alive


def find_host_process() -> HostProcess:
    """The host that started this process, be it by a shell. Raises `ConnectError` where it has ended: who has taken its
    orphans is no host."""
    pid, found = os.getppid(), read_process(os.getppid())
    while found is not None and found.parent > 1 and found.name.lstrip("-") in _GO_BETWEENS:
        pid, found = found.parent, read_process(found.parent)
    # After the look: as long as somebody can read what is printed here, the host was there.
    if found is None or is_reader_gone(sys.stdout.fileno()):
        raise ConnectError("The program that started this has ended.")
    return HostProcess(pid, found.started)


def find_own_process() -> HostProcess:
    """This process."""
    found = read_process(os.getpid())
    return HostProcess(os.getpid(), found.started if found is not None else "")


def find_project(host: Host, start: Path) -> Path:
    """The project in which something runs: the nearest folder that has the host's own, or else where it runs. The
    user's home and what is above it is no project, nor is the root of the file system: what a host has there is for all
    of them."""
    here = start.resolve()
    shared = {Path(here.anchor)}
    with suppress(ConfigError):  # a user id without a home folder has nothing there
        above = find_user_folder().resolve()
        shared |= {above, *above.parents}
    for folder in (here, *here.parents):
        if folder in shared:
            break
        if (folder / host.folder).is_dir():
            return folder
    return here


def claim_name(host: Host, project: Path, process: HostProcess) -> str:
    """The participant's id of a host's process in a project: the same one each time. Raises as `list_names`; then
    nothing has changed."""
    with _locked(home() / "bridge" / "names.lock"):
        names, place = list_names(), show_path(project)
        own = [(name, it) for name, it in names.items() if (it.host, it.project) == (host.name, place)]
        for name, it in own:
            if (it.pid, it.started) == process:
                return name
        free = [name for name, it in own if not it.is_running]
        name = min(free, key=lambda it: (len(it), it)) if free else _make_name(host, project, names)
        names[name] = NameHolder(host.name, place, *process, url=names[name].url if name in names else "")
        write_private(home() / "bridge" / "names.json", names)
        return name


def list_names() -> dict[str, NameHolder]:
    """All names that this user's hosts have had. Raises `ConfigError` where that cannot be read: without it a project
    could be given another one's name, and what waits for it."""
    path = home() / "bridge" / "names.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, NameHolder])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}, which keeps who is whom, is broken ({error}). Give it back from a backup. Or move it away: then "
            "names are given anew, and a project may get one under which another one was known."
        ) from error


def find_hub(agent_id: str, chosen: str | None = None) -> str:
    """The hub of a participant: the chosen one, as `find_url` finds it, or, while no node runs here, the one that it
    reached last."""
    if chosen or os.environ.get("ROUNDELAY_URL") or running_nodes():
        return chosen or find_url()
    holder = list_names().get(agent_id)
    return holder.url if holder is not None and holder.url else find_url()


def remember_hub(agent_id: str, url: str) -> None:
    """Keep which hub a participant has reached."""
    if list_names()[agent_id].url == url:
        return
    with _locked(home() / "bridge" / "names.lock"):
        names = list_names()
        names[agent_id] = msgspec.structs.replace(names[agent_id], url=url)
        write_private(home() / "bridge" / "names.json", names)


def make_card(host: Host, project: Path) -> dict[str, object]:
    """What a bridged host shows of itself. `reads` tells a sender whether something wakes it."""
    reads = "when it is woken" if is_woken(host) else "at its next turn"
    return {"description": f"{host.title} in the project {show_path(Path(project.name))}", "reads": reads}


def is_woken(host: Host) -> bool:
    """Whether this process was started for a host that is to be woken when it is idle."""
    return host.can_be_woken and os.environ.get(WAKE) == "1"


def show_path(path: Path) -> str:
    """A path as text, also one that is not UTF-8: what is none of it stands as its codes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def write_private(path: Path, value: Any) -> None:
    """Keep a value as JSON: whole when this returns, and for its owner alone."""
    make_folder(path.parent)
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
        lock_descriptor(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
