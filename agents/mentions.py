"""Finds the participants that a text mentions. This module is pure. The file `core/mentions.js` of the web page
implements the same rule.

Names in quotes, code and addresses are not mentions: code blocks and inline code, quoted lines, links and their texts,
e-mail addresses, paths, package names (``@ann/tools``) and names at other hosts (``@ann@host``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator

# Ids are in lower case, but people may type capital letters.
_NAME = re.compile(r"@([a-z0-9][a-z0-9._-]*)", re.IGNORECASE | re.ASCII)
# After one of these characters, the name is the last part of an address, a path or an escape.
_PART_OF_A_WORD = re.compile(r"[A-Za-z0-9._%+@\\-]")
_BEFORE_A_SLASH = re.compile(r"@[a-z0-9._-]+/\Z", re.IGNORECASE | re.ASCII)
# Text after a name that makes it a package, a path, a name at another host, or a name on a server.
_GOES_ON = re.compile(r"/[\w.-]|@[a-z0-9]|:[a-z0-9-]+(\.[a-z0-9-]+)+", re.IGNORECASE | re.ASCII)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_QUOTED = re.compile(r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+)*>")
_LISTED = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)])\s")
_BACKTICKS = re.compile(r"`+")
_LINK = re.compile(r"!?\[[^\[\]]*\]\([^()\s]*(?:\([^()\s]*\)[^()\s]*)?(?:\s+(?:\"[^\"]*\"|'[^']*'))?\s*\)")
_URL = re.compile(r"(?:\b[a-z][a-z0-9+.-]{0,30}://|\bwww\.|\bmailto:)[^\s<>]*", re.IGNORECASE | re.ASCII)
_NOTHING = "\ufffc"
"""Placeholder for omitted text: a character that is neither part of an id nor a space."""


def mentions(text: str, agent_id: str) -> bool:
    """Return whether the text contains the mention ``@agent_id``. ``@bob.`` mentions bob at the end of a sentence,
    but ``@bob.smith`` is another participant.
    """
    if f"@{agent_id}" not in text.lower():
        return False
    return any(
        name == agent_id or (name.startswith(agent_id) and not name[len(agent_id) :].strip("._-"))
        for name in list_names(text)
    )


def list_names(text: str) -> Iterator[str]:
    """Yield the name of each mention, in lower case, without the ``@``. A name may include periods that end its
    sentence.
    """
    text = _leave_out(text)
    for match in _NAME.finditer(text):
        begin = match.start()
        while begin and text[begin - 1] in "_*~":  # emphasis around the name
            begin -= 1
        before = text[begin - 1] if begin else ""
        if before and _PART_OF_A_WORD.match(before):
            continue
        if before == "/" and not _BEFORE_A_SLASH.search(text, max(0, begin - 66), begin):
            continue
        if not _GOES_ON.match(text, match.end()):
            yield match[1].lower()


def _leave_out(text: str) -> str:
    """Return a text without its code, quoted lines, links and addresses, where names are not mentions."""
    said = "\n".join(_list_said(text.replace("\r\n", "\n").replace("\r", "\n").split("\n")))
    return _URL.sub(_NOTHING, _LINK.sub(_NOTHING, _leave_out_code(said)))


def _list_said(lines: list[str]) -> Iterator[str]:
    """Yield each line that is neither quoted nor in a code block. For all other lines, yield an empty line."""
    # is_apart: the previous line was empty, so four spaces begin a code block
    fence, is_apart, is_listed = "", True, False
    for line in lines:
        opened = _FENCE.match(line)
        if fence:
            if opened and opened[1].startswith(fence) and not opened[2].strip():
                fence = ""
            yield ""
        elif opened and not (opened[1][0] == "`" and "`" in opened[2]):
            fence, is_apart = opened[1], True
            yield ""
        elif _QUOTED.match(line):
            is_apart = True
            yield ""
        elif is_apart and not is_listed and line.strip() and line.startswith(("    ", "\t")):
            yield ""
        else:
            is_apart = not line.strip()
            if not is_apart:
                is_listed = bool(_LISTED.match(line)) or (is_listed and line.startswith((" ", "\t")))
            yield line


def _leave_out_code(text: str) -> str:
    """Return a text without inline code, which is the text between two equally long runs of backticks in one paragraph."""
    kept: list[str] = []
    for paragraph in re.split(r"(\n\s*\n)", text):
        runs = [(it.start(), it.end()) for it in _BACKTICKS.finditer(paragraph)]
        closing: dict[int, deque[int]] = {}  # positions of the runs of backticks, by length
        for place, (begin, end) in enumerate(runs):
            closing.setdefault(end - begin, deque()).append(place)
        at, place = 0, 0
        while place < len(runs):
            begin, end = runs[place]
            later = closing[end - begin]
            while later and later[0] <= place:
                later.popleft()
            if later:
                kept += [paragraph[at:begin], _NOTHING]
                place = later[0]
                at = runs[place][1]
            place += 1
        kept.append(paragraph[at:])
    return "".join(kept)
