"""Print the size of the code base: lines, classes, files, comments and prose, each with its limit.

``./dev size`` runs this program. tests/unit/test_size.py enforces the limits that a change could exceed without anybody
noticing: large classes, large files, and folders of ``roundelay/`` that import each other in a circle.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # tests import this module, and may find another package named `tools`

from prose import NOT_PROSE, PATHS, SKIPPED, list_sentences  # noqa: E402

PRODUCT = ("network", "agents", "mods", "templates", "web", "interop", "adapters", "roundelay")
SCRIPTS = ("web/page", "clients/typescript")
MAX_METHODS, MAX_ATTRIBUTES, MAX_FILE_LINES = 30, 20, 600


@dataclass(frozen=True)
class ClassSize:
    """Number of methods that a class defines, and of attributes that its methods or its body assign. Inherited methods
    and attributes do not count.
    """

    name: str
    file: str
    methods: int
    attributes: int

    @property
    def is_large(self) -> bool:
        return self.methods > MAX_METHODS or self.attributes > MAX_ATTRIBUTES


def list_files(folders: Iterable[str], *suffixes: str) -> list[Path]:
    """Return the files in these folders with these suffixes, sorted by name. Vendored files are left out."""
    found = (path for folder in folders for suffix in suffixes for path in (ROOT / folder).rglob(f"*{suffix}"))
    return sorted({path for path in found if path.is_file() and not SKIPPED & {*path.parts}})


def count_python(source: str) -> tuple[int, int]:
    """Return the number of lines with code, and the number of lines with a comment. A line with code and a comment
    counts twice. A docstring does not count.
    """
    docstrings = set[int]()
    for node in ast.walk(ast.parse(source)):
        for child in body if isinstance(body := getattr(node, "body", None), list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                docstrings.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    code, comments = set[int](), set[int]()
    skipped = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.update([token.start[0]] if not token.string.startswith(NOT_PROSE) else [])
        elif token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(comments)


def count_script(source: str) -> int:
    """Return the number of lines of JavaScript or TypeScript that contain code. Blank lines and comment lines do not
    count.
    """
    code, in_comment = 0, False
    for line in map(str.strip, source.splitlines()):
        if in_comment or line.startswith("/*"):
            in_comment = "*/" not in line
        elif line and not line.startswith("//"):
            code += 1
    return code


def list_classes(source: str, file: str) -> Iterator[ClassSize]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            declared = {
                child.target.id
                for child in node.body
                if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
            }
            assigned = {
                child.attr
                for method in methods
                for child in ast.walk(method)
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
                if isinstance(child.value, ast.Name) and child.value.id == "self"
            }
            # Count the attributes in the body only for a class with behavior. The fields of a record are its interface.
            yield ClassSize(node.name, file, len(methods), len(assigned | (declared if assigned else set())))


def find_large_classes() -> list[ClassSize]:
    """Return the classes that exceed a limit, largest first."""
    classes = (size for path in list_files(PRODUCT, ".py") for size in list_classes(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))))  # fmt: skip
    return sorted(
        (size for size in classes if size.is_large), key=lambda size: (-size.methods, -size.attributes, size.name)
    )


def find_large_files() -> list[tuple[str, int]]:
    """Return the path and the number of lines of the product's Python files that exceed the limit, largest first."""
    sizes = [
        (str(path.relative_to(ROOT)), len(path.read_text(encoding="utf-8").splitlines()))
        for path in list_files(PRODUCT, ".py")
    ]
    return sorted((size for size in sizes if size[1] > MAX_FILE_LINES), key=lambda size: (-size[1], size[0]))


def main() -> None:
    sources = [path.read_text(encoding="utf-8") for path in list_files(PRODUCT, ".py")]
    code, comments = (sum(counts) for counts in zip(*map(count_python, sources), strict=True))
    scripts = sum(count_script(path.read_text(encoding="utf-8")) for path in list_files(SCRIPTS, ".js", ".ts", ".mjs"))
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in list_files(["tests"], ".py"))
    sentences = list(list_sentences([ROOT / path for path in PATHS]))
    suspicious = 100 * sum(bool(sentence.find_patterns()) for sentence in sentences) / len(sentences)
    classes, files = find_large_classes(), find_large_files()
    rows = [
        ("lines of code, Python", f"{code:,}", "44,000"),
        ("lines of code, JavaScript and TypeScript", f"{scripts:,}", "7,000"),
        ("lines of tests", f"{tests:,}", "70,000"),
        ("classes", f"{sum(len(list(list_classes(source, ''))) for source in sources):,}", ""),
        ("comment lines in 100 lines of code", f"{100 * comments / code:.1f}", "at least 6"),
        ("sentences to look at, in 100", f"{suspicious:.1f}", "2"),
        (f"classes over {MAX_METHODS} methods or {MAX_ATTRIBUTES} attributes", str(len(classes)), "3"),
        (f"files over {MAX_FILE_LINES} lines", str(len(files)), "0"),
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, value, limit in rows:
        print(f"{name:{width}}  {value:>8}" + (f"   limit {limit}" if limit else ""))
    for size in classes:
        print(f"  {size.name}: {size.methods} methods, {size.attributes} attributes ({size.file})")
    for file, lines in files:
        print(f"  {file}: {lines} lines")


if __name__ == "__main__":
    main()
