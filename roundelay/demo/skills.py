"""What the demo's agents can do: `calculate` and dates for one, questions about a text for the other.

`find_sums` and `find_word_tasks` read tasks out of a question; the tools do one task each, for a scripted agent and for a model alike. Pure: no IO,
no clock, no `eval`; what a stranger may type is bounded before it is computed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from roundelay.agents.tools import ToolError, tool

MAX_EXPRESSION_CHARS = 200
MAX_EXPONENT = 512
MAX_BITS = 2048
MAX_TASKS = 8
MAX_TEXT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: the tool with its arguments, and the words that its result completes to a sentence."""

    tool: str
    arguments: Mapping[str, object]
    label: str


# --- numbers

Expression = Annotated[str, Field(description="Such as (17 + 4) * 2 ^ 3", max_length=MAX_EXPRESSION_CHARS)]
Day = Annotated[str, Field(description="As YYYY-MM-DD")]
Text = Annotated[str, Field(description="The text itself, without quotes around it", max_length=MAX_TEXT_CHARS)]


@tool(idempotent=True)
def calculate(expression: Expression) -> str:
    """Calculate exactly with + - * / % ^ and parentheses."""
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return "undefined (a division by zero)"
    except OverflowError:
        return "too large to write out"
    return format_number(value)


@tool(idempotent=True)
def count_days(first: Day, last: Day) -> str:
    """Count the days from one date to another."""
    days = abs((_read_day(last) - _read_day(first)).days)
    return f"{days} day{'' if days == 1 else 's'}"


@tool(idempotent=True)
def name_weekday(day: Day) -> str:
    """Tell the day of the week of a date."""
    return f"{_read_day(day):%A}"


def evaluate(expression: str) -> Fraction:
    """Give the exact value. Raises `ToolError`, `ZeroDivisionError`, and `OverflowError` beyond `MAX_BITS`."""
    source = expression.replace("^", "**").replace("×", "*").replace("÷", "/").strip()
    # No letters: no names, no exponents such as 1e999999, no strings.
    if len(source) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[\d.+\-*/%() ]+", source, re.ASCII):
        raise ToolError(f"{expression[:50]!r} is no expression of numbers, + - * / % ^ and parentheses.")
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ToolError(f"{expression[:50]!r} is not a complete expression.") from error
    return _evaluate(tree.body, source)


