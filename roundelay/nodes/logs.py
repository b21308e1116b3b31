"""Log lines on stderr for the commands that stay: a node and its agents. The only place that configures logging."""

from __future__ import annotations

import logging
import sys

from roundelay.terminal.text import clean, clean_lines

_KNOWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _LineFormatter(logging.Formatter):
    """One line for each record, its ``extra`` fields behind the message as ``name=value``, and a traceback below. What
    was raised may quote a participant, so nothing of it can drive a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extra = " ".join(f"{name}={value!r}" for name, value in vars(record).items() if name not in _KNOWN)
        head, *trace = clean_lines(line)
        return "\n".join([f"{head} {clean(extra)}".rstrip(), *trace])


def log_to_stderr(level: str) -> None:
    """Log what is at least as grave as ``level`` (``debug``, ``info``, ``warning``, ``error``)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    if root.level < logging.WARNING:
        logging.getLogger("websockets").setLevel(logging.WARNING)  # it logs each frame, and message bodies with it
