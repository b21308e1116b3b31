"""What a gateway keeps of its own: one file of its owner's alone, which one process has at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from roundelay.network.durable_files import describe_os_error, make_folder, replace_file
from roundelay.network.errors import ConfigError, RoundelayError
from roundelay.network.platforms import CLOSE_ON_EXEC, lock_descriptor

T = TypeVar("T")


class NotKept(RoundelayError):
    """What was asked for is not done: the gateway's disk does not take it. An operator has to look after it."""


class KeptFile(Generic[T]):
    """A value of ``kind`` as JSON in a file, replaced whole. ``holds`` names it in sentences (webhooks)."""

    def __init__(self, path: Path, kind: type[T], empty: T, holds: str) -> None:
        self._path = path
        self._kind = kind
        self._empty = empty
        self._holds = holds
        self._lock = -1

    def open(self) -> T:
        """What the file holds; no other process has it until `close`. Raises `ConfigError` where another one has it, or
        it is no good."""
        path, holds = self._path, self._holds
        try:
            make_folder(path.absolute().parent)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
            lock_descriptor(self._lock)
            return msgspec.json.decode(path.read_bytes(), type=self._kind) if path.exists() else self._empty
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"Another gateway has the {holds} in {path}; stop it, or name another file.") from error
        except OSError as error:
            self.close()
            raise ConfigError(f"Cannot keep {holds} in {path}: {describe_os_error(error, path)}.") from error
        except msgspec.MsgspecError as error:
            self.close()
            raise ConfigError(f"{path} holds no {holds} ({error}); restore it, or move it away.") from error

    def save(self, value: T) -> None:
        """Raises `NotKept`; the file is as it was then."""
        try:
            with replace_file(self._path) as file:
                file.write(msgspec.json.encode(value).decode())
        except OSError as error:
            raise NotKept(
                f"The {self._holds} of this gateway cannot be kept now: {describe_os_error(error, self._path)}."
            ) from error

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
