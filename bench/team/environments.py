"""The measured systems of systems.toml. Each system that needs its own packages gets an environment under .suites/."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / ".suites" / "bench-team"
MARKER = "pins.json"
"""Name of the file in each complete environment that contains the pinned versions."""


@dataclass(frozen=True)
class System:
    name: str
    file: str
    stores: str
    environment: str = ""
    mode: str = ""
    skip: tuple[str, ...] = ()
    questions: dict[str, int] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        return HERE / f"{self.file}_system.py"

    @property
    def is_peer(self) -> bool:
        return bool(self.environment)


def read_plan() -> dict[str, Any]:
    return tomllib.loads((HERE / "systems.toml").read_text())


def list_systems() -> list[System]:
    return [
        System(name=name, **entry | {"skip": tuple(entry.get("skip", ()))})
        for name, entry in read_plan()["systems"].items()
    ]


def find_python(name: str, folder: Path) -> Path:
    """Return the Python interpreter of an environment in ``folder``. Create the environment if it is missing or its
    pins have changed.

    Raises `RuntimeError` if the installation fails.
    """
    if not name:
        return Path(sys.executable)
    plan, home = read_plan(), folder / name
    pins, python, marker = [plan["newest"], *plan["environments"][name]], home / "bin" / "python", home / MARKER
    if marker.exists() and json.loads(marker.read_text()) == pins:
        return python
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv")
    make = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
    install = (
        [uv, "pip", "install", "--quiet", "--python", str(python), "--exclude-newer", plan["newest"]]
        if uv
        else [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    )
    for command in ([*make, str(home)], [*install, *pins[1:]]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1][:200])
    marker.write_text(json.dumps(pins))
    return python
