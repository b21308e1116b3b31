"""Write logs and messages of long-running commands (a node and its agents) to standard error.

Log lines and the commands' own sentences have the same format, text or JSON. Only this module configures logging. The
levels ``info`` and ``debug`` apply only to this package, because below ``warning`` some libraries log prompts, requests
and frames. This package logs no tokens, prompts or message bodies.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

from roundelay.display.text import sanitize, sanitize_json, sanitize_lines
from roundelay.network.credentials import hide_secrets

LogFormat = Literal["text", "json"]
_PACKAGE = "roundelay"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _LineFormatter(logging.Formatter):
    """Formats a log record as one line: the message, followed by ``name=value`` for each ``extra`` field. A traceback
    follows in separate lines.

    Control characters are removed, because an exception may quote a participant's text.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = hide_secrets(super().format(record))
        extra = " ".join(f"{name}={value!r}" for name, value in _read_extra(record).items())
        # Put the fields between the message and the traceback, so that one line contains the message and the fields.
        head, *trace = sanitize_lines(line)
        return "\n".join([f"{head} {sanitize(extra)}".rstrip(), *trace])


class _JsonFormatter(logging.Formatter):
    """Formats a log record as one JSON object with ``at``, ``level``, ``logger``, ``message``, an optional
    ``exception``, and the record's ``extra`` fields."""

    def format(self, record: logging.LogRecord) -> str:
        texts = {"message": record.getMessage()}
        if record.exc_info:
            texts["exception"] = self.formatException(record.exc_info)
        head = {"at": _format_time(record.created), "level": record.levelname.lower(), "logger": record.name}
        texts = {name: hide_secrets(text) for name, text in texts.items()}
        # Set the fixed fields last, so that an extra field cannot replace the time or the level.
        return _format_json({**_read_extra(record), **head, **texts})


class ProcessLog:
    """Writer for a command's own sentences and for the output of its child processes. Both go to standard error, like
    the log."""

    def __init__(self, log_format: LogFormat) -> None:
        self.format = log_format

    def write(self, sentence: str) -> None:
        """Write a sentence of the command itself."""
        fields = {"at": _format_time(time.time()), "level": "warning", "logger": _PACKAGE, "message": sentence}
        self._print(sentence, fields)

    def forward(self, name: str, line: str) -> None:
        """Write an output line of a child process, prefixed with the name of the process."""
        # The child logs in the same format. Use the time and level of its line instead of quoting the line as a
        # message.
        fields = _read_log_line(line) if self.format == "json" else {}
        fields = fields or {"at": _format_time(time.time()), "level": "info", "logger": "output", "message": line}
        self._print(f"{name}: {sanitize_lines(line)[0]}", {**fields, "process": name})

    def _print(self, text: str, fields: dict[str, Any]) -> None:
        print(text if self.format == "text" else _format_json(fields), file=sys.stderr, flush=True)


def log_to_stderr(level: str, log_format: LogFormat = "text") -> None:
    """Log to standard error at ``level`` and above (``debug``, ``info``, ``warning``, ``error``). Libraries log only at
    ``warning`` and above.

    """
    handler = logging.StreamHandler(sys.stderr)
    line = _LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(line if log_format == "text" else _JsonFormatter())
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level.upper()]
    # Remove handlers that a library installed when it was imported. Otherwise every line would appear twice.
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger(_PACKAGE).setLevel(number)


def _read_extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _hide(value) for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


def _hide(value: Any) -> Any:
    """Return a log value without secrets. A value of any other type becomes text if its text contains a secret."""
    match value:
        case None | bool() | int() | float():
            return value
        case dict():
            return {key: _hide(item) for key, item in value.items()}
        case list() | tuple():
            return [_hide(item) for item in value]
        case str():
            return hide_secrets(value)
        case _:
            # Return the object itself unless its text contains a secret, so that JSON can still show numbers and dates.
            text = hide_secrets(str(value))
            return value if text == str(value) else text


def _read_log_line(line: str) -> dict[str, Any]:
    """Return the fields of a JSON log line from another process, or an empty dictionary for any other line."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) and {"at", "level", "message"} <= fields.keys() else {}


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _format_json(fields: dict[str, Any]) -> str:
    return sanitize_json(json.dumps(fields, ensure_ascii=False, default=str))
