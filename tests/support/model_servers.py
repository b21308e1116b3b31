"""Stand-ins for real model servers. Each stand-in is as strict as the real server, and refuses with the same error
messages.

Each class names the public source of its rules. All stand-ins play the same story of ten turns with tools (`STORY`),
in the format of their server: IDs, indexes, content parts, finish reasons, thinking. ``refused`` holds the refused
requests.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tests.support.fake_openai import FakeOpenAI, Received, Reply, error
from tests.support.openai_rules import Body, Refusal, find_refusal

ANSWER = "All ten turns are done."
THOUGHT = "a secret thought of turn"


@dataclass(frozen=True)
class Said:
    """Content of one turn of the model. ``is_cut`` means that the reply reached the length limit."""

    turn: int
    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    is_cut: bool = False


def _calls(turn: int, *calls: tuple[str, Mapping[str, Any]], text: str = "") -> Said:
    return Said(turn, text, calls)


STORY: Sequence[Said] = (
    _calls(1, ("add", {"a": 1, "b": 2})),
    _calls(2, ("look", {"at": "the door"}), text="Let me look."),
    _calls(3, ("add", {"a": 3, "b": 4}), ("look", {"at": "a window"})),
    Said(4, "This is only the beginn", is_cut=True),
    _calls(5, ("add", {"a": 5, "b": 6})),
    _calls(6, ("add", {"a": 7, "b": 8}), ("add", {"a": 9, "b": 10})),
    _calls(7, ("look", {"at": "große Türen"})),
    _calls(8, ("wait", {})),
    _calls(9, ("add", {"a": 11, "b": 12}), ("wait", {}), ("look", {"at": "it"})),
    _calls(10, ("look", {"at": "the end"})),
    Said(11, ANSWER),
)


class ModelServer(FakeOpenAI):
    """OpenAI's API (https://platform.openai.com/docs/api-reference/chat/create), with a maximum length of call IDs
    (https://github.com/vercel/ai/issues/5171).
    """

    kind = "openai"
    model = "gpt-4o-mini"
    cut_reason = "length"
    calls_reason = "tool_calls"
    has_done = True  # a stream ends with [DONE]
    has_stream_reason = True

    def __init__(self, story: Sequence[Said] = STORY, *, down_from: int = 0) -> None:
        super().__init__(self._answer)
        self._story = story
        self._down_from = down_from  # the first turn in which the server is down, 0 for never
        self._gave: set[int] = set()  # turns whose tool calls this server created
        self.refused: list[str] = []
        self.up: set[int] | None = None
        """Turns in which the server is up. None means that the server is up in all turns."""

    # --- refused requests

    def check(self, body: Body) -> None:
        """Raise `Refusal` for a request that the server does not accept."""
        ids = [it["id"] for it in _list_calls(body)] if self.kind in ("openai", "azure") else []
        if too_long := next((it for it in ids if len(it) > 40), ""):
            raise Refusal(
                "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40, but got "
                f"a string with length {len(too_long)} instead.",
                code="string_above_max_length",
            )
        refusal = find_refusal(body)
        if refusal is not None:
            raise refusal

    def _refuse(self, method: str, path: str, headers: Mapping[str, str], body: Body) -> Reply | None:
        refusal: Reply | None = None
        try:
            self.check(body)
        except Refusal as found:
            refusal = self.write_refusal(found)
        if refusal is None:
            return None
        self.refused.append(json.dumps(refusal.body))
        return refusal

    def write_refusal(self, refusal: Refusal) -> Reply:
        return error(400, refusal.message, code=refusal.code, param=refusal.param)

    # --- replies

    def _answer(self, body: Body) -> Reply:
        turn = 1 + sum(it["role"] == "assistant" for it in body["messages"])
        if (self._down_from and turn >= self._down_from) or (self.up is not None and turn not in self.up):
            return error(503, "The server is overloaded or not ready yet.")
        if not body.get("tools") and "response_format" not in body:
            return self._send_said(Said(turn, ANSWER), body)
        return self._send_said(self._story[min(turn, len(self._story)) - 1], body)

    def _send_said(self, said: Said, body: Body) -> Reply:
        if "response_format" in body:
            said = self._say_as_json(said)
        self._gave.add(said.turn)
        if not body.get("stream"):
            return Reply(body=self.write_whole(said))
        events = [json.dumps(it) for it in self.write_chunks(said)]
        events += ["[DONE]"] if self.has_done else []
        return Reply(body="".join(f"data: {it}\n\n" for it in events), headers={"content-type": "text/event-stream"})

    def _say_as_json(self, said: Said) -> Said:
        """Write one step as JSON, for a model without tool calls. Only the first call is written."""
        if said.is_cut:
            return said
        step: Body = {"answer": said.text}
        if said.calls:
            name, arguments = said.calls[0]
            step = {"call": {"tool": name, "arguments": arguments}}
        return Said(said.turn, json.dumps(step, ensure_ascii=False))

    def write_whole(self, said: Said) -> Body:
        choice = {"index": 0, "message": self.write_message(said), "finish_reason": self.reason_of(said)}
        return {**self.envelope("chat.completion"), "choices": [choice], "usage": USAGE}

    def write_message(self, said: Said) -> Body:
        message: Body = {"role": "assistant", "content": said.text or None}
        if said.calls:
            message["tool_calls"] = [self.write_call(said, at) for at in range(len(said.calls))]
        return message

    def write_call(self, said: Said, at: int) -> Body:
        name, arguments = said.calls[at]
        function = {"name": name, "arguments": self.write_arguments(arguments)}
        return {"id": self.id_of(said, at), "type": "function", "function": function}

    def write_arguments(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False)

    def write_chunks(self, said: Said) -> Iterator[Body]:
        """Yield the chunks of a stream as OpenAI sends them. A call's first chunk holds its ID and name, and all its
        chunks hold its index.
        """
        yield self.chunk({"role": "assistant", "content": ""})
        for piece in split(said.text):
            yield self.chunk({"content": piece})
        for at in range(len(said.calls)):
            call = self.write_call(said, at)
            arguments = call["function"]["arguments"]
            yield self.chunk({"tool_calls": [{**call, "index": at, "function": {**call["function"], "arguments": ""}}]})
            for piece in split(arguments):
                yield self.chunk({"tool_calls": [{"index": at, "function": {"arguments": piece}}]})
        yield self.chunk({}, self.reason_of(said))
        yield {**self.envelope("chat.completion.chunk"), "choices": [], "usage": USAGE}

    def chunk(self, delta: Body, reason: str | None = None) -> Body:
        if not self.has_stream_reason:
            reason = None
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return {**self.envelope("chat.completion.chunk"), "choices": [choice]}

    def envelope(self, kind: str) -> Body:
        return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": self.model}

    def reason_of(self, said: Said) -> str:
        return self.cut_reason if said.is_cut else self.calls_reason if said.calls else "stop"

    def id_of(self, said: Said, at: int) -> str:
        return "call_" + hashlib.sha256(f"{said.turn}/{at}".encode()).hexdigest()[:24]


USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def split(text: str, size: int = 7) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def _list_calls(body: Body) -> Sequence[Body]:
    return [call for message in body["messages"] for call in message.get("tool_calls") or ()]


def _current_turn(messages: Sequence[Body]) -> Sequence[Body]:
    """Return the messages since the last one of the user."""
    places = [at for at, it in enumerate(messages) if it["role"] == "user"]
    return messages[places[-1] :] if places else messages


class AzureServer(ModelServer):
    """Azure: OpenAI's rules, but a stream starts with a chunk about content filters that has no choices.

    https://learn.microsoft.com/azure/foundry/openai/concepts/content-streaming,
    https://learn.microsoft.com/answers/questions/1533887/does-streaming-work-with-tool-calls-yet-on-azureop
    """

    kind = "azure"
    model = "my-deployment"

    def write_chunks(self, said: Said) -> Iterator[Body]:
        filters = [{"prompt_index": 0, "content_filter_results": {}}]
        yield {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": filters}
        for chunk in super().write_chunks(said):
            for choice in chunk["choices"]:
                choice["content_filter_results"] = {}
            yield chunk


class MistralServer(ModelServer):
    """Mistral's API. Sources: message order https://github.com/avante-corp/avante.nvim/issues/2562, call IDs
    https://github.com/langchain-ai/langchain/pull/24668, unknown fields
    https://github.com/charmbracelet/crush/issues/1590 and https://github.com/avante-corp/avante.nvim/issues/2347,
    content parts https://github.com/langchain4j/langchain4j/pull/4474.
    """

    kind = "mistral"
    model = "mistral-small-latest"
    cut_reason = "model_length"
    _after: ClassVar[dict[str, set[str]]] = {
        "system": {"user", "assistant", "system"}, "user": {"user", "assistant", "system"}, "assistant": {"user", "tool"},
        "tool": {"assistant", "tool"},
    }  # fmt: skip
    _fields: ClassVar[dict[str, set[str]]] = {
        "system": {"role", "content"}, "user": {"role", "content"}, "assistant": {"role", "content", "tool_calls", "prefix"},
        "tool": {"role", "content", "tool_call_id", "name"},
    }  # fmt: skip

    def check(self, body: Body) -> None:
        if "stream_options" in body:
            raise Refusal('{"detail":[{"type":"extra_forbidden","loc":["body","stream_options","include_usage"]}]}')
        before = ""
        for place, message in enumerate(body["messages"]):
            role = message["role"]
            if before and role not in self._after[before]:
                raise Refusal(f"Unexpected role '{role}' after role '{before}'", code="3230")
            extra = set(message) - self._fields[role]
            if extra:
                where = f'"loc":["body","messages",{place},"{role}","{sorted(extra)[0]}"]'
                raise Refusal(
                    f'{{"detail":[{{"type":"extra_forbidden",{where},"msg":"Extra inputs are not permitted"}}]}}'
                )
            ids = [it["id"] for it in message.get("tool_calls", ())] + [message.get("tool_call_id", "abcdefghi")]
            wrong = next((it for it in ids if not re.fullmatch("[a-zA-Z0-9]{9}", it)), None)
            if wrong is not None:
                raise Refusal(f"Tool call id was {wrong} but must be a-z, A-Z, 0-9, with a length of 9.", code="3280")
            before = role
        if before not in ("user", "tool"):
            raise Refusal(
                "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
            )
        super().check(body)

    def write_refusal(self, refusal: Refusal) -> Reply:
        kind = "invalid_request_message_order" if refusal.code == "3230" else "invalid_request_error"
        body = {"object": "error", "message": refusal.message, "type": kind, "param": None, "code": refusal.code}
        return Reply(status=422 if "extra_forbidden" in refusal.message else 400, body=body)

    def write_content(self, said: Said, text: str) -> Any:
        if not text:
            return ""
        thought = {"type": "thinking", "thinking": [{"type": "text", "text": f"{THOUGHT} {said.turn}"}]}
        return [thought, {"type": "text", "text": text}]

    def write_message(self, said: Said) -> Body:
        return {**super().write_message(said), "content": self.write_content(said, said.text)}

    def write_chunks(self, said: Said) -> Iterator[Body]:
        """Yield each tool call whole in one chunk, together with the finish reason."""
        yield self.chunk({"role": "assistant", "content": ""})
        yield self.chunk(
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": f"{THOUGHT} {said.turn}"}]}]}
        )
        for piece in split(said.text):
            yield self.chunk({"content": piece})
        delta = {
            "content": "",
            "tool_calls": [{**self.write_call(said, at), "index": at} for at in range(len(said.calls))],
        }
        yield {**self.chunk(delta if said.calls else {"content": ""}, self.reason_of(said)), "usage": USAGE}

    def id_of(self, said: Said, at: int) -> str:
        return hashlib.sha256(f"{said.turn}/{at}".encode()).hexdigest()[:9]


class ThinkingServer(ModelServer):
    """A server that requires the thinking of an earlier reply together with its tool calls."""

    field = "reasoning_content"

    def thought_of(self, said: Said) -> Any:
        return f"{THOUGHT} {said.turn}"

    def write_message(self, said: Said) -> Body:
        return {**super().write_message(said), self.field: self.thought_of(said)}

    def write_chunks(self, said: Said) -> Iterator[Body]:
        chunks = super().write_chunks(said)
        yield next(chunks)
        for piece in split(self.thought_of(said)):
            yield self.chunk({self.field: piece})
        yield from chunks

    def own_turn(self, message: Body) -> Said | None:
        """Return the turn in which this server created the calls of a message, or None if another server created
        them.
        """
        made = message.get("tool_calls") or ()
        ids = [it["id"] for it in made]
        given = [it for it in self._story if it.calls and it.turn in self._gave]
        return next((it for it in given if ids == [self.id_of(it, at) for at in range(len(it.calls))]), None)

    def check(self, body: Body) -> None:
        super().check(body)
        for place, message in enumerate(body["messages"]):
            if message["role"] == "assistant" and message.get("tool_calls"):
                self.check_thought(place, message, self.own_turn(message))

    def check_thought(self, place: int, message: Body, own: Said | None) -> None:
        given = message.get(self.field)
        if not given:
            raise Refusal(self.say_missing(place), code="invalid_request_error")
        if own is not None and self.is_exact and given != self.thought_of(own):
            raise Refusal(f"not the thinking of turn {own.turn}: {given!r}")

    is_exact = True
    """Whether a blank is refused as a substitute for the thinking. The real servers accept a blank."""

    def say_missing(self, place: int) -> str:
        raise NotImplementedError


class DeepSeekServer(ThinkingServer):
    """DeepSeek. Sources: https://api-docs.deepseek.com/guides/thinking_mode,
    https://github.com/continuedev/continue/issues/10193
    """

    kind = "deepseek"
    model = "deepseek-reasoner"

    def id_of(self, said: Said, at: int) -> str:
        return f"call_{at:02}_" + hashlib.sha256(f"deepseek {said.turn}/{at}".encode()).hexdigest()[:20]

    def say_missing(self, place: int) -> str:
        return (
            f"Missing `reasoning_content` field in the assistant message at message index {place}. For more information, "
            "please refer to https://api-docs.deepseek.com/guides/thinking_mode#tool-calls"
        )


class KimiServer(ThinkingServer):
    """Kimi (https://github.com/continuedev/continue/issues/11711). Its call IDs contain the function's name
    (https://github.com/vybestack/llxprt-code/issues/713), and its streams report usage inside the choice
    (https://github.com/earendil-works/pi/issues/2017).
    """

    kind = "kimi"
    model = "kimi-k2-thinking"

    def write_chunks(self, said: Said) -> Iterator[Body]:
        for chunk in super().write_chunks(said):
            if chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                chunk["choices"][0]["usage"] = USAGE
            if chunk["choices"]:  # this server sends no chunk that has only usage
                yield chunk

    def say_missing(self, place: int) -> str:
        return f"thinking is enabled but reasoning_content is missing in assistant tool call message at index {place}"

    def id_of(self, said: Said, at: int) -> str:
        before = sum(len(it.calls) for it in self._story if it.turn < said.turn)
        return f"functions.{said.calls[at][0]}:{before + at}"


class GeminiServer(ModelServer):
    """Gemini's OpenAI endpoint. Sources: thought signatures https://ai.google.dev/gemini-api/docs/thought-signatures,
    chunks without an index https://github.com/open-webui/computer/issues/224, errors as a list
    https://github.com/FuzzAnything/PromptFuzz/issues/42.
    """

    kind = "gemini"
    model = "gemini-3-flash-preview"
    cut_reason = "MAX_TOKENS"
    calls_reason = "stop"

    def signature_of(self, said: Said) -> Body:
        return {"google": {"thought_signature": f"c2lnbmF0dXJl{said.turn}=="}}

    def write_call(self, said: Said, at: int) -> Body:
        call = super().write_call(said, at)
        return {**call, "extra_content": self.signature_of(said)} if at == 0 else call

    def write_chunks(self, said: Said) -> Iterator[Body]:
        for piece in split(said.text):
            yield self.chunk({"role": "assistant", "content": piece})
        for at in range(len(said.calls)):
            yield self.chunk({"role": "assistant", "tool_calls": [self.write_call(said, at)]})
        yield {**self.chunk({"role": "assistant"}, self.reason_of(said)), "usage": USAGE}

    def id_of(self, said: Said, at: int) -> str:
        return f"function-call-{said.turn}{at}"

    def check(self, body: Body) -> None:
        super().check(body)
        for place, message in enumerate(_current_turn(body["messages"])):
            made = message.get("tool_calls")
            if not made:
                continue
            given = (made[0].get("extra_content") or {}).get("google", {}).get("thought_signature")
            given_turns = [it for it in self._story if it.calls and it.turn in self._gave]
            own = next((it for it in given_turns if made[0]["id"] == self.id_of(it, 0)), None)
            wanted = (
                self.signature_of(own)["google"]["thought_signature"]
                if own is not None
                else "skip_thought_signature_validator"
            )
            if given != wanted:
                name = made[0]["function"]["name"]
                raise Refusal(
                    "Function call is missing a thought_signature in functionCall parts. This is required for tools to work "
                    f"correctly. Additional data, function call `default_api:{name}`, position {place}."
                )

    def write_refusal(self, refusal: Refusal) -> Reply:
        return Reply(
            status=400, body=[{"error": {"code": 400, "message": refusal.message, "status": "INVALID_ARGUMENT"}}]
        )


class BedrockServer(ThinkingServer):
    """Claude on Bedrock through LiteLLM. Sources: thinking blocks https://github.com/BerriAI/litellm/issues/15601,
    tools required in the last turn too https://github.com/BerriAI/litellm/issues/40735, no blank text
    https://github.com/OpenHands/OpenHands/issues/5339.
    """

    kind = "bedrock"
    model = "bedrock/us.anthropic.claude-sonnet-4"
    field = "thinking_blocks"

    def thought_of(self, said: Said) -> Any:
        return [{"type": "thinking", "thinking": f"{THOUGHT} {said.turn}", "signature": f"sig{said.turn}"}]

    def write_chunks(self, said: Said) -> Iterator[Body]:
        chunks = ModelServer.write_chunks(self, said)
        yield next(chunks)
        for piece in split(f"{THOUGHT} {said.turn}"):
            block = {"type": "thinking", "thinking": piece, "signature": None}
            yield self.chunk({"reasoning_content": piece, "thinking_blocks": [block]})
        yield self.chunk({"thinking_blocks": [{"type": "thinking", "thinking": "", "signature": f"sig{said.turn}"}]})
        yield from chunks

    def check(self, body: Body) -> None:
        messages = body["messages"]
        if any(it.get("tool_calls") for it in messages) and not body.get("tools"):
            sentence = (
                "litellm.UnsupportedParamsError: Bedrock doesn't support tool calling without `tools=` param specified. "
                "Pass `tools=` param OR set `litellm.modify_params = True`"
            )
            raise Refusal(sentence)
        if any(not re.fullmatch("[a-zA-Z0-9_-]{1,64}", it["id"]) for it in _list_calls(body)):
            raise Refusal("messages.1.content.0.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'")
        said = [it for it in messages if it["role"] != "system"]
        if said[0]["role"] != "user":
            raise Refusal("A conversation must start with a user message.")
        if any(it["content"] is not None and not str(it["content"]).strip() for it in messages):
            raise Refusal(
                "The text field in the ContentBlock object is blank. Add text to the text field, and try again."
            )
        super().check(body)

    def check_thought(self, place: int, message: Body, own: Said | None) -> None:
        if own is not None:  # LiteLLM drops the thinking if another model created the call
            super().check_thought(place, message, own)

    def say_missing(self, place: int) -> str:
        return (
            "litellm.BadRequestError: BedrockException - messages.1.content.0.type: Expected `thinking` or "
            "`redacted_thinking`, but found `tool_use`."
        )

    def id_of(self, said: Said, at: int) -> str:
        return "tooluse_" + hashlib.sha256(f"{said.turn}/{at}".encode()).hexdigest()[:22]


class OllamaServer(ModelServer):
    """Ollama. Each call is one chunk with index 0, chunks have an empty finish reason
    (https://github.com/ollama/ollama/issues/4357, https://github.com/ollama/ollama/issues/15457), and the thinking
    field is `reasoning`.
    """

    kind = "ollama"
    model = "qwen3:8b"

    def write_chunks(self, said: Said) -> Iterator[Body]:
        yield self.chunk({"role": "assistant", "content": "", "reasoning": f"{THOUGHT} {said.turn}"}, "")
        for piece in split(said.text):
            yield self.chunk({"role": "assistant", "content": piece}, "")
        for at in range(len(said.calls)):
            yield self.chunk(
                {"role": "assistant", "content": "", "tool_calls": [{**self.write_call(said, at), "index": 0}]}, ""
            )
        yield self.chunk({"role": "assistant", "content": ""}, self.reason_of(said))

    def id_of(self, said: Said, at: int) -> str:
        return "call_" + hashlib.sha256(f"{said.turn}/{at}".encode()).hexdigest()[:8]


class VllmServer(ModelServer):
    """vLLM and compatible servers. Streams end with [DONE] but without a finish reason
    (https://github.com/waybarrios/vllm-mlx/issues/628), only a call's first chunk has the index, and both names of
    the thinking field occur. The server parses the arguments of earlier calls
    (https://github.com/vllm-project/vllm/issues/43995).
    """

    kind = "vllm"
    model = "our-model"
    has_stream_reason = False

    def check(self, body: Body) -> None:
        for call in _list_calls(body):
            try:
                arguments = json.loads(call["function"]["arguments"] or "{}")
            except ValueError as error:
                raise Refusal(str(error), code="400") from error
            if not isinstance(arguments, dict):
                raise Refusal("Can only get item pairs from a mapping.", code="400")
        super().check(body)

    def write_message(self, said: Said) -> Body:
        thought = f"{THOUGHT} {said.turn}"
        return {**super().write_message(said), "reasoning": thought, "reasoning_content": thought}

    def reason_of(self, said: Said) -> str:
        return super().reason_of(said)

    def chunk(self, delta: Body, reason: str | None = None) -> Body:
        self.has_stream_reason = reason == self.cut_reason  # the stream reports a reached limit, but not a normal end
        return super().chunk(delta, reason)

    def write_chunks(self, said: Said) -> Iterator[Body]:
        yield self.chunk({"role": "assistant", "content": ""})
        for piece in split(said.text):
            yield self.chunk({"content": piece})
        for at in range(len(said.calls)):
            call = self.write_call(said, at)
            head = {**call, "index": at, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield self.chunk({"tool_calls": [head]})
            for piece in split(call["function"]["arguments"]):
                yield self.chunk({"tool_calls": [{"function": {"arguments": piece}}]})
        yield self.chunk({}, self.reason_of(said))

    def id_of(self, said: Said, at: int) -> str:
        return "chatcmpl-tool-" + hashlib.sha256(f"{said.turn}/{at}".encode()).hexdigest()[:32]


class LlamaCppServer(ModelServer):
    """llama.cpp with a Mistral chat template. Roles must alternate, otherwise the template fails with a server error
    (https://github.com/ggml-org/llama.cpp/issues/19851). Calls have no IDs and their arguments are an object. Streams
    have no [DONE], and thinking is between tags. The server parses the arguments of earlier calls
    (https://github.com/OpenHands/software-agent-sdk/issues/2887).
    """

    kind = "llama.cpp"
    model = "local-gguf"
    has_done = False

    def check(self, body: Body) -> None:
        spoken = [
            it
            for it in body["messages"]
            if it["role"] == "user" or (it["role"] == "assistant" and not it.get("tool_calls"))
        ]
        roles = [it["role"] for it in spoken]
        if roles != [("user", "assistant")[at % 2] for at in range(len(roles))]:
            raise Refusal(
                "After the optional system message, conversation roles must alternate user/assistant/user/assistant/..."
            )
        for call in _list_calls(body):
            try:
                json.loads(call["function"]["arguments"])
            except ValueError as error:
                raise Refusal(f"Failed to parse tool call arguments as JSON: {error}") from error
        super().check(body)

    def write_refusal(self, refusal: Refusal) -> Reply:
        return error(500, refusal.message)

    def _send_said(self, said: Said, body: Body) -> Reply:
        """Send thinking as part of the text, because the server runs without a parser for it."""
        if said.text and "response_format" not in body:
            said = replace(said, text=f"<think>\n{THOUGHT} {said.turn}\n</think>\n\n{said.text}")
        return super()._send_said(said, body)

    def write_call(self, said: Said, at: int) -> Body:
        name, arguments = said.calls[at]
        return {"function": {"name": name, "arguments": dict(arguments)}}

    def write_chunks(self, said: Said) -> Iterator[Body]:
        yield self.chunk({"role": "assistant", "content": None})
        for piece in split(said.text):
            yield self.chunk({"content": piece})
        for at in range(len(said.calls)):
            name, arguments = said.calls[at]
            yield self.chunk({"tool_calls": [{"type": "function", "function": {"name": name, "arguments": ""}}]})
            for piece in split(json.dumps(arguments, ensure_ascii=False)):
                yield self.chunk({"tool_calls": [{"function": {"arguments": piece}}]})
        yield self.chunk({}, self.reason_of(said))


SERVERS: Sequence[type[ModelServer]] = (
    ModelServer, AzureServer, MistralServer, DeepSeekServer, KimiServer, GeminiServer, BedrockServer, OllamaServer, VllmServer,
    LlamaCppServer,
)  # fmt: skip

__all__ = ["ANSWER", "SERVERS", "STORY", "THOUGHT", "ModelServer", "Received", "Said"]
