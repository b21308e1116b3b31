"""The plugin interface. Mods extend the hub with hooks for messages and with typed operations.

Mods run only on the hub, and agents get the operations of mods as tools. A mod may implement these methods:

- ``before(incoming)``: step 3, synchronous, no IO. Raises a `RequestError` to refuse a message.
- ``apply(change, message)``: step 6, synchronous, no IO. Changes the mod's own state and sends messages, in the same
  commit as the message.
- ``ended(change, reaction)``: like ``apply``, but when an agent's reaction ends.
- ``undelivered(change, failed)``: like ``apply``, but when a message becomes a dead letter.
- ``deleted(change, message)``: like ``apply``, but when a message is deleted. ``message`` is the head of the message.
- ``removed(change, agent_id)``: like ``apply``, but when a participant is removed.
- ``due(change, key)``: like ``apply``, but at a time that the mod has scheduled with ``change.schedule``.
- ``after(context, message)``: step 8, may do IO. The hook submits results with ``context.submit(payload)``, and the hub
  then calls ``apply_entry(change, payload)``.
- ``standing(reading, trigger, listeners)``: returns sentences for the end of an agent's prompt. No IO.
- ``maintain(context)``: called once a minute, may do IO and call ``context.submit(payload)``.
- methods marked with `operation`: ``change`` operations run in `apply`, after the IO of their ``prepare`` method.
  ``read`` operations are asynchronous and change nothing.

Third parties register a `Mod` subclass under the entry point group ``roundelay.mods``. docs/mods.md has an example.
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
from types import MethodType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Raw, Struct

from roundelay.network.errors import Forbidden, InternalError, InvalidArguments, ModError, RoundelayError
from roundelay.network.frames import ID_IN_WORDS, ID_PATTERN, ModInfo, OperationInfo, SendFrame, Seq, is_id

from .entries import Origin
from .rows import MessageHead, Row
from .screens import ModScreen, check_screens
from .state import State
from .tables import Access, History, OpenReaction

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


class Incoming(Struct, frozen=True):
    """A message that is not stored yet, passed to the hook ``before``."""

    origin: Origin
    frame: SendFrame


class Undelivered(Struct, frozen=True):
    """A message that has become a dead letter of its recipient, passed to the hook ``undelivered``."""

    agent_id: str
    seq: int
    reactions: tuple[str, ...] = ()
    """Ids of the reactions to the message that were still open. They are closed without a final record, so the hook
    ``ended`` does not run for them."""
    message: MessageHead | None = None
    """Head of the message, or None if the message was deleted."""


class Change(Protocol):
    """Actions for synchronous hooks and operations. Either all actions of a change are stored in one commit, or none.
    `ChangeSet` implements this class.

    If a method refuses its action, it raises a `RequestError`. The caller of the operation gets this error, and nothing
    is changed.
    """

    origin: Origin
    state: State
    stamp: int
    absent_ms: int
    """Time in ms since the last session of the watched participant ended. Set only in a ``due`` hook. It is 0 while the
    participant has a session. After a restart of the hub, it counts from the restart."""
    prepared: Any
    """Result of the operation's ``prepare`` method, or None."""

    def get(self, key: str) -> Any:
        """Return the JSON value that the mod has stored under a key, or None."""

    def items(self, prefix: str) -> list[tuple[str, Any]]:
        """Return the mod's keys that begin with ``prefix``, ascending, with their values. This call scans the values of
        all mods, so use it only in rare hooks such as ``removed``."""

    def put(self, key: str, value: object) -> None:
        """Store a JSON value under a key of the mod. None deletes the value."""

    def schedule(self, key: str, at_ms: int, *, cause: int | None = None, watched: str = "") -> None:
        """Schedule a call of the mod's ``due`` hook with this key at ``at_ms``, a time in ms of the hub's clock. A new
        time replaces an earlier time with the same key.

        ``cause`` is a message that the hook may use as a cause. ``watched`` is a participant. The hook can read how
        long this participant has been absent in `absent_ms`.
        """

    def unschedule(self, key: str) -> None:
        """Remove a due time. Do nothing if there is no due time with this key."""

    def create_channel(
        self, name: str, *, topic: str = "", history: History = "since_join", access: Access = "open"
    ) -> None:
        """Create a channel. The caller owns the channel but is not yet a member."""

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
        """Remove a member or withdraw an invitation. Afterwards, the participant can join again only with a new
        invitation."""

    def join_channel(self, name: str, agent_id: str) -> None:
        """Add a participant to a channel. If the caller adds itself to a channel that is not open, it must own the
        channel, be invited or be an operator."""

    def leave_channel(self, name: str, agent_id: str) -> None: ...

    def post(self, to: str, content: object, *, reply_to: int | None = None, cause: int | None = None) -> Row:
        """Send a message in the name of the calling participant. ``reply_to`` and ``cause`` must be messages that this
        change knows (see `head`)."""

    def answer(self, agent_id: str, content: object, *, cause: int | None = None, conversation: str = "") -> Row:
        """Send a message from the mod to one participant. An agent reacts to this message. With a ``cause``, the
        message is charged to the budget of the cause's conversation. With a ``conversation`` (an id), the message is
        sent in its own thread."""

    def open_item(
        self, root: int, key: str, kind: str, who: str = "", note: str = "", *, seq: int | None = None
    ) -> None:
        """Report that a conversation has an open item, such as a task or a timer. The conversation is not quiet until
        `close_item` is called with the same key.

        ``root`` is the conversation's first message (`MessageHead.root`). ``key`` is any text that the mod chooses.
        ``who`` is the participant who has to act next. Participants who may read the message ``seq`` (by default the
        root) see the item, its kind and its note. A new item replaces an open item with the same key.
        """

    def close_item(self, root: int, key: str) -> None:
        """Report that an item is no longer open. Do nothing if the item is not open."""

    def notify(self, agent_id: str, content: object, *, cause: int | None = None, conversation: str = "") -> Row | None:
        """Send a message like `answer`, if possible. If the cause is unknown, it is omitted. If the participant was
        removed or the conversation has no budget left, nothing is sent and the result is None."""

    def head(self, seq: int) -> MessageHead:
        """Return the head of a message that the caller may read. Raise `UnknownMessage` for any other message.

        A change knows only these messages: those in the operation's arguments of type `Seq`, the message passed to a
        hook, the message for which ``after`` submitted a payload, and messages that the change itself has sent.
        """

    def cold(self, key: str) -> Any:
        """Return the JSON value that the mod has stored as cold under a key, or None. Cold values are in the ledger,
        not in memory, so the operation must list the key in ``needs``."""

    def put_cold(self, key: str, value: object) -> None:
        """Store a cold JSON value under a key of the mod. None deletes the value."""

    def log(self, event: dict[str, object], *, hides_args: bool = False) -> Row:
        """Add a row of type ``mod`` to the log. The row contains the event, and the call with its arguments. Nobody
        receives the row. Exports contain it, a replay repeats its call, and a late repeat of the call is recognized by
        it. With ``hides_args``, the row contains no trace of the arguments, and a late repeat is not recognized."""

    def thread(self, of: str | MessageHead) -> MessageHead:
        """Return the head that the next message in a thread would have. ``of`` is the id of the thread, or the head of
        one of its messages. Raise `UnknownMessage` if the caller may not read the next message. A mod can store this
        head with data that belongs to the thread, and later check the head with `reads_now`.

        For a reply thread (``thread:SEQ``), list the seq in ``needs`` of the operation.
        """

    def reads_now(self, head: MessageHead) -> bool:
        """Return whether the caller is an operator or would receive the next message in the thread of ``head``."""

    def message_head(self, seq: int) -> MessageHead:
        """Return the head of a message, as `head` does. Operators get the head of every message that the change
        knows."""

    def edit(self, seq: int, content: object, *, text: str | None = None, before: object) -> Row:
        """Replace the content of the caller's own message. Return the row of the edit. ``before`` is the content before
        the edit, which a ``prepare`` function has read. The row contains this content too."""

    def delete(self, seq: int, edits: Iterable[int]) -> Row:
        """Delete the caller's own message. Operators may delete any message. ``edits`` are the seqs of the message's
        edit rows. The ledger removes the text from the message and from these rows."""

    def check_may_write(self, head: MessageHead) -> None:
        """Raise `Forbidden` unless the node's rights let the caller send to the thread of ``head``."""

    def update_screens(
        self, head: MessageHead, body: dict[str, object], agent_ids: Iterable[str] | None = None
    ) -> None:
        """Send the notice ``mod`` to operators, and to people and services who may read a message or a thread.
        ``agent_ids`` restricts the readers to these ids. The notice is not stored."""


