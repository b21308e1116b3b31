"""Options of features, read from a constructor's signature. Programs and files get the same checks.

A parameter's annotation describes the allowed values, with pydantic's ``Field`` in `Annotated`. `form_of` returns the
pydantic model that validates the options in a file. `checked` validates a program's values with the same model, so
programs and files get the same error. `IN_CODE` marks parameters that a file cannot contain (a model, a function).
`InFile` states the type of a file's value. Pure.
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
"""Marker in a parameter's `Annotated`: only a program can set the parameter. A file cannot contain the parameter."""

OR_NONE = "there may be none of them"
"""Marker in the `Annotated` of ``*options``: the list may be empty. Without this marker, at least one item is required.
"""

MAX_COUNT = 1_000_000
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Field(gt=0)]
"""Seconds. Infinity means no limit. A file cannot state infinity, because files are read as JSON."""

Text = Annotated[str, Field(min_length=1)]

VariableName = Annotated[str, AfterValidator(check_variable_name)]
"""Name of an environment variable with a secret. A file contains only the name."""


class Strict(BaseModel):
    """Base of forms that are not made from a constructor. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class InFile:
    """Marker in the `Annotated` of a parameter or field that states the type of its value in a file."""

    form: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler.generate_schema(self.form)


@cache
def form_of(make: Any) -> Any:
    """Return the pydantic model of the options of ``make``: a function, or a class with its constructor.

    A variadic parameter (``*args``) becomes a list with at least one item.
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
    """Return a pydantic model like `form_of`, but every option may be omitted or None. None keeps the default of
    ``make``.
    """
    own: dict[str, Any] = {name: (kind | None, None) for name, kind, _ in _list_options(make) if name not in without}
    return create_model(make.__qualname__, __base__=Strict, **own)


def read_form(form: BaseModel) -> dict[str, Any]:
    """Return the values of a form by name, without further conversion."""
    return {name: getattr(form, name) for name in type(form).model_fields}


def make_from(make: Callable[..., MadeT], form: BaseModel, **beside: object) -> MadeT:
    """Call ``make`` with the values of its form, and with ``beside`` as further arguments."""
    options = {**read_form(form), **beside}
    several = [it for name in _list_several(make) for it in options.pop(name)]
    return make(*several, **options)


def checks(check: Callable[..., None] | None) -> Callable[[Callable[P, MadeT]], Callable[P, MadeT]]:
    """Decorate a function whose form must also validate combinations of options. ``check`` receives the options by name
    and raises `ValueError`.
    """

    def decorate(make: Callable[P, MadeT]) -> Callable[P, MadeT]:
        make.check_options = check  # type: ignore[attr-defined]  # a function's own attribute
        return make

    return decorate


def checked(
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[Concatenate[OwnerT, P], None]], Callable[Concatenate[OwnerT, P], None]]:
    """Decorate a constructor whose options must be validated with its form. ``check`` validates combinations of
    options, as in `checks`. The constructor receives the validated values, or raises a `ConfigError` that names the
    class.
    """

    def decorate(init: Callable[Concatenate[OwnerT, P], None]) -> Callable[Concatenate[OwnerT, P], None]:
        signature, several = inspect.signature(init), _list_several(init)

        @checks(check)
        @wraps(init)
        def hold(owner: OwnerT, /, *args: P.args, **kwargs: P.kwargs) -> None:
            # Bind the arguments first: a wrong name or a missing argument then raises Python's own TypeError, as for
            # any constructor.
            given = signature.bind(owner, *args, **kwargs).arguments
            (_, *named), form = given.items(), form_of(hold)
            told: dict[str, Any] = {**dict.fromkeys(several, ()), **dict(named)}
            # Values that only a program can give, such as functions, bypass the form unchecked.
            code = {name: told.pop(name) for name in [*told] if name not in form.model_fields}
            options = {**code, **read_form(bind_values(form, type(owner).__name__, told))}
            init(owner, *[it for name in several for it in options.pop(name)], **options)

        return hold

    return decorate


def check_fields(instance: Any) -> None:
    """Validate a dataclass's fields with their annotations. Called in ``__post_init__``. Raises `ValueError`."""
    kind: Any = type(instance)
    form = form_of(kind)
    try:
        bind_values(form, kind.__name__, {name: getattr(instance, name) for name in form.model_fields})
    except ConfigError as error:
        raise ValueError(str(error)) from error


@cache
def list_in_code(make: Any) -> tuple[str, ...]:
    """Return the names of the options that only a program can set."""
    hints = get_type_hints(make if is_dataclass(make) else _find_constructor(make), include_extras=True)
    return tuple(name for name, kind in hints.items() if _is_in_code(kind))


def _find_constructor(make: Callable[..., object]) -> Callable[..., object]:
    return make.__init__ if isinstance(make, type) else make  # type: ignore[misc]  # a class's own, read only


def _list_several(make: Callable[..., object]) -> list[str]:
    parameters = inspect.signature(make).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.VAR_POSITIONAL]


def _list_options(make: Callable[..., object]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the form and the default of each option."""
    hints = get_type_hints(make if is_dataclass(make) else _find_constructor(make), include_extras=True)
    factories = {field.name: field.default_factory for field in fields(make)} if is_dataclass(make) else {}
    for name, parameter in inspect.signature(make).parameters.items():
        if name not in hints or _is_in_code(hints[name]):  # a parameter without an annotation is `self`
            continue
        kind: Any = _read_kind(hints[name])
        if parameter.kind is parameter.VAR_POSITIONAL:
            may_be_none = OR_NONE in getattr(hints[name], "__metadata__", ())
            several = tuple[kind, ...]
            yield (name, several, ()) if may_be_none else (name, Annotated[several, Field(min_length=1)], ...)
        elif parameter.default is parameter.empty:
            yield name, kind, ...
        else:
            factory = factories.get(name, MISSING)
            yield name, kind, Field(default_factory=_Same(parameter.default) if factory is MISSING else factory)


@dataclass(frozen=True, slots=True)
class _Same:
    """Default factory that returns the object itself. Pydantic would copy a plain default."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def _is_in_code(kind: Any) -> bool:
    return get_origin(kind) is Annotated and IN_CODE in kind.__metadata__


def _read_kind(kind: Any) -> Any:
    """Return the type of an option's value in a file: the type that `InFile` states, or the annotation itself."""
    if get_origin(kind) is not Annotated:
        return kind
    forms = [it for it in kind.__metadata__ if isinstance(it, InFile)]
    rest = tuple(it for it in kind.__metadata__ if not isinstance(it, InFile))
    of = forms[0].form if forms else kind.__origin__
    return Annotated[(of, *rest)] if rest else of
