"""Splits the bytes of a streamed reply into events: parsed JSON, or `DONE`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

DONE = "[DONE]"
"""Last event of a stream, from servers that mark the end of a stream."""


MAX_ATTEMPTS = 16
"""Maximum number of attempts to parse an event that has several lines. Each new line leads to one attempt."""


MAX_STRAY_CHARS = 2000


@dataclass(slots=True)
class EventReader:
    """Incremental parser of a stream of server-sent events, more lenient than the standard.

    Some servers omit the blank line between events or after the last event. Some servers send an error as a bare line
    of JSON.
    """

    stray: str = ""
    """First lines of the stream that belong to no event, for example the lines of a web page."""

    _rest: bytes = b""
    _pending: list[str] = field(default_factory=list)  # lines of an event whose JSON is incomplete
    _is_bare: bool = False  # whether the pending lines are JSON without `data:`
    _name: str = ""  # name of the current event
    _has_begun: bool = False

    def feed(self, data: bytes) -> list[object]:
        """Process received bytes and return the events that are now complete. Raises `ValueError` for invalid JSON."""
        # Split bytes: `str.splitlines` would also split at characters that JSON may contain unescaped, such as U+2028.
        lines = (self._rest + data).splitlines(keepends=True) if data else [self._rest]
        self._rest = lines.pop() if data and not lines[-1].endswith(b"\n") else b""
        return [event for line in lines for event in self._read_line(line.decode("utf-8", "replace").rstrip("\r\n"))]

    def close(self) -> list[object]:
        """Process the end of the stream and return the events that are now complete."""
        return [*self.feed(b""), *self._end_event()]

    def _read_line(self, line: str) -> list[object]:
        if not self._has_begun:
            line, self._has_begun = line.removeprefix("\ufeff"), True
        if line.startswith("data:"):
            return self._add_data(line.removeprefix("data:").strip())
        if self._is_bare or line.startswith(("{", "[")):
            self._is_bare = True
            return self._add_data(line)
        if line.startswith("event:"):
            self._name = line.removeprefix("event:").strip()
        elif line and not line.startswith((":", "id:", "retry:")) and len(self.stray) < MAX_STRAY_CHARS:
            self.stray += f"{line[:MAX_STRAY_CHARS]}\n"
        return self._end_event() if not line else []  # ignore comments and the fields `id` and `retry`

    def _add_data(self, text: str) -> list[object]:
        if text == DONE:
            return [*self._end_event(), DONE]
        if not text:
            return []
        self._pending.append(text)
        # Each attempt parses all pending lines again. Without a limit, a long event would take quadratic time.
        if len(self._pending) > MAX_ATTEMPTS and not (self._is_bare and text in ("}", "]")):
            return []
        try:
            event = json.loads("\n".join(self._pending))
        except ValueError:
            return []  # the JSON may continue on the next line
        return [self._finish_event(event)]

    def _end_event(self) -> list[object]:
        text = "\n".join(self._pending)
        if not text:
            self._name = ""
            return []
        if self._name == "error":
            # An error need not be JSON, so report its text unchanged.
            return [self._finish_event(text)]
        self._finish_event(None)
        return [json.loads(text)]

    def _finish_event(self, event: object) -> object:
        """Drop the pending lines. Return the event, wrapped as an error if the stream named the event ``error``."""
        is_error = self._name == "error" and not (
            isinstance(event, Mapping) and ("error" in event or "choices" in event)
        )
        self._pending.clear()
        self._is_bare, self._name = False, ""
        return {"error": event} if is_error and event else event
