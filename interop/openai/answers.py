"""What comes of a question, in the shapes of OpenAI's API: chat completions, responses, and the events of both.

Pure; the shapes are those of the official package. What streams is shown as it comes, one `Segment` for each turn of
the agent. What it sends in the end is what counts: where that goes on from what has streamed, the rest follows; where
it is something else, it stands in a segment of its own behind it. So nothing that is shown is taken back, and every
message of the ledger is shown whole.
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
"""Between two segments where there is one text for all."""

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
"""The ends of which no completion comes, with an answer's status and the error's code."""


@dataclass(slots=True)
class Segment:
    """A text that is shown as one: what streamed in a turn, or a message. ``is_answer``: a message of the agent's ends
    in it."""

    turn: int | None
    text: str = ""
    is_answer: bool = False


Change: TypeAlias = tuple[Literal["open", "add", "close"], int, str]
"""What happens to a segment, with its place and the text that is new."""


@dataclass
class Showing:
    """What is shown of one question so far."""

    segments: list[Segment] = field(default_factory=list)
    _open: int | None = None
    _space: str = ""
    """White space at the end of what is open: it is shown with what follows, as messages end in none."""

    def add_event(self, event: TextPiece | AgentAnswer) -> Iterator[Change]:
        if isinstance(event, AgentAnswer):
            yield from self._answer(event.message.text)
        elif event.kind == "text" and not event.path:
            yield from self._go_on(event)

    def end(self) -> Iterator[Change]:
        """Nothing more comes."""
        if self._open is not None:
            yield "close", self._open, ""
            self._open = None

    def _go_on(self, piece: TextPiece) -> Iterator[Change]:
        current = self.segments[self._open] if self._open is not None else None
        is_new = current is None or current.turn != piece.turn
        text = piece.text.lstrip() if is_new or not (current and current.text) else self._space + piece.text
        space = text[len(text.rstrip()) :]
        text = text.rstrip()
        if is_new and any(it.turn == piece.turn or (it.is_answer and it.text.startswith(text)) for it in self.segments):
            return  # it comes late: its message is there
        self._space = space
        if not text:
            return
        if is_new:
            yield from self.end()
            yield from self._begin(piece.turn)
        yield from self._add(text)

    def _answer(self, text: str) -> Iterator[Change]:
        current = self.segments[self._open] if self._open is not None else None
        if current is not None and text.startswith(current.text):
            rest = text[len(current.text) :]
        else:
            yield from self.end()
            yield from self._begin(None)
            rest = text
        if rest:
            yield from self._add(rest)
        self.segments[-1].is_answer = True
        yield from self.end()

    def _begin(self, turn: int | None) -> Iterator[Change]:
        self._open = len(self.segments)
        self.segments.append(Segment(turn))
        yield "open", self._open, ""

    def _add(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self.segments[self._open].text += text
        yield "add", self._open, text


@dataclass(frozen=True, slots=True)
class Answering:
    """What all that is said of one question has in common."""

    seq: int
    model: str
    created_at: int
    echo: Mapping[str, Any]


# --- usage and models


def sum_usage(of_root: Mapping[str, Mapping[str, int]]) -> Mapping[str, int] | None:
    """The tokens of all models; None where no record tells of any call."""
    names = ("calls", "prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
    total = {name: sum(it.get(name, 0) for it in of_root.values()) for name in names}
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
    """What an end is to a client of chat completions, unless it is a completion. A failed agent's own sentence says
    more than its status."""
    if ended.status not in _PROBLEMS:
        return None
    status, code = _PROBLEMS[ended.status]
    told = BETWEEN.join(answers) if ended.status == "failed" and answers else ended.reason
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiProblem(status, f"{agent_id}: {told}", kind=kind, code=code)


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
    """The chunks of one streamed completion."""

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
    """The response as it stands. Parameters that are passed over have the values that they have by default."""
    made = Response.model_validate(
        {
            "id": f"resp_{about.seq}",
            "created_at": about.created_at,
            "completed_at": ended_at if status == "completed" else None,
            "error": ResponseError(code="server_error", message=reason) if status == "failed" else None,
            "incomplete_details": IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            "instructions": None,
            "max_output_tokens": None,
            "max_tool_calls": None,
            "model": about.model,
            "object": "response",
            "output": [output_message(about, place, it) for place, it in enumerate(segments)],
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
    """The events of one streamed response."""

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
        kind = (
            status if status in ("completed", "failed") else "incomplete"
        )  # one that was stopped has no event of its own
        yield self._event(f"response.{kind}", response=response)

    def fail(self, problem: ApiProblem) -> Iterator[dict[str, Any]]:
        told = problem.body
        yield self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}
