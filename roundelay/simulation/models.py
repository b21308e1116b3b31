"""Wrap the models of a simulation's agents: record requests, add delays and failures, and limit the number of
tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from roundelay.agents.agent import Agent, Handoff
from roundelay.agents.models.model import Model, ModelError, ModelReply, ModelRequest, OnDelta, Usage
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.models.tape import TapeModel
from roundelay.simulation.links import Delay
from roundelay.simulation.virtual_time import SimulationLoop


@dataclass(frozen=True, slots=True)
class Asked:
    """Request to a model, and the model's reply. The reply is None if the model failed."""

    agent_id: str
    request: ModelRequest
    reply: ModelReply | None = None
    model_name: str = ""

    @property
    def text(self) -> str:
        """Return the whole text of the request."""
        return "\n".join(message.content or "" for message in self.request.messages)


@dataclass
class ModelWatch:
    """State that all models of a simulation share. ``asked`` contains all requests, in the order of the replies."""

    delay: Delay
    failure_rate: float = 0.0
    max_tokens: int | None = None
    under_way: int = 0
    spent: Usage = field(default_factory=Usage)
    asked: list[Asked] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Number of tokens used so far."""
        return self.spent.prompt_tokens + self.spent.completion_tokens

    def watch(self, agent: Agent, agent_id: str, chance: random.Random) -> Agent:
        """Return a copy of the agent whose models are observed. Agents that receive handoffs from this agent are
        observed too."""
        return self._watch(agent, agent_id, chance, {})

    def _watch(self, agent: Agent, agent_id: str, chance: random.Random, models: dict[int, WatchedModel]) -> Agent:
        # Agents that hand over to each other may share a model. In that case they also share its stream of random
        # numbers.
        model = models.setdefault(id(agent.model), WatchedModel(agent_id, agent.model, self, chance))
        handoffs = [handoff if isinstance(handoff, Handoff) else Handoff(handoff) for handoff in agent.handoffs]
        watched = tuple(
            replace(handoff, agent=self._watch(handoff.agent, agent_id, chance, models)) for handoff in handoffs
        )
        return replace(agent, model=model, handoffs=watched)


class WatchedModel:
    """Observed model of a simulated agent. Virtual time stops while a real model answers."""

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
            # Fail after the delay, because a failure takes as long as a reply.
            self._refuse()
            with self._being_asked():
                reply = await self._model.complete(request, on_delta)
        except Exception:  # record every kind of error, and raise it again
            watch.asked.append(Asked(self._agent_id, request, None, self.name))
            raise
        finally:
            watch.under_way -= 1
        watch.spent += reply.usage
        watch.asked.append(Asked(self._agent_id, request, reply, self.name))
        return reply

    @contextmanager
    def _being_asked(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            if isinstance(loop, SimulationLoop):
                stack.enter_context(loop.asking(f"the model {self.name} of {self._agent_id}"))
                # Scripts and rules answer inside the loop. A real model takes real time, during which no virtual
                # timeout may fire.
                if not isinstance(self._model, ScriptedModel | TapeModel):
                    stack.enter_context(loop.standing_still())
            yield

    async def close(self) -> None:
        close = getattr(self._model, "close", None)
        if close is not None:
            await close()

    def _refuse(self) -> None:
        watch = self._watch
        if watch.max_tokens is not None and watch.tokens >= watch.max_tokens:
            raise ModelError(
                f"This run may use {watch.max_tokens} tokens, and has used {watch.tokens}.", reason="quota"
            )
        if watch.failure_rate and self._chance.random() < watch.failure_rate:
            raise ModelError("A failure that the simulation caused.", reason="server")
