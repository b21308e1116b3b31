"""What a model was asked, as a print of it, and tapes: recorded replies that `TapeModel` plays.

A print is a few hashes: enough to notice that a model is asked something else now, and to name what. `print_request`
makes the one that is kept with each recorded reply (``request`` in the journal's ``model_reply``), `find_drift`
compares it with the request of today. Ids of tool calls count by their place, so that another provider's ids are no
difference.

A tape has one line for each turn, to be read and edited by people: what the model said and called, and a print of the
request that it answered. Turns of one reaction belong together; reactions are played in the order in which they were
recorded, or, where a request is exactly a recorded one, by that. A line without ``request`` answers whatever is asked:
so is one that a person wrote. No IO but reading and writing the file.
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

Print = Mapping[str, Any]
"""``hash`` of messages, tools and choice; ``model``, ``settings`` and ``tool_choice``; ``messages``, each as the first
letter of its role and the beginning of a hash; ``tools`` likewise by name in the first turn of a run, later one hash of
all; ``attached``, a hash of each image and file, where there are any; ``lines`` of the first two messages, in the first
turn.

Each hash is the beginning of a longer one, so the longer ones of earlier versions compare alike. Those had lists and
objects (``messages``, ``tools``, ``lines``) where there are texts now.
"""

HASH_CHARS = 16
"""Of the hash that tells whether anything is another; the short ones below only tell what."""

SHORT_CHARS = 4
MAX_LINES = 2000
"""Of the instruction and of the prompt, each: how many lines are told apart."""

MAX_SHOWN_CHARS = 160
_LINE_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def print_request(model: Model, request: ModelRequest) -> dict[str, Any]:
    """Give the print of a request to a model, as plain JSON."""
    now = _Hashes.of(model, request)
    made: dict[str, Any] = {
        "hash": now.whole[:HASH_CHARS],
        "model": now.model,
        "messages": "".join(digest[: 1 + SHORT_CHARS] for digest in now.messages),
        "tools": now.all_tools[:SHORT_CHARS],
    }
    if now.settings:
        made["settings"] = {name: value[:SHORT_CHARS] for name, value in now.settings.items()}
    if now.choice != "auto":
        made["tool_choice"] = now.choice
    if now.attached:
        made["attached"] = [digest[:SHORT_CHARS] for digest in now.attached]
    if not any(isinstance(message, AssistantMessage) for message in request.messages):
        made["tools"] = ",".join(f"{name}={value[:SHORT_CHARS]}" for name, value in now.tools.items())
        made["lines"] = " ".join("".join(_print_lines(message.content or "")) for message in request.messages[:2])
    return made


def find_drift(recorded: Print, model: Model, request: ModelRequest, *, any_model: bool = False) -> str | None:
    """Give the nearest difference between what was asked then and what is asked now, None if there is none.

    ``any_model``: whose model it is, and how that is set, does not count.
    """
    now = _Hashes.of(model, request)
    drift = None if any_model else _compare_models(recorded, now)
    if drift is not None or _is_same(recorded.get("hash"), now.whole):
        return drift
    return (
        _compare_choices(recorded, now)
        or _compare_tools(recorded.get("tools"), now, request.tools)
        or _compare_messages(recorded, now, request.messages)
        or _compare_attached(recorded.get("attached") or (), now.attached)
        or "the request is another one"
    )


def read_settings(model: Model) -> Mapping[str, object]:
    """Give what the model sends beside the request (``temperature``, ...), as far as it says."""
    settings = getattr(model, "settings", None)
    return settings if isinstance(settings, Mapping) else {}


@dataclass(frozen=True, slots=True)
class _Hashes:
    """The whole hashes of a request, of which a print holds the beginnings."""

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
        return _digest(self.choice, self.all_tools, *self.messages, *self.attached)


def _is_same(recorded: object, now: str) -> bool:
    """Whether a hash of a print is the beginning of this one."""
    return isinstance(recorded, str) and recorded != "" and now.startswith(recorded)


def _compare_models(recorded: Print, now: _Hashes) -> str | None:
    if recorded.get("model") != now.model:
        return f'the model was "{recorded.get("model")}" and is "{now.model}" now'
    then = recorded.get("settings") or {}
    for name in sorted({*then, *now.settings}):
        if not _is_same(then.get(name), now.settings.get(name, "")):
            how = "is new" if name not in then else "is gone" if name not in now.settings else "has another value"
            return f'the setting "{name}" of model "{now.model}" {how}'
    return None


def _compare_choices(recorded: Print, now: _Hashes) -> str | None:
    was = recorded.get("tool_choice", "auto")
    return f"the choice of tool was {was} and is {now.choice} now" if was != now.choice else None


def _read_tools(recorded: object) -> Mapping[str, str] | None:
    """Give the hashes of tools by their names; None where a print has only one of all."""
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
        return None if is_same else f"the tools are others; now they are: {', '.join(present) or 'none'}"
    added = [tool for tool in tools if tool.name not in then]
    gone = [name for name in then if name not in present]
    for name in gone:
        for tool in added:
            if _is_same(then[name], _digest(name, tool.description, _write(tool.parameters))):
                return f'the tool "{name}" is called "{tool.name}" now'
    if gone or added:
        new = [tool.name for tool in added]
        return ", and ".join([*_tell_tools(gone, "is gone", "are gone"), *_tell_tools(new, "was added", "were added")])
    for name, value in present.items():
        if not _is_same(then[name], value):
            return f'the tool "{name}" has another description or other parameters'
    if list(then) != list(present):
        return f"the tools are in another order: {', '.join(present)}"
    return None


def _tell_tools(names: Sequence[str], one: str, many: str) -> list[str]:
    if not names:
        return []
    listed = ", ".join(f'"{name}"' for name in names)
    return [f"the tool {listed} {one}" if len(names) == 1 else f"the tools {listed} {many}"]


def _compare_messages(recorded: Print, now: _Hashes, messages: Sequence[ChatMessage]) -> str | None:
    given = recorded.get("messages") or ""
    then = _split(given, 1 + SHORT_CHARS) if isinstance(given, str) else list(given)
    present = [digest[: len(then[0])] for digest in now.messages] if then else list(now.messages)
    for place, (was, digest) in enumerate(zip(then, present, strict=False)):
        if was == digest:
            continue
        name, said = f"message {place} ({_ROLES.get(digest[:1], 'unknown')})", messages[place].content
        if was in present[place:] and digest in then[place:]:
            return f"{name} stands in another place; it says now: {_show(said)}"
        if was[:1] != digest[:1]:
            return f"{name} was of the role {_ROLES.get(was[:1], 'unknown')}; it says now: {_show(said)}"
        lines = _read_lines(recorded.get("lines"))
        if place < len(lines):
            return f"{name}: {_compare_lines(lines[place], said or '')}"
        return f"{name} is another; it says now: {_show(said)}"
    if len(then) < len(present):
        added = present[len(then)]
        return f"message {len(then)} ({_ROLES.get(added[:1], 'unknown')}) is new: {_show(messages[len(then)].content)}"
    if len(then) > len(present):
        return f"message {len(present)} ({_ROLES.get(then[len(present)][:1], 'unknown')}) is gone"
    return None


def _compare_attached(then: Sequence[str], present: Sequence[str]) -> str | None:
    for place, (was, digest) in enumerate(zip(then, present, strict=False), 1):
        if not _is_same(was, digest):
            return f"of the images and files, number {place} is another"
    if len(then) != len(present):
        return f"there were {len(then)} images and files, and there are {len(present)} now"
    return None


def _compare_lines(then: Sequence[str], text: str) -> str:
    """Name the first line that is another one, in a message that is."""
    lines = text.split("\n")
    present = _print_lines(text, is_long=any(len(line) == LONG_LINE_CHARS for line in then))
    note = "the same lines in another order; " if Counter(then) == Counter(present) else ""
    for kind, start, end, first, last in SequenceMatcher(None, then, present, autojunk=False).get_opcodes():
        if kind == "replace":
            return f"{note}line {first + 1} is another; it says now: {_show(lines[first])}"
        if kind == "insert":
            count = "a line" if last - first == 1 else f"{last - first} lines"
            return f"{note}{count} more at line {first + 1}: {_show(lines[first])}"
        if kind == "delete":
            count = "a line" if end - start == 1 else f"{end - start} lines"
            where = f"after {_show(lines[first - 1])}" if first else "at the beginning"
            return f"{note}{count} missing {where}"
    return "a line beyond the first 2000 is another, or two differ that look alike"


LONG_LINE_CHARS = 4
"""Of a line's hash in prints of earlier versions, in hexadecimal digits."""


