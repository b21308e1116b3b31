"""Fingerprints of requests, and tapes, which are recorded replies for `TapeModel`.

A fingerprint is a small set of hashes. The hashes show whether the model now gets a different request, and which part
is different. `fingerprint_request` creates the fingerprint that is stored with each recorded reply (``request`` in the
journal's ``model_reply``). `find_drift` compares a stored fingerprint with the current request. The hashes contain the
positions of tool calls instead of their ids, so another provider's ids make no difference.

A tape is a file with one line per turn, which people can read and edit. A line contains the model's text and calls, and
a fingerprint of the request. New reactions get the recorded runs in the order of recording. However, a reaction whose
first request exactly matches the beginning of a recorded run gets this run. A line without ``request``, for example a
line written by hand, answers any request. The only IO of this module is reading and writing tapes.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundelay.network.durable_files import replace_file
from roundelay.network.text import truncate

from .model import (
    AssistantMessage,
    ChatMessage,
    Model,
    ModelDelta,
    ModelError,
    ModelFailure,
    ModelReply,
    ModelRequest,
    OnDelta,
    SystemMessage,
    ToolCall,
    ToolMessage,
    ToolSpec,
    Usage,
    UserMessage,
    derive_call_id,
)

Fingerprint = Mapping[str, Any]
"""Fingerprint of a request. ``hash`` covers the messages, the tools and the tool choice. All other fields locate a
difference.

``messages`` contains the first letter of each message's role and the beginning of its hash. ``tools`` contains a hash
by tool name in the first turn of a run, and one hash of all tools in later turns. ``attached`` contains a hash of each
image and file, if there are any. ``lines`` (first turns only) contains the hashes of the lines of the first two
messages.

Each hash is the beginning of a longer hash, so the longer hashes of earlier versions can still be compared. Earlier
versions stored lists and objects (``messages``, ``tools``, ``lines``) instead of texts.
"""

HASH_CHARS = 16
"""Length of the hash that detects any change. The shorter hashes of `SHORT_CHARS` characters only locate the change."""

SHORT_CHARS = 4
MAX_LINES = 2000
"""Maximum number of compared lines in the instruction and in the prompt."""

MAX_SHOWN_CHARS = 160
_LINE_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def fingerprint_request(model: Model, request: ModelRequest) -> dict[str, Any]:
    """Return the fingerprint of a request to a model, as plain JSON."""
    hashes = _Hashes.of(model, request)
    fingerprint: dict[str, Any] = {
        "hash": hashes.whole[:HASH_CHARS],
        "model": hashes.model,
        "messages": "".join(digest[: 1 + SHORT_CHARS] for digest in hashes.messages),
        "tools": hashes.all_tools[:SHORT_CHARS],
    }
    if hashes.settings:
        fingerprint["settings"] = {name: value[:SHORT_CHARS] for name, value in hashes.settings.items()}
    if hashes.choice != "auto":
        fingerprint["tool_choice"] = hashes.choice
    if hashes.attached:
        fingerprint["attached"] = [digest[:SHORT_CHARS] for digest in hashes.attached]
    # Store details only in the first turn. Later turns have the same tools and prompt, so storing the details again
    # would only make each record larger.
    if not any(isinstance(message, AssistantMessage) for message in request.messages):
        fingerprint["tools"] = ",".join(f"{name}={value[:SHORT_CHARS]}" for name, value in hashes.tools.items())
        fingerprint["lines"] = " ".join(
            "".join(_print_lines(message.content or "")) for message in request.messages[:2]
        )
    return fingerprint


def find_drift(recorded: Fingerprint, model: Model, request: ModelRequest, *, any_model: bool = False) -> str | None:
    """Return the most specific difference between the recorded request and this request, or None if they are equal.

    ``any_model`` ignores the model and its settings.
    """
    now = _Hashes.of(model, request)
    # A tape may replace any model. With ``any_model``, compare only the content of the request.
    drift = None if any_model else _compare_models(recorded, now)
    if drift is not None or _is_same(recorded.get("hash"), now.whole):
        return drift
    return (
        _compare_choices(recorded, now)
        or _compare_tools(recorded.get("tools"), now, request.tools)
        or _compare_messages(recorded, now, request.messages)
        or _compare_attached(recorded.get("attached") or (), now.attached)
        or "the request has changed"
    )


def read_settings(model: Model) -> Mapping[str, object]:
    """Return the settings that the model sends with each request (``temperature``, ...), if it exposes them."""
    settings = getattr(model, "settings", None)
    return settings if isinstance(settings, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Complete hashes of a request. A fingerprint stores only the first characters of each hash."""

    model: str
    settings: Mapping[str, str]
    choice: str
    messages: Sequence[str]
    tools: Mapping[str, str]
    attached: Sequence[str]

    @classmethod
    def of(cls, model: Model, request: ModelRequest) -> _Hashes:
        choice = request.tool_choice
        return cls(
            model.name,
            {name: _digest(_write(value)) for name, value in sorted(read_settings(model).items())},
            choice if isinstance(choice, str) else f"the tool {choice.name}",
            _digest_messages(request.messages),
            {tool.name: _digest_tool(tool) for tool in request.tools},
            [_digest(content) for content in _list_attached(request.messages)],
        )

    @property
    def all_tools(self) -> str:
        return _digest(*self.tools, *self.tools.values())

    @property
    def whole(self) -> str:
        # Exclude the model and its settings: they are compared by name, so that the error can name the setting.
        return _digest(self.choice, self.all_tools, *self.messages, *self.attached)


