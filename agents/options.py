"""Options of what a program makes and a file names: read from a constructor's signature, checked once for both.

A parameter's annotation says what its value may be, with pydantic's ``Field`` in `Annotated`. `form_of` gives the form
in which a file says the same; `checked` holds what a program gives against that form, so both are refused by the same
sentence. `IN_CODE` marks what has no place in a file (a model, a function), `InFile` says what stands there instead.
Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, create_model, model_validator
from pydantic_core import CoreSchema

from roundelay.network.credentials import check_variable_name
from roundelay.network.errors import ConfigError
from roundelay.network.yaml import bind_values

P = ParamSpec("P")
OwnerT = TypeVar("OwnerT")
MadeT = TypeVar("MadeT")

IN_CODE = "only a program can give it"
"""In the `Annotated` of a parameter: a file has no such option."""

OR_NONE = "there may be none of them"
"""In the `Annotated` of ``*options``, of which else at least one is given."""

MAX_COUNT = 1_000_000
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0)]
"""Infinity is no limit; files, which are read as JSON is, know none."""

Text = Annotated[str, Field(min_length=1)]

VariableName = Annotated[str, AfterValidator(check_variable_name)]
"""Of the environment: a secret stands there, and its variable's name in a file."""


class Strict(BaseModel):
    """What a file's mapping is read as, where it is no constructor's: no key but its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class InFile:
    """In the `Annotated` of a parameter, or of a dataclass's field: what a file's value is read as."""

    form: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.form)


@cache
def form_of(make: Any) -> Any:
    """Give the pydantic model of the options that ``make`` takes: a function, or a class by its constructor.

    Parameters behind a ``*`` are a list with at least one item.
    """
    check: Callable[..., None] | None = getattr(_find_constructor(make), "check_options", None)
    validators: dict[str, Any] = {}
    if check is not None:

        def check_together(form: BaseModel) -> BaseModel:
            check(**read_form(form))
            return form

        validators["check_together"] = model_validator(mode="after")(check_together)
    own: dict[str, Any] = {name: (kind, default) for name, kind, default in _list_options(make)}
    return create_model(make.__qualname__, __base__=Strict, __validators__=validators, **own)


def optional_form(make: Callable[..., object], *, without: Collection[str] = ()) -> Any:
    """Give the form of options each of which a file may leave out or empty: None keeps the default of ``make``."""
    own: dict[str, Any] = {name: (kind | None, None) for name, kind, _ in _list_options(make) if name not in without}
    return create_model(make.__qualname__, __base__=Strict, **own)


def read_form(form: BaseModel) -> dict[str, Any]:
    """Give what a form holds, by name; what is inside of a value stays as it is."""
    return {name: getattr(form, name) for name in type(form).model_fields}


def make_from(make: Callable[..., MadeT], form: BaseModel, **beside: object) -> MadeT:
    """Call ``make`` with what its form says."""
    options = {**read_form(form), **beside}
    several = [it for name in _list_several(make) for it in options.pop(name)]
    return make(*several, **options)


def checks(check: Callable[..., None] | None) -> Callable[[Callable[P, MadeT]], Callable[P, MadeT]]:
    """Have the form of a function hold its options, by name, against one another: ``check`` raises `ValueError`."""

    def decorate(make: Callable[P, MadeT]) -> Callable[P, MadeT]:
        make.check_options = check  # type: ignore[attr-defined]  # a function's own attribute
        return make

    return decorate


def checked(
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[Concatenate[OwnerT, P], None]], Callable[Concatenate[OwnerT, P], None]]:
    """Hold the options of a constructor against its form, and against one another as `checks` does. The constructor is
    called with what was read of them. It raises `ConfigError`, which names the class."""

    def decorate(init: Callable[Concatenate[OwnerT, P], None]) -> Callable[Concatenate[OwnerT, P], None]:
        signature, several = inspect.signature(init), _list_several(init)

        @checks(check)
        @wraps(init)
        def hold(owner: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> None:
            given = signature.bind(owner, *args, **kwargs).arguments
            (_, *named), form = given.items(), form_of(hold)
            told: dict[str, Any] = {**dict.fromkeys(several, ()), **dict(named)}
            code = {name: told.pop(name) for name in [*told] if name not in form.model_fields}
            options = {**code, **read_form(bind_values(form, type(owner).__name__, told))}
            init(owner, *[it for name in several for it in options.pop(name)], **options)

        return hold

    return decorate


def check_fields(made: Any) -> None:
    """Hold a dataclass's fields against their annotations, for its ``__post_init__``. Raises `ValueError`."""
    whose: Any = type(made)
    form = form_of(whose)
    try:
        bind_values(form, whose.__name__, {name: getattr(made, name) for name in form.model_fields})
    except ConfigError as error:
        raise ValueError(str(error)) from error


@cache
def list_in_code(make: Any) -> tuple[str, ...]:
    """Give the names of what only a program can give."""
    hints = get_type_hints(make if is_dataclass(make) else _find_constructor(make), include_extras=True)
    return tuple(name for name, kind in hints.items() if _is_in_code(kind))


def _find_constructor(make: Callable[..., object]) -> Callable[..., object]:
    return make.__init__ if isinstance(make, type) else make  # type: ignore[misc]  # a class's own, read only


def _list_several(make: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(make).parameters.values()
    return [it.name for it in parameters if it.kind is it.VAR_POSITIONAL]


def _list_options(make: Callable[..., object]) -> Iterator[tuple[str, Any, Any]]:
    """Give the name, the form and the default of each option."""
    hints = get_type_hints(make if is_dataclass(make) else _find_constructor(make), include_extras=True)
    made = {it.name: it.default_factory for it in fields(make)} if is_dataclass(make) else {}
    for name, parameter in inspect.signature(make).parameters.items():
        if name not in hints or _is_in_code(hints[name]):  # one without an annotation is `self`
            continue
        kind: Any = _read_kind(hints[name])
        if parameter.kind is parameter.VAR_POSITIONAL:
            may_be_none = OR_NONE in getattr(hints[name], "__metadata__", ())
            several = tuple[kind, ...]
            yield (name, several, ()) if may_be_none else (name, Annotated[several, Field(min_length=1)], ...)
        elif parameter.default is parameter.empty:
            yield name, kind, ...
        else:
            factory = made.get(name, MISSING)
            yield name, kind, Field(default_factory=_Same(parameter.default) if factory is MISSING else factory)


@dataclass(frozen=True, slots=True)
class _Same:
    """Makes a default: the object itself, of which pydantic would make a copy."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _is_in_code(kind: Any) -> bool:
    return get_origin(kind) is Annotated and IN_CODE in kind.__metadata__


def _read_kind(kind: Any) -> Any:
    """Give the type that a file's value has."""
    if get_origin(kind) is not Annotated:
        return kind
    found = [it for it in kind.__metadata__ if isinstance(it, InFile)]
    rest = tuple(it for it in kind.__metadata__ if not isinstance(it, InFile))
    of = found[0].form if found else kind.__origin__
    return Annotated[(of, *rest)] if rest else of
