"""Installs the bridge in a project. Adds the bridge's entries to the files of a host, and removes them again.

Before a file is changed, its original is stored in the user's own folder (`network.home`). `remove` restores the
original byte for byte. If the file was changed after the installation, `remove` only deletes the entries of the bridge.
Each file is written atomically.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from roundelay.network.durable_files import describe_os_error, publish_file
from roundelay.network.errors import ConfigError
from roundelay.network.home import home
from roundelay.network.platforms import set_mode

from .host_files import HostFile
from .hosts import WAKE, Commands, Host
from .participants import show_path, write_private

State = Literal["installed", "changed", "partly", "absent"]
"""State of the bridge in a project. ``installed``: all files are unchanged since the installation. ``changed``: all
files have entries of the bridge, but some files were changed later. ``partly``: some files have no entries of the
bridge. ``absent``: no file has entries of the bridge.
"""


class _InstalledFile(Struct, frozen=True):
    """Record about one installed file: the original as base64, and the SHA-256 of the contents that were written. The
    original is None if the file did not exist.
    """

    before: str | None
    written: str


class _Record(Struct, frozen=True):
    project: str
    host: str
    files: dict[str, _InstalledFile]
    folders: tuple[str, ...] = ()
    """Folders that the installation created, outermost first."""


@dataclass(frozen=True)
class FileChange:
    """Contents of one file before and after a change. The contents are None if the file does not exist."""

    path: str
    before: bytes | None
    after: bytes | None
    problem: str = ""
    """Why a file that may contain entries of the bridge stays unchanged, and how to fix it."""

    @property
    def is_change(self) -> bool:
        return self.before != self.after

    def describe(self) -> Literal["written", "removed", "unchanged", "left"]:
        return (
            "left"
            if self.problem
            else "unchanged"
            if not self.is_change
            else "removed"
            if self.after is None
            else "written"
        )

    def diff(self) -> Iterator[str]:
        """Yield the lines of the change in the format of `diff -u`."""
        old, new = (_text(content).splitlines() for content in (self.before, self.after))
        names = [side if content is not None else os.devnull for side, content in self._sides()]
        yield from difflib.unified_diff(old, new, names[0], names[1], lineterm="")

    def _sides(self) -> list[tuple[str, bytes | None]]:
        return [(f"a/{self.path}", self.before), (f"b/{self.path}", self.after)]


def find_command() -> list[str]:
    """Return the command with which hosts start this program. If the search path finds this installation, the command
    is the bare name. Otherwise the command is the full path.
    """
    beside = Path(sys.executable).with_name("roundelay")
    command = shutil.which("roundelay")
    # Use the bare name only if it starts this installation. Another installation may have another version.
    if command is not None and beside.exists() and Path(command).resolve() == beside.resolve():
        return ["roundelay"]
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "roundelay"]


def plan_install(
    host: Host, project: Path, *, url: str | None = None, command: str | None = None, wakes: bool = False
) -> list[FileChange]:
    """Return the changes that an installation makes. Raises `ConfigError` for a file that cannot be changed without
    loss, and for ``wakes`` with a host that cannot be woken.
    """
    if wakes and not host.can_be_woken:
        raise ConfigError(f"{host.title} cannot be woken when it is idle. Install the bridge without --wake.")
    words = shlex.split(command) if command else find_command()
    environment = {"ROUNDELAY_URL": url} if url else {}
    if wakes:
        environment[WAKE] = "1"
    if chosen := os.environ.get("ROUNDELAY_HOME"):
        # Write an absolute path, because a host may start its hooks in any folder.
        environment["ROUNDELAY_HOME"] = str(Path(chosen).resolve())
    changes = []
    for file in host.make_files(Commands(words, environment)):
        before = _read(project / file.path)
        text = None if before is None else _decode(before, file.path)
        try:
            after = file.add(text).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{file.path} cannot contain a path that is not UTF-8. Rename the folder of ROUNDELAY_HOME, or of this "
                "program."
            ) from error
        changes.append(FileChange(file.path, before, after))
    return changes


def install(host: Host, project: Path, changes: list[FileChange]) -> None:
    """Write the planned changes. The originals are stored first, so that a crash loses nothing."""
    record = _load(host, project)
    stored = record.files if record is not None else {}
    files = {
        change.path: _InstalledFile(_keep_before(host, change, stored.get(change.path)), _hash(change.after))
        for change in changes
    }
    folders = [*(record.folders if record is not None else ())]
    for change in changes:
        for folder in reversed(Path(change.path).parents):
            if not (project / folder).exists() and str(folder) not in folders:
                folders.append(str(folder))
    # Write the record before changing the first file. Without the record, `remove` could not restore a partial
    # installation.
    write_private(_find_record(host, project), _Record(show_path(project), host.name, files, tuple(folders)))
    for change in changes:
        _apply(project, change)


def plan_remove(host: Host, project: Path) -> list[FileChange]:
    """Return the changes that a removal makes. An unchanged file is replaced by its original. A file that was changed
    later only loses the entries of the bridge. If neither is possible, the file stays as it is, and its change has a
    ``problem``.
    """
    record = _load(host, project)
    changes = []
    for file in host.make_files(Commands(["roundelay"], {})):
        stored = record.files.get(file.path) if record is not None else None
        content = None
        try:
            after = content = _read(project / file.path)
            if content is not None and stored is not None and _hash(content) == stored.written:
                after = base64.b64decode(stored.before) if stored.before is not None else None
            elif content is not None:
                rest = file.take_out(_decode(content, file.path))
                after = None if rest is None else rest.encode()
            changes.append(FileChange(file.path, content, after))
        except ConfigError as error:
            problem = f"{error}\n{error.to_paste}" if error.to_paste else str(error)
            changes.append(FileChange(file.path, content, content, problem))
    return changes


def remove(host: Host, project: Path, changes: list[FileChange]) -> None:
    """Write the planned changes, and delete folders of the installation that are now empty. If any file has a problem,
    the originals are kept.
    """
    record = _load(host, project)
    for change in changes:
        _apply(project, change)
    # Delete the innermost folder first. A folder with other files stays, because rmdir fails.
    for folder in reversed(record.folders if record is not None else ()):
        with suppress(OSError):
            (project / folder).rmdir()
    if not any(change.problem for change in changes):
        _find_record(host, project).unlink(missing_ok=True)


def find_state(host: Host, project: Path) -> State:
    """Return the state of the bridge for one host in a project."""
    record = _load(host, project)
    contents = [(file, _read(project / file.path)) for file in host.make_files(Commands(["roundelay"], {}))]
    if record is not None and all(
        content is not None and file.path in record.files and _hash(content) == record.files[file.path].written
        for file, content in contents
    ):
        return "installed"
    there = [content is not None and _has_ours(file, content) for file, content in contents]
    return "changed" if all(there) else "partly" if any(there) else "absent"


def _has_ours(file: HostFile, content: bytes) -> bool:
    text = content.decode(errors="replace")
    try:
        return file.take_out(text) != text
    except ConfigError:
        return True  # only a file with entries of the bridge raises


def _keep_before(host: Host, change: FileChange, stored: _InstalledFile | None) -> str | None:
    """Return the original of a file as base64. If the file is unchanged since an earlier installation, return the
    original of that installation.
    """
    if stored is not None and change.before is not None and _hash(change.before) == stored.written:
        return stored.before
    before = change.before
    if before is not None:
        [file] = [file for file in host.make_files(Commands(["roundelay"], {})) if file.path == change.path]
        text = _decode(before, change.path)
        rest = file.take_out(text)
        # Remove the entries of an earlier installation from the original. Otherwise `remove` would restore these
        # entries.
        before = before if rest == text else None if rest is None else rest.encode()
    return None if before is None else base64.b64encode(before).decode("ascii")


def _apply(project: Path, change: FileChange) -> None:
    path = project / change.path
    try:
        if not change.is_change:
            return
        if change.after is None:
            path.resolve().unlink(missing_ok=True)
        else:
            _write(path, change.after)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {describe_os_error(error, path)}.") from error


def _write(path: Path, content: bytes) -> None:
    """Write a file of the project. A symbolic link stays a link. An existing file keeps its mode, and its temporary
    copy never has wider permissions. A new file gets the default mode of the user.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Create the temporary copy in the target's folder, because a rename is atomic only within one file system.
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    try:
        with open(
            draft, "xb", opener=lambda name, flags: os.open(name, flags, 0o666 if mode is None else mode)
        ) as file:
            if mode is not None:
                set_mode(file.fileno(), mode)
            file.write(content)
        publish_file(draft, target, replaces=True)
    finally:
        draft.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {describe_os_error(error, path, 'read')}.") from error


def _decode(content: bytes, path: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8. Save it as UTF-8.") from error


def _text(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace")


def _hash(content: bytes | None) -> str:
    return hashlib.sha256(content or b"").hexdigest()


def _find_record(host: Host, project: Path) -> Path:
    return home() / "bridge" / "installed" / f"{host.name}-{_hash(os.fsencode(project))[:16]}.json"


def _load(host: Host, project: Path) -> _Record | None:
    try:
        return msgspec.json.decode(_find_record(host, project).read_bytes(), type=_Record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"Cannot read {_find_record(host, project)}. Delete it, and edit the files by hand."
        ) from error


def is_waking(host: Host, project: Path) -> bool:
    """Return whether the bridge was installed with the option to wake the host."""
    files = (project / file.path for file in host.make_files(Commands(["roundelay"], {})))
    return any(WAKE.encode() in (_read(file) or b"") for file in files)
