"""Tools of the demo's agents. One agent has `calculate`, and the other has tools that answer questions about a text.

`find_sums` and `find_word_tasks` find tasks in a question. A tool solves one task, for a script or a model. This module
uses no IO, no clock and no `eval`. Users may type anything, so sizes are limited before anything is computed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from roundelay.agents.tools import tool
from roundelay.agents.values import ToolError

MAX_EXPRESSION_CHARS = 200
MAX_EXPONENT = 512
MAX_BITS = 2048
MAX_TASKS = 8
MAX_TEXT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Task:
    """One task for an agent: a tool, its arguments, and the beginning of the sentence that the result completes."""

    tool: str
    arguments: Mapping[str, object]
    label: str


# --- numbers

Expression = Annotated[str, Field(description="Such as (17 + 4) * 2 ^ 3", max_length=MAX_EXPRESSION_CHARS)]
Text = Annotated[str, Field(description="The text itself, without quotes around it", max_length=MAX_TEXT_CHARS)]


@tool(idempotent=True)
def calculate(expression: Expression) -> str:
    """Calculate exactly with + - * / % ^ and parentheses."""
    try:
        return format_number(evaluate(expression))
    except ZeroDivisionError:
        return "undefined (a division by zero)"
    except OverflowError:
        return "too large to write out"


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression. Raises `ToolError`, `ZeroDivisionError`, or `OverflowError` beyond
    `MAX_BITS`."""
    source = expression.replace("^", "**").replace("×", "*").replace("÷", "/").strip()
    # Refuse letters, and with them names, strings and exponents such as 1e999999.
    if len(source) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[\d.+\-*/%() ]+", source, re.ASCII):
        raise ToolError(f"{expression[:50]!r} is not an expression. Use numbers, + - * / % ^ and parentheses.")
    return _evaluate(_parse(source), source)


