"""Forced tools: the first turn has to call each of them, the turns after it call what they want. An agent that is
handed the conversation has a first turn of its own.

`ForcedTools` is middleware around the model call: it asks once for each forced tool, all at the same time, and merges
what comes back into the one reply of the turn: calls and texts in the order of the tools, usage added up. Only that
reply is recorded, so a reaction that is killed before asks for all of them again. What stands before it in an agent's
list is around all of these requests together, what stands after it around each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from roundelay.agents.containment import first_error
from roundelay.agents.middleware import Around, CallModel, Middleware
from roundelay.agents.models.model import ModelError, ModelReply, ModelRequest, NamedTool, Usage
from roundelay.agents.models.tokens import SEVERAL_REQUESTS
from roundelay.agents.options import Text, checked
from roundelay.agents.values import TurnState

Ask = Callable[[ModelRequest], Awaitable[ModelReply]]


class ForcedTools(Middleware):
    """Has the first turn call these ``tools``, in this order.

    One that is held back from the turn (`Middleware.prepare`) is left out; one that the agent does not have ends the
    reaction as misconfigured.
    """

    @checked()
    def __init__(self, *tools: Text) -> None:
        self._names = tuple(dict.fromkeys(tools))

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        state.values[SEVERAL_REQUESTS] = state.own_turn == 1 and bool(step.tools) and len(self._names) > 1
        return step

    async def around_model(self, around: Around, request: ModelRequest, proceed: Ask) -> ModelReply:
        if around.state.own_turn != 1 or not request.tools:
            return await proceed(request)
        offered = {spec.name for spec in request.tools}
        known = {spec.name for spec in around.agent.specs}
        for name in self._names:
            if name not in offered | known:
                listed = ", ".join(sorted(offered))
                sentence = f'The forced tool "{name}" is none of the tools of {around.agent.id}: {listed}.'
                raise ModelError(sentence, reason="misconfigured")
        forced = [replace(request, tool_choice=NamedTool(name)) for name in self._names if name in offered]
        if not forced:
            return await proceed(request)
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(_ask(proceed, it)) for it in forced]
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return merge_replies([task.result() for task in asked])


def merge_replies(replies: Sequence[ModelReply]) -> ModelReply:
    """Make one reply of several; the first says which model it was, and why one of them ended early."""
    texts = [it.text.strip() for it in replies if it.text and it.text.strip()]
    return ModelReply(
        "\n\n".join(texts) or None,
        tuple(call for it in replies for call in it.tool_calls),
        sum((it.usage for it in replies), Usage()),
        next((it.finish_reason for it in replies if it.finish_reason == "length"), replies[0].finish_reason),
        replies[0].model,
    )


async def _ask(proceed: Ask, request: ModelRequest) -> ModelReply:
    return await proceed(request)
