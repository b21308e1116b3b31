"""Download the libraries in ``web/page/vendor`` unchanged from the npm registry: ``python -m
tests.support.vendoring``.

``vendored.json`` records the source of each file and its bare import name, from which the page's import map is made.
To update a library, change its version in `LIBRARIES` and run this program with npm on PATH. npm's own settings
select the registry. Read the library's changes before you commit the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "web" / "page" / "vendor"


@dataclass(frozen=True)
class Library:
    """One file of a package. ``imported_as`` is the bare name by which other vendored files import it."""

    file: str
    package: str
    version: str
    source: str
    license: str
    imported_as: str = ""


PREACT = "11.2.0"
LIBRARIES = (
    Library("preact.js", "preact", PREACT, "dist/preact.mjs", "MIT", "preact"),
    Library("hooks.js", "preact", PREACT, "hooks/dist/hooks.mjs", "MIT", "preact/hooks"),
    Library("htm.js", "htm", "3.1.1", "dist/htm.mjs", "Apache-2.0", "htm"),
    Library(
        "signals-core.js", "@preact/signals-core", "1.14.5", "dist/signals-core.mjs", "MIT", "@preact/signals-core"
    ),
    Library("signals.js", "@preact/signals", "2.11.4", "dist/signals.mjs", "MIT", "@preact/signals"),
    Library("marked.js", "marked", "18.2.1", "lib/marked.esm.js", "MIT"),
)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "licenses").mkdir(parents=True)
    files: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            files[library.file] = _take(library, Path(folder))
    imports = {it.imported_as: f"#vendor/{it.file}" for it in LIBRARIES if it.imported_as}
    text = json.dumps({"imports": imports, "files": files}, indent=2)
    (FOLDER / "vendored.json").write_text(f"{text}\n", encoding="utf-8")


def _take(library: Library, work: Path) -> dict[str, str]:
    """Write the file and its license, and return its entry for ``vendored.json``. npm verifies the archive's
    integrity hash.
    """
    command = ("npm", "pack", "--json", "--pack-destination", str(work), f"{library.package}@{library.version}")
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=work).stdout
    [packed] = json.loads(printed)
    license_file = f"licenses/{library.package.replace('@', '').replace('/', '-')}.txt"
    with tarfile.open(work / packed["filename"]) as archive:
        for source, target in ((library.source, library.file), ("LICENSE", license_file)):
            member = archive.extractfile(f"package/{source}")
            assert member is not None
            (FOLDER / target).write_bytes(member.read())
    return {
        "package": library.package,
        "version": library.version,
        "source": library.source,
        "license": library.license,
        "license_file": license_file,
        "sha256": hashlib.sha256((FOLDER / library.file).read_bytes()).hexdigest(),
        "license_sha256": hashlib.sha256((FOLDER / license_file).read_bytes()).hexdigest(),
        "integrity": packed["integrity"],
    }


if __name__ == "__main__":
    main()
