"""Prove that tests detect what they promise to detect: break one line at a time, and require that the tests fail.

    python tests/mutants/run.py [NAME ...]

Each ``*.yaml`` file in this folder is a mutant: the `promise` that it breaks, the `file`, the `old` text, which must
occur there exactly once, the `new` text, and the `tests`, all of which must fail. The tests first run on an unchanged
copy of the tree, where all must pass. The working tree is never changed. A mutant that prevents the tests from
running is broken, and does not count as caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import BaseModel, Field

from roundelay.network.config import bind, load_yaml
from roundelay.network.errors import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Copy bytecode. Python checks it by the time of the source, which copies keep and the changed file does not.
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "*.egg-info", ".*_cache", ".hypothesis", "build", "dist")
TESTS_TIMEOUT_S = 300


class Mutant(BaseModel):
    """One change that must make the tests fail."""

    promise: str
    file: str
    old: str = Field(min_length=1)
    new: str
    tests: list[str] = Field(min_length=1)


class NotCaughtError(Exception):
    """Reason why a mutant does not count as caught."""


class SkippedError(Exception):
    """All tests of a mutant are skipped here, because their dependencies are not installed."""


def catch_mutant(mutant: Mutant) -> None:
    """Run the mutant's tests without and with the mutant, in a copy of the tree. Raise `NotCaughtError` unless they
    first pass and then fail.
    """
    with tempfile.TemporaryDirectory(prefix="roundelay-mutant-") as directory:
        tree = copy_tree(Path(directory) / "tree")
        source = (tree / mutant.file).read_text(encoding="utf-8")
        if source.count(mutant.old) != 1:
            raise NotCaughtError(f"its old text stands {source.count(mutant.old)} times in {mutant.file}, not once")
        red, output = run_tests(tree, mutant.tests)
        if red:
            raise NotCaughtError(f"its tests are red without it:\n{output}")
        if " passed" not in output:
            raise SkippedError(output.strip().splitlines()[-1])
        (tree / mutant.file).write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
        red, output = run_tests(tree, mutant.tests)
        for test in mutant.tests:
            if not any(failed.startswith(test) for failed in red):
                raise NotCaughtError(f"{test} stays green:\n{output}")


def copy_tree(target: Path) -> Path:
    """Copy the tree, so that tests and their subprocesses import `roundelay` from the copy."""
    shutil.copytree(ROOT, target, ignore=NOT_COPIED, symlinks=True)
    return target


def run_tests(tree: Path, tests: list[str]) -> tuple[list[str], str]:
    """Return the IDs of the failed tests, and pytest's output."""
    # Start a separate run: workers of one run share their build results, such as the wheel.
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = known | {"PYTHONPATH": str(tree)}
    # A mutant may make a test hang. With the method "signal", a timeout fails the test and does not end the process.
    options = ["-q", "-rfE", "--tb=no", "--no-header", "--full", "-p", "no:cacheprovider", "--timeout-method=signal"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TESTS_TIMEOUT_S,
    )
    if done.returncode not in (0, 1):  # not collected, interrupted, or no such test
        raise NotCaughtError(f"its tests do not run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    lines = done.stdout.splitlines()
    return [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))], done.stdout[-3000:]


def main(names: list[str]) -> int:
    missed = skipped = 0
    paths = [HERE / f"{name}.yaml" for name in names] or sorted(HERE.glob("*.yaml"))
    for path in paths:
        try:
            mutant = bind(Mutant, load_yaml(path))
            catch_mutant(mutant)
        except SkippedError as error:
            skipped += 1
            print(f"skipped {path.stem}: {error}")
        except (ConfigError, NotCaughtError, OSError, subprocess.TimeoutExpired) as error:
            missed += 1
            print(f"MISSED {path.stem}: {error}")
        else:
            print(f"caught {path.stem}: {mutant.promise}")
    left_out = f", {skipped} skipped" if skipped else ""
    print(f"mutants: {len(paths) - missed - skipped} caught, {missed} missed{left_out}")
    return 1 if missed or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
