"""Jinja templates with limits: every rendering ends, and its output stays small.

Operators write the templates, but strangers write the texts that the templates insert. Jinja's sandbox limits which
objects a template may reach, not how much it computes. ``{{ match.n | int ** match.m | int }}`` or a nested loop could
hold Python's lock forever. `BoundedEnvironment` counts the loops, calls and operators of a rendering, and checks the
size of a result before computing it. The limits count steps instead of time, so a resumed or replayed reaction renders
the same text. Every exceeded limit raises a `TemplateError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000
"""Maximum number of loop rounds, calls and operators in one rendering. This number of steps takes about one second. A
prompt with 100 threads needs about 30,000 steps.
"""

STEPS_OF_CALL = 10
"""Steps charged for a call. A macro call takes ten times as long as one round of a loop."""

MAX_CHARS = 8_000_000
"""Maximum characters of a rendering's output and of each text that a rendering joins. Also the maximum number of items
in a list that a rendering creates.
"""

MAX_WIDTH = 100_000
"""Maximum number that a template may pass as a width for padding, indenting, rounding or slicing."""

MAX_BITS = 20_000
"""Maximum bits of an integer that is the result of a power or a product."""


class TemplateTooLarge(TemplateRuntimeError):
    """Rendering that exceeds `MAX_STEPS` or another limit."""


@dataclass(slots=True)
class _Budget:
    steps: int = MAX_STEPS
    chars: int = MAX_CHARS

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateTooLarge(f"it takes more than {MAX_STEPS:,} rounds of loops, calls and operators")

    def write(self, chars: int) -> None:
        self.chars -= chars
        if self.chars < 0:
            raise TemplateTooLarge(f"it makes more than {MAX_CHARS:,} characters")


_budget: ContextVar[_Budget | None] = ContextVar("roundelay_template_budget", default=None)


class BoundedTemplate(Template):
    """Template whose rendering is limited."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        token = _budget.set(_Budget())
        try:
            return super().render(*args, **kwargs)
        finally:
            _budget.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox that limits the work of a rendering. Accepts the same options as jinja's environments."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})
    template_class = BoundedTemplate

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]  # generates any amount of text
        for name in ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap"):
            self.filters[name] = _check_numbers(self.filters[name])
        for name in ("join", "replace", "format", "xmlattr", "pprint", "tojson", "string"):
            self.filters[name] = _check_text(name, self.filters[name])
        self.filters |= {_COUNT: _count_rounds, _MEASURE: _measure_output}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            # Wrap the loops in the parsed template, because no option of jinja's sandbox can count the rounds of a
            # loop.
            loop.iter = _through(_COUNT, loop.iter)
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [_through(_MEASURE, node) for node in joined.nodes]
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [
                node if isinstance(node, nodes.TemplateData) else _through(_MEASURE, node) for node in output.nodes
            ]
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if (budget := _budget.get()) is not None:
            budget.step(STEPS_OF_CALL)
        method = getattr(obj, "__wrapped__", obj)  # jinja wraps the method `format`
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_method(owner, name, [*args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (budget := _budget.get()) is not None:
            budget.step()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


# --- changes to the parsed template

_COUNT, _MEASURE = "_count_rounds", "_measure_output"


def _through(name: str, node: nodes.Node) -> nodes.Expr:
    assert isinstance(node, nodes.Expr)
    filtered = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    filtered.environment = node.environment
    return filtered


class _Rounds:
    """Items of a loop, with each round counted."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for item in self._items:
            if budget is not None:
                budget.step()
            yield item


class _SizedRounds(_Rounds):
    """Loop items with a known length. Variables such as ``loop.last`` need the length."""

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # it has one


def _count_rounds(items: Any) -> Any:
    if not isinstance(items, Iterable):
        return items  # jinja reports that this value cannot be iterated
    return _SizedRounds(items) if hasattr(items, "__len__") else _Rounds(items)


def _measure_output(value: Any) -> Any:
    budget = _budget.get()
    if isinstance(value, str | list | tuple | Mapping):
        size = _measure(value, MAX_CHARS)
        if budget is not None:
            budget.write(size)
    return value


# --- sizes of results, before they are made


def _measure(value: Any, max_chars: int) -> int:
    """Return the approximate number of characters of a value as text. Raises `TemplateTooLarge` if this number is above
    ``max_chars``.
    """
    size = 0
    waiting = [value]
    while waiting:
        it = waiting.pop()
        match it:
            case str():
                size += len(it)
            case Mapping():
                size += 4 * len(it)
                waiting += [*it.keys(), *it.values()]
            case list() | tuple() | set() | frozenset():
                size += 2 * len(it)
                waiting += it
            case _:
                size += 4
        if size > max_chars:
            raise TemplateTooLarge(f"it makes more than {max_chars:,} characters")
    return size


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateTooLarge(f"it makes a text or list of more than {MAX_CHARS:,}")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    match operator, left, right:
        case "**", int(), int():
            # Estimate the size from the operands. Computing the power first could already take too long.
            if left.bit_length() * max(right, 0) > MAX_BITS:
                raise TemplateTooLarge(f"the result of ** has more than {MAX_BITS:,} bits")
        case "*", int(), int():
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateTooLarge(f"the result of * has more than {MAX_BITS:,} bits")
        case ("*", str() | list() | tuple() | bytes(), int()):
            _check_size(len(left) * right)
        case ("*", int(), str() | list() | tuple() | bytes()):
            _check_size(left * len(right))
        case ("+", str() | list() | tuple() | bytes(), str() | list() | tuple() | bytes()):
            _check_size(len(left) + len(right))
        case ("%", str(), _):
            _check_format(left, [right])
        case _:
            pass


_WIDTH = re.compile(rf"[0-9]{{{len(str(MAX_WIDTH))},}}")


def _check_format(form: str, values: Iterable[Any]) -> None:
    """Check the widths in a format string and in its values. Also limit the total size, because the format may use one
    value many times.
    """
    if _WIDTH.search(form):
        raise TemplateTooLarge(f"it pads a text to more than {MAX_WIDTH:,} characters")
    values = list(values)
    for value in values:
        parts = value if isinstance(value, tuple | list) else value.values() if isinstance(value, Mapping) else [value]
        if ("*" in form or "{" in form) and any(_is_wide(part) for part in parts):
            raise TemplateTooLarge(f"it pads a text to more than {MAX_WIDTH:,} characters")
    places = form.count("%") + form.count("{") + 1
    # A format may use one value at several positions, so the values share the remaining size.
    _measure(values, MAX_CHARS // places)


def _is_wide(value: Any) -> bool:
    return isinstance(value, int) and abs(value) >= MAX_WIDTH


def _check_method(owner: str, name: str, args: list[Any]) -> None:
    """Check a call of a string method whose result may be longer than the original string."""
    match name:
        case "center" | "ljust" | "rjust" | "zfill" | "expandtabs":
            if any(_is_wide(arg) for arg in args):
                raise TemplateTooLarge(f"it pads a text to more than {MAX_WIDTH:,} characters")
        case "replace" if len(args) >= 2:
            _check_replaced(owner, args[0], args[1])
        case "join" if args:
            _check_joined(args[0], owner)
        case "format" | "format_map":
            _check_format(owner, args)
        case "translate" if args:
            _check_size(len(owner) * max(1, _measure(args[0], MAX_CHARS)))
        case _:
            pass


def _check_replaced(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        # An empty search text matches before and after every character.
        places = text.count(old) if old else len(text) + 1
        _check_size(len(text) + places * len(new))


def _check_joined(items: Any, separator: Any) -> None:
    if isinstance(items, list | tuple | Mapping | set | frozenset):
        between = len(separator) if isinstance(separator, str) else 0
        _check_size(_measure(items, MAX_CHARS) + between * len(items))


# --- filters


def _check_numbers(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Limit a filter whose output size depends on a number."""
    places = 2 if hasattr(inner, "jinja_pass_arg") else 1  # jinja may pass an environment before the value

    @wraps(inner)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if any(_is_wide(it) for it in (*args[places:], *kwargs.values())):
            raise TemplateTooLarge(f"a filter is given a number of {MAX_WIDTH:,} or more")
        return inner(*args, **kwargs)

    return bounded


def _check_text(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Limit a filter whose output size depends on the value."""

    @wraps(inner)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        # Jinja may pass an environment or an evaluation context before the value.
        value, *rest = args[1:] if hasattr(inner, "jinja_pass_arg") else args
        match name:
            case "join":
                _check_joined(value, rest[0] if rest else kwargs.get("d", ""))
            case "replace" if len(rest) >= 2:
                _check_replaced(str(value), rest[0], rest[1])
            case "format":
                _check_format(str(value), [rest, kwargs])
            case _:
                _measure(value, MAX_CHARS)
        return inner(*args, **kwargs)

    return bounded
