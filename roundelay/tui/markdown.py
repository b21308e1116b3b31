"""Render participants' Markdown as styled terminal lines: headings, lists, quotes, code, tables, emphasis and links.

HTML is shown as text. A link is shown as its text and address, and nothing is clickable. Every piece of text is
sanitized after parsing, because the parser turns ``&#27;`` into an escape character. `messages.fold` shows texts that
cannot be rendered well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console
from rich.text import Text
from textual.content import Content

from roundelay.display.text import break_lines, display_width, fit_start, sanitize

MAX_CHARS = 20_000
"""Maximum length of a text that is parsed, in characters. Parsing a longer text would take too long."""
MIN_COLUMNS = 20
_SIGNS = re.compile(r"[*_`#>~|\[]|^\s*([-+]|\d+[.)])\s", re.MULTILINE)
_PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 20}).enable(["table", "strikethrough"])
_CONSOLE = Console(file=io.StringIO(), width=200, color_system=None)
_STYLES = {"strong": "bold", "em": "italic", "s": "strike", "link": "underline"}


def render(text: str, width: int) -> list[Content] | None:
    """Return a text as sanitized lines of at most ``width`` columns, or None if its Markdown cannot be rendered.

    A text without Markdown also returns None.
    """
    # Skip texts without Markdown: most texts have none, and this search is far cheaper than the parser.
    if len(text) > MAX_CHARS or width < MIN_COLUMNS or _SIGNS.search(text) is None:
        return None
    writer = _Writer(width)
    writer.write(_PARSER.parse(text))
    lines = writer.lines
    # Rich may count columns differently. The terminal would break a line that is too wide.
    is_fitting = all(len(break_lines([line.plain], width)) == 1 for line in lines)
    return [Content.from_rich_text(line) for line in lines] if lines and is_fitting else None


class _Writer:
    """Builds lines from Markdown tokens. Each line begins with ``_prefixes``, which come from the open blocks."""

    def __init__(self, width: int) -> None:
        self.lines: list[Text] = []
        self._width = width
        self._prefixes: list[str] = []
        self._bullet: str | None = None  # bullet of the list item whose first line is written next
        self._numbers: list[int | None] = []
        self._row: list[str] = []  # cells of the current table row
        self._is_in_cell = False

    def write(self, tokens: Sequence[Token]) -> None:
        style = ""
        for token in tokens:
            match token.type:
                case "heading_open":
                    style = "bold underline" if token.tag in ("h1", "h2") else "bold"
                case "heading_close":
                    style = ""
                case "paragraph_open" if token.level == 0:
                    self._leave_line()
                case "bullet_list_open":
                    self._open_list(None, token)
                case "ordered_list_open":
                    self._open_list(int(token.attrGet("start") or 1), token)
                case "bullet_list_close" | "ordered_list_close":
                    self._numbers.pop()
                case "list_item_open":
                    self._open_item()
                case "list_item_close":
                    self._prefixes.pop()
                    self._bullet = None
                case "blockquote_open":
                    self._leave_line()
                    self._prefixes.append("▏ ")
                case "blockquote_close":
                    self._prefixes.pop()
                case "fence" | "code_block":
                    self._write_code(token)
                case "hr":
                    self._leave_line()
                    self._add(Text("─" * min(24, self._room()), style="dim"))
                case "table_open":
                    self._leave_line()
                case "tr_open":
                    self._row = []
                case "tr_close":
                    self._add(Text(" │ ".join(self._row)))
                case "th_open" | "td_open":
                    self._is_in_cell = True
                case "th_close" | "td_close":
                    self._is_in_cell = False
                case "inline" if self._is_in_cell:
                    self._row.append(_read_inline(token.children or [], style).plain)
                case "inline":
                    if style:
                        self._leave_line()
                    self._add(_read_inline(token.children or [], style))
                case _:
                    pass

    def _open_list(self, start: int | None, token: Token) -> None:
        if token.level == 0:
            self._leave_line()
        self._numbers.append(start)

    def _open_item(self) -> None:
        number = self._numbers[-1]
        self._bullet = "• " if number is None else f"{number}. "
        if number is not None:
            self._numbers[-1] = number + 1
        self._prefixes.append(" " * len(self._bullet))

    def _write_code(self, token: Token) -> None:
        self._leave_line()
        for line in token.content.rstrip("\n").split("\n"):
            self._add(Text(f"│ {sanitize(line)}", style="cyan"))

    def _leave_line(self) -> None:
        """Add an empty line before a block, except at the beginning and after a bullet."""
        if self.lines and self._bullet is None and self.lines[-1].plain.strip():
            self.lines.append(Text(""))

    def _room(self) -> int:
        return max(8, self._width - sum(map(display_width, self._prefixes)))

    def _add(self, text: Text) -> None:
        for line in text.split("\n", allow_blank=True):
            for piece in line.wrap(_CONSOLE, self._room(), overflow="fold") or [Text("")]:
                prefixes = list(self._prefixes)
                if self._bullet is not None and prefixes:
                    prefixes[-1], self._bullet = self._bullet, None
                piece.rstrip()
                self.lines.append(Text.assemble(("".join(prefixes), "dim"), piece))


def _read_inline(tokens: Sequence[Token], style: str) -> Text:
    text = Text()
    open_styles = [style] if style else []
    address = ""
    for token in tokens:
        now = " ".join(open_styles)
        name = token.type.partition("_")[0]
        match token.type:
            case "text":
                text.append(sanitize(token.content), now)
            case "code_inline":
                text.append(sanitize(token.content), f"{now} cyan".strip())
            case "softbreak" | "hardbreak":
                text.append("\n")
            case "image":
                # Do not load images: the request would tell the image's server who reads the message.
                text.append(f"[image {sanitize(token.content)}]", now)
            case "link_open":
                address = sanitize(str(token.attrGet("href") or ""))
                open_styles.append(_STYLES[name])
            case "link_close":
                open_styles.remove(_STYLES[name])
                # The text of a link may lie about its target, so show the address unless it equals the text.
                if address and not text.plain.endswith(address):
                    text.append(f" ({fit_start(address, 60)})", "dim")
            case _ if token.nesting > 0 and name in _STYLES:
                open_styles.append(_STYLES[name])
            case _ if token.nesting < 0 and name in _STYLES:
                open_styles.remove(_STYLES[name])
            case _:
                text.append(sanitize(token.content), now)
    return text
