"""Build the release, and check that the built archives work without the clone.

    ./dev release --check            # everything below; nothing leaves this machine
    ./dev release --build DIR        # the sdist and the wheel of HEAD, and their sha256 sums
    python tools/release.py --check --only wheel,demo

`--check` builds HEAD twice and compares the bytes. The check then reads the archives, installs the wheel into empty
environments, and uses it there. Each check prints one line. The exit code is 1 if any check failed. The workflow
.github/workflows/release.yml runs the same two commands and publishes the release.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION: str = PYPROJECT["project"]["version"]

MAX_WHEEL_BYTES = 3_000_000
"""Maximum size of the wheel in bytes. The page and the documents fit into it, but comparable packages are smaller
(openai-agents: 0.4 MB).
"""

BUILD = "from setuptools import build_meta; build_meta.build_{0}({1!r})"

UNINSTALLABLE_EXTRAS = frozenset({"dev", "all", "local"})
"""Extras that the check does not install. `dev` is for the tests, `all` contains the other extras, and `local` needs
130 MB of weights.
"""

TOOLS = ("twine>=6", "griffe>=1.7", "check-jsonschema>=0.33")
"""Tools that the check itself uses. These tools are installed into a separate environment."""

NEED_A_PACKAGE = {"roundelay.agents.features.schema_worker": "jsonschema", "roundelay.pytest_plugin": "pytest"}
"""Modules that need a package, but whose error names no extra. The extra `mcp` starts the first one by its path, and
pytest loads the second one.
"""

IMPORT_ALL = """
import importlib, json, pkgutil, sys, roundelay
failures = {}
for module in sorted(it.name for it in pkgutil.walk_packages(roundelay.__path__, "roundelay.", onerror=lambda name: None)):
    if module.endswith("__main__"):
        continue
    try:
        importlib.import_module(module)
    except Exception as error:  # a module without its extra raises ConfigError, or ImportError
        failures[module] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


class CheckFailed(Exception):
    """A check found a problem that prevents the release from being published."""


@dataclass(frozen=True)
class Archives:
    """The two archive files of a release."""

    sdist: Path
    wheel: Path


