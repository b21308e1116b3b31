"""Run programs of the documentation and the examples in the test's process. A new process would cost half a second
for each.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType


def run_program(text: str, name: str) -> str:
    """Run a program as ``__main__`` and return what it printed. Writing to stderr fails the test."""
    module = ModuleType("__main__")
    module.__file__ = name
    main, sys.modules["__main__"] = sys.modules["__main__"], module
    out, errors = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            exec(compile(text, name, "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = main
    assert errors.getvalue() == ""
    return out.getvalue()


def read_output(program: Path) -> str | None:
    """Return the output that a program's docstring promises, or None if the docstring promises none."""
    docstring = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    shown = re.search(r"^It prints:\n\n((?: {4}.*\n|\n)+)", f"{docstring}\n", re.MULTILINE)
    return strip_lines(re.sub(r"^ {4}", "", shown[1], flags=re.MULTILINE)) if shown else None


def strip_lines(text: str) -> str:
    """Return a text without the white space at the ends of its lines, which docstrings do not keep."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())
