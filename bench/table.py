"""The table with the results of a run. The table has one line per measurement, with the value of each round and the
bound that the value must meet.

This module performs no IO. Its functions convert lines to text, Markdown or plain data. Each measurement module chooses
the lines of its results.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """One measurement over all rounds. ``unit`` is empty for a ratio. ``beside`` is a text in the last column that
    helps to interpret the value.
    """

    name: str
    title: str
    values: list[float]
    bound: float | None = None
    aim: float | None = None
    fewer_is_better: bool = False
    unit: str = ""
    beside: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median meets the bound, or None for a line without a bound."""
        if self.bound is None:
            return None
        return self.median <= self.bound if self.fewer_is_better else self.median >= self.bound

    @property
    def bound_text(self) -> str:
        return "" if self.bound is None else f"{'<=' if self.fewer_is_better else '>='} {self.bound:g}"

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "median": round(self.median, 4),
            "values": [round(value, 4) for value in self.values],
            "bound": self.bound,
            "aim": self.aim,
            "fewer_is_better": self.fewer_is_better,
            "is_met": self.is_met,
            "beside": self.beside,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Line:
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__})


def format_lines(lines: Sequence[Line]) -> str:
    """Return the table for a terminal."""
    shown = [f"{'measure':<58}{'median':>9}{'min':>9}{'max':>9}{'bound':>9}{'aim':>6}  {'':<7}beside it"]
    for line in lines:
        title = f"{line.title}{f' ({line.unit})' if line.unit else ''}"
        numbers = "".join(f"{_short(value):>9}" for value in (line.median, min(line.values), max(line.values)))
        aim = f"{line.aim:g}" if line.aim is not None else ""
        verdict = {None: "", True: "ok", False: "MISSED"}[line.is_met]
        shown.append(f"{title:<58}{numbers}{line.bound_text:>9}{aim:>6}  {verdict:<7}{line.beside}".rstrip())
    return "\n".join(shown)


def format_markdown(lines: Sequence[Line]) -> str:
    """Return the table in Markdown, for docs/performance.md."""
    shown = [
        "| measure | median | rounds | bound | aim | | beside it |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    for line in lines:
        title = f"{line.title.strip()}{f' ({line.unit})' if line.unit else ''}"
        spread = f"{_short(min(line.values))} to {_short(max(line.values))}"
        aim = f"{line.aim:g}" if line.aim is not None else ""
        verdict = {None: "", True: "ok", False: "**missed**"}[line.is_met]
        shown.append(
            f"| {title} | {_short(line.median)} | {spread} | {line.bound_text} | {aim} | {verdict} | {line.beside} |"
        )
    return "\n".join(shown)


def median_of(values: Sequence[float]) -> float:
    """Return the median of the values, or 0.0 if there are none."""
    return statistics.median(values) if values else 0.0


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
