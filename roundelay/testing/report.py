"""Report the results of scenarios as text for people, as JSON, and as JUnit XML for CI.

The report of a failure shows its line in the file, the actual result, the conversation, the causes of the related
messages, and the command that repeats the run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any
from xml.etree import ElementTree  # nosec B405  # this module writes XML and never parses it

from roundelay.display.text import sanitize_lines
from roundelay.network.text import count
from roundelay.testing.record import describe_message
from roundelay.testing.run import ScenarioResult

MAX_TRANSCRIPT = 40
MAX_PATHS = 2
_NO_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Failure:
    """One failure of a run: its position in the file, the expected and the actual result, and the related messages."""

    file: str
    line: int
    what: str
    found: str
    messages: tuple[int, ...] = ()


def list_failures(result: ScenarioResult) -> list[Failure]:
    """Return the failures of a run, in the order of the file. After a failed step, that step is the only failure."""
    scenario = result.scenario
    if result.failure is not None:
        failure = result.failure
        # The last message before the failed step is the most likely cause.
        last = tuple(message.seq for message in result.record.messages[-1:])
        return [Failure(str(failure.place.path), failure.place.line, failure.what, failure.reason, last)]
    failures = [
        Failure(str(verdict.place.path), verdict.place.line, f"expect {verdict.name}", verdict.found, verdict.seqs)
        for verdict in result.verdicts
        if not verdict.holds
    ]
    return [*failures, *(Failure(str(scenario.path), 1, "scenario", problem) for problem in result.problems)]


def describe_command(result: ScenarioResult) -> str:
    """Return the command that repeats this run exactly."""
    live = f" --live {shlex.quote(result.url)}" if result.url is not None else f" --seed {result.seed}"
    return f"roundelay scenario run {shlex.quote(str(result.scenario.path))}{live}"


def describe_result(result: ScenarioResult) -> str:
    """Describe a result for people, in one line if the run passed, and with all details if it failed."""
    word = "PASS" if result.passed else "FAIL"
    lines = [f"{word}  {result.scenario.name}  ({_describe_run(result)})"]
    if not result.passed:
        for failure in list_failures(result):
            lines += ["", f"  {failure.file}:{failure.line}: {failure.what}", *_indent(failure.found, 6)]
            lines += _indent("\n".join(describe_causes(result, failure)), 6)
        lines += ["", "  What was said:", *_indent(_transcript(result), 4)]
        lines += [f"  Faults: {'; '.join(result.faults)}"] if result.faults else []
        lines += [f"  Again: {describe_command(result)}"]
    lines += [f"  Note: {note}" for note in result.notes]
    return "\n".join(sanitize_lines("\n".join(lines)))


def describe_causes(result: ScenarioResult, failure: Failure) -> list[str]:
    """Describe the causes of the messages that belong to a failure, up to their roots."""
    lines: list[str] = []
    for seq in list(dict.fromkeys(failure.messages))[:MAX_PATHS]:
        message = result.record.find(seq)
        if message is None:
            continue
        path = result.record.path_to_root(message)
        lines += [f"how #{seq} came about:", *(f"  {describe_message(it)}" for it in reversed(path))]
    return lines


def _describe_run(result: ScenarioResult) -> str:
    record, place = result.record, f"seed {result.seed}" if result.url is None else result.url
    return f"{place}, {count(len(record.messages), 'message')} in {record.lasted_s:.1f} s, took {result.took_s:.2f} s"


def _transcript(result: ScenarioResult) -> str:
    messages = result.record.messages
    left_out = len(messages) - MAX_TRANSCRIPT
    lines = [f"... {left_out} before"] if left_out > 0 else []
    return "\n".join([*lines, *map(describe_message, messages[-MAX_TRANSCRIPT:])]) or "nothing"


def _indent(text: str, by: int) -> list[str]:
    return [" " * by + line for line in text.split("\n") if line]


def to_json(results: Sequence[ScenarioResult]) -> dict[str, Any]:
    """Return the results as JSON for programs."""
    return {"passed": all(result.passed for result in results), "runs": [_run_to_json(result) for result in results]}


def _run_to_json(result: ScenarioResult) -> dict[str, Any]:
    failures = [asdict(failure) for failure in list_failures(result)]
    value: dict[str, Any] = {
        "scenario": result.scenario.name,
        "file": str(result.scenario.path),
        "seed": result.seed,
        "passed": result.passed,
        "messages": len(result.record.messages),
        "took_s": round(result.took_s, 4),
        "virtual_s": result.record.lasted_s,
        "failures": failures,
        "notes": list(result.notes),
        "faults": list(result.faults),
        "command": describe_command(result),
    }
    if failures:
        value["transcript"] = [message.model_dump(mode="json", exclude_none=True) for message in result.record.messages]
    return value


def to_junit(results: Sequence[ScenarioResult]) -> str:
    """Return the results as JUnit XML, with one suite per file and one case per run."""
    root = ElementTree.Element("testsuites")
    suites: dict[str, list[ScenarioResult]] = {}
    for result in results:
        suites.setdefault(_xml(str(result.scenario.path)), []).append(result)
    for file, runs in suites.items():
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=file,
            tests=str(len(runs)),
            failures=str(sum(not run.passed for run in runs)),
            time=f"{sum(run.took_s for run in runs):.3f}",
        )
        for run in runs:
            # CI compares cases by name, so a single run has the same name for every seed.
            name = f"{run.scenario.name} [seed {run.seed}]" if len(runs) > 1 else run.scenario.name
            case = ElementTree.SubElement(suite, "testcase", classname=file, name=_xml(name), time=f"{run.took_s:.3f}")
            if not run.passed:
                first = list_failures(run)[0]
                message = f"{first.file}:{first.line}: {first.what}: {first.found}".split("\n")[0]
                failure = ElementTree.SubElement(case, "failure", message=_xml(message))
                failure.text = _xml(describe_result(run))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _xml(text: str) -> str:
    """Replace characters that XML 1.0 does not allow (https://www.w3.org/TR/xml/#charsets)."""
    return _NO_XML.sub("\ufffd", text)