def format_number(value: Fraction) -> str:
    """Give a whole number or short decimal as it is, anything else rounded to 10 places, with a sign that says so."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**10
    digits = str(abs(round(scaled))).rjust(11, "0")
    text = f"{'-' if value < 0 else ''}{digits[:-10]}.{digits[-10:].rstrip('0')}".rstrip(".")
    return text if scaled.denominator == 1 else f"about {text}"


def find_sums(question: str) -> list[Task]:
    """Give the tasks for `numbers` in a question: expressions, in digits or in words, and dates; quoted texts are not looked into."""
    text = _QUOTED.sub(" ; ", question[:MAX_TEXT_CHARS])
    days = [found for found in _DAY.findall(text) if _is_day(found)]
    tasks = []
    if len(days) >= 2:
        tasks.append(Task("count_days", {"first": days[0], "last": days[1]}, f"from {days[0]} to {days[1]} there are"))
    if days and re.search(r"weekday|day of the week|(?:which|what) day", text, re.IGNORECASE):
        tasks += [Task("name_weekday", {"day": day}, f"{day} is a") for day in days]
    spelled = _spell_in_digits(_DAY.sub(" ; ", text))
    for found in _EXPRESSION.findall(spelled):
        source = _trim_expression(found)
        if source is not None:
            tasks.append(Task("calculate", {"expression": source}, f"{_write_expression(source)} ="))
    return _without_repeats(tasks)


_DAY = re.compile(r"(?<!\d)\d{4}-\d{2}-\d{2}(?!\d)", re.ASCII)
_EXPRESSION = re.compile(r"-?[\d(.][\d\s+\-*/%^().]*", re.ASCII)
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_DIGITS = {word: str(number) for number, word in enumerate(_WORDS)} | {"twenty": "20", "hundred": "100"}
_SPELLINGS = [
    (re.compile(pattern, re.IGNORECASE), sign)
    for pattern, sign in (
        (rf"\b(?:{'|'.join(_DIGITS)})\b", lambda found: _DIGITS[found[0].lower()]),
        (r"(?<=\d),(?=\d{3}\b)", ""),
        (r"(?<=[\d)])\s*(?:%|percent\b|per cent\b)\s+of\b", " / 100 *"),
        (r"\bto the power of\b|\*\*", "^"),
        (r"\bsquared\b", "^ 2"),
        (r"\bcubed\b", "^ 3"),
        (r"\b(?:times|multiplied by)\b|[×∙·]|(?<=\d)\s*x\s*(?=\d)", " * "),
        (r"\bdivided by\b|[÷]", " / "),
        (r"\bplus\b", " + "),
        (r"\bminus\b|[−–]", " - "),
        (r"\bmod(?:ulo)?\b", " % "),
    )
]


def _spell_in_digits(text: str) -> str:
    for pattern, sign in _SPELLINGS:
        text = pattern.sub(sign, text)
    return text


def _trim_expression(found: str) -> str | None:
    """Give the longest part of a run of digits and signs that is an expression with something to calculate."""
    source = re.sub(r"\s+", " ", found)[: MAX_EXPRESSION_CHARS // 2].strip()
    while source:
        closed = source + ")" * (source.count("(") - source.count(")"))
        try:
            tree = ast.parse(closed.replace("^", "**"), mode="eval")
        except (SyntaxError, MemoryError, RecursionError):
            source = source[:-1].strip()  # what belongs to the sentence, not to the expression
            continue
        return closed if isinstance(tree.body, ast.BinOp) and _can_calculate(closed) else None
    return None


def _can_calculate(source: str) -> bool:
    try:
        evaluate(source)
    except ToolError:
        return False
    except (ZeroDivisionError, OverflowError):
        return True  # the answer will say so
    return True


def _write_expression(source: str) -> str:
    spaced = re.sub(r"\s*([+*/%^])\s*|(?<=[\d)])\s*(-)\s*", lambda found: f" {found[1] or found[2]} ", source)
    return spaced.replace("*", "×").replace("/", "÷").replace("%", "mod").replace(" ^ ", "^").strip()


def _evaluate(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(int() | float()):  # and no ellipsis
            return Fraction(ast.get_source_segment(source, node) or "0")  # by its digits: a float would round them
        case ast.UnaryOp(ast.USub(), operand):
            return -_evaluate(operand, source)
        case ast.UnaryOp(ast.UAdd(), operand):
            return _evaluate(operand, source)
        case ast.BinOp(left, operator, right):
            value = _apply(_evaluate(left, source), operator, _evaluate(right, source))
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise OverflowError
            return value
        case _:
            raise ToolError(f"{source[:50]!r} holds more than numbers, + - * / % ^ and parentheses.")


def _apply(left: Fraction, operator: ast.operator, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.Mod():
            return left % right
        case ast.Pow() if right.denominator == 1:
            bits = max(left.numerator.bit_length(), left.denominator.bit_length())
            if abs(right) > MAX_EXPONENT or bits * abs(right) > 2 * MAX_BITS:
                raise OverflowError
            power: Fraction = left ** int(right)
            return power
        case _:
            raise ToolError("Only + - * / % and ^ with a whole exponent can be calculated.")


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _read_day(text: str) -> date:
    if not _DAY.fullmatch(text) or not _is_day(text):
        raise ToolError(f"{text[:50]!r} is no date: write YYYY-MM-DD.")
    return date.fromisoformat(text)


# --- words

Counted = Annotated[str, Field(description='"words", "letters", "vowels", "consonants", or one letter', max_length=10)]


@tool(idempotent=True)
def pick_word(text: Text, which: Literal["longest", "shortest"]) -> str:
    """Find the longest or the shortest word of a text, all of them if several are."""
    words = _list_words(text)
    if not words:
        return "none: it has no words"
    length = (max if which == "longest" else min)(map(len, words))
    found = list(dict.fromkeys(word for word in words if len(word) == length))
    letters = f"{length} letter{'' if length == 1 else 's'}"
    return (
        f"“{found[0]}” ({letters})"
        if len(found) == 1
        else f"{' and '.join(f'“{word}”' for word in found)} ({letters} each)"
    )


@tool(idempotent=True)
def count_in_text(text: Text, what: Counted) -> str:
    """Count the words, letters, vowels or consonants of a text, or how often one letter stands in it."""
    letters = [char for char in text.casefold() if char.isalpha()]
    match what.strip().casefold():
        case "words":
            count = len(_list_words(text))
        case "letters":
            count = len(letters)
        case "vowels":
            count = sum(char in _VOWELS for char in letters)
        case "consonants":
            count = sum(char not in _VOWELS for char in letters)
        case letter if len(letter) == 1:
            return f"{letters.count(letter)} × “{letter}”"
        case _:
            raise ToolError("Only words, letters, vowels, consonants or one letter can be counted.")
    return f"{count} {what if count != 1 else what.removesuffix('s')}"


@tool(idempotent=True)
def reverse_text(text: Text) -> str:
    """Write a text backwards."""
    return f"“{text[::-1]}”"


@tool(idempotent=True)
def check_palindrome(text: Text) -> str:
    """Tell whether a text reads the same backwards."""
    letters = [char for char in text.casefold() if char.isalnum()]
    return "a palindrome" if letters == letters[::-1] else "no palindrome"


def find_word_tasks(question: str) -> list[Task]:
    """Give the tasks for `words` in a question; each is about the quoted text after it, else before it, else about what follows."""
    question = question[:MAX_TEXT_CHARS]
    tasks = []
    for order in sorted(_find_orders(question), key=lambda order: order.at):
        text = _find_subject(question, order.at)
        if text:
            chosen = {_CHOICES[order.tool]: order.choice} if order.choice else {}
            tasks.append(Task(order.tool, {"text": text, **chosen}, order.label.format(text=f"“{text}”")))
    return _without_repeats(tasks)


class _Order(NamedTuple):
    at: int
    tool: str
    choice: str
    label: str


_VOWELS = frozenset("aeiouáàâäãåéèêëíìîïóòôöõúùûüæœø")
_QUOTED = re.compile(r"“([^”]+)”|\"([^\"]+)\"|«([^»]+)»|„([^“”]+)[“”]|(?<!\w)[‘']([^’']+)[’'](?!\w)")
_ORDERS = (
    (r"\blongest word", "pick_word", "longest", "the longest word in {text} is"),
    (r"\bshortest word", "pick_word", "shortest", "the shortest word in {text} is"),
    (r"\b(?:how many|number of|count the) words", "count_in_text", "words", "{text} has"),
    (r"\b(?:how many|number of|count the) letters(?! [“\"']?\w[”\"']?\s)", "count_in_text", "letters", "{text} has"),
    (r"\bvowels", "count_in_text", "vowels", "{text} has"),
    (r"\bconsonants", "count_in_text", "consonants", "{text} has"),
    (r"\breverse|\bbackwards?\b", "reverse_text", "", "{text} backwards is"),
    (r"\bpalindrome", "check_palindrome", "", "{text} is"),
)
_CHOICES = {"pick_word": "which", "count_in_text": "what"}
_ONE_LETTER = re.compile(
    r"\bhow (?:many|often|many times)\s+(?:(?:does|is)\s+)?(?:the\s+)?(?:letters?\s+)?[“\"'‘]?(?P<letter>[^\W\d_])[”\"'’]?(?:['’]?s)?"
    r"\s+(?:are|is|occur|appear|stand|does|do|has|in)\b",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"\b(?:in|of|does|is|spell|reversed?|the (?:word|text|sentence|phrase))\s+(?P<text>[^?!.;:]+)", re.IGNORECASE
)
_FILLER = re.compile(
    r"^(?:(?:in|of|is|are|there|does|the (?:word|text|sentence|phrase)|the letters? of)\s+)+|\s+(?:has|have|backwards?|a palindrome|reversed)$",
    re.IGNORECASE,
)


def _find_orders(question: str) -> list[_Order]:
    # What is quoted is what is asked about, not the question; but one letter in quotes belongs to it.
    plain = _QUOTED.sub(lambda found: found[0] if len(found[0]) == 3 else " " * len(found[0]), question)
    orders = [
        _Order(found.start(), tool_name, choice, label)
        for pattern, tool_name, choice, label in _ORDERS
        for found in re.finditer(pattern, plain, re.IGNORECASE)
    ]
    if any(order.tool == "pick_word" for order in orders):  # it tells the word's letters itself
        orders = [order for order in orders if order.choice != "letters"]
    for found in _ONE_LETTER.finditer(plain):
        orders.append(_Order(found.start(), "count_in_text", found["letter"].lower(), "{text} has"))
    return orders


def _find_subject(question: str, at: int) -> str:
    texts = ((found.start(), "".join(found.groups(""))) for found in _QUOTED.finditer(question))
    quoted = [(start, text) for start, text in texts if len(text) > 1]  # one letter is what is counted
    if quoted:
        return next((text for start, text in quoted if start > at), quoted[-1][1])
    if re.search(r"\bthis (?:sentence|question|text|message)\b", question, re.IGNORECASE):
        return question
    found = _SUBJECT.search(question, at) or _SUBJECT.search(question)
    text = found["text"].strip() if found is not None else ""
    for _ in range(3):
        text = _FILLER.sub("", text).strip(" ,\n")
    return text


def _list_words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text)


def _without_repeats(tasks: list[Task]) -> list[Task]:
    return list({task.label + str(task.arguments): task for task in tasks}.values())[:MAX_TASKS]
