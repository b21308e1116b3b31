"""What a simulation sees: every row that its ledger stores, and every request that its agents' models are asked.

`WatchedLedger` and `WatchedModel` stand in the place of the real ones and change nothing, but for the delays and failures that a model is given.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.models.model import Model, ModelError, ModelReply, ModelRequest, OnDelta, Usage
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.models.tape import TapeModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.network.ledger import Row
from roundelay.network.ledger_memory import MemoryLedger
from roundelay.network.tables import Put
from roundelay.simulation.links import Delay
from roundelay.simulation.virtual_time import SimulationLoop


class WatchedLedger(MemoryLedger):
    """A `MemoryLedger` that tells of each batch it has stored."""

    def __init__(self, *, epoch: str, name: str, on_rows: Callable[[Sequence[Row]], None]) -> None:
        super().__init__(epoch=epoch, name=name)
        self._on_rows = on_rows

    async def append(self, rows: Sequence[Row], puts: Sequence[Put]) -> None:
        await super().append(rows, puts)
        if rows:
            self._on_rows(rows)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request to a model, and what came of it: ``failure`` or a reply."""

    agent_id: str
    request: ModelRequest
    reply: ModelReply | None = None
    failure: str | None = None
    model_name: str = ""

    @property
    def text(self) -> str:
        """Everything that the model read."""
        return "\n".join(message.content or "" for message in self.request.messages)


@dataclass
class ModelWatch:
    """What all models of one simulation share: what they were asked, how long they take, how often they fail, what they may spend."""

    delay: Delay
    failure_rate: float = 0.0
    max_tokens: int | None = None
    under_way: int = 0
    spent: Usage = field(default_factory=Usage)
    on_asked: Callable[[Asked], None] = lambda asked: None


class WatchedModel:
    """A model of a simulated agent. Under a virtual clock time stands still while one that is not scripted is asked."""

    def __init__(self, agent_id: str, model: Model, watch: ModelWatch, chance: random.Random) -> None:
        self.name = model.name
        self._agent_id = agent_id
        self._model = model
        self._watch = watch
        self._chance = chance

    async def complete(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        watch = self._watch
        watch.under_way += 1
        try:
            if watch.delay:
                await asyncio.sleep(watch.delay.draw_s(self._chance))
            self._refuse()
            loop = asyncio.get_running_loop()
            is_scripted = isinstance(self._model, ScriptedModel | TapeModel)
            still = loop.standing_still() if isinstance(loop, SimulationLoop) and not is_scripted else nullcontext()
            with still:
                reply = await self._model.complete(request, on_delta)
        except Exception as error:  # noted, whatever it is, and raised again
            watch.on_asked(Asked(self._agent_id, request, None, str(error), self.name))
            raise
        finally:
            watch.under_way -= 1
        watch.spent += reply.usage
        watch.on_asked(Asked(self._agent_id, request, reply, None, self.name))
        return reply

    async def close(self) -> None:
        close = getattr(self._model, "close", None)
        if close is not None:
            await close()

    def _refuse(self) -> None:
        watch = self._watch
        spent = watch.spent.prompt_tokens + watch.spent.completion_tokens
        if watch.max_tokens is not None and spent >= watch.max_tokens:
            raise ModelError(f"The run may use {watch.max_tokens} tokens, and {spent} are used.", reason="quota")
        if watch.failure_rate and self._chance.random() < watch.failure_rate:
            raise ModelError("A failure that the simulation chose.", reason="server")


def watch_models(runner: SimpleAgentRunner, watch: ModelWatch, chance: random.Random) -> None:
    """Put a watch on the models of an agent and of those that it hands over to, before it runs."""
    runner.agent = _watch_agent(runner.agent, runner.agent_id, watch, chance, {})


def _watch_agent(
    agent: Agent, agent_id: str, watch: ModelWatch, chance: random.Random, models: dict[int, WatchedModel]
) -> Agent:
    model = models.setdefault(id(agent.model), WatchedModel(agent_id, agent.model, watch, chance))
    handoffs = [it if isinstance(it, Handoff) else Handoff(it) for it in agent.handoffs]
    watched = tuple(replace(it, agent=_watch_agent(it.agent, agent_id, watch, chance, models)) for it in handoffs)
    return replace(agent, model=model, handoffs=watched)
