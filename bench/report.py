"""Command-line options and output of every measurement. The output is a table, JSON, or the Markdown of a
stored run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from table import Line, format_lines, format_markdown

Results = dict[str, Any]
"""Results of a measurement as plain data. The key ``table`` contains the lines of the table."""

Size = TypeVar("Size")


def make_parser(description: str | None, sizes: Iterable[str], *, quick: str, rounds: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every measurement has. ``quick`` and ``rounds`` are the help texts of these
    two options.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--size", choices=sizes, default="full", help="amount of work; tiny only tests that the program works"
    )
    parser.add_argument("--rounds", type=int, help=rounds)
    parser.add_argument("--json", metavar="FILE", help="also write the results to FILE; with -, print only JSON")
    parser.add_argument(
        "--markdown", metavar="FILE", help="measure nothing, and print the table of a --json FILE as Markdown"
    )
    return parser


def pick_size(options: argparse.Namespace, sizes: Mapping[str, Size]) -> Size:
    return sizes["quick" if options.quick else options.size]


def tell_results(
    options: argparse.Namespace,
    measure: Callable[[], Results],
    describe: Callable[[Results], str],
    *,
    failure: type[Exception] = RuntimeError,
) -> None:
    """Measure or load a stored run, and print the results as requested. If ``measure`` raises ``failure``, the process
    ends with the text of the error.
    """
    if options.markdown:
        kept = json.loads(Path(options.markdown).read_text())
        print(f"```\n{describe(kept)}\n```\n\n{format_markdown(_read_lines(kept))}")
        return
    try:
        results = measure()
    except failure as error:
        sys.exit(f"the measurement failed: {error}")
    text = json.dumps(results, indent=2) + "\n"
    if options.json == "-":
        print(text, end="")
        return
    parts = (describe(results), results.get("subjects"), format_lines(_read_lines(results)))
    print("\n\n".join(part for part in parts if part))
    if options.json:
        Path(options.json).write_text(text)


def tell(text: str) -> None:
    """Print a line about the progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def _read_lines(results: Results) -> list[Line]:
    return [Line.from_plain(plain) for plain in results["table"]]
