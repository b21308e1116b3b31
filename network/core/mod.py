"""The plugin seam: mods extend the hub with hooks on a message's way and with typed operations.

A mod is written once, on the hub; agents get its operations as tools. The whole surface:

- ``before(incoming)``: step 3, synchronous, no IO; raises a `RequestError` to refuse a message.
- ``apply(change, message)``: step 6, synchronous, no IO; changes the mod's own state and sends messages, in the
  message's commit.
- ``ended(change, reaction)``: as ``apply``, when an agent's reaction ends.
- ``after(context, message)``: step 8, may do IO; its outcome returns by ``context.submit(payload)`` to
  ``apply_entry(change, payload)``.
- methods marked `operation`: ``change`` operations run in `apply`, ``read`` operations are asynchronous and change
  nothing.

Third parties register a `Mod` subclass under the entry point group ``roundelay.mods``. docs/mods.md shows one.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from roundelay.network.errors import Forbidden, InternalError, InvalidArguments, ModError, RoundelayError
from roundelay.network.frames import ID_IN_WORDS, ID_PATTERN, ModInfo, OperationInfo, SendFrame, Seq, is_id

from .entries import Origin
from .rows import MessageHead, Row
from .state import State
from .tables import Access, History, OpenReaction

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Incoming(Struct, frozen=True):
    """A message as ``before`` sees it: who sends what where; not yet stored."""

    origin: Origin
    frame: SendFrame


class Change(Protocol):
    """What the synchronous hooks and operations may do; all of it lands in one commit, or none. Implemented by `apply`.

    Its methods raise `RequestError`; whatever they raise is the caller's answer, and nothing has changed.
    """

    origin: Origin
    state: State
    stamp: int

    def get(self, key: str) -> Any:
        """The mod's own JSON value under a key, or None."""

    def put(self, key: str, value: object) -> None:
        """Keep a JSON value under a key of the mod's own; None deletes it."""

    def create_channel(
        self, name: str, *, topic: str = "", history: History = "since_join", access: Access = "open"
    ) -> None:
        """Make a channel; who calls is its owner, and not yet in it."""

    def set_channel(
        self,
        name: str,
        *,
        topic: str | None = None,
        history: History | None = None,
        access: Access | None = None,
        owner: str | None = None,
        title: str | None = None,
    ) -> None: ...

    def invite_to_channel(self, name: str, agent_id: str) -> None: ...

    def remove_from_channel(self, name: str, agent_id: str) -> None:
        """Take a member, or an invitation, out: it comes back by a new invitation alone."""

    def join_channel(self, name: str, agent_id: str) -> None:
        """Let somebody in. Whoever calls for itself needs the channel open, an invitation, or to be its owner or
        an operator."""

    def leave_channel(self, name: str, agent_id: str) -> None: ...

    def post(self, to: str, content: object, *, reply_to: int | None = None, cause: int | None = None) -> Row:
        """Send a message as the calling participant. ``reply_to`` and ``cause`` are messages that this change knows:
        see `head`."""

    def answer(self, agent_id: str, content: object, *, cause: int | None = None) -> Row:
        """Send a message from the mod to one participant; with a ``cause`` it counts in that conversation's budget."""

    def head(self, seq: int) -> MessageHead:
        """The head of a message that the caller may read. Raises `UnknownMessage`.

        A change knows the messages that the operation's arguments of type `Seq` name, the one that a hook is shown, the
        one for which ``after`` submitted a payload, and those that it sends itself.
        """


def run_before_hooks(mods: Iterable[Mod], incoming: Incoming) -> RoundelayError | None:
    """Step 3: the first refusal of the mods' ``before`` hooks. A hook that fails refuses too: it was meant to guard."""
    for mod in mods:
        try:
            mod.before(incoming)
        except RoundelayError as error:
            return error
        except Exception as error:
            log.exception("a mod's before hook failed", extra={"mod": mod.id})
            return InternalError(f"The mod {mod.id} failed on this message: {type(error).__name__}.")
    return None


class AfterContext(Struct, frozen=True):
    """What ``after`` gets: ``submit`` sends a payload back into the log's order, to ``apply_entry``."""

    state: State
    submit: Callable[[Any], None]


