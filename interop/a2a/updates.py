"""Computes the updates of an A2A stream: the difference between the task that the caller has seen and the task in the
ledger.

This module performs no IO. `TaskUpdates` gets streamed text and task records, and yields A2A events. `handler` reads
the tasks and sends the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from roundelay.interop.conversations import TextPiece
from roundelay.network.client import AnyMessage
from roundelay.network.extras import needs

from .parts import make_parts
from .tasks import INTERRUPTED, SUBMITTED, WORKING, TaskRecord, describe

with needs("gateway"):
    from a2a.server.events.event_queue import Event
    from a2a.types import Artifact, Part, TaskArtifactUpdateEvent, TaskStatusUpdateEvent


class TaskUpdates:
    """Computes the updates of one task for one stream of the caller."""

    def __init__(self, task: TaskRecord) -> None:
        self._task = task
        self._state = task.state
        self.seqs = {message.seq for message in task.messages}
        """Seqs of the messages that the caller has seen."""
        self._stream: object = None
        self._streamed = ""
        """Text of the current stream that the caller has already received."""

    def add_piece(self, piece: TextPiece) -> Iterator[Event]:
        """Yield updates for a piece of streamed text. The streamed text is the beginning of the next artifact. A new
        stream replaces the text of the previous one.
        """
        if self._state == SUBMITTED:
            # The first piece proves that the agent is working, before the ledger shows a reaction.
            self._state = WORKING
            status = self._task.make_status()
            status.state = WORKING
            yield TaskStatusUpdateEvent(task_id=self._task.id, context_id=self._task.context_id, status=status)
        if piece.kind != "text" or piece.path:
            return
        continues = piece.stream == self._stream
        self._stream, self._streamed = piece.stream, (self._streamed if continues else "") + piece.text
        artifact = Artifact(artifact_id=f"answer-{len(self._task.results) + 1}", parts=make_parts(piece.text))
        yield self._make_update(artifact, append=continues, is_last=False)

    def catch_up(self, task: TaskRecord) -> Iterator[Event]:
        """Yield updates for everything in the task that the caller has not seen."""
        self._task = task
        for number, message in enumerate(task.results, 1):
            if message.seq not in self.seqs:
                yield self._make_answer(number, message)
        questions = [message for message in task.messages if message.seq not in self.seqs and task.is_question(message)]
        self.seqs |= {message.seq for message in task.messages}
        # A second question does not change the task's state. Without an event, the client would never see the question.
        if task.state != self._state or (questions and task.state in INTERRUPTED):
            self._state = task.state
            yield TaskStatusUpdateEvent(
                task_id=task.id,
                context_id=task.context_id,
                status=task.make_status(),
                metadata={"seq": task.messages[-1].seq},
            )

    def _make_answer(self, number: int, message: AnyMessage) -> Event:
        """Return an answer as an artifact update. If the caller has already received the beginning of the answer as
        streamed text, include only the rest.
        """
        artifact, streamed = self._task.make_artifact(number, message), self._streamed
        self._stream, self._streamed = None, ""
        continues = bool(streamed) and isinstance(message.content, str) and message.content.startswith(streamed)
        if continues:
            del artifact.parts[:]
            artifact.parts.append(Part(text=cast(str, message.content)[len(streamed) :]))
        return self._make_update(artifact, append=continues, is_last=True, metadata=describe(message))

    def _make_update(
        self, artifact: Artifact, *, append: bool, is_last: bool, metadata: dict[str, Any] | None = None
    ) -> TaskArtifactUpdateEvent:
        return TaskArtifactUpdateEvent(
            task_id=self._task.id,
            context_id=self._task.context_id,
            artifact=artifact,
            append=append,
            last_chunk=is_last,
            metadata=metadata,
        )
