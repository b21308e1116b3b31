"""Forced tools: the first turn has to call each of them, the turns after it call what they want. An agent that is
handed the conversation has a first turn of its own.

`ForcedTools` is middleware around the model call: it asks once for each forced tool, all at the same time, and merges
what comes back into the one reply of the turn: calls and texts in the order of the tools, usage added up. Only that
reply is recorded, so a reaction that is killed before asks for all of them again. What stands before it in an agent's
list is around all of these requests together, what stands after it around each. A message may name further ones of
those that the agent's author lets messages force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated

from roundelay.agents.isolation import first_error
from roundelay.agents.middleware import Around, CallModel, Middleware
from roundelay.agents.models.model import ModelError, ModelReply, ModelRequest, NamedTool, Usage, join_origins
from roundelay.agents.models.tokens import SEVERAL_REQUESTS
from roundelay.agents.options import OR_NONE, Text, checked
from roundelay.agents.values import TurnState

Ask = Callable[[ModelRequest], Awaitable[ModelReply]]


FORCED_TOOLS = "forced_tools"
"""In the metadata of a message: the tools that the reaction to it has to call first."""


def _check_names(tools: Sequence[str], by_message: Sequence[str]) -> None:
    if not tools and not by_message:
        raise ValueError("forces nothing: name tools, or in by_message those that a message may force")


class ForcedTools(Middleware):
    """Has the first turn call these ``tools``, in this order, and then those of ``by_message`` that the message names
    in its metadata, ``{"forced_tools": ["search"]}``; what else it names there is passed over.

    One that is held back from the turn (`Middleware.prepare`) is left out; one that the agent does not have ends the
    reaction as misconfigured.
    """

    min_turns = 2

    @checked(_check_names)
    def __init__(self, *tools: Annotated[Text, OR_NONE], by_message: tuple[Text, ...] = ()) -> None:
        self._names = tuple(dict.fromkeys(tools))
        self._by_message = frozenset(by_message)

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        state.values[SEVERAL_REQUESTS] = state.own_turn == 1 and bool(step.tools) and len(self._find_names(state)) > 1
        return step

    async def around_model(self, around: Around, request: ModelRequest, proceed: Ask) -> ModelReply:
        if around.state.own_turn != 1 or not request.tools:
            return await proceed(request)
        offered = {spec.name for spec in request.tools}
        known = {spec.name for spec in around.agent.specs}
        names = self._find_names(around.state)
        for name in names:
            if name not in offered | known:
                listed = ", ".join(sorted(offered))
                sentence = f'The forced tool "{name}" is none of the tools of {around.agent.id}: {listed}.'
                raise ModelError(sentence, reason="misconfigured")
        forced = [replace(request, tool_choice=NamedTool(name)) for name in names if name in offered]
        if not forced:
            return await proceed(request)
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(_ask(proceed, single)) for single in forced]
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return merge_replies([task.result() for task in asked])

    def _find_names(self, state: TurnState) -> tuple[str, ...]:
        """Give the tools that this reaction has to call first."""
        named = state.trigger.metadata.get(FORCED_TOOLS) if state.trigger is not None else None
        further = (
            [name for name in named if isinstance(name, str) and name in self._by_message]
            if isinstance(named, list)
            else []
        )
        return tuple(dict.fromkeys((*self._names, *further)))


def merge_replies(replies: Sequence[ModelReply]) -> ModelReply:
    """Make one reply of several; the first says which model it was, and why one of them ended early."""
    texts = [reply.text.strip() for reply in replies if reply.text and reply.text.strip()]
    return ModelReply(
        "\n\n".join(texts) or None,
        tuple(call for reply in replies for call in reply.tool_calls),
        sum((reply.usage for reply in replies), Usage()),
        next((reply.finish_reason for reply in replies if reply.is_cut), replies[0].finish_reason),
        replies[0].model,
        origin=join_origins(replies),
    )


async def _ask(proceed: Ask, request: ModelRequest) -> ModelReply:
    return await proceed(request)