def run_before_hooks(mods: Iterable[Mod], incoming: Incoming) -> RoundelayError | None:
    """Do step 3: return the first refusal of the mods' ``before`` hooks. A hook that fails also refuses the message,
    because such hooks exist to guard the network."""
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
    """Context of an ``after`` hook. ``submit`` queues a payload for ``apply_entry``. Payloads are applied in order."""

    state: State
    submit: Callable[[Any], None]


class Upkeep(Struct, frozen=True):
    """Context of a ``maintain`` hook. ``first_seq`` is the oldest seq that retention has kept, and ``now`` is the hub's
    time in ms. ``list_cold(prefix, limit, after)`` returns cold keys of the mod."""

    state: State
    submit: Callable[[Any], None]
    first_seq: int
    now: int
    list_cold: Callable[[str, int, str], Awaitable[list[str]]]


class Operation(Struct, frozen=True):
    """An operation of a mod or of the hub: its wire name, the type of its arguments, whether it changes anything, and
    whether only operators may call it."""

    op: str
    description: str
    args_type: type[Struct]
    function: Callable[..., Any]
    is_change: bool
    is_for_operators: bool = False
    prepare: Callable[..., Awaitable[Any]] | None = None
    """Method that does the IO of a changing operation before the change. It receives a `Reading` and the arguments."""
    is_tool: bool = True
    """Whether agents get the operation as a tool."""
    needs: Callable[[Any], Iterable[str | int]] | None = None
    """Function that returns the data that a call with these arguments reads from the ledger: keys of cold values (str)
    and seqs of messages (int)."""

    def decode(self, args: Raw) -> Struct:
        """Decode the arguments. If they are wrong, raise `InvalidArguments`, whose text names the wrong field and all
        valid fields."""
        try:
            return msgspec.json.decode(args, type=self.args_type)
        except (msgspec.DecodeError, RecursionError) as error:
            names = ", ".join(
                field.encode_name + ("" if field.required else "?") for field in msgspec.structs.fields(self.args_type)
            )
            problem = str(error).replace(f"`str` matching regex {ID_PATTERN!r}", ID_IN_WORDS)
            raise InvalidArguments(f"{self.op}: {problem}. Its arguments are {{{names}}}.") from error

    def list_needs(self, args: Struct) -> tuple[str | int, ...]:
        """Return the keys and seqs that a call with these arguments needs from the ledger."""
        return tuple(self.needs(args)) if self.needs is not None else ()

    def call(self, context: Any, args: Struct) -> Any:
        """Run the operation with decoded arguments. ``context`` is a `Change` or a `Reading`. A reading operation
        returns an awaitable."""
        # Check for operators here, because every call passes through this method.
        if self.is_for_operators and not context.origin.is_operator:
            raise Forbidden(
                "Only operators may call this operation. Use the owner's token, or a token made by: roundelay token "
                "create --operator."
            )
        return self.function(context, **_as_keywords(args))

    def info(self) -> OperationInfo:
        """Return the operation's entry in the ``welcome`` frame."""
        return OperationInfo(
            self.op,
            self.description,
            args_schema(self.args_type),
            "change" if self.is_change else "read",
            UNSET if self.is_tool else False,
        )

    async def run_prepare(self, reading: Any, args: Struct) -> Any:
        """Do the operation's IO and return its result. The change receives the result as ``change.prepared``."""
        assert self.prepare is not None
        return await self.prepare(reading, **_as_keywords(args))