def _is_same(recorded: object, now: str) -> bool:
    """Return whether a stored hash is the beginning of the hash ``now``."""
    # Fingerprints of earlier versions have other lengths. Refuse an empty text, because it would match everything.
    return isinstance(recorded, str) and recorded != "" and now.startswith(recorded)


def _compare_models(recorded: Fingerprint, now: _Hashes) -> str | None:
    if recorded.get("model") != now.model:
        return f'the model was "{recorded.get("model")}" and is now "{now.model}"'
    then = recorded.get("settings") or {}
    for name in sorted({*then, *now.settings}):
        if not _is_same(then.get(name), now.settings.get(name, "")):
            how = "is new" if name not in then else "is missing" if name not in now.settings else "has changed"
            return f'the setting "{name}" of model "{now.model}" {how}'
    return None


def _compare_choices(recorded: Fingerprint, now: _Hashes) -> str | None:
    was = recorded.get("tool_choice", "auto")
    return f"the tool choice was {was} and is now {now.choice}" if was != now.choice else None


def _read_tools(recorded: object) -> Mapping[str, str] | None:
    """Return the hash of each tool by tool name, or None if the fingerprint stores a single hash for all tools."""
    match recorded:
        case Mapping():
            return recorded
        case "":
            return {}
        case str() if "=" in recorded:
            return {name: value for name, _, value in (item.partition("=") for item in recorded.split(","))}
        case _:
            return None


def _compare_tools(recorded: object, now: _Hashes, tools: Sequence[ToolSpec]) -> str | None:
    then, present = _read_tools(recorded), now.tools
    if then is None:
        is_same = _is_same(recorded, now.all_tools)
        return None if is_same else f"the tools have changed; they are now: {', '.join(present) or 'none'}"
    added = [tool for tool in tools if tool.name not in then]
    gone = [name for name in then if name not in present]
    for name in gone:  # if an added tool has the same hash except for its name, the tool was renamed
        for tool in added:
            if _is_same(then[name], _digest(name, tool.description, _write(tool.parameters))):
                return f'the tool "{name}" is now called "{tool.name}"'
    if gone or added:
        new = [tool.name for tool in added]
        return ", and ".join(
            [*_describe_tools(gone, "is missing", "are missing"), *_describe_tools(new, "was added", "were added")]
        )
    for name, value in present.items():
        if not _is_same(then[name], value):
            return f'the description or the parameters of the tool "{name}" have changed'
    # Report a different order too, because it can change which tool a model chooses.
    if list(then) != list(present):
        return f"the tools are in a different order: {', '.join(present)}"
    return None


