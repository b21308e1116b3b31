"""What a client of OpenAI's API asks for, read from its request: which agent, in which conversation, what it says.

Pure. `PASSED_OVER` and `REFUSED` say what becomes of each parameter that is not read (docs/openai.md has the table).
Everything that a client sends is its caller's word: instructions, and what it says was said before, become marked parts
of the caller's message, and never an agent's own prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from roundelay.network.frames import is_id

Role: TypeAlias = Literal["system", "user", "assistant"]
_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

PASSED_OVER = frozenset(
    [
        "background_options",
        "context_management",
        "frequency_penalty",
        "include",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "max_tool_calls",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "safety_identifier",
        "seed",
        "service_tier",
        "store",
        "temperature",
        "top_p",
        "truncation",
        "verbosity",
    ]
)
"""How a model is to work is the agent's own affair, and what is said stays in the ledger."""

_ITS_OWN_TOOLS = "An agent has its own tools, and calls none of its client's: leave {} out."
_TEXT_ALONE = "An agent answers in text, as it is: leave {} out."
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), _ITS_OWN_TOOLS),
    "functions": (([],), _ITS_OWN_TOOLS),
    "tool_choice": (("none", "auto"), _ITS_OWN_TOOLS),
    "function_call": (("none", "auto"), _ITS_OWN_TOOLS),
    "web_search_options": ((), _ITS_OWN_TOOLS),
    "n": ((1,), "An agent gives one answer: leave {} out."),
    "logprobs": ((False,), _TEXT_ALONE),
    "top_logprobs": ((0,), _TEXT_ALONE),
    "logit_bias": (({},), _TEXT_ALONE),
    "response_format": (({"type": "text"},), _TEXT_ALONE),
    "text": (({"format": {"type": "text"}}, {}), _TEXT_ALONE),
    "stop": (([], ""), "An agent's answer is not cut: leave {} out."),
    "audio": ((), _TEXT_ALONE),
    "modalities": ((["text"],), _TEXT_ALONE),
    "prompt": ((), "There are no stored prompts here: leave {} out."),
    "moderation": ((), "Nothing is moderated here: leave {} out."),
}
"""What would change what an answer means: taken with the values that change nothing, and else refused in these
words."""


class ApiProblem(Exception):
    """What refuses a request, as OpenAI's clients know it. ``is_final``: the same request again is no help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        is_final: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
        self.headers = dict(headers or {})
        if is_final:
            self.headers["x-should-retry"] = "false"


@dataclass(frozen=True, slots=True)
class SaidItem:
    """One message of a client's history."""

    role: Role
    text: str
    images: tuple[Mapping[str, str], ...] = ()
    files: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request as it is to be carried out. ``said`` is all that the client sends, its instructions first."""

    model: str
    said: tuple[SaidItem, ...]
    is_streamed: bool
    conversation: str | None = None
    """The name that the client gives to the conversation."""
    previous: str | None = None
    has_history: bool = True
    """``said`` is the whole conversation, as the client has it."""
    wants_usage: bool = False
    is_background: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What an answer repeats of the request."""

    @property
    def digest(self) -> str:
        return digest_of(self.said)

    @property
    def _answered(self) -> int:
        return max((place for place, it in enumerate(self.said, 1) if it.role == "assistant"), default=0)

    @property
    def earlier(self) -> tuple[SaidItem, ...]:
        """What was said up to the last answer, with it."""
        return self.said[: self._answered]

    @property
    def new(self) -> tuple[SaidItem, ...]:
        return self.said[self._answered :]

    @property
    def asked_before(self) -> str | None:
        """The `digest` of the request that gave the last answer of the history; None where that begins."""
        return digest_of(self.earlier[:-1]) if self.earlier and self.has_history else None

    @property
    def family(self) -> str:
        """The same of all requests of one conversation: of how it began."""
        first = next((place for place, it in enumerate(self.said) if it.role == "assistant"), len(self.said))
        return digest_of(self.said[:first])[:16]

    @property
    def instructions(self) -> str:
        return _instructions(self.said)

    @property
    def new_chars(self) -> int:
        """The length of what the user says now, which is the end of the message's text (`compose`)."""
        return len(_join(it.text for it in self.new if it.role == "user"))


class _ReadPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str = Field(min_length=1)
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


BodyT = TypeVar("BodyT", bound=_ReadPart)


class _ChatBody(_ReadPart):
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream_options: dict[str, Any] | None = None


class _ResponsesBody(_ReadPart):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    stream_options: dict[str, Any] | None = None


