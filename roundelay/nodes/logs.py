"""What the commands that stay, a node and its agents, write on stderr: log lines, and what is said beside the log, in
words or as JSON. The only place that configures logging.

``info`` and ``debug`` are this package's own: libraries are heard from ``warning`` on, since below that some of them
log prompts, requests and frames. Nothing of ours logs tokens, prompts or the bodies of messages.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

from roundelay.network.credentials import hide_secrets
from roundelay.terminal.text import clean, clean_json, clean_lines

LogFormat = Literal["text", "json"]
_OURS = "roundelay"
_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _LineFormatter(logging.Formatter):
    """One line for each record, its ``extra`` fields behind the message as ``name=value``, and a traceback below. What
    was raised may quote a participant, so nothing of it can drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        line = hide_secrets(super().format(record))
        extra = " ".join(f"{name}={value!r}" for name, value in _read_extra(record).items())
        head, *trace = clean_lines(line)
        return "\n".join([f"{head} {clean(extra)}".rstrip(), *trace])


class _JsonFormatter(logging.Formatter):
    """One line of JSON for each record: ``at``, ``level``, ``logger``, ``message``, ``exception`` if there is one, and
    its ``extra`` fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"message": record.getMessage()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        head = {"at": _write_time(record.created), "level": record.levelname.lower(), "logger": record.name}
        said = {name: hide_secrets(text) for name, text in said.items()}
        return _write_json({**_read_extra(record), **head, **said})


class Voice:
    """What a command says on stderr beside its log, and passes on of the processes that it has started."""

    def __init__(self, log_format: LogFormat) -> None:
        self.format = log_format

    def say(self, text: str) -> None:
        """Say a sentence."""
        self._write(text, {"at": _write_time(time.time()), "level": "warning", "logger": _OURS, "message": text})

    def pass_on(self, agent_id: str, line: str) -> None:
        """Pass on a line that the process of an agent has written: its log's, or what its code prints."""
        found = _read_object(line) if self.format == "json" else {}
        told = found or {"at": _write_time(time.time()), "level": "info", "logger": "output", "message": line}
        self._write(f"{agent_id}: {clean_lines(line)[0]}", {**told, "process": agent_id})

    def _write(self, text: str, told: dict[str, Any]) -> None:
        print(text if self.format == "text" else _write_json(told), file=sys.stderr, flush=True)


def log_to_stderr(level: str, log_format: LogFormat = "text") -> None:
    """Log what is at least as grave as ``level`` (``debug``, ``info``, ``warning``, ``error``); of libraries nothing
    below ``warning``."""
    handler = logging.StreamHandler(sys.stderr)
    line = _LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(line if log_format == "text" else _JsonFormatter())
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger(_OURS).setLevel(number)


def _read_extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _hide(value) for name, value in vars(record).items() if name not in _KNOWN}


def _hide(value: Any) -> Any:
    """Return a value without secrets; what is neither text, number nor a collection becomes text."""
    match value:
        case None | bool() | int() | float():
            return value
        case dict():
            return {key: _hide(it) for key, it in value.items()}
        case list() | tuple():
            return [_hide(it) for it in value]
        case str():
            return hide_secrets(value)
        case _:
            shown = hide_secrets(str(value))
            return value if shown == str(value) else shown


def _read_object(line: str) -> dict[str, Any]:
    """Read a line of another process's log; nothing where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and {"at", "level", "message"} <= found.keys() else {}


def _write_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _write_json(told: dict[str, Any]) -> str:
    return clean_json(json.dumps(told, ensure_ascii=False, default=str))
