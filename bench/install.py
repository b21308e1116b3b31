"""Cost of an installation in CPU seconds, megabytes and packages, for Roundelay and for comparable projects.

    python bench/install.py [--runs 3] [--only roundelay,langgraph] [--json FILE]

pip installs each project from the package index into an empty virtual environment, without a cache. The projects take
turns, so that a slow minute of the machine affects all of them. Roundelay's wheel is built from this checkout. The
output shows medians. The CPU time includes pip and its children, and the size does not include the empty environment.
For Roundelay, the installed demo runs too. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = "roundelay"
PEERS = ("agno", "langgraph", "openai-agents", "openagents[sdk]", "agentscope", "crewai", "autogen-agentchat")
CPU_TARGET_S, SIZE_TARGET_MB = 20.0, 130.0
"""Maximum CPU time and size for Roundelay, from an empty environment to the end of the demo."""


@dataclass
class Cost:
    """Measured costs of one project. Each list has one value per run."""

    name: str
    cpu_s: list[float] = field(default_factory=list)
    size_mb: list[float] = field(default_factory=list)
    packages: list[int] = field(default_factory=list)
    failure: str = ""


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout. The build uses a copy of the tracked files, so that the working tree stays
    unchanged.
    """
    source = folder / "source"
    source.mkdir()
    packed = folder / "source.tar"
    with packed.open("wb") as file:
        subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=file, check=True)
    subprocess.run(["tar", "-xf", packed, "-C", source], check=True)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def count_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_size_mb(folder: Path) -> float:
    return sum(it.lstat().st_size for it in folder.rglob("*") if it.is_file() and not it.is_symlink()) / 1e6


def measure(cost: Cost, wanted: str, folder: Path) -> None:
    """Install ``wanted`` into a new environment, and add its cost. For Roundelay, the cost includes the demo."""
    home = folder / "environment"
    venv.create(home, with_pip=True)
    python, empty_mb = home / "bin" / "python", measure_size_mb(home)
    began = count_cpu_s()
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir", wanted]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode != 0:
        cost.failure = (done.stderr.strip().splitlines() or ["pip failed"])[-1][:160]
    elif cost.name == OWN:
        ran = subprocess.run([python, "-m", "roundelay", "demo"], cwd=folder, capture_output=True, text=True)
        cost.failure = "" if ran.returncode == 0 else "the demo failed"
    cost.cpu_s.append(count_cpu_s() - began)
    cost.size_mb.append(measure_size_mb(home) - empty_mb)
    cost.packages.append(len(list(home.glob("lib/python*/site-packages/*.dist-info"))))
    shutil.rmtree(home)


def format_costs(costs: list[Cost]) -> str:
    lines = [f"{'medians':<22}{'CPU s':>8}{'MB':>8}{'packages':>10}"]
    for cost in costs:
        if cost.failure:
            lines.append(f"{cost.name:<22}  not installed: {cost.failure}")
            continue
        cpu_s, size_mb = statistics.median(cost.cpu_s), statistics.median(cost.size_mb)
        note = "  with the demo" if cost.name == OWN else ""
        lines.append(f"{cost.name:<22}{cpu_s:>8.1f}{size_mb:>8.0f}{statistics.median(cost.packages):>10.0f}{note}")
    lines.append(f"Targets of {OWN}: at most {CPU_TARGET_S:.0f} s and {SIZE_TARGET_MB:.0f} MB.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", metavar="NAMES", help=f"some of {', '.join((OWN, *PEERS))}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results to FILE")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [OWN, *PEERS]
    costs = [Cost(name) for name in names]
    with tempfile.TemporaryDirectory(prefix="roundelay-install-") as work:
        wheel = build_wheel(Path(work)) if OWN in names else None
        for _ in range(options.runs):
            for cost in costs:
                if not cost.failure:
                    measure(cost, str(wheel) if cost.name == OWN else cost.name, Path(work))
    print(format_costs(costs))
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n", encoding="utf-8")
    own = [cost for cost in costs if cost.name == OWN]
    met = all(
        not it.failure
        and statistics.median(it.cpu_s) <= CPU_TARGET_S
        and statistics.median(it.size_mb) <= SIZE_TARGET_MB
        for it in own
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
