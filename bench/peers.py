"""Turns in other libraries, if they are installed: `./dev bench turns --peers`.

The project does not depend on these libraries. Each is used as in the beginning of its documentation, without tracing
and streaming.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from chat_server import ANSWER
from loops import PROMPT, SYSTEM, Loop, look_up
from wire import LoadError


class OpenAIAgents:
    """`openai-agents`: its runner, on chat completions."""

    def __init__(self, base_url: str) -> None:
        library, openai = importlib.import_module("agents"), importlib.import_module("openai")
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        model = library.OpenAIChatCompletionsModel(model="bench", openai_client=self._client)
        self._agent = library.Agent(
            name="keeper", instructions=SYSTEM, model=model, tools=[library.function_tool(look_up)]
        )
        self._config = library.RunConfig(tracing_disabled=True)
        self._run = library.Runner.run

    async def run(self) -> None:
        _check((await self._run(self._agent, PROMPT, run_config=self._config)).final_output)

    async def close(self) -> None:
        await self._client.close()


class PydanticAI:
    """`pydantic-ai`: its agent, on chat completions."""

    def __init__(self, base_url: str) -> None:
        library, openai = importlib.import_module("pydantic_ai"), importlib.import_module("openai")
        models, providers = (importlib.import_module(f"pydantic_ai.{name}.openai") for name in ("models", "providers"))
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        provider = providers.OpenAIProvider(openai_client=self._client)
        model: Any = models.OpenAIChatModel("bench", provider=provider)
        self._agent = library.Agent(model, system_prompt=SYSTEM, tools=[look_up])

    async def run(self) -> None:
        _check((await self._agent.run(PROMPT)).output)

    async def close(self) -> None:
        await self._client.close()


PEERS: dict[str, tuple[str, type[OpenAIAgents] | type[PydanticAI]]] = {
    "openai-agents": ("agents", OpenAIAgents),
    "pydantic-ai": ("pydantic_ai", PydanticAI),
}


def make_peers(base_url: str) -> dict[str, Loop]:
    """Return the loops of the installed libraries. Raises `LoadError` if there are none."""
    found = {name: make for name, (module, make) in PEERS.items() if importlib.util.find_spec(module) is not None}
    if not found:
        raise LoadError(f"none of {', '.join(PEERS)} is installed; pip install them into an environment with Roundelay")
    return {name: make(base_url) for name, make in found.items()}


def _check(answer: object) -> None:
    if answer != ANSWER:
        raise LoadError(f"a run ended with {answer!r}, not with the server's answer")
