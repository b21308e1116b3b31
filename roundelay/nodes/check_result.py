"""`Checked`: the result of one check by ``roundelay doctor``, as a line for people or as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from roundelay.display.screen import Paint
from roundelay.display.text import sanitize
from roundelay.network.credentials import hide_secrets

Status = Literal["ok", "note", "failed"]


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of one check. ``advice`` describes how to fix the problem."""

    name: str
    status: Status
    detail: str
    advice: str = ""

    def describe(self, paint: Paint) -> str:
        color = {"ok": paint.green, "note": paint.yellow, "failed": paint.red}[self.status]
        advice = f" {sanitize(self.advice)}" if self.advice else ""
        return f"{color(f'{self.status:<6}')} {sanitize(self.name):<10} {sanitize(hide_secrets(self.detail))}{advice}"

    def to_json(self) -> dict[str, str]:
        # Only details can contain a secret. Hiding a password such as "secret" must not change the names of checks.
        return asdict(self) | {"detail": hide_secrets(self.detail), "advice": hide_secrets(self.advice)}
