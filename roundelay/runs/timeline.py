"""Convert the records of a reaction into timed steps, each with a start and an end. This module performs no IO.

A step is a model call, a tool call, a wait for agents, an approval, a review or a failed model call. The module `work`
lists the same work without times, in the format of `roundelay why --json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from roundelay.agents.models.model import Usage
from roundelay.runs.reading import Record, RecordedReaction, read_path

StepKind: TypeAlias = Literal["model", "tool", "wait", "approval", "review", "failed"]


@dataclass(slots=True)
class TimedStep:
    """One step of a reaction. Times are in milliseconds since the Unix epoch. ``ended_at`` is None while the step
    runs."""

    kind: StepKind
    seq: int
    path: str
    turn: int
    call: int | None
    started_at: int
    ended_at: int | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """Additional fields, depending on the step's kind; see `_Steps`."""
    usage: Usage | None = None
    """Token usage of a model call, or None for other steps."""

    def to_json(self) -> dict[str, Any]:
        place = {"kind": self.kind, "seq": self.seq, "path": self.path, "turn": self.turn}
        call = {} if self.call is None else {"call": self.call}
        return {**place, **call, "started_at": self.started_at, "ended_at": self.ended_at, **self.details}


def list_steps(reaction: RecordedReaction) -> list[TimedStep]:
    """Return the steps of a reaction and of the runs inside it, ordered by their recorded start."""
    steps = _Steps(reaction)
    for record in reaction.readable:
        steps.add(record)
    return steps.steps


class _Steps:
    """Builds the list of steps from records, oldest first."""

    def __init__(self, reaction: RecordedReaction) -> None:
        self.steps: list[TimedStep] = []
        self._reaction = reaction
        self._open: dict[tuple[StepKind, str, int, int], TimedStep] = {}
        """Steps without an end, by kind and position."""
        self._last_at: dict[str, int] = {}
        """Time of the last record of each run, by path."""

    def add(self, record: Record) -> None:
        body, at = record["body"], int(record["at"])
        match record["kind"]:
            case "model_reply":
                step = self._begin(record, "model", self._describe_reply(record), self._find_start(record), at)
                step.usage = self._reaction.runs[step.path].replies[step.turn].usage
            case "model_failed":
                details = {"failure": body.get("failure", "server"), "reason": body["reason"]}
                self._begin(record, "failed", details, self._find_start(record), at)
            case "tool_started":
                details = {"tool": str(body.get("tool", "")), "arguments": str(body.get("args", ""))}
                self._open_step(record, "tool", {**details, "result": None, "is_ok": False})
            case "tool_result":
                self._add_result(record)
            case "waiting":
                self._add_wait(record)
            case "approval":
                self._end(record, "approval", _describe_approval(body))
            case "review":
                details = {"is_accepted": body.get("is_accepted", False), "notes": list(body.get("notes", ()))}
                self._begin(record, "review", details, self._find_start(record), at)
        self._last_at[read_path(record)] = at

    def _find_start(self, record: Record) -> int:
        """Return the start time of a step whose start was not recorded.

        A run asks its model as soon as all earlier steps are finished. The first turn of a run inside a call starts
        when the call starts.
        """
        path = read_path(record)
        if path in self._last_at:
            return self._last_at[path]
        outer = self._open.get(("tool", *_find_call(path))) if path else None
        return outer.started_at if outer is not None else int(record["at"])

    def _describe_reply(self, record: Record) -> dict[str, Any]:
        body, run = record["body"], self._reaction.runs[read_path(record)]
        turn = int(body["turn"])
        reply, prompt = run.replies[turn], run.prompts.get(turn)
        return {
            "agent": str(body.get("agent") or self._reaction.agent_id),
            "model": reply.model,
            "usage": asdict(reply.usage),
            "text": reply.text,
            "calls": [call.name for call in reply.tool_calls],
            "thinking": run.thinking.get(turn, ""),
            "prompt": asdict(prompt) if prompt is not None else None,
        }

    def _add_result(self, record: Record) -> None:
        body = record["body"]
        result = {"result": body["content"], "is_ok": body["ok"]}
        if _find_place("tool", record) not in self._open:  # the call was refused before it started
            details = {"tool": str(body.get("tool", "")), "arguments": "", **result}
            self._begin(record, "tool", details, self._find_start(record), int(record["at"]))
        # A result ends all waits of its call: after a timeout, no other record ends them.
        for kind in ("wait", "approval"):
            self._end(record, kind, {})
        self._end(record, "tool", result)

    def _add_wait(self, record: Record) -> None:
        questions = record["body"]["questions"]
        details = {"asked": list(questions), "questions": list(questions.values())}
        if not record["body"].get("is_approval"):
            self._open_step(record, "wait", details)
        elif (step := self._open.get(_find_place("approval", record))) is not None:
            # Another person's approval is still needed, or other people are asked. Both belong to the same approval
            # step.
            step.details |= details
        else:
            self._open_step(record, "approval", details)

    def _begin(self, record: Record, kind: StepKind, details: dict[str, Any], start: int, end: int | None) -> TimedStep:
        body = record["body"]
        call = int(body["call"]) if "call" in body else None
        step = TimedStep(kind, int(record["seq"]), read_path(record), int(body["turn"]), call, start, end, details)
        self.steps.append(step)
        return step

    def _open_step(self, record: Record, kind: StepKind, details: dict[str, Any]) -> None:
        step = self._begin(record, kind, details, int(record["at"]), None)
        self._open[_find_place(kind, record)] = step

    def _end(self, record: Record, kind: StepKind, details: Mapping[str, Any]) -> None:
        step = self._open.pop(_find_place(kind, record), None)
        if step is not None:
            step.ended_at = int(record["at"])
            step.details |= details


def _find_place(kind: StepKind, record: Record) -> tuple[StepKind, str, int, int]:
    body = record["body"]
    return kind, read_path(record), int(body["turn"]), int(body["call"])


def _find_call(path: str) -> tuple[str, int, int]:
    """Return the path, turn and call that contain a run. For example, ``1.0/2.1`` is inside call 2.1 of the run
    ``1.0``.
    """
    outer, _, last = path.rpartition("/")
    try:
        turn, call = map(int, last.split(".")[:2])
    except ValueError:  # another program wrote the path
        return outer, 0, 0
    return outer, turn, call


def _describe_approval(body: Mapping[str, Any]) -> dict[str, Any]:
    votes: Sequence[Mapping[str, Any]] = body.get("votes") or ()
    # One person denies a request, even if other people have approved it.
    people = [vote["by"] for vote in votes] if body["is_approved"] and votes else [body["by"]]
    words = [vote for vote in (votes or [{"by": body["by"], "said": body.get("said", "")}]) if vote.get("said")]
    return {
        "is_approved": body["is_approved"],
        "by": " and ".join(people),
        "decision": body["seq"],
        "said": "; ".join(f"{vote['by']}: {vote['said']}" for vote in words),
    }
