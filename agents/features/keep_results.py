"""Middleware that shows the tool results of earlier reactions in the prompts of later reactions in the same thread.

The results come from the agent's own records, so data that a data policy removed does not appear. The shown results are
stored as a note of the reaction, so a resumed reaction reads the same results.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field, JsonValue

from roundelay.agents.history import add_to_prompt
from roundelay.agents.isolation import retry_later
from roundelay.agents.middleware import Around, AskModel, CallModel, Middleware
from roundelay.agents.models.model import ModelReply, ModelRequest
from roundelay.agents.network_tools import communication_tools
from roundelay.agents.options import checked
from roundelay.agents.values import ALTERED, DISABLED, NOT_RUN, TurnState
from roundelay.network.elements import render_element
from roundelay.network.errors import ConnectError, RoundelayError
from roundelay.network.text import cut

KEPT = "keep_results"
"""Name of the note with the results, and their key in ``state.values``."""

HEADING = "Results of your tools for earlier messages of this thread (newest last):"
LOOKED_AT = 20
"""Maximum number of earlier messages in the thread whose reactions are searched for results. The search begins with the
newest message.
"""

_PLACED = "keep_results.placed"
_logger = logging.getLogger(__name__)


class KeepResults(Middleware):
    """Shows tool results of earlier reactions in the thread: of the last ``reactions`` reactions that called tools. At
    most ``max_chars`` characters are shown, and the newest results have priority.
    """

    @checked()
    def __init__(
        self,
        reactions: Annotated[int, Field(ge=1, le=20)] = 3,
        *,
        max_chars: Annotated[int, Field(ge=200, le=200_000)] = 8000,
    ) -> None:
        self._reactions = reactions
        self._max_chars = max_chars

    def prepare(self, state: TurnState, step: CallModel) -> CallModel:
        text = _render(state.values.get(KEPT))
        state.values[_PLACED] = bool(text)
        return step.add_to_prompt(text) if text else step

    async def around_model(self, around: Around, request: ModelRequest, proceed: AskModel) -> ModelReply:
        values = around.state.values
        # Search only in the first turn. Later turns and a resumed run read the note, so that all turns show the same
        # results.
        if KEPT not in values and not around.path and around.state.own_turn == 1:
            # A replay must show the same results as the recorded run, even if the ledger contains more records by now.
            results = around.replayed(KEPT)
            if results is None:
                results = await self._find(around)
            if isinstance(results, list) and results:
                tools = {str(result["tool"]) for result in results if isinstance(result, Mapping)}
                await around.keep(KEPT, results, of=tools)
        text = _render(values.get(KEPT))
        if text and not values.get(_PLACED):  # the results were not known yet when the request was prepared
            request = replace(request, messages=add_to_prompt(request.messages, around.state.history, text))
        return await proceed(request)

    async def _find(self, around: Around) -> list[JsonValue]:
        """Return the earlier results to show, oldest first."""
        trigger, client = around.context.trigger, around.context.client
        agent_id = around.context.agent_id
        earlier = [
            message.seq
            for message in around.state.conversation
            if message.thread_id == trigger.thread_id and message.seq < trigger.seq and message.sender_id != agent_id
        ]
        shown: list[JsonValue] = []
        room, left = min(self._max_chars, around.max_kept_chars), self._reactions
        try:
            for seq in sorted(earlier, reverse=True)[:LOOKED_AT]:
                results = _read_results(await retry_later(partial(client.read_own_reaction, seq)), seq)
                # Count only reactions that called tools.
                left -= bool(results)
                for result in reversed(results):
                    if room <= 0:
                        return shown[::-1]
                    result["content"] = cut(str(result["content"]), room)
                    # the element around the result takes about 100 characters
                    room -= len(str(result["content"])) + 100
                    shown.append(result)
                if left <= 0:
                    break
        except ConnectError:
            raise
        except RoundelayError as error:  # for example a quota: the reaction continues without earlier results
            _logger.warning("no earlier results", extra={"reaction": around.reaction, "code": error.code})
        return shown[::-1]


def _read_results(records: Sequence[Mapping[str, Any]], seq: int) -> list[dict[str, JsonValue]]:
    """Return the successful results of a reaction's calls, in order.

    Calls that did not run, results that a data policy changed, and results of tools that send messages are skipped.
    """
    talks = {tool.name for tool in communication_tools()}
    started: dict[tuple[str, int, int], str] = {}
    results: list[dict[str, JsonValue]] = []
    for record in records:
        body = record["body"]
        position = (body.get("path", ""), body.get("turn", 0), body.get("call", 0))
        if record["kind"] == "tool_started":
            started[position] = str(body.get("args") or "{}")
        elif record["kind"] == "tool_result" and position in started and not position[0] and body["tool"] not in talks:
            data = body.get("data") or {}
            if body["ok"] and not any(name in data for name in (ALTERED, DISABLED, NOT_RUN)):
                results.append(
                    {"tool": body["tool"], "arguments": started[position], "for": seq, "content": body["content"]}
                )
    return results


def _render(kept: object) -> str:
    """Return the earlier results as prompt text. The text is empty if there are no results."""
    if not isinstance(kept, list):
        return ""
    shown = [
        render_element(
            "result",
            str(result["content"]),
            tool=result["tool"],
            arguments=result["arguments"],
            message=f"#{result['for']}",
        )
        for result in kept
        if isinstance(result, Mapping)
    ]
    return "\n".join([HEADING, "<earlier_results>", *shown, "</earlier_results>"]) if shown else ""
