"""The text of a note: paragraphs with their sources, sections, links, differences and earlier versions. Pure."""

from __future__ import annotations

import difflib
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

MAX_DIFF_LINES = 300
"""Maximum number of different lines of each text that are compared line by line. The comparison takes quadratic time
and blocks the hub, so larger differences are shown as one block."""
_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*$")
_LINK = re.compile(r"\[\[([^\[\]|\n]{1,200})(?:\|[^\[\]\n]*)?\]\]")


class Paragraph(Struct, array_like=True, frozen=True):
    """Piece of a note with its source: the author, the seq of the write, the seq of the cause of the write (0 if there
    is none), and the version that added the piece."""

    text: str
    by: str
    seq: int
    cause: int
    version: int


class Delta(Struct, array_like=True, frozen=True):
    """Difference that restores the previous version of a note. The previous version consists of the first ``kept``
    paragraphs of this version, the paragraphs ``replaced``, and the last ``kept_last`` paragraphs of this version."""

    kept: int
    kept_last: int
    replaced: list[Paragraph]


def join(paragraphs: Iterable[Paragraph]) -> str:
    return "".join(paragraph.text for paragraph in paragraphs)


def split(text: str) -> list[str]:
    """Split a text after each run of blank lines and before each heading. Fenced code is never split. Joining the
    parts restores the text."""
    parts: list[str] = []
    lines: list[str] = []
    fence, is_blank = "", False
    for line in text.splitlines(keepends=True):
        blank = not line.strip()
        starts = (is_blank and not blank) or _HEADING.match(line)
        if starts and not fence and any(kept.strip() for kept in lines):
            parts.append("".join(lines))
            lines = []
        lines.append(line)
        is_blank = blank
        if marker := _FENCE.match(line):
            if not fence:
                fence = marker[1]
            elif marker[1].startswith(fence):
                fence = ""
    return [*parts, "".join(lines)] if lines else parts


def attribute(text: str, before: Sequence[Paragraph], source: Paragraph) -> list[Paragraph]:
    """Return the paragraphs of a new text. Unchanged paragraphs keep their source, even if they have moved. All other
    paragraphs get ``source``."""
    known: defaultdict[str, deque[Paragraph]] = defaultdict(deque)
    for paragraph in before:
        known[paragraph.text.strip()].append(paragraph)
    result = []
    for part in split(text):
        kept = known.get(part.strip())
        old = kept.popleft() if kept else source
        result.append(Paragraph(part, old.by, old.seq, old.cause, old.version))
    return result


def find_delta(before: Sequence[Paragraph], after: Sequence[Paragraph]) -> Delta:
    """Return the difference that restores the paragraphs ``before`` from the paragraphs ``after``."""
    kept, kept_last = _count_equal(before, after)
    return Delta(kept, kept_last, list(before[kept : len(before) - kept_last]))


def go_back(after: Sequence[Paragraph], delta: Delta) -> list[Paragraph]:
    """Return the paragraphs of the previous version: apply ``delta`` to the paragraphs ``after``."""
    return [*after[: delta.kept], *delta.replaced, *after[len(after) - delta.kept_last :]]


def _count_equal(one: Sequence[object], other: Sequence[object]) -> tuple[int, int]:
    """Return the number of equal items at the start of both sequences, and at the end of their remaining items."""
    most = min(len(one), len(other))
    first = next((index for index in range(most) if one[index] != other[index]), most)
    last = next((index for index in range(most - first) if one[-1 - index] != other[-1 - index]), most - first)
    return first, last


def write_diff(before: str, after: str, before_name: str, after_name: str) -> str:
    """Return a unified diff. To limit the time, show a large difference as one block of removed and added lines."""
    old, new = before.splitlines(), after.splitlines()
    first, last = _count_equal(old, new)
    start = max(0, first - 3)
    old_end, new_end = min(len(old), len(old) - last + 3), min(len(new), len(new) - last + 3)
    if old == new:
        return ""
    changed_old, changed_new = len(old) - first - last, len(new) - first - last
    if max(changed_old, changed_new) <= MAX_DIFF_LINES:
        # Compare only the different region with its context, and number its lines as in the whole texts.
        lines = difflib.unified_diff(old[start:old_end], new[start:new_end], before_name, after_name, lineterm="")
        return "\n".join(_shift(line, start) for line in lines)
    context, rest = old[start:first], old[len(old) - last : old_end]
    block = [
        *(f" {line}" for line in context),
        *(f"-{line}" for line in old[first : len(old) - last]),
        *(f"+{line}" for line in new[first : len(new) - last]),
        *(f" {line}" for line in rest),
    ]
    numbers = f"@@ -{start + 1},{old_end - start} +{start + 1},{new_end - start} @@"
    return "\n".join([f"--- {before_name}", f"+++ {after_name}", numbers, *block])


def _shift(line: str, by: int) -> str:
    def add(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) + by}"

    return re.sub(r"([-+])(\d+)(?=[, ])", add, line, count=2) if line.startswith("@@") else line


def find_section(paragraphs: Sequence[Paragraph], heading: str) -> tuple[int, int] | None:
    """Return the range of paragraphs from a heading to the next heading of the same or a higher level. Return None if
    there is no such heading. The comparison ignores case and ``#``.
    """
    wanted = heading.strip().lstrip("#").strip().casefold()
    start, level = None, 0
    for index, paragraph in enumerate(paragraphs):
        for found_level, title in list_headings(paragraph.text):
            if start is None and title.casefold() == wanted:
                start, level = index, found_level
            elif start is not None and found_level <= level and index > start:
                return start, index
    return (start, len(paragraphs)) if start is not None else None


def list_headings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the level and title of each Markdown heading outside fenced code."""
    fence = ""
    for line in text.splitlines():
        if marker := _FENCE.match(line):
            fence = "" if fence and marker[1].startswith(fence) else fence or marker[1]
        elif not fence and (match := _HEADING.match(line)):
            yield len(match[1]), match[2]


def list_links(text: str, thread_id: str, limit: int) -> list[str]:
    """Return the ids of the notes that a text links to, without repetitions. ``[[plan]]`` is a note of the same thread,
    ``[[channel:dev/plan]]`` a note of another thread."""
    targets = (match.strip() for match in _LINK.findall(text))
    ids = (target if "/" in target else f"{thread_id}/{target}" for target in targets if target.count("/") <= 1)
    return list(dict.fromkeys(ids))[:limit]
