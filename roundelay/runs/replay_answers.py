"""Answer for models, tools and reviewers in a replay from the records, and collect changed requests (drifts)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import NoReturn

from pydantic import JsonValue

from roundelay.agents.models.model import Model, ModelError, ModelFailure, ModelReply, ModelRequest
from roundelay.agents.models.tape import find_drift
from roundelay.agents.reaction_ids import derived_id
from roundelay.agents.recorded import Recorded
from roundelay.agents.tools import PlannedCall
from roundelay.agents.values import ModelFailed, Reviewed, StopTrace, ToolResult
from roundelay.network.text import shorten
from roundelay.runs.reading import read_path
from roundelay.runs.recording import CallPlace, Recording
from roundelay.runs.replay_compare import Difference


class RecordedAnswers:
    """`Playback` that returns recorded results.

    ``drifts`` lists requests that differ from the recorded requests; a strict replay ends at the first drift. ``seen``
    is the sequence number of the last produced row. ``run_tools`` names the tools that run again.
    """

    def __init__(self, recording: Recording, *, run_tools: Collection[str], is_lenient: bool) -> None:
        self.seen = 0
        self.drifts: list[Difference] = []
        self.notes: list[str] = []
        self.turns = 0
        self._recording = recording
        self._run_tools = run_tools
        self._is_lenient = is_lenient
        self._shortened: dict[str, Difference] = {}
        """Reactions that must shorten their prompt, each with the difference to report if the shorter prompt also
        differs."""

    def is_made(self, place: CallPlace) -> bool:
        """Return whether a tool call must run again because it affected the network. Other calls use their recorded
        results.
        """
        recorded = self._recording
        reaction = recorded.reactions[place.reaction]
        run = reaction.runs.get(place.path)
        if run is None:
            return False
        if run.replies[place.turn].tool_calls[place.call].name in self._run_tools:
            return True
        call_id, agent_id = derived_id(place.reaction, place.path, place.turn, place.call), reaction.agent_id
        own = ((agent_id, f"m:{call_id}"), (agent_id, f"c:{call_id}"))
        inside = f"{place.path}/{place.turn}.{place.call}".lstrip("/")
        wait = run.waiting.waits.get((place.turn, place.call))
        return (
            any(key in recorded.keys for key in own)
            or f"c:{agent_id}/{call_id}" in recorded.answered_calls
            or (place.turn, place.call) in run.waiting.questions
            or (wait is not None and not wait.is_approval)
            or any(path == inside or path.startswith((f"{inside}.", f"{inside}/")) for path in reaction.runs)
        )

    async def complete(self, model: Model, request: ModelRequest, path: str, *, is_own: bool) -> ModelReply:
        run, reaction = self._find_run(request.reaction, path), request.reaction
        if run is None or not is_own:
            self.notes.append(
                f"Middleware of {request.agent_id} asks a model itself. The results are replayed, and the "
                "requests are not compared"
            )
            raise ModelError(
                "A recording does not contain the requests that middleware sends to a model.", reason="misconfigured"
            )
        reply, failed = run.replies.get(request.turn), run.failures.get(request.turn)
        if reply is None and failed is None:
            self._notice_further_turn(request, run)
            await _never()
        drift = self._find_drift(model, request, path) if reply is not None else None
        if drift is not None and reaction not in self._shortened and not self._is_lenient:
            # In the recording, the prompt may have been too long. Make the reaction try again with a shorter prompt.
            self._shortened[reaction] = drift
            raise _fail("The recorded request may have been shortened.", "context_too_long")
        if drift is not None:
            self.drifts.append(self._shortened.get(reaction, drift))
            if not self._is_lenient:
                await _never()  # never returns: the replay stops at this difference
        self.turns += 1
        if reply is not None:
            return reply
        assert failed is not None
        raise _fail(failed.reason, failed.failure)

    def _notice_further_turn(self, request: ModelRequest, run: Recorded) -> None:
        """Handle a turn that the recording does not contain. The turn is a difference unless the recording left the
        reaction open.
        """
        end = run.finished
        # A person may stop a reaction at any moment, so one turn more or less is no difference.
        if end is not None and end.status != "cancelled":
            trigger = self._recording.reactions[request.reaction].trigger
            then = f"in the recording it had {end.status} after turn {end.turns} ({end.reason})"
            text = f"{request.agent_id} asks its model in turn {request.turn}; {then}"
            self.drifts.append(Difference(text, trigger, request.agent_id, request.reaction, request.turn))

    def settle(
        self, reaction: str, path: str, turn: int, outcome: ModelReply | ModelFailed
    ) -> ModelReply | ModelFailed:
        run = self._find_run(reaction, path)
        if run is None or (
            isinstance(outcome, ModelFailed) and outcome.failure == "context_too_long" and turn in run.replies
        ):
            return outcome
        if turn in run.replies:
            return replace(run.replies[turn], reasoning=run.thinking.get(turn, ""))
        failed = run.failures.get(turn)
        return replace(failed, is_recorded=False) if failed is not None else outcome

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        run = self._find_run(reaction, path)
        place = CallPlace(reaction, path, turn, planned.index)
        if run is None or self.is_made(place):
            return None
        result = run.results.get((turn, planned.index))
        if result is not None and (turn, planned.index) in run.begun_calls:
            place_there = (turn, planned.index)
            return replace(result, used=run.used.get(place_there, ()), steps=run.progress.get(place_there, ()))
        if result is not None:
            agent_id = self._recording.reactions[reaction].agent_id
            text = f"{agent_id} runs {planned.tool.name} now; then it was answered: {shorten(result.content)}"
            self.drifts.append(Difference(text, None, agent_id, reaction, turn))
        await _never()  # the call was in progress when the log ended

    def review(self, reaction: str, path: str, turn: int, message: tuple[int, int] | None = None) -> Reviewed | None:
        run = self._find_run(reaction, path)
        if run is None:
            return None
        return run.reviews.get(turn) if message is None else run.sent_reviews.get((turn, *message))

    def find_note(self, reaction: str, path: str, turn: int, name: str) -> JsonValue:
        run = self._find_run(reaction, path)
        return run.notes.get(turn, {}).get(name) if run is not None else None

    def find_form(self, reaction: str) -> str | None:
        found = self._recording.reactions.get(reaction)
        started = found.run.started if found is not None and found.run is not None else None
        return started.form if started is not None else None

    def find_stopped(self, reaction: str) -> StopTrace | None:
        found = self._recording.reactions.get(reaction)
        return found.run.stopped if found is not None and found.run is not None else None

    def find_standing(self, reaction: str) -> str:
        found = self._recording.reactions.get(reaction)
        started = found.run.started if found is not None and found.run is not None else None
        return started.standing if started is not None else ""

    def reads_new_messages(self, reaction: str) -> bool:
        found = self._recording.reactions.get(reaction)
        if found is None:
            return False
        following = (it for it in found.records if it["seq"] > self.seen and not read_path(it))
        record = next(following, None)
        return record is not None and record["kind"] == "new_messages"

    def _find_run(self, reaction: str, path: str) -> Recorded | None:
        found = self._recording.reactions.get(reaction)
        return found.runs.get(path) if found is not None and found.run is not None else None

    def _find_drift(self, model: Model, request: ModelRequest, path: str) -> Difference | None:
        record = self._recording.reactions[request.reaction].find_reply(path, request.turn)
        if record is None:
            return None
        body = record["body"]
        if body["agent"] != request.agent_id:
            text = f"{request.agent_id} is asked in turn {request.turn}; in the recording it was {body['agent']}"
        elif body.get("request") is None:
            self.notes.append(
                "Some replies were recorded without a fingerprint of their request. Their prompts are not compared"
            )
            return None
        elif drift := find_drift(body["request"], model, request):
            inside = f" (inside of call {path})" if path else ""
            text = f"{request.agent_id}{inside} asks its model something else: {drift}"
        else:
            return None
        return Difference(text, record["seq"], request.agent_id, request.reaction, request.turn)


async def _never() -> NoReturn:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nothing sets it")


def _fail(reason: str, kind: ModelFailure) -> ModelError:
    """Return a model error that causes no retry."""
    error = ModelError(reason, reason=kind)
    # The recorded failure is the last one of its turn, after all retries. Another retry would need a reply that does
    # not exist.
    error.retryable = False
    return error
