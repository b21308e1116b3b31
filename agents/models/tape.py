"""Tapes: the recorded replies of one agent's model, as lines that people read and edit, and `TapeModel`, which plays
them.

Each line is one turn: what the model said and called, and a print of the request that it answered (`request_print`).
Turns of one reaction belong together; reactions are played in the order in which they were recorded, or, where a
request is exactly a recorded one, by that. A line without ``request`` answers whatever is asked: so is one that a
person wrote. No IO but reading and writing the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .model import (
    ModelDelta,
    ModelError,
    ModelFailure,
    ModelReply,
    ModelRequest,
    OnDelta,
    ToolCall,
    Usage,
    derive_call_id,
)
from .request_print import find_drift


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
            run=run, turn=turn, for_message=for_message, text=reply.text, calls=calls, finish_reason=reply.finish_reason,
            usage=reply.usage, model=reply.model, request=dict(request) if request is not None else None,
        )  # fmt: skip

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
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
                f"{_name(request)} asks for turn {request.turn}, and the tape {self.name} has no more of this reaction: "
                f"it ends after turn {run.turns[-1].turn}"
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
