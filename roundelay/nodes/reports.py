"""Reports of a command to the process that started it: one JSON line for each report, in place of a sentence.

A supervisor (`processes.Process`) sets `SUPERVISED` in the environment of its child. The child then reports that it is
ready, or why it ends, in JSON, so that the supervisor never parses sentences. A person who starts the same command reads
the sentence. This module reads no frames and starts no processes.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Literal, TypedDict

SUPERVISED = "ROUNDELAY_SUPERVISED"
"""Environment variable by which a supervisor asks its child for JSON lines."""
_PREFIX = '{"report": '


class Report(TypedDict):
    """A report of a child. ``url`` is the address at which it is ready, or empty."""

    report: Literal["ready", "error"]
    message: str
    url: str


class Reporter:
    """Prints the reports of a command, for a person or for the supervisor that started it."""

    def __init__(self) -> None:
        # Remove the variable: a command that a tool of an agent starts is not a child of the supervisor.
        self._is_supervised = os.environ.pop(SUPERVISED, "") != ""

    def report_ready(self, sentence: str, url: str) -> None:
        """Print on stdout that the command is ready at ``url``."""
        # Flushed, because output to a pipe is buffered and the parent waits for this very line.
        print(self._format("ready", sentence, url) or sentence, flush=True)

    def report_error(self, sentence: str) -> None:
        """Print on stderr why the command ends."""
        print(self._format("error", sentence) or f"Error: {sentence}", file=sys.stderr, flush=True)

    def _format(self, kind: Literal["ready", "error"], sentence: str, url: str = "") -> str:
        return json.dumps(Report(report=kind, message=sentence, url=url)) if self._is_supervised else ""


@cache
def get_reporter() -> Reporter:
    """Return the reporter of this process."""
    return Reporter()


def read_report(line: str) -> Report | None:
    """Return the report of a child's output line, or None for any other output."""
    # The text before decides, without parsing each line of an agent that prints much.
    if not line.startswith(_PREFIX):
        return None
    try:
        report: Report = json.loads(line)
    except ValueError:  # cut off, because the child was killed while it wrote
        return None
    return report
