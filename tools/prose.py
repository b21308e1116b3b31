"""Find sentences that a reader has to read twice, and commit messages that break the rules of CONTRIBUTING.md.

Reads docstrings and comments of Python, comments of JavaScript and TypeScript, and Markdown. Each sentence is matched
against ``PATTERNS``. A match is a hint: rewrite the sentence if a native reader would stumble over it, and prefer a clear
sentence that matches to an obscure one that does not.

Usage: ``python tools/prose.py [--show N] [--max RATE] [--commits BASE..HEAD] [PATH ...]``. Exits with 1 when more than
``RATE`` sentences in 100 match, or when a commit message breaks a rule.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_WORDS = 32
"""Maximum number of words in a sentence that does not count as long. Aim for at most 25 words when you write."""
MAX_SUBJECT = 72
"""Maximum length of a commit subject, in characters. Tools that list commits cut off longer subjects."""

PATTERNS = {
    "starts with a relative clause": r"^(?:Who|Whoever|Whose|Whatever|Where|Wherever|What|How|One (?:who|that)|Those (?:who|that)|That which)\b(?!.*\?$)",
    "starts with 'so long', 'as many'": r"^(?:So|As) (?:many|much|long|far|often)\b",
    "starts with 'Of'": r"^Of\b",
    "is a phrase about a pronoun": r"^(?:Of|By|For|To|From|In|At|With) (?:it|its|them|their|this|these|that|those|each|all|others?|one|an?|the|which|what|whom)\b[^.,]{0,60}$",
    "is a fragment": r"^(?:The same|Likewise|As (?:it is|they are)|Nothing|Nobody|None)\b[^.]{0,40}\.?$",
    "has a pronoun without its noun": r"^(?:It|They|This|That|These|Those|One|Both) (?:is|are|was|were|has|have|does|do|can|may|will|would)\b[^.]{0,25}\.?$",
    "says 'told'": r"(?i)\b(?:is|are|was|were|be|been|not|gets?) told\b|\btells? (?:of|from|that|what|when|where|whether|which|who|how)\b",
    "has a private idiom": (
        r"(?i)\b(?:anew|mend(?:ed|s)?|whom|is gone|are gone|is there\b|by itself|of (?:its|their) own|at the (?:least|most)|be it|says? so"
        r"|is said (?:so|of|by|with)|(?:as|than) (?:it|they) (?:was|were)|in (?:its|their) (?:place|words)|go(?:es)? on|gives? away"
        r"|takes? (?:back|over from|for)|(?:is another|are other) ones?|comes? to (?:it|them|what|nothing)"
        r"|stands? (?:in|at|for|there|beside)|who may not|somebody else's)\b"
    ),
    "is long": rf"^(?:\S+\s+){{{MAX_WORDS},}}",
}
COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
NOT_IMPERATIVE = re.compile(
    r"(?!(?:Feed|Seed|Shed|Need|Embed|Speed|Exceed|Proceed|Succeed|Bring|Ring|String|Focus)\b)"
    r"(?:\w+(?:ed|ing)|[A-Z][a-z]+(?<!s)s|The|An?|What|Who|Of|It|One|That)\b"
)
PATHS = (
    "network", "agents", "mods", "templates", "web", "interop", "adapters", "roundelay", "docs", "README.md", "CONTRIBUTING.md",
    "tests", "examples", "bench",
)  # fmt: skip
SKIPPED = {".venv", "vendor", "node_modules", "__pycache__"}
NOT_PROSE = ("#!", "# type:", "# noqa", "# pragma", "# fmt", "# nosec")


@dataclass(frozen=True)
class Sentence:
    path: Path
    line: int
    text: str

    def find_patterns(self) -> list[str]:
        """Return the names of the patterns that match the sentence."""
        return [name for name, pattern in COMPILED.items() if pattern.search(self.text)]


def split_sentences(text: str) -> Iterator[str]:
    """Split a text into sentences. A colon or semicolon before a capital letter also ends a sentence. Parts with fewer
    than three words are dropped.
    """
    for part in re.split(r"(?<=[.!?:;])\s+(?=[A-Z`\"'(*])", " ".join(text.split())):
        if len(part.split()) >= 3:
            yield part.strip("-* ")


def read_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each docstring, attribute docstring and block of comments."""
    for node in ast.walk(ast.parse(source)):
        for child in body if isinstance(body := getattr(node, "body", None), list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(NOT_PROSE):
            continue
        line, is_alone = token.start[0], not token.line[: token.start[1]].strip()
        if block and not (is_alone and line == last + 1):
            yield first, " ".join(block)
            block = []
        first, last = first if block else line, line
        block.append(token.string.lstrip("# "))
    if block:
        yield first, " ".join(block)


def read_script(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each comment line."""
    for number, line in enumerate(source.splitlines(), 1):
        if (comment := re.match(r"\s*(?://+|/?\*+)\s?(.*?)(?:\*/)?$", line)) and comment[1].strip():
            yield number, comment[1]


def read_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each paragraph, list item and long table cell outside of code blocks."""
    paragraph: list[str] = []
    first, in_code = 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        if in_code or is_fence:
            continue
        if line.lstrip().startswith("|"):
            yield from ((number, cell) for cell in line.split("|") if len(cell.split()) >= 6)
        is_break = not line.strip() or re.match(r"\s*(?:[|>#`]|<!--|---)", line)
        if paragraph and (is_break or re.match(r"\s*(?:[-*]|\d+\.)\s", line)):
            yield first, " ".join(paragraph)
            paragraph = []
        if not is_break:
            first = first if paragraph else number
            paragraph.append(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.strip()))


READERS = {".py": read_python, ".md": read_markdown, ".js": read_script, ".ts": read_script}


def list_sentences(paths: list[Path]) -> Iterator[Sentence]:
    """Yield every sentence in the files under ``paths``, sorted by file name. Linked folders are not followed."""
    for root in paths:
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.suffix in READERS and path.is_file() and not SKIPPED & {*path.parts}:
                for line, text in READERS[path.suffix](path.read_text(encoding="utf-8")):
                    yield from (Sentence(path, line, sentence) for sentence in split_sentences(text))


def check_message(message: str) -> list[str]:
    """Return the problems of a commit message, according to the rules of CONTRIBUTING.md."""
    subject, _, rest = message.partition("\n")
    faults = []
    if len(subject) > MAX_SUBJECT:
        faults.append(f"the subject has {len(subject)} characters, at most {MAX_SUBJECT} are allowed")
    if not subject[:1].isupper() or subject.endswith("."):
        faults.append("the subject starts with a capital letter and has no final period")
    if NOT_IMPERATIVE.match(subject):
        faults.append(
            "the subject starts with an imperative verb: 'Reject forged snapshots', not 'Rejects' or 'What is rejected'"
        )
    if not rest.strip():
        faults.append("the body is missing: say why after a blank line")
    elif not rest.startswith("\n"):
        faults.append("a blank line separates subject and body")
    return faults


def list_messages(commits: str) -> list[tuple[str, str]]:
    """Return the abbreviated hash and the message of each commit in a range, newest first. Merges are left out."""
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%h%x00%B%x01", commits]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [
        (name.strip(), message.strip())
        for name, _, message in (part.partition("\0") for part in log.split("\x01"))
        if name.strip()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders (default: the product, its documents and its tests)"
    )
    parser.add_argument(
        "--show", type=int, default=0, metavar="N", help="print N of the matching sentences, evenly spread"
    )
    parser.add_argument("--max", type=float, metavar="RATE", help="fail above this many matching sentences in 100")
    parser.add_argument("--commits", metavar="BASE..HEAD", help="check the messages of these commits as well")
    options = parser.parse_args(arguments)
    sentences = list(list_sentences(options.paths or [ROOT / path for path in PATHS]))
    matches = [(sentence, patterns) for sentence in sentences if (patterns := sentence.find_patterns())]
    for sentence, patterns in matches[:: max(len(matches) // options.show, 1)][: options.show] if options.show else ():
        print(f"{sentence.path}:{sentence.line}: {patterns[0]}: {sentence.text[:160]}")
    for name, count in Counter(pattern for _, patterns in matches for pattern in patterns).most_common():
        print(f"{count:6} {name}")
    rate = 100 * len(matches) / max(len(sentences), 1)
    print(f"prose: {len(matches)} of {len(sentences)} sentences to look at ({rate:.1f} per 100)")
    faults = (
        [f"{name} {fault}" for name, message in list_messages(options.commits) for fault in check_message(message)]
        if options.commits
        else []
    )
    for fault in faults:
        print(f"commit {fault}")
    if options.max is not None and rate > options.max:
        print(f"More than {options.max:g} per 100. List them with: ./dev prose --show 50 PATH", file=sys.stderr)
        return 1
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
