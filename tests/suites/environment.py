"""Official test suites and foreign frameworks for `./dev test --full`. Each suite is installed separately from the
project, under ``.suites``.

A suite's file with exact versions is next to its test: ``NAME.txt`` for pip, ``NAME/package.json`` for npm. The suite
is installed at its first use, and again when that file changes. The settings of pip and npm select the registry.
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
    """Return a Python with the packages of ``NAME.txt``, and with this checkout if requested. Skip the test if they
    cannot be installed.
    """
    wanted = HERE / f"{name}.txt"

    def install(folder: Path) -> None:
        run(sys.executable, "-m", "venv", str(folder))
        python = str(folder / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "-r", str(wanted))
        if with_roundelay:
            run(python, "-m", "pip", "install", "--quiet", "-e", str(ROOT))

    return _installed(f"{name}-py", wanted.read_bytes() + bytes(with_roundelay), install) / "bin" / "python"


def node_modules_of(name: str) -> Path:
    """Return the ``node_modules`` of ``NAME/package.json``. Skip the test if they cannot be installed."""
    wanted = HERE / name / "package.json"

    def install(folder: Path) -> None:
        folder.mkdir(parents=True)
        shutil.copy(wanted, folder)
        run("npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", cwd=folder)

    return _installed(f"{name}-npm", wanted.read_bytes(), install) / "node_modules"


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command. Raise `CalledProcessError` if it fails. pip and npm have then printed the reason."""
    subprocess.run(command, cwd=cwd, check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)


def _installed(name: str, wanted: bytes, install: Callable[[Path], None]) -> Path:
    folder, stamp = FOLDER / name, FOLDER / f"{name}.installed"
    mark = hashlib.sha256(wanted + os.fsencode(ROOT)).hexdigest()
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several workers may install the suite at the same time
        if not (stamp.exists() and stamp.read_text() == mark):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                install(folder)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"{name} cannot be installed here: {error}")
            stamp.write_text(mark)
    return folder