def _describe_tools(names: Sequence[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    listed = ", ".join(f'"{name}"' for name in names)
    return [f"the tool {listed} {one}" if len(names) == 1 else f"the tools {listed} {many}"]


def _compare_messages(recorded: Fingerprint, now: _Hashes, messages: Sequence[ChatMessage]) -> str | None:
    recorded_messages = recorded.get("messages") or ""
    then = _split(recorded_messages, 1 + SHORT_CHARS) if isinstance(recorded_messages, str) else list(recorded_messages)
    present = [digest[: len(then[0])] for digest in now.messages] if then else list(now.messages)
    for index, (was, digest) in enumerate(zip(then, present, strict=False)):
        if was == digest:
            continue
        name, content = f"message {index} ({_ROLES.get(digest[:1], 'unknown')})", messages[index].content
        # If both requests contain both messages, only the order has changed. Report the move instead of changed texts.
        if was in present[index:] and digest in then[index:]:
            return f"{name} has moved; it is now: {_show(content)}"
        if was[:1] != digest[:1]:
            return f"{name} had the role {_ROLES.get(was[:1], 'unknown')}; it is now: {_show(content)}"
        lines = _read_lines(recorded.get("lines"))
        if index < len(lines):
            return f"{name}: {_compare_lines(lines[index], content or '')}"
        return f"{name} has changed; it is now: {_show(content)}"
    if len(then) < len(present):
        added = present[len(then)]
        return f"message {len(then)} ({_ROLES.get(added[:1], 'unknown')}) is new: {_show(messages[len(then)].content)}"
    if len(then) > len(present):
        return f"message {len(present)} ({_ROLES.get(then[len(present)][:1], 'unknown')}) is missing"
    return None


def _compare_attached(then: Sequence[str], present: Sequence[str]) -> str | None:
    for number, (was, digest) in enumerate(zip(then, present, strict=False), 1):
        if not _is_same(was, digest):
            return f"number {number} of the images and files has changed"
    if len(then) != len(present):
        return f"there were {len(then)} images and files, and now there are {len(present)}"
    return None


def _compare_lines(then: Sequence[str], text: str) -> str:
    """Return a text that names the first line of a message that differs from the recorded message."""
    lines = text.split("\n")
    present = _print_lines(text, is_long=any(len(line) == LONG_LINE_CHARS for line in then))
    note = "the same lines in a different order; " if Counter(then) == Counter(present) else ""
    # Disable autojunk, because it ignores lines that repeat often. With autojunk, the error could name the wrong line.
    for kind, start, end, first, last in SequenceMatcher(None, then, present, autojunk=False).get_opcodes():
        if kind == "replace":
            return f"{note}line {first + 1} has changed; it is now: {_show(lines[first])}"
        if kind == "insert":
            count = "a line" if last - first == 1 else f"{last - first} lines"
            return f"{note}{count} more at line {first + 1}: {_show(lines[first])}"
        if kind == "delete":
            count = "a line" if end - start == 1 else f"{end - start} lines"
            where = f"after {_show(lines[first - 1])}" if first else "at the beginning"
            return f"{note}{count} missing {where}"
    return f"a line after the first {MAX_LINES} has changed, or two different lines have the same short hash"


LONG_LINE_CHARS = 4
"""Length of a line's hash in fingerprints of earlier versions, in hexadecimal digits."""


def _print_lines(text: str, *, is_long: bool = False) -> list[str]:
    """Return a short hash of each line: 12 bits as two characters."""
    lines = text.encode("utf-8", "replace").split(b"\n", MAX_LINES)[:MAX_LINES]
    hashes = [zlib.crc32(line) & 0xFFFF for line in lines]
    return [
        f"{checksum:04x}" if is_long else _LINE_DIGITS[checksum >> 6 & 63] + _LINE_DIGITS[checksum & 63]
        for checksum in hashes
    ]


def _read_lines(recorded: object) -> list[list[str]]:
    if isinstance(recorded, str):
        return [_split(text, 2) for text in recorded.split(" ")]
    return [_split(text, LONG_LINE_CHARS) for text in recorded] if isinstance(recorded, list) else []


def _split(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


_ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def _show(text: str | None) -> str:
    return f'"{truncate((text or "").strip(), MAX_SHOWN_CHARS)}"'


def _digest_messages(messages: Sequence[ChatMessage]) -> list[str]:
    positions: dict[str, int] = {}  # position of each call id, in the order of the calls
    digests = []
    for message in messages:
        match message:
            case SystemMessage(content):
                digests.append("s" + _digest(content))
            case UserMessage(content):
                digests.append("u" + _digest(content))
            case AssistantMessage(content, calls):
                parts = ["" if content is None else content]
                for call in calls:
                    # Providers make new call ids in each run. With positions instead of ids, the same calls have the
                    # same hash.
                    positions[call.id] = len(positions)
                    parts += [call.name, call.arguments]
                digests.append("a" + _digest(*parts))
            case ToolMessage(call_id, content):
                digests.append("t" + _digest(str(positions.get(call_id, "")), content))
    return digests


def _list_attached(messages: Sequence[ChatMessage]) -> list[str]:
    users = [message for message in messages if isinstance(message, UserMessage)]
    return [
        attached
        for message in users
        for attached in (
            *message.images,
            *("\x1f".join((file.name, file.media_type, file.data)) for file in message.files),
        )
    ]


def _digest_tool(tool: ToolSpec) -> str:
    # Hash each schema only once, because schemas are large and the same in every turn.
    cached = _tools.get(id(tool.parameters))
    if cached is not None and cached[0] is tool.parameters and cached[1] == (tool.name, tool.description):
        return cached[2]
    digest = _digest(tool.name, tool.description, _write(tool.parameters))
    if len(_tools) >= MAX_KNOWN_TOOLS:
        _tools.clear()
    _tools[id(tool.parameters)] = (tool.parameters, (tool.name, tool.description), digest)
    return digest


MAX_KNOWN_TOOLS = 4096
# Digests by the identity of a schema. Each entry also references the schema, because otherwise another object could
# later get the same identity.
_tools: dict[int, tuple[object, tuple[str, str], str]] = {}


def _write(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


class TapedCall(BaseModel):
    """A tool call on a tape. The arguments are a JSON object, or text if the model did not write valid JSON."""

    model_config = ConfigDict(extra="forbid")

    tool: str
    arguments: dict[str, Any] | str = {}
    id: str = ""


class TapedTurn(BaseModel):
    """One line of a tape.

    ``run`` names the reaction of the turn. ``for_message`` is only for human readers. If ``failure`` is set, the model
    failed permanently in this turn, and ``text`` is the reason.
    """

    model_config = ConfigDict(extra="forbid")

    run: str = ""
    turn: int = Field(default=1, ge=1)
    for_message: str = ""
    text: str | None = None
    calls: list[TapedCall] = []
    failure: ModelFailure | None = None
    finish_reason: str = ""
    usage: Usage = Usage()
    model: str = ""
    request: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, reply: ModelReply, *, run: str, turn: int, request: Mapping[str, Any] | None, for_message: str = ""
    ) -> TapedTurn:
        """Return the tape line for a recorded reply."""
        calls = [
            TapedCall(tool=call.name, arguments=_parse_arguments(call.arguments), id=call.id)
            for call in reply.tool_calls
        ]
        return cls(
            run=run,
            turn=turn,
            for_message=for_message,
            text=reply.text,
            calls=calls,
            finish_reason=reply.finish_reason,
            usage=reply.usage,
            model=reply.model,
            request=dict(request) if request is not None else None,
        )

    def make_reply(self, request: ModelRequest, name: str) -> ModelReply:
        """Return the model reply that this tape line stores. Raises `ModelError` if the line stores a failure."""
        if self.failure is not None:
            error = ModelError(self.text or "The model failed.", reason=self.failure)
            error.retryable = False  # this failure ended the recorded run, after all its retries
            raise error
        calls = tuple(
            ToolCall(call.id or derive_call_id(request, number), call.tool, _write_arguments(call.arguments))
            for number, call in enumerate(self.calls)
        )
        reason = self.finish_reason or ("tool_calls" if calls else "stop")
        return ModelReply(self.text, calls, self.usage, reason, self.model or name)


def write_tape(path: Path, agent_id: str, turns: Iterable[TapedTurn]) -> None:
    """Write a tape. Each line omits empty fields."""
    lines = [json.dumps({"roundelay_tape": 1, "agent": agent_id})]
    for turn in turns:
        value = turn.model_dump(mode="json", exclude_defaults=True)
        # Write the run and the turn first, even if they have default values, because people edit tapes.
        ordered = {"run": turn.run, "turn": turn.turn, **value}
        lines.append(json.dumps(ordered, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write("\n".join(lines) + "\n")


def read_tape(path: Path) -> list[TapedTurn]:
    """Read a tape. Raises `ModelError` with the number of an invalid line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a text may contain U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise _make_error(
            f"The tape {path} cannot be read ({error}). Create it from a recorded run with: roundelay tapes"
        ) from error
    turns = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            value = json.loads(line)
            if isinstance(value, dict) and "roundelay_tape" in value:
                continue
            turns.append(TapedTurn.model_validate(value))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise _make_error(f"{path}:{number}: {where or 'the line'}: {first['msg']}") from error
        except ValueError as error:
            raise _make_error(f"{path}:{number}: the line is not JSON: {error}") from error
    return turns


@dataclass(slots=True)
class _Run:
    """Recorded run of a tape, with the number of turns that were already played."""

    turns: list[TapedTurn]
    played: int = 0
    answered: dict[str, TapedTurn] = field(default_factory=dict)  # by request, because a resumed reaction repeats them


class TapeModel:
    """Model that answers requests with the recorded replies of a tape.

    A request fails if the tape does not answer it, or if it differs from the recorded request. The error names the
    position and the difference. If ``is_strict`` is False, a request may differ. ``problems`` collects all failures for
    tests.
    """

    def __init__(self, tape: Path | Sequence[TapedTurn], *, is_strict: bool = True) -> None:
        self.name = str(tape) if isinstance(tape, Path) else "tape"
        self.problems: list[str] = []
        turns = read_tape(tape) if isinstance(tape, Path) else list(tape)
        by_run: dict[str, list[TapedTurn]] = {}
        for number, turn in enumerate(turns):
            by_run.setdefault(turn.run or f"line {number}", []).append(turn)
        self._waiting = [_Run(run_turns) for run_turns in by_run.values()]
        self._bound: dict[tuple[str, str], _Run] = {}
        self._is_strict = is_strict

    @property
    def is_begun(self) -> bool:
        """Whether a reaction has requested any turn of the tape."""
        return bool(self._bound)

    @property
    def unplayed(self) -> int:
        """Number of recorded turns that no reaction has requested."""
        runs = (*self._waiting, *self._bound.values())
        return sum(len(run.turns) - run.played for run in {id(run): run for run in runs}.values())

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Return the tape's reply to this request. Raises `ModelError` if the tape has no reply for it."""
        reply = self._find(request).make_reply(request, self.name)
        if on_delta is not None and reply.text:
            on_delta(ModelDelta(reply.text))
        return reply

    def _find(self, request: ModelRequest) -> TapedTurn:
        request_key = repr((request.messages, request.tools, request.turn))
        reaction_key = (request.reaction, request.agent_id)
        # A resumed reaction repeats requests whose replies it had not recorded. Return the same reply as before,
        # without advancing on the tape.
        run = self._bound.get(reaction_key)
        if run is not None and request_key in run.answered:
            return run.answered[request_key]
        # A first turn that is not answered yet starts a new run, even for a known reaction.
        if run is None or request.turn == 1:
            run = self._bind(reaction_key, request)
        # Raise an error instead of starting the run again: repeated answers could make an agent loop forever.
        if run.played == len(run.turns):
            raise self._report(
                f"{_name(request)} asks for turn {request.turn}, but the tape {self.name} ends this reaction after "
                f"turn {run.turns[-1].turn}"
            )
        turn = run.turns[run.played]
        drift = self._compare(turn, request)
        if drift is not None:
            self.problems.append(drift)
            if self._is_strict:
                raise _make_error(
                    f"{drift}. Record the tape again, or remove `request` from the line to answer any request."
                )
        run.played += 1
        run.answered[request_key] = turn
        return turn

    def _bind(self, reaction_key: tuple[str, str], request: ModelRequest) -> _Run:
        """Choose the recorded run for a new reaction: the run that began with exactly this request, or the next run."""
        if not self._waiting:
            raise self._report(f"{_name(request)} asks its model, but the tape {self.name} has no further reaction")
        # Prefer the run that began with this request, because parallel reactions may begin in any order.
        run = next((run for run in self._waiting if self._is_exact(run.turns[0], request)), self._waiting[0])
        self._waiting.remove(run)
        self._bound[reaction_key] = run
        return run

    def _is_exact(self, turn: TapedTurn, request: ModelRequest) -> bool:
        return turn.request is not None and find_drift(turn.request, self, request, any_model=True) is None

    def _compare(self, turn: TapedTurn, request: ModelRequest) -> str | None:
        if turn.request is None:
            return None
        drift = find_drift(turn.request, self, request, any_model=True)
        return f"{_name(request)}, turn {turn.turn} on the tape {self.name}: {drift}" if drift is not None else None

    def _report(self, text: str) -> ModelError:
        self.problems.append(text)
        return _make_error(f"{text}.")


class NamedModel:
    """Placeholder during a replay for the model with the name ``name``. A replay never calls a model."""

    def __init__(self, name: str, settings: Mapping[str, object] | None = None) -> None:
        self.name = name
        self.settings = dict(settings or {})

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        raise _make_error(f"A replay does not ask the model {self.name}.")


def _name(request: ModelRequest) -> str:
    return request.agent_id or "the agent"


def _make_error(text: str) -> ModelError:
    return ModelError(text, reason="misconfigured")


def _parse_arguments(arguments: str) -> dict[str, Any] | str:
    """Parse arguments as JSON if encoding the parsed value restores the same text. Otherwise return the text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _write_arguments(value) == arguments else arguments


def _write_arguments(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
