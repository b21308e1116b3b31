"""Tests of templates that render strangers' texts: endless computations and huge results are refused, and ordinary
templates render unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from roundelay.agents.bounded_templates import BoundedEnvironment, TemplateTooLarge

ENVIRONMENT = BoundedEnvironment(undefined=StrictUndefined)
PLAIN = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
VALUES: dict[str, Any] = {
    "n": 10**9, "big": "1" * 4000, "text": "a" * 1000, "items": [1, 2, 3], "tree": [{"kids": [{"kids": []}]}], "map": {"a": 1, "b": 2},
}  # fmt: skip

TOO_MUCH = [
    "{{ 9 ** (9 ** 9) }}",
    "{{ n ** n }}",
    "{{ (2 ** 5000) ** 5000 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(n) %}{% endfor %}",
    "{{ 'x' * n }}",
    "{{ n * 'x' }}",
    "{{ [1] * n }}",
    "{{ ['x' * 1000] * 100000 }}",
    "{{ 'x'.ljust(n) }}",
    "{{ 'x'.zfill(n) }}",
    "{{ 'x' | center(n) }}",
    "{{ 'x' | indent(n) }}",
    "{{ items | batch(n, 'x') | list }}",
    "{{ items | slice(n) | list }}",
    "{{ 1.5 | round(n) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (n, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, n) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ text.replace('a', text * 100) }}",
    "{{ text | replace('a', text * 100) }}",
    "{{ ([text] * 100000) | join }}",
    "{{ (text * 100).join([text] * 1000) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=2) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% for i in range(9999) %}{{ text * 1000 }}{% endfor %}",
    "{{ lipsum(100000) }}",
]


@pytest.mark.parametrize("source", TOO_MUCH)
def test_what_would_never_end_or_fill_memory_is_refused(source: str) -> None:
    with pytest.raises((TemplateError, RecursionError, OverflowError)):
        ENVIRONMENT.from_string(source).render(VALUES)


def test_a_refusal_names_its_bound() -> None:
    with pytest.raises(TemplateTooLarge, match="1,000,000 rounds of loops, calls and operators"):
        ENVIRONMENT.from_string(TOO_MUCH[3]).render()
    with pytest.raises(TemplateTooLarge, match=r"the result of \*\* has more than 20,000 bits"):
        ENVIRONMENT.from_string("{{ n ** n }}").render(VALUES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 2 ** 10 + 3 * 4 - 1 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ 2 ** -1 }} {{ 2.5 ** 2 }}",
        "{% for i in items %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{{ loop.previtem | default(0) }}{{ loop.cycle(1, 2) }}{% else %}none{% endfor %}",
        "{% for i in items if i > 1 %}{{ loop.index }}{{ i }}{{ loop.last }}{% endfor %}",
        "{% for i in items | reverse %}{{ i }}{{ loop.revindex }}{% endfor %}",
        "{% for k, v in map.items() %}{{ k }}={{ v }} {% endfor %}{% for k in map %}{{ k }}{% endfor %}",
        "{% for t in tree recursive %}({{ loop(t.kids) }}){% endfor %}",
        "{% for i in [] %}{% else %}empty{% endfor %}",
        "{{ items | join(', ') }} {{ 'a b' | replace(' ', '_') }} {{ '%05d %s' % (7, 'x') }} {{ '%s' | format(1) }}",
        "{{ '{:>5}|{}'.format(1, 'b') }} {{ 'a,b'.split(',') }} {{ ', '.join(['a', 'b']) }} {{ 'x'.center(5) }}",
        "{{ text | truncate(20) }} {{ 'a\\nb' | indent(2) }} {{ items | batch(2) | list }} {{ 3.14159 | round(2) }}",
        "{% set ns = namespace(x=0) %}{% for i in items %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
        "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say('a') ~ say('b') }}{% set c %}{{ say(1) }}{% endset %}{{ c }}",
        "{{ map | tojson }} {{ none }} {{ true }} {{ n }} {{ n | default(3) }} {{ items | sum }} {{ big | length }}",
        "{% filter upper %}{{ 'abc' }}{% endfilter %}",
        "{% for i in range(1000) %}{{ i }}{% endfor %}",
    ],
)
def test_ordinary_templates_render_as_in_the_plain_sandbox(source: str) -> None:
    assert ENVIRONMENT.from_string(source).render(VALUES) == PLAIN.from_string(source).render(VALUES)


def test_each_rendering_has_bounds_of_its_own() -> None:
    template = ENVIRONMENT.from_string("{% for i in range(90000) %}{{ i }}{% endfor %}")
    for _ in range(15):
        assert len(template.render()) > 400_000


def test_what_is_missing_is_still_named() -> None:
    for source in ("{{ nope }}", "{% for i in nope %}{% endfor %}", "{{ nope ~ 'x' }}", "{{ nope | join }}"):
        with pytest.raises(TemplateError, match="'nope' is undefined"):
            ENVIRONMENT.from_string(source).render()
