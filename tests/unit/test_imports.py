"""Tests of the architecture's import directions in the source of every product file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import read_pages

ROOT = Path(__file__).parents[2]

# The project's modules that each folder may import (docs: "Import directions"). A file imports its own folder
# relatively, and a subfolder of it absolutely.
ALLOWED = {
    "templates": set[str](),
    "network": set[str](),
    "mods": {"roundelay.network"},
    "agents": {"roundelay.lazy", "roundelay.network", "roundelay.templates"},
    "web": {"roundelay.network"},
    "interop": {"roundelay.network"},
    "adapters": {"roundelay.network", "roundelay.agents", "roundelay.interop.a2a.parts"},
    "roundelay": {"roundelay"},
}
# The OpenAI Agents SDK is imported as `agents`, which is also the name of a folder here.
NO_FOLDER = {Path("adapters/openai_agents.py"): "from agents import"}
FILES = [path.relative_to(ROOT) for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def list_imports(source: str, parents: int) -> Iterator[tuple[int, str]]:
    """Yield the line and module of each import, including nested ones. A relative import is ``.``, or ``..`` if it
    leaves the folder.
    """
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
    """Return the forbidden imports of a file in ``folder``, ``parents`` levels deep."""
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
    if file in NO_FOLDER:
        source = source.replace(NO_FOLDER[file], "from openai_agents_sdk import")
    assert find_breaches(file.parts[0], source, parents=len(file.parts) - 1) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("network", "from roundelay.agents import runner"),
        ("network", "from roundelay.network import errors"),  # a folder imports its own modules relatively
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
        ("network", "from roundelay.web.site import PageSite"),
        ("web", "from roundelay.app import serve"),
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
        ("mods", "import roundelay.network.core.mod", 1),
        ("roundelay", "from roundelay.agents import runner", 1),
        ("roundelay", "import networkx", 1),
    ],
)
def test_right_direction_passes(folder: str, source: str, parents: int) -> None:
    assert find_breaches(folder, source, parents) == []


def find_twice_named(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of public classes that are defined more than once, with their files. Private names may repeat."""
    defined: dict[str, list[str]] = {}
    for file, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(file)
    return {name: files for name, files in defined.items() if len(files) > 1}


def test_public_class_names_are_unique() -> None:
    assert find_twice_named({str(file): (ROOT / file).read_text(encoding="utf-8") for file in FILES}) == {}


def test_repeated_public_class_name_is_found() -> None:
    sources = {
        "one.py": "class HandshakeLimiter: ...\nclass _Row: ...",
        "other.py": "def late():\n    class HandshakeLimiter: ...\nclass Door: ...\nclass _Row: ...",
    }
    assert find_twice_named(sources) == {"HandshakeLimiter": ["one.py", "other.py"]}


def test_every_module_has_a_docstring_and_every_folder_a_line_in_the_design() -> None:
    folders = ("network", "mods", "agents", "web", "interop", "adapters", "roundelay")
    modules = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in modules}
    assert [path for path, tree in trees.items() if tree.body and ast.get_docstring(tree) is None] == []
    page = read_pages("design")
    packages = {path.parent for path in modules if path.name == "__init__.py"}
    assert [path for path in packages if not re.search(rf"\b{path.name}/", page)] == []


# Each wing of the network imports only the wings before it. The client imports only the contract.
WINGS = ("contract", "core", "ledger", "cluster", "operations", "hub")
FACES = {"roundelay.network.mod", "roundelay.network.visibility"}
"""Public import paths that count as part of the contract, although they export names of the core."""


def name_module(file: Path) -> str:
    """Return the import name of a product file."""
    parts = [*file.with_suffix("").parts]
    return ".".join((["roundelay"] if parts[0] != "roundelay" else []) + parts).removesuffix(".__init__")


MODULES = {name_module(file): file for file in FILES}