def _print_lines(text: str, *, is_long: bool = False) -> list[str]:
    """Give a short hash of each line: 12 bits, as two digits."""
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
    shown = (text or "").strip()
    return f'"{shown[:MAX_SHOWN_CHARS]}{"..." if len(shown) > MAX_SHOWN_CHARS else ""}"'


def _digest_messages(messages: Sequence[ChatMessage]) -> list[str]:
    places: dict[str, int] = {}  # of call ids, in the order of their calls
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
                    places[call.id] = len(places)
                    parts += [call.name, call.arguments]
                digests.append("a" + _digest(*parts))
            case ToolMessage(call_id, content):
                digests.append("t" + _digest(str(places.get(call_id, "")), content))
    return digests


def _list_attached(messages: Sequence[ChatMessage]) -> list[str]:
    said = [message for message in messages if isinstance(message, UserMessage)]
    return [
        attached
        for message in said
        for attached in (
            *message.images,
            *("\x1f".join((file.name, file.media_type, file.data)) for file in message.files),
        )
    ]


def _digest_tool(tool: ToolSpec) -> str:
    known = _tools.get(id(tool.parameters))
    if known is not None and known[0] is tool.parameters and known[1] == (tool.name, tool.description):
        return known[2]
    digest = _digest(tool.name, tool.description, _write(tool.parameters))
    if len(_tools) >= MAX_KNOWN_TOOLS:
        _tools.clear()
    _tools[id(tool.parameters)] = (tool.parameters, (tool.name, tool.description), digest)
    return digest