def format_number(value: Fraction) -> str:
    """Format a whole number or a short decimal exactly. Any other value is rounded to 10 places and marked as
    rounded."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**10
    digits = str(abs(round(scaled))).rjust(11, "0")
    text = f"{'-' if value < 0 else ''}{digits[:-10]}.{digits[-10:].rstrip('0')}".rstrip(".")
    return text if scaled.denominator == 1 else f"about {text}"


def find_sums(question: str) -> list[Task]:
    """Return the expressions in a question as tasks. Quoted texts are skipped."""
    text = _QUOTED.sub(" ; ", question[:MAX_TEXT_CHARS])
    for pattern, sign in _SPELLINGS:
        text = re.sub(pattern, sign, text, flags=re.IGNORECASE)
    sources = filter(None, map(_trim_expression, re.findall(r"-?[\d(.][\d\s+\-*/%^().]*", text, re.ASCII)))
    tasks = [
        Task("calculate", {"expression": source}, f"{_write_expression(source)} =") for source in dict.fromkeys(sources)
    ]
    return tasks[:MAX_TASKS]


_QUOTED = re.compile(r"“([^”]+)”|\"([^\"]+)\"|«([^»]+)»|„([^“”]+)[“”]|(?<!\w)[‘']([^’']+)[’'](?!\w)")
_SPELLINGS = (
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"(?<=[\d)])\s*(?:%|percent\b)\s+of\b", " / 100 *"),
    (r"\bsquared\b", "^ 2"),
    (r"\*\*", "^"),
    (r"\b(?:times|multiplied by)\b|[×∙·]|(?<=\d)\s*x\s*(?=\d)", " * "),
    (r"\bdivided by\b|÷", " / "),
    (r"\bplus\b", " + "),
    (r"\bminus\b|[−–]", " - "),
)


def _parse(source: str) -> ast.expr:
    try:
        return ast.parse(source.replace("^", "**"), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ToolError(f"{source[:50]!r} is not a complete expression.") from error


def _trim_expression(found: str) -> str | None:
    """Return the longest prefix that is an expression with something to calculate, or None."""
    source = re.sub(r"\s+", " ", found)[: MAX_EXPRESSION_CHARS // 2].strip()
    while source:
        closed = source + ")" * (source.count("(") - source.count(")"))
        try:
            parsed = _parse(closed)
        except ToolError:
            source = source[:-1].strip()  # drop characters that belong to the sentence
            continue
        try:
            evaluate(closed)
        except ToolError:
            return None
        except (ZeroDivisionError, OverflowError):
            pass  # the tool's result reports the error
        return closed if isinstance(parsed, ast.BinOp) else None
    return None


def _write_expression(source: str) -> str:
    spaced = re.sub(r"\s*([+*/%^])\s*|(?<=[\d)])\s*(-)\s*", lambda found: f" {found[1] or found[2]} ", source)
    return spaced.replace("*", "×").replace("/", "÷").replace("%", "mod").replace(" ^ ", "^").strip()


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("Only whole exponents can be calculated.")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Check before computing: a power of large numbers would use all memory.
    if abs(exponent) > MAX_EXPONENT or bits * abs(exponent) > 2 * MAX_BITS:
        raise OverflowError
    power: Fraction = base ** int(exponent)
    return power


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _evaluate(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(int() | float()):  # a number, but not an ellipsis, which is also a constant
            # Read the digits from the source, because a float would round them.
            return Fraction(ast.get_source_segment(source, node) or "0")
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand, source)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _evaluate(operand, source)
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            value = _OPERATORS[type(sign)](_evaluate(left, source), _evaluate(right, source))
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise OverflowError
            return value
    raise ToolError(f"{source[:50]!r} contains more than numbers, + - * / % ^ and parentheses.")


# --- words


@tool(idempotent=True)
def pick_word(text: Text, which: Literal["longest", "shortest"]) -> str:
    """Find the longest or the shortest word of a text, all of them if several are."""
    words = _list_words(text)
    if not words:
        return "none: it has no words"
    length = (max if which == "longest" else min)(map(len, words))
    found = list(dict.fromkeys(word for word in words if len(word) == length))
    letters = f"{length} letter{'' if length == 1 else 's'}{' each' if len(found) > 1 else ''}"
    return f"{' and '.join(f'“{word}”' for word in found)} ({letters})"


@tool(idempotent=True)
def count_in_text(text: Text, what: Literal["words", "letters", "vowels"]) -> str:
    """Count the words, letters or vowels of a text."""
    letters = [char for char in text.lower() if char.isalpha()]  # casefold() would turn "ß" into two letters
    vowels = [char for char in letters if char in _VOWELS]
    count = len({"words": _list_words(text), "letters": letters, "vowels": vowels}[what])
    return f"{count} {what if count != 1 else what.removesuffix('s')}"


@tool(idempotent=True)
def reverse_text(text: Text) -> str:
    """Write a text backwards."""
    return f"“{text[::-1]}”"


def find_word_tasks(question: str) -> list[Task]:
    """Return the tasks in a question that the agent ``words`` can solve.

    A task applies to the next quoted text. If there is none, it applies to the previous quoted text, or else to the
    words after the task.
    """
    question = question[:MAX_TEXT_CHARS]
    plain = _QUOTED.sub(lambda found: " " * len(found[0]), question)  # quoted words are not tasks
    orders = [
        (found.start(), tool_name, choice, label)
        for pattern, tool_name, choice, label in _ORDERS
        for found in re.finditer(pattern, plain, re.IGNORECASE)
    ]
    tasks: dict[str, Task] = {}
    for at, tool_name, choice, label in sorted(orders, key=lambda order: order[0]):
        if text := _find_subject(question, at):
            title = label.format(text=f"“{text}”")
            tasks.setdefault(f"{title} {choice}", Task(tool_name, {"text": text, **choice}, title))
    return list(tasks.values())[:MAX_TASKS]


_VOWELS = frozenset("aeiouáàâäãåéèêëíìîïóòôöõúùûüæœø")
_ORDERS: tuple[tuple[str, str, dict[str, str], str], ...] = (
    (r"\blongest word", "pick_word", {"which": "longest"}, "the longest word in {text} is"),
    (r"\bshortest word", "pick_word", {"which": "shortest"}, "the shortest word in {text} is"),
    (r"\b(?:how many|number of) words", "count_in_text", {"what": "words"}, "{text} has"),
    (r"\b(?:how many|number of) letters", "count_in_text", {"what": "letters"}, "{text} has"),
    (r"\bvowels", "count_in_text", {"what": "vowels"}, "{text} has"),
    (r"\breverse|\bbackwards?\b", "reverse_text", {}, "{text} backwards is"),
)
_SUBJECT = re.compile(
    r"\b(?:in|of|does|is|spell|reversed?|the (?:word|text|sentence|phrase))\s+(?P<text>[^?!.;:]+)", re.IGNORECASE
)
_FILLER = re.compile(
    r"^(?:(?:in|of|is|are|the (?:word|text|sentence|phrase)) )+|\s+(?:has|have|backwards?)$", re.IGNORECASE
)


def _find_subject(question: str, at: int) -> str:
    quoted = [(found.start(), "".join(found.groups(""))) for found in _QUOTED.finditer(question)]
    if quoted:
        return next((text for start, text in quoted if start > at), quoted[-1][1])
    found = _SUBJECT.search(question, at) or _SUBJECT.search(question)
    return _FILLER.sub("", found["text"].strip()).strip(" ,\n") if found is not None else ""


def _list_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text)
