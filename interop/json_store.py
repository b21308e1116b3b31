"""A JSON file that one process owns and writes atomically. The file stores the registrations of a gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from roundelay.network.durable_files import describe_os_error, make_folder, replace_file
from roundelay.network.errors import ConfigError, RoundelayError
from roundelay.network.platforms import CLOSE_ON_EXEC, lock_descriptor

T = TypeVar("T")


class NotStored(RoundelayError):
    """The gateway could not write its file, so the request was not carried out. An operator must check the disk."""


class JsonStore(Generic[T]):
    """A value of type ``kind`` in a JSON file. Each save replaces the whole file. ``noun`` names the contents in error
    messages, for example "webhooks".
    """

    def __init__(self, path: Path, kind: type[T], empty: T, noun: str) -> None:
        self._path = path
        self._kind = kind
        self._empty = empty
        self._noun = noun
        self._lock = -1

    def open(self) -> T:
        """Lock the file until `close`, and return the stored value. Raises `ConfigError` if another process has locked
        the file, or if its contents are invalid.
        """
        path, noun = self._path, self._noun
        try:
            make_folder(path.absolute().parent)
            self._lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
            lock_descriptor(self._lock)  # two gateways with one file would send every post twice
            return msgspec.json.decode(path.read_bytes(), type=self._kind) if path.exists() else self._empty
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"Another gateway uses the {noun} in {path}. Stop it, or choose another file.") from error
        except OSError as error:
            self.close()
            raise ConfigError(f"Cannot store {noun} in {path}: {describe_os_error(error, path)}.") from error
        except msgspec.MsgspecError as error:
            self.close()
            raise ConfigError(f"{path} contains no valid {noun} ({error}). Restore it, or move it away.") from error

    def save(self, value: T) -> None:
        """Replace the contents of the file. Raises `NotStored` and leaves the file unchanged if the write fails."""
        try:
            with replace_file(self._path) as file:
                file.write(msgspec.json.encode(value).decode())
        except OSError as error:
            raise NotStored(
                f"This gateway cannot store its {self._noun} now: {describe_os_error(error, self._path)}."
            ) from error

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
