"""Tests that each mutant in this folder refers to existing lines and tests. `./dev test --full` also proves that each
is caught. run.py explains the term.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from roundelay.network.config import bind, load_yaml
from tests.mutants.run import ROOT, Mutant, NotCaughtError, SkippedError, catch_mutant
from tests.web.browsers import HOW_TO, find_browser

MUTANTS = sorted(Path(__file__).parent.glob("*.yaml"))
IN_BROWSERS = "tests/web/test_in_browsers.py"
CLOCK_TEST = "tests/unit/test_imports.py::test_file_imports_only_what_its_folder_may[network/clock.py]"


def test_mutants_name_lines_and_tests_that_are_there() -> None:
    read = cache(lambda file: (ROOT / file).read_text(encoding="utf-8"))
    for path in MUTANTS:
        mutant = bind(Mutant, load_yaml(path))
        assert read(mutant.file).count(mutant.old) == 1, path.stem
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            assert all(f"def {name}(" in read(file) or f"class {name}" in read(file) for name in names), (
                path.stem,
                test,
            )


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_mutant_is_caught(path: Path) -> None:
    mutant = bind(Mutant, load_yaml(path))
    if find_browser("chromium") is None and any(
        "[chromium]" in it or it.startswith(IN_BROWSERS) for it in mutant.tests
    ):
        pytest.skip(f"its test needs a browser: {HOW_TO}")
    try:
        catch_mutant(mutant)
    except SkippedError as error:
        pytest.skip(f"its tests are: {error}")


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("old", "new", "tests", "reason"),
    [
        ("token_urlsafe(16)", "token_urlsafe(17)", [CLOCK_TEST], "stays green"),
        ("token_urlsafe(18)", "", [CLOCK_TEST], "0 times"),
        (
            "import secrets",
            "import roundelay.agents",
            [CLOCK_TEST, "tests/unit/test_config.py"],
            r"test_config\.py stays",
        ),
        ("import secrets", "", ["tests/unit/test_nowhere.py"], "do not run"),
    ],
)
def test_a_mutant_that_proves_nothing_is_not_caught(old: str, new: str, tests: list[str], reason: str) -> None:
    mutant = Mutant(promise="none", file="network/clock.py", old=old, new=new, tests=tests)
    with pytest.raises(NotCaughtError, match=reason):
        catch_mutant(mutant)
