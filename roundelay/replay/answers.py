"""What models, tools and reviewers answer in a replay: what the records hold; and what was asked otherwise than it was then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from roundelay.agents.ids import derived_id
from roundelay.agents.models.model import Model, ModelError, ModelReply, ModelRequest
from roundelay.agents.models.request_print import find_drift
from roundelay.agents.records import Recorded
from roundelay.agents.steps import ModelFailed, PlannedCall, Reviewed
from roundelay.agents.tools import ToolResult
from roundelay.reading.recording import CallPlace, Recording, shorten


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as it was: where in the log, of whom, and what."""

    text: str
    seq: int | None = None
    agent_id: str = ""
    reaction: str = ""
    turn: int | None = None

    def __str__(self) -> str:
        place = [f"at #{self.seq}"] if self.seq is not None else []
        if self.reaction:
            place.append(f"reaction {self.reaction[:12]}")
        if self.turn is not None:
            place.append(f"turn {self.turn}")
        return f"{self.text} ({', '.join(place)})" if place else self.text


class RecordedAnswers:
    """A `StandIn`. ``drifts`` are the requests that are others now, in their order; strictly the first is the last. ``seen`` gives the last
    seq that has come about, ``run_tools`` are to be run again."""

    def __init__(
        self, recording: Recording, *, run_tools: Collection[str], is_lenient: bool, seen: Callable[[], int]
    ) -> None:
        self.drifts: list[Difference] = []
        self.notes: list[str] = []
        self.turns = 0
        self._recording = recording
        self._run_tools = run_tools
        self._is_lenient = is_lenient
        self._seen = seen
        self._shortened: dict[str, Difference] = {}
        """Reactions that are asked to shorten their prompt, and what was wrong with it."""

    def is_made(self, place: CallPlace) -> bool:
        """Whether a tool call is made again: what it does is in the network. Else its recorded result stands for it."""
        recorded = self._recording
        reaction = recorded.reactions[place.reaction]
        run = reaction.find_run(place.path)
        if run is None:
            return False
        if run.replies[place.turn].tool_calls[place.call].name in self._run_tools:
            return True
        call_id, agent_id = derived_id(place.reaction, place.path, place.turn, place.call), reaction.agent_id
        own = ((agent_id, f"m:{call_id}"), (agent_id, f"c:{call_id}"))
        inside = f"{place.path}/{place.turn}.{place.call}".lstrip("/")
        wait = run.waits.get((place.turn, place.call))
        return (
            any(key in recorded.keys for key in own)
            or f"c:{agent_id}/{call_id}" in recorded.answered_calls
            or (place.turn, place.call) in run.askings
            or (wait is not None and not wait.is_approval)
            or any(
                path == inside or path.startswith((f"{inside}.", f"{inside}/"))
                for path in (reaction.run.children if reaction.run is not None else ())
            )
        )

    async def complete(self, model: Model, request: ModelRequest, path: str, *, is_own: bool) -> ModelReply:
        run, reaction = self._find_run(request.reaction, path), request.reaction
        if run is None or not is_own:
            self.notes.append(
                f"Middleware of {request.agent_id} asks a model itself: what came of that is replayed, its requests are not compared"
            )
            raise ModelError("What middleware asked a model is not in a recording.", reason="misconfigured")
        reply = run.replies.get(request.turn)
        failed = run.failures.get(request.turn)
        if reply is None and failed is None:
            return await self._ask_beyond(request, run)
        if reply is not None:
            drift = self._find_drift(model, request, path)
            if drift is not None and reaction not in self._shortened and not self._is_lenient:
                # perhaps the model had found it too long: the reaction then asks once more, with less
                self._shortened[reaction] = drift
                error = ModelError("The recorded request may have been shortened.", reason="context_too_long")
                error.retryable = False
                raise error
            if drift is not None:
                self.drifts.append(self._shortened.get(reaction, drift))
                if not self._is_lenient:
                    await asyncio.get_running_loop().create_future()  # the replay ends here
            self.turns += 1
            return reply
        assert failed is not None
        self.turns += 1
        error = ModelError(failed.reason, reason=failed.kind)
        error.retryable = False
        raise error

    async def _ask_beyond(self, request: ModelRequest, run: Recorded) -> ModelReply:
        """A turn that the recording does not have. Where the reaction was left open that is its end; else it is a difference."""
        reaction = self._recording.reactions[request.reaction]
        end = run.finished
        if end is not None and end.status != "cancelled":
            text = f"{request.agent_id} asks its model in turn {request.turn}; then it had {end.status} after turn {end.turns} ({end.reason})"
            self.drifts.append(Difference(text, reaction.trigger, request.agent_id, request.reaction, request.turn))
        never: asyncio.Future[ModelReply] = asyncio.get_running_loop().create_future()
        return await never

    def settle(
        self, reaction: str, path: str, turn: int, outcome: ModelReply | ModelFailed
    ) -> ModelReply | ModelFailed:
        run = self._find_run(reaction, path)
        if run is None or (
            isinstance(outcome, ModelFailed) and outcome.kind == "context_too_long" and turn in run.replies
        ):
            return outcome
        if turn in run.replies:
            return run.replies[turn]
        failed = run.failures.get(turn)
        return replace(failed, is_recorded=False) if failed is not None else outcome

    async def perform(self, reaction: str, path: str, turn: int, planned: PlannedCall) -> ToolResult | None:
        run = self._find_run(reaction, path)
        place = CallPlace(reaction, path, turn, planned.index)
        if run is None or self.is_made(place):
            return None
        result = run.results.get((turn, planned.index))
        if result is not None and (turn, planned.index) in run.begun_calls:
            return result
        if result is not None:
            agent_id = self._recording.reactions[reaction].agent_id
            text = f"{agent_id} runs {planned.tool.name} now; then it was answered: {shorten(result.content)}"
            self.drifts.append(Difference(text, None, agent_id, reaction, turn))
        never: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        return await never  # it was under way when the reaction was left

    def review(self, reaction: str, path: str, turn: int) -> Reviewed | None:
        run = self._find_run(reaction, path)
        return run.reviews.get(turn) if run is not None else None

    def reads_arrivals(self, reaction: str) -> bool:
        found = self._recording.reactions.get(reaction)
        if found is None:
            return False
        following = (row for row in found.rows if row.seq > self._seen() and not self._recording.read_path(row))
        row = next(following, None)
        return row is not None and row.label == "new_messages"

    def _find_run(self, reaction: str, path: str) -> Recorded | None:
        found = self._recording.reactions.get(reaction)
        return found.find_run(path) if found is not None else None

    def _find_drift(self, model: Model, request: ModelRequest, path: str) -> Difference | None:
        reaction = self._recording.reactions[request.reaction]
        for row in reaction.rows:
            body = self._recording.bodies[row.seq]
            if row.label != "model_reply" or body["turn"] != request.turn or self._recording.read_path(row) != path:
                continue
            if body["agent"] != request.agent_id:
                text = f"{request.agent_id} is asked in turn {request.turn}; then it was {body['agent']}"
                return Difference(text, row.seq, request.agent_id, request.reaction, request.turn)
            printed = body.get("request")
            if printed is None:
                self.notes.append(
                    "Some replies were recorded without a print of their request: those prompts are not compared"
                )
                return None
            drift = find_drift(printed, model, request)
            if drift is None:
                return None
            inside = f" (inside of call {path})" if path else ""
            return Difference(
                f"{request.agent_id}{inside} asks its model something else: {drift}", row.seq, request.agent_id,
                request.reaction, request.turn,
            )  # fmt: skip
        return None
