"""Middleware that forces the model to call certain tools in its first turn. In later turns, the model may choose
freely. After a handoff, the same rule applies to the first turn of the new agent.

`ForcedTools` is middleware around the model call. `ForcedTools` sends one request per forced tool, concurrently, and
merges the replies into one reply of the turn. The merged reply lists calls and texts in the order of the tools, and its
usage is the sum. Only the merged reply is recorded, so a reaction that is killed earlier repeats all requests.
Middleware that precedes `ForcedTools` in an agent's list wraps all these requests together. Middleware after
`ForcedTools` in the list wraps each request. A message may force additional tools if the agent's author allows these
tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from roundelay.agents.isolation import first_error
from roundelay.agents.middleware import Around, AskModel, CallModel, Middleware
from roundelay.agents.models.model import ModelError, ModelReply, ModelRequest, NamedTool, Usage, join_origins
from roundelay.agents.models.tokens import SEVERAL_REQUESTS
from roundelay.agents.options import OR_NONE, Text, checked
from roundelay.agents.values import TurnState

FORCED_TOOLS = "forced_tools"
"""Key in a message's metadata for the names of tools that the reaction to this message must call first."""


def _check_names(tools: Sequence[str], by_message: Sequence[str]) -> None:
    if not tools and not by_message:
        raise ValueError("forces nothing: name tools, or set by_message to the tools that a message may force")


class ForcedTools(Middleware):
    """Makes the first turn call ``tools`` in this order, followed by the tools in ``by_message`` that the message's
    metadata names.

    The metadata is ``{"forced_tools": ["search"]}``. Names that are not in ``by_message`` are ignored. A tool that a
    hook withholds from the turn (`Middleware.prepare`) is skipped. If the agent does not have a forced tool, the
    reaction fails with the reason ``misconfigured``.
    """

    min_turns = 2

    @checked(_check_names)
    def __init__(self, *tools: Annotated[Text, OR_NONE], by_message: tuple[Text, ...] = ()) -> None:
        self._names = tuple(dict.fromkeys(tools))
        self._by_message = frozenset(by_message)
        self.tool_names = (*self._names, *by_message)

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        # Set a flag for the context engine if the turn has several requests. Without the flag, the engine would mistake
        # the sum of their usage for the size of one request.
        state.values[SEVERAL_REQUESTS] = state.own_turn == 1 and bool(step.tools) and len(self._find_names(state)) > 1
        return step

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        if around.state.own_turn != 1 or not request.tools:
            return await proceed(request)
        offered = {spec.name for spec in request.tools}
        agent_tools = {spec.name for spec in around.agent.specs}
        names = self._find_names(around.state)
        for name in names:
            if name not in offered | agent_tools:
                listed = ", ".join(sorted(offered))
                sentence = f'The agent {around.agent.id} does not have the forced tool "{name}". Its tools: {listed}.'
                raise ModelError(sentence, reason="misconfigured")
        forced = [replace(request, tool_choice=NamedTool(name)) for name in names if name in offered]
        if not forced:
            return await proceed(request)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_ask(proceed, single)) for single in forced]
        except BaseExceptionGroup as failures:  # callers expect a `ModelError` instead of a group
            raise first_error(failures) from failures
        return merge_replies([task.result() for task in tasks])

    def _find_names(self, state: TurnState) -> tuple[str, ...]:
        """Return the tools that this reaction must call first."""
        requested = state.trigger.metadata.get(FORCED_TOOLS) if state.trigger is not None else None
        further = (
            [name for name in requested if isinstance(name, str) and name in self._by_message]
            if isinstance(requested, list)
            else []
        )
        return tuple(dict.fromkeys((*self._names, *further)))


def merge_replies(replies: Sequence[ModelReply]) -> ModelReply:
    """Merge several replies into one. The model's name comes from the first reply. The finish reason comes from the
    first reply that was cut off, if there is one.
    """
    texts = [reply.text.strip() for reply in replies if reply.text and reply.text.strip()]
    return ModelReply(
        "\n\n".join(texts) or None,
        tuple(call for reply in replies for call in reply.tool_calls),
        sum((reply.usage for reply in replies), Usage()),
        next((reply.finish_reason for reply in replies if reply.is_cut), replies[0].finish_reason),
        replies[0].model,
        origin=join_origins(replies),
    )


async def _ask(proceed: AskModel, request: ModelRequest) -> ModelReply:
    return await proceed(request)
