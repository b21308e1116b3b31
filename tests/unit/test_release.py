"""Tests of release checks: the same commit gives the same sdist, and a failed check ends with exit code 1."""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_release() -> ModuleType:
    """Load the module by its path. The name `tools` is also a module of the demo, which other tests put on the path."""
    spec = importlib.util.spec_from_file_location("roundelay_release", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclasses` looks up the module by name
    spec.loader.exec_module(module)
    return module


release: Any = load_release()


def write_sdist(path: Path, *, time: int, owner: str, names: list[str]) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(f"roundelay-0/{name}")
            member.size, member.mtime, member.uname, member.uid = len(name), time, owner, time
            member.mode = 0o664 if time % 2 else 0o600
            archive.addfile(member, io.BytesIO(name.encode()))
    path.write_bytes(gzip.compress(content.getvalue(), mtime=time))


def test_an_sdist_has_the_same_bytes_whenever_and_by_whomever_it_is_built(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tar.gz", tmp_path / "other.tar.gz"
    write_sdist(one, time=1_000_001, owner="ann", names=["b", "a"])
    write_sdist(other, time=2_000_000, owner="bob", names=["a", "b"])
    assert one.read_bytes() != other.read_bytes()
    for path in (one, other):
        release.normalize_sdist(path, 1_700_000_000)
    assert one.read_bytes() == other.read_bytes()
    with tarfile.open(one) as archive:
        assert [(it.name, it.mtime, it.uname) for it in archive] == [
            ("roundelay-0/a", 1_700_000_000, ""),
            ("roundelay-0/b", 1_700_000_000, ""),
        ]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("# Changelog\n\n## Unreleased\n\n### Added\n- A thing.\n", True),
        (f"# Changelog\n\n## {release.VERSION} - 2026-01-01\n- A thing.\n", True),
        ("# Changelog\n\n## Unreleased\n\n## 0.0.1\n- An older thing.\n", False),
        ("# Changelog\n\n## 0.0.1\n- An older thing.\n", False),
    ],
)
def test_a_release_needs_an_entry_in_the_changelog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_good: bool
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    if is_good:
        assert "entry" in release.check_changelog(release.Release(tmp_path))
    else:
        with pytest.raises(release.CheckFailed, match="no entry"):
            release.check_changelog(release.Release(tmp_path))


def test_a_failed_check_is_named_and_the_others_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> str:
        raise release.CheckFailed("the wheel is blue")

    monkeypatch.setattr(release, "CHECKS", {"blue": fail, "fine": lambda _: "as wanted"})
    assert release.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED  the wheel is blue" in printed
    assert "ok      as wanted" in printed
    assert release.main(["--check", "--only", "fine"]) == 0


def test_unknown_checks_and_used_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        release.main(["--check", "--only", "colour"])
    assert "unknown check 'colour'" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        release.main(["--build", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_the_release_passes_its_checks() -> None:
    """The check builds HEAD, and installs it with each extra from the package index."""
    command = [sys.executable, str(ROOT / "tools" / "release.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
