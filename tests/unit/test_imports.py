"""The import directions of the architecture, read from the source of every product file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folder -> what it may import of ours (docs: "Import directions"). Its own modules it imports relatively, a folder inside of it absolutely.
ALLOWED = {
    "templates": set[str](),
    "network": set[str](),
    "mods": {"roundelay.network"},
    "agents": {"roundelay.network", "roundelay.templates"},
    "roundelay": {"roundelay"},
}
FILES = [path.relative_to(ROOT) for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def list_imports(source: str, parents: int) -> Iterator[tuple[int, str]]:
    """Line and module of each import, nested ones too; a relative one is ``.``, or ``..`` where it leaves the folder."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            yield node.lineno, "." if node.level <= parents else ".."
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            # `from roundelay import network` imports roundelay.network.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def find_breaches(folder: str, source: str, parents: int = 1) -> list[str]:
    """What a file of ``folder``, ``parents`` folders deep in it, imports and may not."""
    breaches = []
    allowed_here = {*ALLOWED[folder], *([f"roundelay.{folder}"] if parents > 1 else [])}
    for line, module in list_imports(source, parents):
        top = module.partition(".")[0]
        if module == ".." or (module == "." and folder == "roundelay"):
            breaches.append(f"line {line}: a relative import out of its folder, or in roundelay/")
        elif top in ALLOWED and top != "roundelay":
            breaches.append(f"line {line}: {module}: the bare name of a folder; it is roundelay.{module}")
        elif top == "roundelay" and not any(
            module == allowed or module.startswith(f"{allowed}.") for allowed in allowed_here
        ):
            breaches.append(f"line {line}: {module}: {folder}/ must not import it")
    return breaches


@pytest.mark.parametrize("file", FILES, ids=str)
def test_file_imports_only_what_its_folder_may(file: Path) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert find_breaches(file.parts[0], source, parents=len(file.parts) - 1) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("network", "from roundelay.agents import runner"),
        ("network", "from roundelay.network import errors"),  # its own modules are relative
        ("network", "import roundelay"),
        ("network", "from roundelay import agents"),
        ("network", "from ..mods import channels"),
        ("network", "def late():\n    import roundelay.mods.channels"),
        ("templates", "from roundelay.network.errors import ConfigError"),
        ("mods", "from roundelay.agents.tools import tool"),
        ("mods", "from roundelay.networking import x"),
        ("agents", "from roundelay.mods import channels"),
        ("agents", "from roundelay.app import serve"),
        ("agents", "import network.errors"),
        ("roundelay", "from .app import serve"),
        ("roundelay", "from agents import runner"),
    ],
)
def test_wrong_direction_is_seen(folder: str, source: str) -> None:
    assert len(find_breaches(folder, source)) == 1


@pytest.mark.parametrize(
    ("folder", "source", "parents"),
    [
        ("network", "from .errors import ConfigError", 1),
        ("agents", "from ..tools import tool", 2),
        ("agents", "from roundelay.network.errors import RoundelayError", 1),
        ("agents", "from roundelay.network import NetworkClient", 1),
        ("mods", "import roundelay.network.mod", 1),
        ("roundelay", "from roundelay.agents import runner", 1),
        ("roundelay", "import networkx", 1),
    ],
)
def test_right_direction_passes(folder: str, source: str, parents: int) -> None:
    assert find_breaches(folder, source, parents) == []


def test_the_page_about_the_design_names_every_module() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[a-z_]+\b", page))
    folders = ("network", "mods", "agents")
    modules = {path.stem for folder in folders for path in (ROOT / folder).rglob("*.py")} - {"__init__"}
    modules |= {path.stem for path in (ROOT / "roundelay").glob("*.py")} - {"__init__"}
    assert modules - named == set()


@pytest.mark.parametrize(
    "package",
    sorted(path.parent.name for path in (ROOT / "roundelay").glob("*/__init__.py") if not path.parent.is_symlink()),
)
def test_its_row_of_a_package_names_just_its_modules(package: str) -> None:
    """A row of its own, since these names are short: `run` stands in many a place."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| `{package}/`[^|]*\|(.*)\|$", page, re.MULTILINE)
    modules = {path.stem for path in (ROOT / "roundelay" / package).glob("*.py")} - {"__init__"}
    assert modules == set(re.findall(r"`([a-z_]+)`", row))
