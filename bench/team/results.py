"""The tables of `./dev bench team`, created from one row per round, workload and system.

A ratio compares a system with the best peer of the same round, so a slow minute affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from environments import System
from workloads import GROWING, WORKLOADS

Row = dict[str, Any]
Value = Callable[[Row], float | None]


def is_right(row: Row) -> bool:
    return not row.get("error") and not row["wrong"]


def read_cpu_ms(row: Row) -> float:
    """Return the CPU time of one answer in ms. For the workload `start`, the time includes the start of the system."""
    total_s = row["cpu_s"] + (row["ready_cpu_s"] if row["work"] == "w6" else 0)
    return total_s / row["questions"] * 1000


def list_ratios(rows: Sequence[Row], system: str, work: str, peers: Iterable[str]) -> list[float]:
    """Return, for each round, the CPU time of a system divided by the CPU time of the best peer."""
    ratios = []
    for row in rows:
        if (row["system"], row["work"]) != (system, work) or not is_right(row):
            continue
        beside = [
            read_cpu_ms(it)
            for it in rows
            if it["system"] in peers and (it["work"], it["round"]) == (work, row["round"]) and is_right(it)
        ]
        if beside:
            ratios.append(read_cpu_ms(row) / min(beside))
    return ratios


def find_median(rows: Sequence[Row], system: str, work: str, value: Value) -> float | None:
    values = [value(row) for row in rows if (row["system"], row["work"]) == (system, work) and is_right(row)]
    known = [it for it in values if it is not None]
    return statistics.median(known) if known else None


COLUMNS: dict[str, Value] = {
    "CPU ms": read_cpu_ms,
    "prompt bytes": lambda row: row["prompt_bytes"] / row["questions"],
    "fresh": lambda row: row["fresh_bytes"] / row["questions"],
    "MB": lambda row: row["memory_mb"],
    "p50 ms": lambda row: row["p50_s"] * 1000,
    "wall s": lambda row: row["wall_s"],
    "ready CPU s": lambda row: row["ready_cpu_s"],
    "ready MB": lambda row: row["ready_mb"],
    "last / first": lambda row: row.get("growth"),
}


Table = tuple[str, list[list[str]]]
"""A title, and rows of cells. The first row is the header."""
SUMMARY = (
    ("tool call: CPU ms", "w1", "CPU ms"),
    ("p50 ms", "w1", "p50 ms"),
    ("prompt bytes", "w1", "prompt bytes"),
    ("MB", "w1", "MB"),
    ("team: CPU ms", "w2", "CPU ms"),
    ("prompt bytes", "w2", "prompt bytes"),
    ("200 agents: MB", "w5", "MB"),
    ("after 1,000", "w7", "last / first"),
)
"""Columns of the second table of docs/performance.md: title, workload and value."""


def choose_systems(rows: Sequence[Row], systems: Sequence[System]) -> list[System]:
    measured = {row["system"] for row in rows}
    return [system for system in systems if system.name in measured]


def build_overview(rows: Sequence[Row], systems: Sequence[System]) -> Table:
    """Return a table with the ratios of all workloads."""
    peers = {system.name for system in systems if system.is_peer}
    works = [work for work in WORKLOADS if any(row["work"] == work for row in rows)]
    table = [["CPU / best peer", "stores", *(WORKLOADS[work].title for work in works)]]
    for system in choose_systems(rows, systems):
        ratios = [list_ratios(rows, system.name, work, peers) for work in works]
        table.append([system.name, system.stores, *(_format(statistics.median(it)) if it else "" for it in ratios)])
    return "CPU of an answer, divided by that of the best peer in the same round (median)", table


def build_summary(rows: Sequence[Row], systems: Sequence[System]) -> Table:
    """Return a table with the values that help a user to choose a system."""
    table = [["", *(title for title, _, _ in SUMMARY)]]
    for system in choose_systems(rows, systems):
        values = (find_median(rows, system.name, work, COLUMNS[name]) for _, work, name in SUMMARY)
        table.append([system.name, *("" if it is None else _format(it) for it in values)])
    return "Values of an answer (median)", table


def build_details(rows: Sequence[Row], systems: Sequence[System]) -> list[Table]:
    """Return one table with all values for each workload."""
    peers = {system.name for system in systems if system.is_peer}
    tables: list[Table] = []
    for work in (work for work in WORKLOADS if any(row["work"] == work for row in rows)):
        names = [name for name in COLUMNS if name != "last / first" or work in GROWING]
        table = [["", "CPU / best (rounds)", *names]]
        for system in choose_systems(rows, systems):
            values = [find_median(rows, system.name, work, COLUMNS[name]) for name in names]
            if values[0] is not None:
                spread = _format_spread(list_ratios(rows, system.name, work, peers))
                table.append([system.name, spread, *("" if it is None else _format(it) for it in values)])
        tables.append((f"{work}: {WORKLOADS[work].title}", table))
    return tables


def _format_spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    median = _format(statistics.median(ratios))
    return median if len(ratios) == 1 else f"{median} ({_format(min(ratios))} to {_format(max(ratios))})"


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def format_text(tables: Iterable[Table]) -> str:
    lines: list[str] = []
    for title, table in tables:
        widths = [max(len(row[place]) for row in table) for place in range(len(table[0]))]
        lines += ["", title]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
    return "\n".join(lines[1:])


def format_markdown(tables: Iterable[Table]) -> str:
    """Return the tables in Markdown, for docs/performance.md."""
    blocks = []
    for title, (head, *body) in tables:
        marks = ["---" if place == 0 or name == "stores" else "---:" for place, name in enumerate(head)]
        blocks.append("\n".join([f"{title}:", "", *(f"| {' | '.join(row)} |" for row in (head, marks, *body))]))
    return "\n\n".join(blocks)


def format_problems(rows: Iterable[Row]) -> list[str]:
    """Return one line for each measurement that failed or had a wrong answer. The tables leave out such
    measurements.
    """
    return [
        f"{row['system']}, {row['work']}, round {row['round'] + 1}: {row.get('error') or row['wrong'][0]}"
        for row in rows
        if not is_right(row)
    ]
