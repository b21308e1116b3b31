"""Parses requests of OpenAI's API into the agent, the conversation and the messages.

This module performs no IO. `IGNORED` and `REFUSED` list the parameters that the gateway does not use
(docs/openai/parameters.md has the table). All text that a client sends counts as the caller's own text. The client's instructions and history
become marked parts of the caller's message, and never part of an agent's prompt.
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

IGNORED = frozenset(
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
"""Parameters that have no effect. The agent configures its own model, and messages always stay in the ledger."""

_OWN_TOOLS = "An agent uses only its own tools, not those of the client. Leave {} out."
_TEXT_ONLY = "An agent answers only in plain text. Leave {} out."
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "tools": (([],), _OWN_TOOLS),
    "functions": (([],), _OWN_TOOLS),
    "tool_choice": (("none", "auto"), _OWN_TOOLS),
    "function_call": (("none", "auto"), _OWN_TOOLS),
    "web_search_options": ((), _OWN_TOOLS),
    "n": ((1,), "An agent gives only one answer. Leave {} out."),
    "logprobs": ((False,), _TEXT_ONLY),
    "top_logprobs": ((0,), _TEXT_ONLY),
    "logit_bias": (({},), _TEXT_ONLY),
    "response_format": (({"type": "text"},), _TEXT_ONLY),
    "text": (({"format": {"type": "text"}}, {}), _TEXT_ONLY),
    "stop": (([], ""), "An agent's answer cannot be cut off. Leave {} out."),
    "audio": ((), _TEXT_ONLY),
    "modalities": ((["text"],), _TEXT_ONLY),
    "prompt": ((), "There are no stored prompts here. Leave {} out."),
    "moderation": ((), "There is no moderation here. Leave {} out."),
}
"""Parameters that would change the meaning of an answer. For each parameter, the tuple contains the harmless values and
the error message for all other values.
"""


class ApiProblem(Exception):
    """Error response in the form of OpenAI's API. ``is_final`` means that repeating the request cannot succeed."""

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
    """A request in terms of the network. ``said`` contains all messages of the client. The instructions come first."""

    model: str
    said: tuple[SaidItem, ...]
    is_streamed: bool
    conversation: str | None = None
    """Name of the conversation, chosen by the client."""
    previous: str | None = None
    has_history: bool = True
    """Whether ``said`` is the client's copy of the whole conversation."""
    wants_usage: bool = False
    is_background: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Values of the request that its response repeats."""

    @property
    def digest(self) -> str:
        return digest_of(self.said)

    @property
    def _answered(self) -> int:
        """Number of messages up to and including the last answer."""
        return max((number for number, item in enumerate(self.said, 1) if item.role == "assistant"), default=0)

    @property
    def earlier(self) -> tuple[SaidItem, ...]:
        """The messages up to and including the last answer."""
        return self.said[: self._answered]

    @property
    def new(self) -> tuple[SaidItem, ...]:
        return self.said[self._answered :]

    @property
    def asked_before(self) -> str | None:
        """The `digest` of the earlier request that got the last answer in the history, or None if there is no
        history.
        """
        # The history without its last answer equals the client's earlier request. The digest of that request finds the
        # earlier message in the ledger.
        return digest_of(self.earlier[:-1]) if self.earlier and self.has_history else None

    @property
    def family(self) -> str:
        """Digest of the beginning of the conversation. All requests of one conversation have the same digest."""
        # Use only the messages before the first answer. Later requests repeat these messages unchanged.
        first = next((index for index, item in enumerate(self.said) if item.role == "assistant"), len(self.said))
        return digest_of(self.said[:first])[:16]

    @property
    def instructions(self) -> str:
        return _instructions(self.said)

    @property
    def new_chars(self) -> int:
        """Length of the user's new text, which is at the end of the message's text (see `compose`)."""
        # Store this length with the message. Instructions and history precede the question, and must not be shown as
        # its text.
        return len(_join(item.text for item in self.new if item.role == "user"))


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


def read_echo(stored: object) -> dict[str, Any]:
    """Read `AgentRequest.echo` from the metadata of a message. Invalid values are dropped, because the caller may have
    sent the message through another protocol.
    """
    try:
        return _Echo.model_validate(stored or {}).model_dump(exclude_unset=True)
    except ValidationError:
        return {}


def read_chat(body: object) -> AgentRequest:
    """Parse a request for a chat completion. Raises `ApiProblem`."""
    chat = _read(_ChatBody, body)
    items = [_read_message(message, f"messages[{number}]") for number, message in enumerate(chat.messages)]
    _check_last(items, "messages")
    # Treat an empty text as no value, because clients send it for a value that is not set.
    name = (chat.metadata or {}).get("conversation") or chat.user or None
    options = chat.stream_options or {}
    return AgentRequest(
        chat.model, tuple(items), bool(chat.stream), name, wants_usage=options.get("include_usage") is True
    )


def read_response(body: object) -> AgentRequest:
    """Parse a request for a response. Raises `ApiProblem`."""
    fields = _read(_ResponsesBody, body)
    items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    said = read_items(items, "input")
    _check_last(said, "input")
    conversation = fields.conversation.get("id") if isinstance(fields.conversation, dict) else fields.conversation
    if fields.conversation and (not isinstance(conversation, str) or not conversation):
        raise ApiProblem(400, "conversation must be a text, or an object with a text as its id.", param="conversation")
    if conversation and fields.previous_response_id:
        raise ApiProblem(400, "Give either conversation or previous_response_id.", param="previous_response_id")
    # Refuse the combination. A background request returns at once, so nobody could read its stream.
    if fields.background and fields.stream:
        raise ApiProblem(400, "A background response cannot be streamed. Read it by its id.", param="background")
    previous = fields.previous_response_id or None
    instructions = [SaidItem("system", fields.instructions)] if fields.instructions else []
    echo = {
        "instructions": fields.instructions,
        "metadata": fields.metadata or {},
        "previous_response_id": previous,
        "background": bool(fields.background),
        "user": fields.user or None,
    }
    name = conversation or (fields.metadata or {}).get("conversation") or None
    # Do not use the user's name if there is a previous response, which already determines the thread.
    if name is None and previous is None:
        name = fields.user or None
    if conversation:
        echo["conversation"] = {"id": conversation}
    return AgentRequest(
        fields.model,
        (*instructions, *said),
        bool(fields.stream),
        name,
        previous,
        # In both cases, the server has the history, and the client sends only new messages.
        has_history=previous is None and not conversation,
        is_background=bool(fields.background),
        echo=echo,
    )


def conversation_id(name: str) -> str:
    """Return the id of the conversation with this name."""
    # Clients may choose any text as a name. Hash a text that is not a valid id, so that the same name always leads to
    # the same thread.
    return name if is_id(name) else f"x-{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def digest_of(said: Sequence[SaidItem]) -> str:
    # Strip the texts. White space at their ends must not prevent the history from being recognized.
    items = [[item.role, item.text.strip(), list(item.images), list(item.files)] for item in said]
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:32]


def compose(
    request: AgentRequest, *, is_new: bool, has_instructions: bool, has_answer: bool = True
) -> str | dict[str, Any]:
    """Return the content of the message to send. The content consists of the parts of the conversation that the agent
    does not know, followed by the user's new text.

    In a new conversation, the agent does not know the history. In a conversation without an answer, the agent does not
    know the text that the client has as the answer. The client's instructions are added unless the conversation already
    contains them.
    """
    parts = []
    if instructions := _instructions(request.new if has_instructions else request.said):
        parts.append(f"Instructions of my client, a part of this message:\n{_quote(instructions)}")
    # Send only what the agent does not know. A repeated history would cost tokens, and the agent would read every
    # message twice.
    missing = request.earlier if is_new or not request.has_history else () if has_answer else request.earlier[-1:]
    history = [item for item in missing if item.role != "system" and item.text]
    if history:
        lines = "\n".join(_quote(f"{item.role}: {item.text}") for item in history)
        parts.append(f"Said before, as my client tells it:\n{lines}")
    questions = [item for item in request.new if item.role == "user"]
    text = _join([*parts, *(item.text for item in questions)])
    images = [dict(image) for item in (*history, *questions) for image in item.images]
    files = [dict(file) for item in (*history, *questions) for file in item.files]
    # Keep plain text as text, so that agents and screens can show it without knowing this API.
    if not (images or files):
        return text
    return {"text": text, **({"images": images} if images else {}), **({"files": files} if files else {})}


def _instructions(said: Sequence[SaidItem]) -> str:
    return _join(item.text for item in said if item.role == "system")


def _read(shape: type[BodyT], body: object) -> BodyT:
    if not isinstance(body, dict):
        raise ApiProblem(400, "The body must be a JSON object.")
    for name, value in body.items():
        # Ignore null, because clients send it for a value that is not set.
        if name in shape.model_fields or name in IGNORED or value is None:
            continue
        harmless, sentence = REFUSED.get(name, ((), "There is no parameter {} here."))
        # Refuse the parameter instead of ignoring it. Otherwise the answer would look right, but lack something that
        # the client relies on.
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
    """Parse the messages in the input of a response, or the items of a conversation. Raises `ApiProblem`."""
    return [_read_item(item, f"{param}[{number}]") for number, item in enumerate(items)]


def _read_item(item: Mapping[str, Any], place: str) -> SaidItem:
    """Parse one item of the input of a response. Raises `ApiProblem` if the item is not a message."""
    kind = item.get("type", "message")
    if kind != "message":
        raise ApiProblem(400, f"{place}: an agent accepts only messages, not items of type {kind!r}.", param=place)
    return _read_message(item, place)


def _read_message(message: Mapping[str, Any], place: str) -> SaidItem:
    role = _ROLES.get(str(message.get("role")))
    # Refuse tool calls. Dropping a call would leave its result without a request, and the agent would misread the
    # history.
    if role is None or message.get("tool_calls") or message.get("function_call"):
        raise ApiProblem(400, f"{place}: {_OWN_TOOLS.format('calls and their results')}", param=place)
    texts: list[str] = []
    images: list[Mapping[str, str]] = []
    files: list[Mapping[str, str]] = []
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else []:
        match part:
            case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
                texts.append(text)
            # Treat a refusal as an answer. Otherwise the history would contain a question without an answer.
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
                images.append({"url": url})
            case {"type": "file", "file": {"file_data": str(data), **rest}} | {
                "type": "input_file",
                "file_data": str(data),
                **rest,
            }:
                # Accept both forms that clients send: a data URL with its media type, and bare base64.
                where = "url" if data.startswith("data:") else "data"
                files.append({"name": str(rest.get("filename", "file")), where: data})
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise ApiProblem(
                    400,
                    f"{place}: a part must be text, an image with its URL, or a file with its data; not "
                    f"{str(kind)[:80]!r}.",
                    param=place,
                )
    if content is not None and not isinstance(content, str | list):
        raise ApiProblem(400, f"{place}: content must be a text, or a list of parts.", param=place)
    return SaidItem(role, "\n".join(texts), tuple(images), tuple(files))


def _check_last(said: Sequence[SaidItem], param: str) -> None:
    last = max((place for place, item in enumerate(said) if item.role == "assistant"), default=-1)
    if not any(item.role == "user" for item in said[last + 1 :]):
        raise ApiProblem(400, "There is no user message after the last answer.", param=param)


def _quote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])


def _join(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
