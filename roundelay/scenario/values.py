"""The kinds of values in a scenario: times, ids, patterns, counts, and the strictness of its models."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_SECONDS = 366 * 86_400
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def read_duration(value: object) -> object:
    seconds = _parse_duration(value)
    if isinstance(seconds, int | float) and not 0 <= seconds <= MAX_SECONDS:
        raise ValueError(f"must be a time from 0 to {MAX_SECONDS // 86_400} days, not {value}")
    return seconds


def _parse_duration(value: object) -> object:
    if isinstance(value, str):
        found = _DURATION.fullmatch(value.strip())
        if found is None:
            raise ValueError(f'must be a time like "500ms", "60s" or "5m", not "{value}"')
        return float(found[1]) * _UNITS_S[found[2]]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _check_pattern(source: str) -> str:
    try:
        re.compile(source)
    except re.error as error:
        raise ValueError(f"is no valid regular expression: {error}") from error
    return source


Seconds = Annotated[float, BeforeValidator(read_duration), Field(ge=0, le=MAX_SECONDS)]
Id = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Text = Annotated[str, Field(min_length=1)]
Pattern = Annotated[str, AfterValidator(_check_pattern)]
Count = Annotated[int, Field(ge=0)]


def which_form(value: object) -> str:
    """Which of several forms a value has, so that an error speaks of that one alone."""
    return "one" if isinstance(value, str | int | float) else "many"


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def need_one(value: BaseModel, names: Iterable[str]) -> None:
    """Raise `ValueError` unless exactly one of these fields is set."""
    given = [name for name in names if getattr(value, name) is not None]
    if len(given) != 1:
        shown = ", ".join(type(value).model_fields[name].alias or name for name in names)
        raise ValueError(f"must have exactly one of {shown}" + (f", not {len(given)}" if given else ""))