def _as_keywords(args: Struct) -> dict[str, Any]:
    return {name: getattr(args, name) for name in args.__struct_fields__}


def operation(
    kind: Literal["change", "read"],
    *,
    name: str | None = None,
    prepare: Callable[..., Awaitable[Any]] | None = None,
    is_tool: bool = True,
    needs: Callable[[Any], Iterable[str | int]] | None = None,
) -> Callable[[F], F]:
    """Mark a method of a mod as an operation.

    A ``change`` operation is ``def method(self, change, *, arg: type, ...)``, synchronous and without IO. A ``read``
    operation is ``async def method(self, reading, *, arg: type, ...)``. Models see the first paragraph of the docstring
    as the description.

    ``prepare`` is a method ``async def method(self, reading, *, arg: type, ...)`` that does IO before a change. The
    method must be idempotent, because it runs again when the client repeats its call. The change gets its result as
    ``change.prepared``. With ``is_tool=False`` agents do not get the operation as a tool. ``needs`` is a function that
    gets the arguments of a ``change`` and returns the cold keys and seqs that the change reads (`Change.cold`).
    """

    def mark(function: F) -> F:
        marked = (kind, name or function.__name__, prepare, is_tool, needs)
        function.__roundelay_operation__ = marked  # type: ignore[attr-defined]
        return function

    return mark