def list_imported(name: str, source: str, *, is_package: bool) -> set[str]:
    """Return the project's modules that a module imports: at the top, inside functions, and for types only."""
    found = set()
    package = name.split(".") if is_package else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            named = {f"{module}.{alias.name}" for alias in node.names}
            found |= {it if it in MODULES else module for it in named}
    return (found & MODULES.keys()) - {name}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the imports of each module. A fixture, so that the files are read only where these tests run."""
    return {
        name: list_imported(name, (ROOT / file).read_text(encoding="utf-8"), is_package=file.stem == "__init__")
        for name, file in MODULES.items()
    }


def find_wing(module: str) -> str | None:
    """Return the wing of the network that contains a module, or None for a module of another folder."""
    if module != "roundelay.network" and not module.startswith("roundelay.network."):
        return None
    parts = module.split(".")
    return parts[2] if len(parts) > 2 and parts[2] in (*WINGS, "client") else "contract"


def may_stand_on(wing: str, other: str) -> bool:
    """Whether modules of one wing may import modules of another."""
    if wing == other or other == "contract":
        return True
    return wing != "client" and other != "client" and WINGS.index(other) < WINGS.index(wing)


def find_wing_breaches(imports: dict[str, set[str]]) -> list[str]:
    found = []
    for module, imported in imports.items():
        wing = find_wing(module)
        for other in sorted(imported) if wing is not None and module not in FACES else ():
            other_wing = find_wing(other)
            if other_wing is not None and not may_stand_on(wing or "", other_wing):
                found.append(f"{module} ({wing}) imports {other} ({other_wing})")
    return found


def find_circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other in a circle (Tarjan's strongly connected components)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for other in sorted(imports.get(module, ())):
            if other not in numbers:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], numbers[other])
        if lowest[module] == numbers[module]:
            circle = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(circle) > 1:
                found.append(circle)

    for module in sorted(imports):
        if module not in numbers:
            visit(module)
    return found


def test_each_wing_of_the_network_stands_on_those_before_it(imports: dict[str, set[str]]) -> None:
    assert find_wing_breaches(imports) == []


@pytest.mark.parametrize(
    ("wing", "source"),
    [
        ("core", "from roundelay.network.ledger import Ledger"),
        ("core", "def late():\n    from roundelay.network.hub.session import Session"),
        ("ledger", "from roundelay.network.operations.paging import Page"),
        ("ledger", "from roundelay.network.cluster.shared_log import SharedLog"),
        ("operations", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roundelay.network.hub.hub import Hub"),
        ("client", "from roundelay.network.core.tables import Row"),
        ("hub", "from roundelay.network.client import NetworkClient"),
        ("contract", "from .core import state"),
    ],
)  # fmt: skip
def test_an_import_of_a_later_wing_is_seen(wing: str, source: str) -> None:
    module = "roundelay.network.some" if wing == "contract" else f"roundelay.network.{wing}.some"
    assert len(find_wing_breaches({module: list_imported(module, source, is_package=False)})) == 1


def test_modules_import_each_other_in_no_circle_but_those_that_are_left(imports: dict[str, set[str]]) -> None:
    found = find_circles(imports)
    assert found == []


def name_part(module: str) -> str:
    """Return the subfolder of roundelay/ that contains a module, or the module's own name elsewhere."""
    file = MODULES[module]
    return str(file.parent) if file.parts[0] == "roundelay" and len(file.parts) > 2 else module


def test_folders_of_roundelay_import_each_other_in_no_circle(imports: dict[str, set[str]]) -> None:
    folders: dict[str, set[str]] = {}
    for module, imported in imports.items():
        part = name_part(module)
        folders.setdefault(part, set()).update({name_part(it) for it in imported} - {part})
    # Count folders only: the package's root and its top-level modules export names of many folders.
    known = {it for it in folders if "/" in it}
    assert find_circles({it: imported & known for it, imported in folders.items() if it in known}) == []


def test_a_circle_is_seen_also_where_types_alone_close_it(imports: dict[str, set[str]]) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roundelay.network.hub.hub import Hub"
    module = "roundelay.network.clock"
    back = {module: list_imported(module, typed, is_package=False)}
    assert find_circles(imports | back) != find_circles(imports)


def test_the_page_about_the_design_names_files_and_names_that_are_there() -> None:
    page = (ROOT / "docs" / "design" / "where.md").read_text(encoding="utf-8")
    section = page[page.index("# Where is ...?") : page.index("## Where do I put ...?")]
    rows = [row.split("|")[2:4] for row in section.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) > 15
    for files, names in rows:
        sources = [
            "".join(it.read_text(encoding="utf-8") for it in [ROOT / path] if it.is_file())
            for path in re.findall(r"`([\w/]+\.py)`", files)
        ]
        assert sources, files
        assert all(sources), files
        for name in re.findall(r"`(\w+)`", names):
            assert any(re.search(rf"\b(def|class) {name}\b", source) for source in sources), f"{name}: {files}"


@pytest.mark.parametrize("folder", [name for name in ALLOWED if name != "roundelay"])
def test_a_folder_imported_by_its_bare_name_says_how_to_import_it(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (
        f"ImportError: Import this package as roundelay.{folder} (from roundelay.{folder} import ...)." in done.stderr
    )
