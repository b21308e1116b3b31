"""Converts agents' answers to the formats of OpenAI's API: chat completions, responses, and their streamed events.

This module performs no IO. The types of all objects come from OpenAI's official package. Streamed text is shown as it
arrives, in one `Segment` per turn of the agent. The message that the agent finally sends is authoritative. If the
message continues the streamed text, only the rest is added. Otherwise the message becomes a new segment. Text that was
shown is therefore never revoked, and each message in the ledger is shown completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from openai.types.responses import Response, ResponseError, ResponseOutputMessage, ResponseOutputText, ResponseUsage
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_status import ResponseStatus
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails

from roundelay.interop.conversations import AgentAnswer, EndStatus, QuestionEnded, TextPiece

from .requests import ApiProblem

BETWEEN = "\n\n"
"""Separator between segments when they are shown as one text."""

STATUSES: dict[EndStatus, ResponseStatus] = {
    "answered": "completed",
    "silent": "completed",
    "stopped": "incomplete",
    "cancelled": "cancelled",
    "failed": "failed",
    "held": "failed",
    "dead": "failed",
    "removed": "failed",
}
_PROBLEMS: dict[EndStatus, tuple[int, str]] = {
    "failed": (500, "agent_failed"),
    "dead": (500, "dead_letter"),
    "removed": (404, "model_not_found"),
    "held": (409, "held"),
    "cancelled": (409, "cancelled"),
}
"""Outcomes of a question for which there is no completion, with their HTTP status and error code."""


@dataclass(slots=True)
class Segment:
    """Text that is shown as one item: the streamed text of a turn, or a message. ``is_answer`` is true if the segment
    ends with a message of the agent.
    """

    turn: int | None
    text: str = ""
    is_answer: bool = False


Change: TypeAlias = tuple[Literal["open", "add", "close"], int, str]
"""Change of a segment: the kind of change, the index of the segment, and the added text."""


@dataclass
class Showing:
    """All segments of one question that were shown so far."""

    segments: list[Segment] = field(default_factory=list)
    _open: int | None = None
    _space: str = ""
    """Trailing white space of the open segment. The white space is held back until more text follows, because the
    agent's final message has no trailing white space.
    """

    def add_event(self, event: TextPiece | AgentAnswer) -> Iterator[Change]:
        if isinstance(event, AgentAnswer):
            yield from self._add_answer(event.message.text)
        elif event.kind == "text" and not event.path:
            yield from self._add_piece(event)

    def end(self) -> Iterator[Change]:
        """Close the open segment. Call this method when no more text follows."""
        if self._open is not None:
            yield "close", self._open, ""
            self._open = None

    def _add_piece(self, piece: TextPiece) -> Iterator[Change]:
        current = self.segments[self._open] if self._open is not None else None
        is_new = current is None or current.turn != piece.turn
        text = piece.text.lstrip() if is_new or not (current and current.text) else self._space + piece.text
        space = text[len(text.rstrip()) :]
        text = text.rstrip()
        # Show each turn only once. Pieces of a turn may arrive after the message that ended the turn.
        if is_new and any(
            segment.turn == piece.turn or (segment.is_answer and segment.text.startswith(text))
            for segment in self.segments
        ):
            return  # the piece is late: its message was already shown
        self._space = space
        if not text:
            return
        if is_new:
            yield from self.end()
            yield from self._open_segment(piece.turn)
        yield from self._add(text)

    def _add_answer(self, text: str) -> Iterator[Change]:
        current = self.segments[self._open] if self._open is not None else None
        # If the message continues the streamed text, only add the rest. Otherwise add the message as a new segment,
        # because clients cannot revoke text that they have shown.
        if current is not None and text.startswith(current.text):
            rest = text[len(current.text) :]
        else:
            yield from self.end()
            yield from self._open_segment(None)
            rest = text
        if rest:
            yield from self._add(rest)
        self.segments[-1].is_answer = True
        yield from self.end()

    def _open_segment(self, turn: int | None) -> Iterator[Change]:
        self._open = len(self.segments)
        self.segments.append(Segment(turn))
        yield "open", self._open, ""

    def _add(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self.segments[self._open].text += text
        yield "add", self._open, text


@dataclass(frozen=True, slots=True)
class Answering:
    """Values of one request that all response formats share."""

    seq: int
    model: str
    created_at: int
    echo: Mapping[str, Any]


# --- usage and models


def sum_usage(of_root: Mapping[str, Mapping[str, int]]) -> Mapping[str, int] | None:
    """Return the sum of the tokens of all models, or None if no model call is recorded."""
    names = ("calls", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    total = {name: sum(usage.get(name, 0) for usage in of_root.values()) for name in names}
    return total if total["calls"] else None


def chat_usage(total: Mapping[str, int] | None) -> CompletionUsage | None:
    if total is None:
        return None
    return CompletionUsage(
        prompt_tokens=total["prompt_tokens"],
        completion_tokens=total["completion_tokens"],
        total_tokens=total["prompt_tokens"] + total["completion_tokens"],
        prompt_tokens_details=PromptTokensDetails(cached_tokens=total["cached_tokens"]),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=total["reasoning_tokens"]),
    )


def response_usage(total: Mapping[str, int] | None) -> ResponseUsage | None:
    if total is None:
        return None
    return ResponseUsage(
        input_tokens=total["prompt_tokens"],
        input_tokens_details=InputTokensDetails(cached_tokens=total["cached_tokens"], cache_write_tokens=0),
        output_tokens=total["completion_tokens"],
        output_tokens_details=OutputTokensDetails(reasoning_tokens=total["reasoning_tokens"]),
        total_tokens=total["prompt_tokens"] + total["completion_tokens"],
    )


def describe_model(agent_id: str, network: str) -> dict[str, Any]:
    return Model(id=agent_id, created=0, object="model", owned_by=network).to_dict()


# --- chat completions


def find_problem(ended: QuestionEnded, agent_id: str, answers: Sequence[str]) -> ApiProblem | None:
    """Return the error for a question that ended without a completion, or None. For a failed agent, the error contains
    the agent's own text, which explains more than the status.
    """
    if ended.status not in _PROBLEMS:
        return None
    status, code = _PROBLEMS[ended.status]
    reason = BETWEEN.join(answers) if ended.status == "failed" and answers else ended.reason
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiProblem(status, f"{agent_id}: {reason}", kind=kind, code=code)


def _finish_reason(ended: QuestionEnded) -> Literal["stop", "length"]:
    return "length" if ended.status == "stopped" else "stop"


def chat_completion(
    about: Answering, ended: QuestionEnded, answers: Sequence[str], total: Mapping[str, int] | None
) -> dict[str, Any]:
    message = ChatCompletionMessage(role="assistant", content=BETWEEN.join(answers), refusal=None)
    return ChatCompletion(
        id=f"chatcmpl-{about.seq}",
        choices=[Choice(finish_reason=_finish_reason(ended), index=0, logprobs=None, message=message)],
        created=about.created_at,
        model=about.model,
        object="chat.completion",
        usage=chat_usage(total),
    ).to_dict()


class ChatStream:
    """Creates the chunks of one streamed chat completion."""

    def __init__(self, about: Answering, *, wants_usage: bool) -> None:
        self._about = about
        self._wants_usage = wants_usage
        self._has_text = False

    def begin(self) -> Iterator[dict[str, Any]]:
        yield self._chunk(ChoiceDelta(role="assistant", content=""))

    def show(self, changes: Iterator[Change]) -> Iterator[dict[str, Any]]:
        for what, _, text in changes:
            if what == "open" and self._has_text:
                yield self._chunk(ChoiceDelta(content=BETWEEN))
            elif what == "add":
                self._has_text = True
                yield self._chunk(ChoiceDelta(content=text))

    def end(self, ended: QuestionEnded, total: Mapping[str, int] | None) -> Iterator[dict[str, Any]]:
        yield self._chunk(ChoiceDelta(), _finish_reason(ended))
        if self._wants_usage and total is not None:
            yield self._make([], chat_usage(total))

    def _chunk(self, delta: ChoiceDelta, finish_reason: Literal["stop", "length"] | None = None) -> dict[str, Any]:
        return self._make([ChunkChoice(delta=delta, finish_reason=finish_reason, index=0)], None)

    def _make(self, choices: list[ChunkChoice], usage: CompletionUsage | None) -> dict[str, Any]:
        chunk = ChatCompletionChunk(
            id=f"chatcmpl-{self._about.seq}",
            choices=choices,
            created=self._about.created_at,
            model=self._about.model,
            object="chat.completion.chunk",
        )
        if self._wants_usage:
            chunk.usage = usage
        return chunk.to_dict()


# --- responses


def output_message(about: Answering, place: int, segment: Segment, *, is_done: bool = True) -> ResponseOutputMessage:
    text = ResponseOutputText(annotations=[], text=segment.text, type="output_text", logprobs=[])
    return ResponseOutputMessage(
        id=f"msg_{about.seq}_{place}",
        content=[text] if is_done else [],
        role="assistant",
        status="completed" if is_done else "in_progress",
        type="message",
        phase=("final_answer" if segment.is_answer else "commentary") if is_done else None,
    )


def make_response(
    about: Answering,
    status: ResponseStatus,
    segments: Sequence[Segment],
    *,
    reason: str = "",
    total: Mapping[str, int] | None = None,
    ended_at: int | None = None,
) -> dict[str, Any]:
    """Return a response object of OpenAI's API. Parameters that the gateway ignores have their default values."""
    made = Response.model_validate(
        {
            "id": f"resp_{about.seq}",
            "created_at": about.created_at,
            "completed_at": ended_at if status == "completed" else None,
            "error": ResponseError(code="server_error", message=reason) if status == "failed" else None,
            # The API allows only two reasons. `max_output_tokens` describes a limit of the agent better than
            # `content_filter`.
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "model": about.model,
            "object": "response",
            "output": [output_message(about, place, segment) for place, segment in enumerate(segments)],
            "parallel_tool_calls": True,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "previous_response_id": None,
            "prompt_cache_key": None,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "status": status,
            "store": True,
            "temperature": 1,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1,
            "truncation": "disabled",
            "usage": response_usage(total),
            "user": None,
            "metadata": {},
            "background": False,
            **about.echo,
        }
    )
    return made.to_dict()