class Mod:
    """Base class of mods. The docstring of this module lists the hooks. ``id`` names the mod. Its address is
    ``mod:ID``, and its operations are called ``ID.name``."""

    id: ClassVar[str] = ""
    screens: ClassVar[Sequence[ModScreen]] = ()
    """Screens for the page and the terminal UI, described as data."""
    stores_blobs: ClassVar[bool] = False
    """Whether the mod uses the node's blob store. Such a mod must store a key ``blob/SHA256`` for each blob that it
    needs, because the hub deletes blobs without a key. Nodes with a shared log refuse such a mod."""

    def before(self, incoming: Incoming) -> None:
        """Refuse a message by raising a `RequestError`."""

    def apply(self, change: Change, message: Row) -> None:
        """React to an accepted message, in the message's commit. ``message.target`` is ``mod:ID`` if the message is
        addressed to this mod."""

    def ended(self, change: Change, reaction: OpenReaction) -> None:
        """React to the end of an agent's reaction, in the commit of the reaction's final record. Messages of the change
        are sent in the agent's name. If the hook raises an error, its change is discarded and the reaction still
        ends."""

    def undelivered(self, change: Change, failed: Undelivered) -> None:
        """React to a dead letter, in the commit of the recipient's fifth failure. Messages of the change are sent in
        the mod's name. If the hook raises an error, its change is discarded and the message is still a dead letter."""

    def deleted(self, change: Change, message: MessageHead) -> None:
        """React to the deletion of a message, in the same commit. If the hook raises an error, the deletion is
        refused."""

    def removed(self, change: Change, agent_id: str) -> None:
        """React to the removal of a participant, in the same commit. If the hook raises an error, its change is
        discarded and the participant is still removed."""

    def due(self, change: Change, key: str) -> None:
        """React to a due time. The due time is removed before this call. If the hook raises an error, its changes are
        discarded and the due time stays removed."""

    def apply_entry(self, change: Change, payload: Any) -> None:
        """Apply a payload that ``after`` submitted."""

    def after(self, context: AfterContext, message: Row) -> Awaitable[None] | None:
        """React to a stored message after the commit. This hook may do IO. If the hub stops during the call, the call
        is not repeated."""

    async def maintain(self, context: Upkeep) -> None:
        """Do periodic work. The hub calls this hook once a minute, in a cluster only on the leader. The hook may do
        IO."""

    def standing(self, reading: Any, trigger: MessageHead, listeners: Collection[str]) -> list[str]:
        """Return sentences about the conversation of ``trigger`` for the end of an agent's prompt. They may contain
        only information that both the caller of the `Reading` and all ``listeners`` may have. No IO."""
        return []

    def operations(self) -> list[Operation]:
        """Return the operations of this mod, sorted by name."""
        declared = []
        for attribute in dir(type(self)):
            method = getattr(self, attribute)
            mark = getattr(method, "__roundelay_operation__", None)
            if mark is not None:
                kind, name, prepare, is_tool, needs = mark
                made = make_operation(self.id, method, name=name, is_change=kind == "change", needs=needs)
                bound = None if prepare is None else MethodType(prepare, self)
                declared.append(msgspec.structs.replace(made, prepare=bound, is_tool=is_tool))
        return sorted(declared, key=lambda operation: operation.op)

    def describe(self) -> ModInfo:
        """Return the mod's entry in the ``welcome`` frame."""
        return ModInfo(self.id, [operation.info() for operation in self.operations()])

    def overrides(self, hook: str) -> bool:
        """Return whether this mod implements a hook. The hub calls only implemented hooks."""
        return getattr(type(self), hook) is not getattr(Mod, hook)