MAX_KNOWN_TOOLS = 4096
# Digests by the identity of a schema, which is held so that it stays one.
_tools: dict[int, tuple[object, tuple[str, str], str]] = {}


def _write(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


class TapedCall(BaseModel):
    """A tool call: its arguments as JSON, or, where the model wrote no JSON, as text."""

    model_config = ConfigDict(extra="forbid")

    tool: str
    arguments: dict[str, Any] | str = {}
    id: str = ""


class TapedTurn(BaseModel):
    """One line of a tape. ``run`` names the reaction that it belongs to; ``for_message`` is for the reader only.

    ``failure`` instead of a reply: the model failed for good, with ``text`` as the reason.
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
        """Give the line of a recorded reply."""
        calls = [TapedCall(tool=call.name, arguments=_open(call.arguments), id=call.id) for call in reply.tool_calls]
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
        """Give the reply of this line. Raises `ModelError` where it is a failure."""
        if self.failure is not None:
            error = ModelError(self.text or "The model failed.", reason=self.failure)
            error.retryable = False  # it was the end then, whatever had been tried before
            raise error
        calls = tuple(
            ToolCall(call.id or derive_call_id(request, number), call.tool, _close(call.arguments))
            for number, call in enumerate(self.calls)
        )
        reason = self.finish_reason or ("tool_calls" if calls else "stop")
        return ModelReply(self.text, calls, self.usage, reason, self.model or name)


def write_tape(path: Path, agent_id: str, turns: Iterable[TapedTurn]) -> None:
    """Write a tape; each line leaves out what is empty."""
    lines = [json.dumps({"roundelay_tape": 1, "agent": agent_id})]
    for turn in turns:
        value = turn.model_dump(mode="json", exclude_defaults=True)
        ordered = {"run": turn.run, "turn": turn.turn, **value}
        lines.append(json.dumps(ordered, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write("\n".join(lines) + "\n")


def read_tape(path: Path) -> list[TapedTurn]:
    """Read a tape. Raises `ModelError` with the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(
            f"The tape {path} cannot be read ({error}); roundelay tapes makes one of a recorded run."
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
            raise _wrong(f"{path}:{number}: {where or 'the line'}: {first['msg']}") from error
        except ValueError as error:
            raise _wrong(f"{path}:{number} is no line of JSON: {error}") from error
    return turns


@dataclass(slots=True)
class _Run:
    """A recorded run, and how far it is played."""

    turns: list[TapedTurn]
    played: int = 0
    answered: dict[str, TapedTurn] = field(default_factory=dict)  # by what was asked: a resumed reaction asks again


class TapeModel:
    """Plays a tape. A request that the tape does not answer, or another one than was recorded, fails and says where and
    what.

    ``is_strict`` False plays on over a request that is another one. ``problems`` holds what went wrong, for whoever
    runs a test.
    """

    def __init__(self, tape: Path | Sequence[TapedTurn], *, is_strict: bool = True) -> None:
        self.name = str(tape) if isinstance(tape, Path) else "tape"
        self.problems: list[str] = []
        turns = read_tape(tape) if isinstance(tape, Path) else list(tape)
        by_run: dict[str, list[TapedTurn]] = {}
        for number, turn in enumerate(turns):
            by_run.setdefault(turn.run or f"line {number}", []).append(turn)
        self._waiting = [_Run(found) for found in by_run.values()]
        self._bound: dict[tuple[str, str], _Run] = {}
        self._is_strict = is_strict

    @property
    def is_begun(self) -> bool:
        """Whether anybody has asked for a turn."""
        return bool(self._bound)

    @property
    def unplayed(self) -> int:
        """How many turns nobody has asked for."""
        runs = (*self._waiting, *self._bound.values())
        return sum(len(run.turns) - run.played for run in {id(run): run for run in runs}.values())

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer with what the tape has for this request. Raises `ModelError` when that is nothing."""
        reply = self._find(request).make_reply(request, self.name)
        if on_delta is not None and reply.text:
            on_delta(ModelDelta(reply.text))
        return reply

    def _find(self, request: ModelRequest) -> TapedTurn:
        asked = repr((request.messages, request.tools, request.turn))
        place = (request.reaction, request.agent_id)
        run = self._bound.get(place)
        if run is not None and asked in run.answered:
            return run.answered[asked]
        if run is None or request.turn == 1:
            run = self._bind(place, request)
        if run.played == len(run.turns):
            raise self._problem(
                f"{_name(request)} asks for turn {request.turn}, and the tape {self.name} has no more of this "
                f"reaction: it ends after turn {run.turns[-1].turn}"
            )
        turn = run.turns[run.played]
        drift = self._compare(turn, request)
        if drift is not None:
            self.problems.append(drift)
            if self._is_strict:
                raise _wrong(
                    f"{drift}. Record it anew, or take `request` out of the line to play it whatever is asked."
                )
        run.played += 1
        run.answered[asked] = turn
        return turn

    def _bind(self, place: tuple[str, str], request: ModelRequest) -> _Run:
        """Choose the recorded run for one that begins: that of this very request, else the next one."""
        if not self._waiting:
            raise self._problem(f"{_name(request)} asks its model, and the tape {self.name} is played to its end")
        run = next((run for run in self._waiting if self._is_exact(run.turns[0], request)), self._waiting[0])
        self._waiting.remove(run)
        self._bound[place] = run
        return run

    def _is_exact(self, turn: TapedTurn, request: ModelRequest) -> bool:
        return turn.request is not None and find_drift(turn.request, self, request, any_model=True) is None

    def _compare(self, turn: TapedTurn, request: ModelRequest) -> str | None:
        if turn.request is None:
            return None
        drift = find_drift(turn.request, self, request, any_model=True)
        return f"{_name(request)}, turn {turn.turn} on the tape {self.name}: {drift}" if drift is not None else None

    def _problem(self, text: str) -> ModelError:
        self.problems.append(text)
        return _wrong(f"{text}.")


class NamedModel:
    """Stands for a model of this name where none is asked: in a replay."""

    def __init__(self, name: str, settings: Mapping[str, object] | None = None) -> None:
        self.name = name
        self.settings = dict(settings or {})

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        raise _wrong(f"The model {self.name} is not asked in a replay.")


def _name(request: ModelRequest) -> str:
    return request.agent_id or "the agent"


def _wrong(text: str) -> ModelError:
    return ModelError(text, reason="misconfigured")


def _open(arguments: str) -> dict[str, Any] | str:
    """Give arguments as JSON where they are written as they would be again; else the text itself, so that nothing is
    lost."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and _close(value) == arguments else arguments


def _close(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
