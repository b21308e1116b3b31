"""Tests of the limits of tools/size.py that a later change could exceed unnoticed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from size import count_python, count_script, find_large_classes, find_large_files, list_classes

LARGE_CLASSES = {"State", "NetworkClient", "SQLiteLedger"}
"""Classes with many small methods of one kind: the state's tables, the client's operations and the database's
queries.
"""


def test_no_other_class_is_large() -> None:
    assert {size.name for size in find_large_classes()} <= LARGE_CLASSES


def test_no_file_is_large() -> None:
    assert find_large_files() == []


def test_methods_and_assigned_attributes_are_counted() -> None:
    source = "class A:\n    kept: int\n    def f(self):\n        self.a = self.b = 1\n    async def g(self):\n        self.a += 1\n"
    [size] = list_classes(source, "a.py")
    assert (size.methods, size.attributes, size.is_large) == (2, 3, False)
    [large] = list_classes("class B:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(31)), "b.py")
    assert large.is_large


def test_docstrings_and_blank_lines_are_no_code() -> None:
    assert count_python('"""Text\nover two lines."""\n\n# Why.\nx = """a\nb"""  # Beside.\n') == (2, 2)
    assert count_script("/* one\n two */\n\n// three\nlet a = 1;\n") == 1
