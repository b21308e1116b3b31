"""``roundelay init``: the first files of somebody's own, a node's and one agent that works at once, without a model
(`first_files/`)."""

from __future__ import annotations

from pathlib import Path

FIRST_FILES = Path(__file__).with_name("first_files")


def write_starter(folder: Path) -> list[Path]:
    """Write the files and give their paths. Raises `FileExistsError`, before anything is written, for one that is
    there."""
    names = [path.relative_to(FIRST_FILES) for path in sorted(FIRST_FILES.rglob("*.yaml"), reverse=True)]
    for name in names:
        if (folder / name).exists():
            raise FileExistsError(17, "File exists", str(folder / name))
    for name in names:  # all of them first: where one cannot be, no file is written
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        with (folder / name).open("x", encoding="utf-8") as file:  # exclusive: somebody may have been faster
            file.write((FIRST_FILES / name).read_text(encoding="utf-8"))
    return [folder / name for name in names]
