"""Official test suites and foreign frameworks, each installed apart from the project under ``.suites``, for `./dev test --full`.

A suite's file of exact versions stands beside its test: ``NAME.txt`` for pip, ``NAME/package.json`` for npm. It is installed at the
first use and again when that file changes; which registry is asked is pip's and npm's own setting.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".suites"
INSTALL_TIMEOUT_S = 900


def python_of(name: str, *, with_roundelay: bool = False) -> Path:
    """The Python in which the packages of ``NAME.txt`` are installed, and this checkout too if wanted. Skips the test
    where they cannot be."""
    wanted = HERE / f"{name}.txt"

    def install(folder: Path) -> None:
        run(sys.executable, "-m", "venv", str(folder))
        python = str(folder / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "-r", str(wanted))
        if with_roundelay:
            run(python, "-m", "pip", "install", "--quiet", "-e", str(ROOT))

    return _installed(f"{name}-py", wanted.read_bytes() + bytes(with_roundelay), install) / "bin" / "python"


def node_modules_of(name: str) -> Path:
    """The ``node_modules`` of ``NAME/package.json``. Skips the test where they cannot be installed."""
    wanted = HERE / name / "package.json"

    def install(folder: Path) -> None:
        folder.mkdir(parents=True)
        shutil.copy(wanted, folder)
        run("npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", cwd=folder)

    return _installed(f"{name}-npm", wanted.read_bytes(), install) / "node_modules"


def run(*command: str, cwd: Path | None = None) -> None:
    """Raises `CalledProcessError`, whose output pip and npm have printed."""
    subprocess.run(command, cwd=cwd, check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)


def _installed(name: str, wanted: bytes, install: Callable[[Path], None]) -> Path:
    folder, stamp = FOLDER / name, FOLDER / f"{name}.installed"
    mark = hashlib.sha256(wanted + os.fsencode(ROOT)).hexdigest()
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may ask for it
        if not (stamp.exists() and stamp.read_text() == mark):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                install(folder)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{name} cannot be installed here: {error}")
            stamp.write_text(mark)
    return folder