class Operation(Struct, frozen=True):
    """One operation: its name on the wire, its arguments' type, whether it changes anything, and who may call it."""

    op: str
    description: str
    args_type: type[Struct]
    function: Callable[..., Any]
    is_change: bool
    is_for_operators: bool = False

    def decode(self, args: Raw) -> Struct:
        """Decode the arguments. Raises `InvalidArguments` with the field and the operation's own."""
        try:
            return msgspec.json.decode(args, type=self.args_type)
        except (msgspec.DecodeError, RecursionError) as error:
            known = ", ".join(
                field.encode_name + ("" if field.required else "?") for field in msgspec.structs.fields(self.args_type)
            )
            said = str(error).replace(f"`str` matching regex {ID_PATTERN!r}", ID_IN_WORDS)
            raise InvalidArguments(f"{self.op}: {said}; its arguments are {{{known}}}.") from error

    def call(self, context: Any, args: Struct) -> Any:
        """Perform it with what it is given, a `Change` or a `Reading`, and `decode`d arguments; a reading one gives an
        awaitable."""
        if self.is_for_operators and not context.origin.is_operator:
            raise Forbidden(
                "This operation is for operators: call it with the owner's token, or with one made by roundelay token "
                "create --operator."
            )
        return self.function(context, **{name: getattr(args, name) for name in args.__struct_fields__})

    def info(self) -> OperationInfo:
        """What ``welcome`` advertises."""
        return OperationInfo(
            self.op, self.description, args_schema(self.args_type), "change" if self.is_change else "read"
        )


def operation(kind: Literal["change", "read"], *, name: str | None = None) -> Callable[[F], F]:
    """Mark a method of a mod as an operation.

    A ``change`` is ``def method(self, change, *, arg: type, ...)``, synchronous and without IO; a ``read`` is ``async
    def method(self, reading, *, arg: type, ...)``. The docstring's first paragraph is the description that models see.
    """

    def mark(function: F) -> F:
        function.__roundelay_operation__ = (kind, name or function.__name__)  # type: ignore[attr-defined]
        return function

    return mark


class Mod:
    """Subclass this; see the module's docstring. ``id`` names the mod, its address ``mod:ID`` and its operations
    ``ID.name``."""

    id: ClassVar[str] = ""

    def before(self, incoming: Incoming) -> None:
        """Refuse a message by raising a `RequestError`."""

    def apply(self, change: Change, message: Row) -> None:
        """React to an accepted message within its commit. ``message.target`` is ``mod:ID`` when it is for this mod."""

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        """React to the end of an agent's reaction, within the commit of its last record. The change is that agent's; of
        a hook that raises nothing is kept, and the reaction ends."""

    def apply_entry(self, change: Change, payload: Any) -> None:
        """Take what ``after`` submitted."""

    def after(self, context: AfterContext, message: Row) -> Awaitable[None] | None:
        """React to a stored message outside the commit; may do IO. Not repeated if the hub dies meanwhile."""

    def operations(self) -> list[Operation]:
        """The operations that this mod's methods declare, by name."""
        found = []
        for _, method in inspect.getmembers(self, callable):
            mark = getattr(method, "__roundelay_operation__", None)
            if mark is not None:
                found.append(make_operation(self.id, method, name=mark[1], is_change=mark[0] == "change"))
        return sorted(found, key=lambda operation: operation.op)

    def describe(self) -> ModInfo:
        """What ``welcome`` says of this mod."""
        return ModInfo(self.id, [operation.info() for operation in self.operations()])

    def overrides(self, hook: str) -> bool:
        """Whether this mod has a hook of its own; the hub calls only those."""
        return getattr(type(self), hook) is not getattr(Mod, hook)


def make_operation(
    owner: str, function: Callable[..., Any], *, name: str = "", is_change: bool, is_for_operators: bool = False
) -> Operation:
    """The operation ``OWNER.name`` of a function, or of a mod's method, which is called that itself if nothing else is
    said."""
    name = name or function.__name__
    declared = getattr(function, "__func__", function)
    description, args_type = _read_declaration(owner, name, declared, skipped=2 if declared is not function else 1)
    return Operation(f"{owner}.{name}", description, args_type, function, is_change, is_for_operators)


@cache  # Else each hub of a process makes some fifty types, a dozen milliseconds of work, which `_seq_fields` keeps.
def _read_declaration(mod: str, name: str, method: Callable[..., Any], skipped: int) -> tuple[str, type[Struct]]:
    """The description and the arguments' type of an operation; its method's first ``skipped`` parameters are no
    arguments."""
    description = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    if not description:
        raise ModError(f"The operation {mod}.{name} has no docstring; its first paragraph is what models read.")
    hints = get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[skipped:]:
        hint = hints[parameter.name]
        has_default = parameter.default is not inspect.Parameter.empty
        fields.append((parameter.name, hint, parameter.default) if has_default else (parameter.name, hint))
    title = "".join(part.title() for part in f"{mod}_{name}".split("_"))
    args_type = msgspec.defstruct(title, fields, forbid_unknown_fields=True, kw_only=True, frozen=True)
    return description, args_type