class _Echo(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    instructions: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    previous_response_id: str | None = None
    background: bool = False
    user: str | None = None
    conversation: dict[Literal["id"], str] | None = None


def read_echo(kept: object) -> dict[str, Any]:
    """What an answer repeats of a request (`AgentRequest.echo`), as it was kept in a message's metadata: which its
    caller may have written by other ways."""
    try:
        return _Echo.model_validate(kept or {}).model_dump(exclude_unset=True)
    except ValidationError:
        return {}


def read_chat(body: object) -> AgentRequest:
    """Read a request for a chat completion. Raises `ApiProblem`."""
    given = _read(_ChatBody, body)
    said = [_read_message(it, f"messages[{number}]") for number, it in enumerate(given.messages)]
    _check_last(said, "messages")
    # Clients send empty texts for what they do not set.
    name = (given.metadata or {}).get("conversation") or given.user or None
    options = given.stream_options or {}
    return AgentRequest(
        given.model, tuple(said), bool(given.stream), name, wants_usage=options.get("include_usage") is True
    )


def read_response(body: object) -> AgentRequest:
    """Read a request for a response. Raises `ApiProblem`."""
    given = _read(_ResponsesBody, body)
    items = [{"role": "user", "content": given.input}] if isinstance(given.input, str) else given.input
    said = read_items(items, "input")
    _check_last(said, "input")
    conversation = given.conversation.get("id") if isinstance(given.conversation, dict) else given.conversation
    if given.conversation and (not isinstance(conversation, str) or not conversation):
        raise ApiProblem(400, "conversation is a text, or has one as its id.", param="conversation")
    if conversation and given.previous_response_id:
        raise ApiProblem(400, "Give either conversation or previous_response_id.", param="previous_response_id")
    if given.background and given.stream:
        raise ApiProblem(400, "What runs in the background is not streamed; ask for it by its id.", param="background")
    previous = given.previous_response_id or None
    instructions = [SaidItem("system", given.instructions)] if given.instructions else []
    echo = {
        "instructions": given.instructions,
        "metadata": given.metadata or {},
        "previous_response_id": previous,
        "background": bool(given.background),
        "user": given.user or None,
    }
    name = conversation or (given.metadata or {}).get("conversation") or None
    if name is None and previous is None:
        name = given.user or None
    if conversation:
        echo["conversation"] = {"id": conversation}
    return AgentRequest(
        given.model,
        (*instructions, *said),
        bool(given.stream),
        name,
        previous,
        has_history=previous is None and not conversation,
        is_background=bool(given.background),
        echo=echo,
    )


def conversation_id(name: str) -> str:
    """The conversation's id for what a client calls it."""
    return name if is_id(name) else f"x-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def digest_of(said: Sequence[SaidItem]) -> str:
    told = [[it.role, it.text.strip(), list(it.images), list(it.files)] for it in said]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def compose(
    request: AgentRequest, *, is_new: bool, has_instructions: bool, has_answer: bool = True
) -> str | dict[str, Any]:
    """The content of the caller's message: what is new, behind what its conversation does not hold. In a new one that
    is what was said before; in one that has no answer yet, what the client shows as that; and the client's
    instructions, where they are not there as they are."""
    parts = []
    if instructions := _instructions(request.new if has_instructions else request.said):
        parts.append(f"Instructions of my client, a part of this message:\n{_quote(instructions)}")
    untold = request.earlier if is_new or not request.has_history else () if has_answer else request.earlier[-1:]
    told = [it for it in untold if it.role != "system" and it.text]
    if told:
        lines = "\n".join(_quote(f"{it.role}: {it.text}") for it in told)
        parts.append(f"Said before, as my client tells it:\n{lines}")
    asked = [it for it in request.new if it.role == "user"]
    text = _join([*parts, *(it.text for it in asked)])
    images = [dict(image) for it in (*told, *asked) for image in it.images]
    files = [dict(file) for it in (*told, *asked) for file in it.files]
    if not (images or files):
        return text
    return {"text": text, **({"images": images} if images else {}), **({"files": files} if files else {})}


def _instructions(said: Sequence[SaidItem]) -> str:
    return _join(it.text for it in said if it.role == "system")


def _read(shape: type[BodyT], body: object) -> BodyT:
    if not isinstance(body, dict):
        raise ApiProblem(400, "The body is to be a JSON object.")
    for name, value in body.items():
        if name in shape.model_fields or name in PASSED_OVER or value is None:
            continue
        harmless, sentence = REFUSED.get(name, ((), "There is no parameter {} here."))
        if value not in harmless:
            code = "unsupported_parameter" if name in REFUSED else "unknown_parameter"
            raise ApiProblem(400, sentence.format(repr(name)), code=code, param=name)
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiProblem(400, f"{place}: {first['msg']}", param=str(first["loc"][0])) from error


def read_items(items: Sequence[Mapping[str, Any]], param: str) -> list[SaidItem]:
    """Read messages of a response's input, or of a conversation. Raises `ApiProblem`."""
    return [_read_item(it, f"{param}[{number}]") for number, it in enumerate(items)]


def _read_item(item: Mapping[str, Any], place: str) -> SaidItem:
    """One item of a response's input."""
    kind = item.get("type", "message")
    if kind != "message":
        raise ApiProblem(400, f"{place}: an agent takes messages, and nothing of type {kind!r}.", param=place)
    return _read_message(item, place)


def _read_message(message: Mapping[str, Any], place: str) -> SaidItem:
    role = _ROLES.get(str(message.get("role")))
    if role is None or message.get("tool_calls") or message.get("function_call"):
        raise ApiProblem(400, f"{place}: {_ITS_OWN_TOOLS.format('calls and their results')}", param=place)
    texts: list[str] = []
    images: list[Mapping[str, str]] = []
    files: list[Mapping[str, str]] = []
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else []:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
                images.append({"url": url})
            case {"type": "file", "file": {"file_data": str(data), **rest}} | {
                "type": "input_file",
                "file_data": str(data),
                **rest,
            }:
                where = "url" if data.startswith("data:") else "data"
                files.append({"name": str(rest.get("filename", "file")), where: data})
            case _:
                told = part.get("type") if isinstance(part, dict) else part
                raise ApiProblem(
                    400,
                    f"{place}: a part of a message is text, an image by its address or a file with its data; not "
                    f"{str(told)[:80]!r}.",
                    param=place,
                )
    if content is not None and not isinstance(content, str | list):
        raise ApiProblem(400, f"{place}: content is a text, or a list of parts.", param=place)
    return SaidItem(role, "\n".join(texts), tuple(images), tuple(files))


def _check_last(said: Sequence[SaidItem], param: str) -> None:
    last = max((place for place, it in enumerate(said) if it.role == "assistant"), default=-1)
    if not any(it.role == "user" for it in said[last + 1 :]):
        raise ApiProblem(400, "There is no message of the user behind the last answer.", param=param)


def _quote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def _join(texts: Iterable[str]) -> str:
    return "\n\n".join(it for it in texts if it)