def make_operation(
    owner: str,
    function: Callable[..., Any],
    *,
    name: str = "",
    is_change: bool,
    is_for_operators: bool = False,
    needs: Callable[[Any], Iterable[str | int]] | None = None,
) -> Operation:
    """Build the operation ``OWNER.NAME`` from a function or from a method of a mod. ``name`` defaults to the name of
    the function."""
    name = name or function.__name__
    declared = getattr(function, "__func__", function)
    description, args_type = _read_declaration(owner, name, declared, skipped=2 if declared is not function else 1)
    return Operation(f"{owner}.{name}", description, args_type, function, is_change, is_for_operators, needs=needs)


@cache  # otherwise each hub in a process would create about 50 types, which takes 12 ms
def _read_declaration(mod: str, name: str, method: Callable[..., Any], skipped: int) -> tuple[str, type[Struct]]:
    """Return the description and the argument type of an operation. The first ``skipped`` parameters of ``method`` do
    not count as arguments of the operation."""
    description = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    if not description:
        raise ModError(f"The operation {mod}.{name} has no docstring. Add one: models read its first paragraph.")
    hints = get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[skipped:]:
        hint = hints[parameter.name]
        has_default = parameter.default is not inspect.Parameter.empty
        fields.append((parameter.name, hint, parameter.default) if has_default else (parameter.name, hint))
    title = "".join(part.title() for part in f"{mod}_{name}".split("_"))
    # Refuse unknown arguments. Otherwise a misspelled argument from a model would have no effect, and nobody would
    # notice.
    args_type = msgspec.defstruct(title, fields, forbid_unknown_fields=True, kw_only=True, frozen=True)
    return description, args_type


@cache
def _seq_fields(args_type: type[Struct]) -> tuple[str, ...]:
    def names_messages(hint: Any) -> bool:
        return hint == Seq or any(names_messages(inner) for inner in get_args(hint))

    return tuple(field.name for field in msgspec.structs.fields(args_type) if names_messages(field.type))


def list_named_seqs(args: Struct) -> list[int]:
    """Return the seqs in an operation's arguments, from fields of type `Seq` and from lists and tuples of `Seq`."""
    seqs: list[int] = []
    for name in _seq_fields(type(args)):
        value = getattr(args, name)
        seqs += value if isinstance(value, list | tuple) else [value] if isinstance(value, int) else []
    return seqs