@cache
def _seq_fields(args_type: type[Struct]) -> tuple[str, ...]:
    def names_messages(hint: Any) -> bool:
        return hint == Seq or any(names_messages(inner) for inner in get_args(hint))

    return tuple(field.name for field in msgspec.structs.fields(args_type) if names_messages(field.type))


def list_named_seqs(args: Struct) -> list[int]:
    """The messages that an operation's arguments name: those of type `Seq`, or lists of them."""
    found: list[int] = []
    for name in _seq_fields(type(args)):
        value = getattr(args, name)
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    return found


def args_schema(args_type: type[Struct]) -> dict[str, Any]:
    """The JSON Schema of an operation's arguments: one object, no references."""
    _, components = msgspec.json.schema_components([args_type], ref_template="#/$defs/{name}")
    schema = dict(components.pop(args_type.__name__))
    schema.pop("title", None)
    schema["additionalProperties"] = False
    schema.setdefault("required", [])
    if components:
        schema["$defs"] = components
    return schema


def load_mods(wanted: Sequence[str | Mod], known: Mapping[str, type[Mod]]) -> list[Mod]:
    """Make the mods of these names: ``known`` ones first, ``module:Class`` by its import path, else entry points of the
    group ``roundelay.mods``. A mod is taken as it is.

    Raises `ModError` that names the mod and the reason; a node does not start with less than it was told.
    """
    mods: list[Mod] = []
    for item in wanted:
        try:
            mods.append(_load_mod(item, known, {mod.id for mod in mods}))
        except ModError as error:
            error.mod = item.id if isinstance(item, Mod) else item
            raise
    return mods


def _load_mod(item: str | Mod, known: Mapping[str, type[Mod]], taken: Collection[str]) -> Mod:
    name = item.id if isinstance(item, Mod) else item
    try:
        mod = item if isinstance(item, Mod) else (known.get(item) or _find_mod(item))()
        mod.operations()
    except ModError:
        raise
    except Exception as error:
        raise ModError(f"The mod {name!r} failed to load: {type(error).__name__}: {error}.") from error
    if not isinstance(mod, Mod) or not is_id(mod.id):
        raise ModError(f"The mod {name!r} is no roundelay Mod with a lower-case id; see docs/mods.md.")
    if mod.id in taken or mod.id == "network":
        raise ModError(f"The mod id {mod.id!r} is taken; each mod needs its own.")
    return mod


def add_mod_folder(folder: Path | None) -> None:
    """Have modules of mods found beside a node's file: behind everything else that can be imported."""
    if folder is not None and str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def _find_mod(name: str) -> Callable[[], Mod]:
    return _import_mod(name) if ":" in name else _find_entry_point(name)


def _import_mod(name: str) -> Callable[[], Mod]:
    """What ``module:Class`` names. Raises `ModError`."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ModError(f"The mod {name!r} is no import path; write module:Class, as polls:Polls for polls.py.")
    try:
        found: object = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ModError(
            f"The mod {name!r} was not found: there is no {module_name}.py beside the node's file, and no installed "
            f"module {module_name}."
        ) from error
    except AttributeError as error:
        raise ModError(f"The mod {name!r} was not found: {module_name} has no {attribute}.") from error
    if isinstance(found, Mod):
        return lambda: found
    if not callable(found):
        raise ModError(f"The mod {name!r} is a {type(found).__name__}; name a subclass of roundelay.network.mod.Mod.")
    return found


def _find_entry_point(name: str) -> Callable[[], Mod]:
    found = entry_points(group="roundelay.mods", name=name)
    for point in found:
        loaded: Callable[[], Mod] = point.load()
        return loaded
    installed = sorted(point.name for point in entry_points(group="roundelay.mods"))
    more = f"; installed are {', '.join(installed)}" if installed else ""
    raise ModError(
        f"No mod is called {name!r}{more}. Check the node's `mods:`, or install the package that brings it. A mod in a "
        "file beside the node's is named by its import path: polls:Polls for the class Polls of polls.py."
    )
