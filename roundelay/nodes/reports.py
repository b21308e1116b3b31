"""Reports from a command to the process that started it, one JSON line per report.

A supervisor (`processes.Process`) sets the environment variable `SUPERVISED` for its child. The child then reports in
JSON that it is ready or why it ends, so that the supervisor need not parse sentences. A person who starts the same
command sees a sentence instead. This module reads no frames and starts no processes.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Literal, NotRequired, TypedDict, get_args

SUPERVISED = "ROUNDELAY_SUPERVISED"
"""Name of the environment variable that tells a child to report in JSON lines. Its value is the supervisor's process id, or
0 for a forked process."""
_PREFIX = '{"report": '
ReportKind = Literal["ready", "error", "output", "ended"]


class Report(TypedDict):
    """Report of a child process. ``url`` is the address at which the child is ready, or empty.

    A process with several agents sets ``agent`` to the agent that the report is about. Such a process also reports the
    agent's output lines, and the end of an agent with its exit code and the number of its threads and tasks that could
    not be stopped (``leftovers``).
    """

    report: ReportKind
    message: str
    url: str
    agent: NotRequired[str]
    code: NotRequired[int]
    leftovers: NotRequired[int]


class Reporter:
    """Prints the reports of a command, for a person or for the supervisor that started the command."""

    def __init__(self) -> None:
        # Remove the variable: a command that an agent's tool starts is not a child of the supervisor.
        supervisor = os.environ.pop(SUPERVISED, "")
        self._is_supervised = supervisor != ""
        self.supervisor_pid = int(supervisor) if supervisor.isdecimal() else 0

    def report_ready(self, sentence: str, url: str) -> None:
        """Print on stdout that the command is ready at ``url``."""
        # Flush, because output to a pipe is buffered and the parent waits for this line.
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
    """Return the report in an output line of a child, or None for any other output."""
    # Check the prefix before parsing, because agents may print many lines.
    if not line.startswith(_PREFIX):
        return None
    try:
        report: Report = json.loads(line)
    except ValueError:  # the line is incomplete because the child was killed while it wrote
        return None
    # A tool may print its own JSON that starts with this prefix.
    fields = [report.get(name) for name in ("report", "message", "url")] + [report.get("agent", "")]
    return report if all(isinstance(field, str) for field in fields) and fields[0] in get_args(ReportKind) else None