class ResponseStream:
    """Creates the events of one streamed response."""

    def __init__(self, about: Answering) -> None:
        self._about = about
        self._number = -1

    def begin(self) -> Iterator[dict[str, Any]]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=make_response(self._about, "in_progress", []))

    def show(self, changes: Iterator[Change], segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
        for what, place, text in changes:
            segment = segments[place]
            item_place = {"item_id": f"msg_{self._about.seq}_{place}", "output_index": place, "content_index": 0}
            if what == "open":
                item = output_message(self._about, place, segment, is_done=False).to_dict()
                part = ResponseOutputText(annotations=[], text="", type="output_text", logprobs=[]).to_dict()
                yield self._event("response.output_item.added", output_index=place, item=item)
                yield self._event("response.content_part.added", **item_place, part=part)
            elif what == "add":
                yield self._event("response.output_text.delta", **item_place, delta=text, logprobs=[])
            else:
                message = output_message(self._about, place, segment)
                yield self._event("response.output_text.done", **item_place, text=segment.text, logprobs=[])
                yield self._event("response.content_part.done", **item_place, part=message.content[0].to_dict())
                yield self._event("response.output_item.done", output_index=place, item=message.to_dict())

    def end(self, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        status = response["status"]
        # Report a cancelled response as incomplete, because OpenAI has no event for it.
        kind = status if status in ("completed", "failed") else "incomplete"
        yield self._event(f"response.{kind}", response=response)

    def fail(self, problem: ApiProblem) -> Iterator[dict[str, Any]]:
        body = problem.body
        yield self._event("error", code=body["code"], message=body["message"], param=body["param"])

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}