@cache  # Each hub in a process describes all operations, and a schema takes 0.3 ms.
def args_schema(args_type: type[Struct]) -> dict[str, Any]:
    """Return the JSON Schema of an operation's arguments: one object, without references."""
    _, components = msgspec.json.schema_components([args_type], ref_template="#/$defs/{name}")
    schema = dict(components.pop(args_type.__name__))
    schema.pop("title", None)
    schema["additionalProperties"] = False
    schema.setdefault("required", [])
    if components:
        schema["$defs"] = components
    return schema


def list_blobs_in_use(state: State) -> set[str]:
    """Return the SHA-256 of every blob that mods refer to."""
    return {key.rpartition("/")[2] for key, _ in state.items("mod") if "/blob/" in key}


def load_mods(wanted: Sequence[str | Mod], known: Mapping[str, type[Mod]]) -> list[Mod]:
    """Load mods by name. A name is looked up in ``known``, then as an import path ``module:Class``, then among the
    entry points ``roundelay.mods``. A `Mod` object is returned unchanged.

    If a mod cannot be loaded, raise `ModError` with the mod and the reason, because a node must not start without one
    of its mods.
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
        # Read the declarations now, so that a wrong declaration fails at the start of the node and not at the first
        # call.
        types = {operation.op: operation.args_type for operation in mod.operations()}
        arguments = {op: args_type.__struct_fields__ for op, args_type in types.items()}
        check_screens(mod.id, mod.screens, arguments, lambda op: args_schema(types[op])["properties"])
    except ModError:
        raise
    except Exception as error:
        raise ModError(f"The mod {name!r} failed to load: {type(error).__name__}: {error}.") from error
    if not isinstance(mod, Mod) or not is_id(mod.id):
        raise ModError(f"The mod {name!r} is not a roundelay Mod with a lower-case id. docs/mods.md shows one.")
    if mod.id in taken or mod.id == "network":
        raise ModError(f"The mod id {mod.id!r} is taken. Each mod needs an id of its own.")
    return mod


def add_mod_folder(folder: Path | None) -> None:
    """Make the folder of the node's file importable for mods. The folder is searched last."""
    if folder is not None and str(folder.resolve()) not in sys.path:
        # Append at the end. A file in this folder must not replace another module with the same name.
        sys.path.append(str(folder.resolve()))


def _find_mod(name: str) -> Callable[[], Mod]:
    return _import_mod(name) if ":" in name else _find_entry_point(name)


def _import_mod(name: str) -> Callable[[], Mod]:
    """Import the object that ``module:Class`` names. Raise `ModError` if the object does not exist."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ModError(f"The mod {name!r} is not an import path. Write module:Class, such as polls:Polls for polls.py.")
    try:
        target: object = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        # The mod exists, but one of its own imports fails. The original error is more useful than "not found".
        if error.name != module_name:
            raise
        raise ModError(
            f"The mod {name!r} was not found: there is no {module_name}.py beside the node's file, and no installed "
            f"module {module_name}."
        ) from error
    except AttributeError as error:
        raise ModError(f"The mod {name!r} was not found: {module_name} has no {attribute}.") from error
    if isinstance(target, Mod):
        return lambda: target
    if not callable(target):
        raise ModError(f"The mod {name!r} is a {type(target).__name__}. Name a subclass of roundelay.network.mod.Mod.")
    return target


def _find_entry_point(name: str) -> Callable[[], Mod]:
    points = entry_points(group="roundelay.mods", name=name)
    for point in points:
        loaded: Callable[[], Mod] = point.load()
        return loaded
    installed = sorted(point.name for point in entry_points(group="roundelay.mods"))
    more = f"; installed are {', '.join(installed)}" if installed else ""
    raise ModError(
        f"No mod is called {name!r}{more}. Check the node's `mods:`, or install the package that provides it. Name a "
        "mod in a file beside the node's by its import path, such as polls:Polls for the class Polls of polls.py."
    )