def run(*command: str | Path, cwd: Path, timeout_s: float = 900, **environment: str) -> str:
    """Run a command and return its output. Raises `CheckFailed` with the end of the output if the command fails."""
    known = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=known | environment, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode != 0:
        words = " ".join(map(str, command))
        raise CheckFailed(f"`{words[:200]}` exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


# --- building


def build(folder: Path, revision: str = "HEAD") -> Archives:
    """Build the sdist and the wheel of a commit into ``folder``. Two builds of the same commit produce the
    same bytes.
    """
    source = folder / "source"
    source.mkdir(parents=True)
    packed = folder / "source.tar"
    run("git", "archive", "--format=tar", f"--output={packed}", revision, cwd=ROOT)
    run("tar", "-xf", packed, "-C", source, cwd=folder)
    epoch = run("git", "log", "-1", "--format=%ct", revision, cwd=ROOT).strip()
    run(sys.executable, "-c", BUILD.format("sdist", str(folder)), cwd=source, SOURCE_DATE_EPOCH=epoch)
    [sdist] = folder.glob("roundelay-*.tar.gz")
    normalize_sdist(sdist, int(epoch))
    # Build the wheel from the sdist, as an installer does. A file that the sdist lacks is then also missing in the
    # wheel.
    unpacked = folder / "unpacked"
    run("mkdir", "-p", unpacked, cwd=folder)
    run("tar", "-xzf", sdist, "-C", unpacked, "--strip-components=1", cwd=folder)
    run(sys.executable, "-c", BUILD.format("wheel", str(folder)), cwd=unpacked, SOURCE_DATE_EPOCH=epoch)
    [wheel] = folder.glob("roundelay-*.whl")
    for path in (source, unpacked):
        shutil.rmtree(path)
    packed.unlink()
    return Archives(sdist, wheel)


def normalize_sdist(path: Path, epoch: int) -> None:
    """Rewrite an sdist with sorted members, a fixed time and no owner. Setuptools stores the time and the owner of the
    build, which would make each build different.
    """
    content = io.BytesIO()
    with tarfile.open(path) as read, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as written:
        for member in sorted(read.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            written.addfile(member, read.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(content.getvalue(), mtime=epoch))


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- checks; each raises CheckFailed or returns the line to print


class Release:
    """The archives of HEAD, which are built once, and the environments that several checks share."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._archives: Archives | None = None
        self._tools: Path | None = None

    @property
    def archives(self) -> Archives:
        if self._archives is None:
            self._archives = build(self._work / "first")
        return self._archives

    @property
    def wheel(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.archives.wheel)

    @property
    def metadata(self) -> Message:
        with self.wheel as wheel:
            [name] = [it for it in wheel.namelist() if it.endswith(".dist-info/METADATA")]
            return Parser().parsestr(wheel.read(name).decode())

    @property
    def tools(self) -> Path:
        """Path of the Python interpreter in the environment with the tools of the checks."""
        if self._tools is None:
            self._tools = self.make_environment("tools", *TOOLS)
        return self._tools

    def make_environment(self, name: str, *wanted: str) -> Path:
        """Create an environment with packages, and return the path of its Python interpreter. Uses uv if uv is
        installed.
        """
        home = self._work / name
        if shutil.which("uv"):
            run("uv", "venv", "--quiet", "--python", sys.executable, home, cwd=self._work)
            python = find_python(home)
            run("uv", "pip", "install", "--quiet", "--python", python, *wanted, cwd=self._work)
        else:
            venv.create(home, with_pip=True, symlinks=os.name != "nt")
            python = find_python(home)
            run(python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted, cwd=self._work)
        return python

    def install_wheel(self, name: str, extra: str = "") -> Path:
        """Install the wheel with an extra into a new environment, and return the path of its Python interpreter."""
        target = f"{self.archives.wheel}[{extra}]" if extra else str(self.archives.wheel)
        return self.make_environment(name, target)


def find_python(home: Path) -> Path:
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def check_changelog(release: Release) -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = list(re.finditer(r"^## (.+)$", text, re.MULTILINE))
    named = [head for head in heads if head[1].split(" ")[0].strip("[]") in {VERSION, "Unreleased"}]
    for head in named:
        end = next((it.start() for it in heads if it.start() > head.start()), len(text))
        if re.search(r"^- ", text[head.end() : end], re.MULTILINE):
            return f'an entry under "{head[1]}"'
    raise CheckFailed(
        f'CHANGELOG.md has no entry under "## {VERSION}" or "## Unreleased". Write what users will notice.'
    )


def check_reproducible(release: Release) -> str:
    first = release.archives
    second = build(release._work / "second")
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        if one.name != other.name or hash_file(one) != hash_file(other):
            raise CheckFailed(f"{one.name}: two builds of the same commit differ")
    return f"sha256 {hash_file(first.wheel)[:16]}… and {hash_file(first.sdist)[:16]}…, twice"


def check_metadata(release: Release) -> str:
    found = release.metadata
    wanted = {"Name": "roundelay", "Version": VERSION, "License-Expression": "Apache-2.0"}
    for field, value in wanted.items():
        if found[field] != value:
            raise CheckFailed(f"METADATA says {field}: {found[field]}, not {value}")
    described = found.get_payload()
    if not isinstance(described, str) or not described.lstrip().startswith("# Roundelay"):
        raise CheckFailed("METADATA does not contain the README")
    extras = set(found.get_all("Provides-Extra") or ())
    if extras != {re.sub(r"[-_.]+", "-", it) for it in PYPROJECT["project"]["optional-dependencies"]}:
        raise CheckFailed(f"METADATA names different extras than pyproject.toml: {sorted(extras)}")
    if local := [it for it in found.get_all("Requires-Dist") or () if " @ " in it]:
        raise CheckFailed(f"an index refuses dependencies by address: {local}")
    return f"{found['Name']} {found['Version']}, Python {found['Requires-Python']}, {len(extras)} extras"


def check_twine(release: Release) -> str:
    run(
        release.tools,
        "-m",
        "twine",
        "check",
        "--strict",
        release.archives.sdist,
        release.archives.wheel,
        cwd=release._work,
    )
    return "twine check --strict"


def check_licenses(release: Release) -> str:
    with release.wheel as wheel:
        names = set(wheel.namelist())
        if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
            raise CheckFailed("the wheel contains no LICENSE")
        vendor = "roundelay/web/page/vendor"
        files = json.loads(wheel.read(f"{vendor}/vendored.json"))["files"]
        for name, row in files.items():
            for kind, path, wanted in (
                ("file", name, row["sha256"]),
                ("license", row["license_file"], row["license_sha256"]),
            ):
                if f"{vendor}/{path}" not in names:
                    raise CheckFailed(f"{name}: the wheel lacks its {kind}, {vendor}/{path}")
                if hashlib.sha256(wheel.read(f"{vendor}/{path}")).hexdigest() != wanted:
                    raise CheckFailed(f"{vendor}/{path} is not what vendored.json says")
    return f"LICENSE, and the licenses of {len(files)} vendored files"


def check_size(release: Release) -> str:
    size = release.archives.wheel.stat().st_size
    if size > MAX_WHEEL_BYTES:
        raise CheckFailed(f"the wheel has {size / 1e6:.2f} MB, more than {MAX_WHEEL_BYTES / 1e6:.0f}")
    return f"wheel {size / 1e6:.2f} MB, sdist {release.archives.sdist.stat().st_size / 1e6:.2f} MB"


def check_wheel(release: Release) -> str:
    python = release.install_wheel("plain")
    empty = release._work / "elsewhere"
    empty.mkdir()
    said = run(python, "-m", "roundelay", "--version", cwd=empty).strip()
    if said != f"roundelay {VERSION}":
        raise CheckFailed(f"`roundelay --version` of the wheel says {said!r}")
    failures = json.loads(run(python, "-c", IMPORT_ALL, cwd=empty))
    # A module that needs an extra names the extra in its error. Any other error is a dependency that pyproject.toml
    # does not list.
    if other := {name: text for name, text in failures.items() if not is_expected(name, text)}:
        raise CheckFailed("modules that cannot be imported:\n" + "\n".join(f"  {it}" for it in other.items()))
    return f"every module imports, or names its extra ({len(failures)})"


def is_expected(module: str, failure: str) -> bool:
    """Return whether a failed import is expected, because the error names the missing extra or package."""
    return "roundelay[" in failure or failure.endswith(f"'{NEED_A_PACKAGE.get(module, '')}'")


def check_extras(release: Release) -> str:
    extras = sorted(set(PYPROJECT["project"]["optional-dependencies"]) - UNINSTALLABLE_EXTRAS)
    for extra in extras:
        python = release.install_wheel(f"with-{extra}", extra)
        failures = json.loads(run(python, "-c", IMPORT_ALL, cwd=release._work))
        broken = {name: it for name, it in failures.items() if not is_expected(name, it) or f"[{extra}]" in it}
        if broken:
            raise CheckFailed(f"with the extra {extra}:\n" + "\n".join(f"  {it}" for it in broken.items()))
        shutil.rmtree(release._work / f"with-{extra}")
    return f"installed one by one: {', '.join(extras)}"


def check_demo(release: Release) -> str:
    python = release.install_wheel("demo")
    empty = release._work / "demo-folder"
    empty.mkdir()
    began = time.monotonic()
    said = run(python, "-m", "roundelay", "demo", "What is 2^10 - 24?", cwd=empty)
    if "= 1000" not in said:
        raise CheckFailed(f"the demo did not answer:\n{said[-2000:]}")
    return f"answered in {time.monotonic() - began:.1f} s"


def check_workflows(release: Release) -> str:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    run(release.tools, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files, cwd=ROOT)
    return f"{len(files)} workflow files by their schema"


def check_api(release: Release) -> str:
    tags = run("git", "tag", "--list", "v*", "--sort=-v:refname", cwd=ROOT).split()
    if not tags:
        return "no earlier release to compare with"
    run(release.tools, "-m", "griffe", "check", "roundelay", "--against", tags[0], "--search", ROOT, cwd=ROOT)
    return f"no incompatible change since {tags[0]}"


CHECKS: dict[str, Callable[[Release], str]] = {
    "changelog": check_changelog,
    "reproducible": check_reproducible,
    "metadata": check_metadata,
    "licenses": check_licenses,
    "size": check_size,
    "twine": check_twine,
    "workflows": check_workflows,
    "wheel": check_wheel,
    "demo": check_demo,
    "extras": check_extras,
    "api": check_api,
}


def check(names: Sequence[str]) -> int:
    """Run all of these checks in order, even if one fails. Return the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="roundelay-release-") as work:
        release = Release(Path(work))
        for name in names:
            try:
                line = f"ok      {CHECKS[name](release)}"
            except CheckFailed as error:
                failed, line = failed + 1, f"FAILED  {error}"
            print(f"{name:<13} {line}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="build HEAD and check the archives")
    mode.add_argument("--build", metavar="DIR", type=Path, help="write the sdist and the wheel of HEAD into DIR")
    parser.add_argument("--only", metavar="NAMES", help=f"with --check: some of {', '.join(CHECKS)}")
    options = parser.parse_args(arguments)
    if options.check:
        names = options.only.split(",") if options.only else list(CHECKS)
        if unknown := [name for name in names if name not in CHECKS]:
            parser.error(f"unknown check {unknown[0]!r}; there are {', '.join(CHECKS)}")
        return check(names)
    if options.build.exists() and any(options.build.iterdir()):
        parser.error(f"{options.build} is not empty; name a new folder")
    archives = build(options.build.resolve())
    for path in (archives.sdist, archives.wheel):
        print(f"{hash_file(path)}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
