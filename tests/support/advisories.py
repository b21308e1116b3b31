"""Check the pinned packages for known vulnerabilities with `pip-audit`, which queries an advisory service. `./dev
test --full` runs this module as a separate step, because tests may only connect to loopback. If the service is
unreachable, the step prints one line and passes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

TIMEOUT_S = 300
AUDIT = ("-m", "pip_audit", "--require-hashes", "--disable-pip", "--progress-spinner", "off", "--format", "json")


def judge(report: str) -> tuple[bool, str]:
    """Return False if a package has a known vulnerability, and a sentence for the output. An unreachable service
    counts as success.
    """
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return True, "pip-audit is left out: the advisory service cannot be reached."
    asked = [it for it in packages if "skip_reason" not in it]
    if not asked:
        return True, "pip-audit is left out: the advisory service knows none of the packages here."
    holes = [f"{it['name']} {it['version']}: {hole['id']}" for it in asked for hole in it["vulns"]]
    told = f"pip-audit asked about {len(asked)} of {len(packages)} packages"
    return not holes, f"{told}: {', '.join(holes) if holes else 'nothing is known against them'}."


def main(files: Sequence[str]) -> int:
    named = [part for file in files for part in ("--requirement", file)]
    try:
        done = subprocess.run(
            [sys.executable, *AUDIT, *named], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        report = done.stdout
    except subprocess.TimeoutExpired:
        report = ""
    is_well, told = judge(report)
    print(told)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
