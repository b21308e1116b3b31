"""Reads A2A tasks from the ledger. The gateway itself stores no tasks.

An A2A context is a conversation of the caller with an agent. A task starts with a message that the caller sends in the
context. The task also contains the messages that the caller adds later, whose metadata name the task under ``a2a``. The
agent's answers to all messages of the caller belong to the task too. An answer that requires a reply from the caller is
a question. Every other answer is an artifact.

The id of a task is derived from the ``seq`` of its first message, the caller and the agent. Every gateway therefore
computes the same id.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeAlias

from roundelay.interop.conversations import SENTENCES, Conversations, EndStatus, QuestionEnded, QuestionStored
from roundelay.network.addresses import agent_address, conversation_of, direct_thread
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.errors import UnknownMessage
from roundelay.network.extras import needs
from roundelay.network.messages import message_from_wire

from .parts import make_parts

with needs("gateway"):
    from a2a.types import Artifact, Message, Role, Task, TaskState, TaskStatus


PAGE = 500
MAX_THREADS = 100
"""Maximum number of conversations that a search for tasks reads, newest first."""
MAX_READ = 20_000
"""Maximum number of messages that a search for tasks reads. In each conversation, the newest messages are
read first.
"""
MAX_LISTED = 1000
"""Maximum number of tasks in a list of tasks, newest first."""
CALLED_OFF = "a2a_called_off"
"""Kind of the record by which a caller cancels a task when no reaction is running."""

State: TypeAlias = TaskState
SUBMITTED, WORKING = TaskState.TASK_STATE_SUBMITTED, TaskState.TASK_STATE_WORKING
COMPLETED, FAILED = TaskState.TASK_STATE_COMPLETED, TaskState.TASK_STATE_FAILED
CANCELED, REJECTED = TaskState.TASK_STATE_CANCELED, TaskState.TASK_STATE_REJECTED
INPUT_REQUIRED, AUTH_REQUIRED = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_AUTH_REQUIRED
INTERRUPTED = frozenset((INPUT_REQUIRED, AUTH_REQUIRED))
TERMINAL = frozenset((COMPLETED, FAILED, CANCELED, REJECTED))
_ENDS: dict[EndStatus, State] = {
    "answered": COMPLETED,
    "silent": COMPLETED,
    "stopped": FAILED,
    "cancelled": CANCELED,
    "failed": FAILED,
    "held": INPUT_REQUIRED,
    "dead": FAILED,
    "removed": REJECTED,
}


def make_task_id(client: NetworkClient, agent_id: str, seq: int) -> str:
    """Return the id of the task that starts with the message ``seq`` from this caller to this agent."""
    # Include the caller and the agent in the digest. A bare seq could be guessed, which would expose tasks of other
    # callers.
    parts = "\x1f".join(("a2a-task", client.welcome.network.epoch, client.agent_id, agent_id, str(seq)))
    return f"{seq}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def read_task_id(client: NetworkClient, agent_id: str, task_id: str) -> int | None:
    """Return the seq of the first message of a task. Return None if the id does not belong to a task of this caller
    with this agent.
    """
    digits = task_id.partition("-")[0]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16):
        return None
    seq = int(digits)
    return seq if make_task_id(client, agent_id, seq) == task_id else None


@dataclass(frozen=True)
class TaskRecord:
    """State of one A2A task, as read from the ledger."""

    id: str
    caller: str
    agent_id: str
    messages: Sequence[AnyMessage]
    """All messages of the task, ascending by seq. The first message starts the task."""

    active: AnyMessage
    """The caller's first message that still awaits an answer. If no message awaits an answer, the caller's last
    message.
    """

    ended: QuestionEnded | None
    """Outcome of the active message, or None while its answer is awaited."""

    is_begun: bool
    """Whether the agent has started to work on the task."""

    is_called_off: bool

    @property
    def root(self) -> AnyMessage:
        return self.messages[0]

    @property
    def context_id(self) -> str:
        return conversation_of(self.root.thread_id)

    @property
    def open_question(self) -> AnyMessage | None:
        """The agent's last question, or None if it was answered. Either the caller must reply, or a person must approve
        a call.
        """
        answered = {message.reply_to for message in self.messages if message.sender_id == self.caller}
        last = next((message for message in reversed(self.messages) if message.sender_id == self.agent_id), None)
        return last if last is not None and self.is_question(last) and last.seq not in answered else None

    def is_question(self, message: AnyMessage) -> bool:
        """Return whether a message is a question from the agent, as opposed to a result."""
        if message.sender_id != self.agent_id:
            return False
        required = message.requires_response
        return required is True or (isinstance(required, list) and self.caller in required) or is_request(message)

    @property
    def state(self) -> State:
        # Check the caller's cancellation record first. No reaction was running that could have recorded the
        # cancellation.
        if self.is_called_off:
            return CANCELED
        ended = _ENDS[self.ended.status] if self.ended is not None else None
        if self.open_question is not None and is_request(self.open_question):
            return ended if ended is not None else AUTH_REQUIRED
        # The agent's reaction ends when it sends a question. The A2A task continues and waits for the caller's reply.
        if self.open_question is not None and ended in (None, COMPLETED):
            return INPUT_REQUIRED
        return ended if ended is not None else WORKING if self.is_begun else SUBMITTED

    @property
    def results(self) -> list[AnyMessage]:
        """The agent's answers that are not questions, ascending by seq."""
        return [
            message for message in self.messages if message.sender_id == self.agent_id and not self.is_question(message)
        ]

    def make_status(self) -> TaskStatus:
        state = self.state
        status = TaskStatus(state=state, timestamp=datetime.fromtimestamp(self.messages[-1].sent_at / 1000, UTC))
        if self.open_question is not None and state in INTERRUPTED:
            status.message.CopyFrom(self.make_message(self.open_question))
        elif self.is_called_off or (self.ended is not None and self.ended.status != "answered"):
            reason = SENTENCES["cancelled"] if self.ended is None or self.is_called_off else self.ended.reason
            status.message.CopyFrom(self._make_network_message(reason))
        return status

    def make_artifact(self, number: int, message: AnyMessage) -> Artifact:
        """Return an answer as an A2A artifact. ``number`` is the position of the answer among the task's results,
        counted from 1.
        """
        description = message.text_representation if not isinstance(message.content, str) else None
        return Artifact(
            artifact_id=f"answer-{number}",
            name=f"Answer of {self.agent_id}",
            description=description,
            parts=make_parts(message.content),
            metadata=describe(message),
        )

    def make_message(self, message: AnyMessage) -> Message:
        return Message(
            message_id=message.message_id,
            context_id=self.context_id,
            task_id=self.id,
            role=Role.ROLE_USER if message.sender_id == self.caller else Role.ROLE_AGENT,
            parts=make_parts(message.content),
            metadata=describe(message),
        )

    def make_task(self, history_length: int | None = None, *, with_artifacts: bool = True) -> Task:
        """Return the task as an A2A object. The history of the object contains the caller's messages and the agent's
        questions. The results are returned as artifacts.
        """
        history = [
            message for message in self.messages if message.sender_id == self.caller or self.is_question(message)
        ]
        shown = history if history_length is None else history[len(history) - min(history_length, len(history)) :]
        return Task(
            id=self.id,
            context_id=self.context_id,
            status=self.make_status(),
            artifacts=[self.make_artifact(n, message) for n, message in enumerate(self.results, 1)]
            if with_artifacts
            else [],
            history=[self.make_message(message) for message in shown],
            metadata={"seq": self.messages[-1].seq},
        )

    def _make_network_message(self, sentence: str) -> Message:
        return Message(
            message_id=f"{self.id}-{TaskState.Name(self.state)}",
            context_id=self.context_id,
            task_id=self.id,
            role=Role.ROLE_AGENT,
            parts=make_parts(sentence),
            metadata={"sender": "network"},
        )


def is_request(message: AnyMessage) -> bool:
    """Return whether a message asks a person to approve a tool call of an agent."""
    return message.sender_kind == "agent" and isinstance((message.metadata or {}).get("approval"), dict)


def describe(message: AnyMessage) -> dict[str, Any]:
    """Return the metadata of an A2A object that is created from a message."""
    return {"seq": message.seq, "sender": message.sender_id}


def read_task_mark(message: AnyMessage) -> int | None:
    """Return the task that a message's metadata name, as the seq of the task's first message. Return None if the
    metadata name no task.
    """
    mark = (message.metadata or {}).get("a2a")
    seq = mark.get("task") if isinstance(mark, dict) else None
    return seq if isinstance(seq, int) else None


@dataclass
class GatheredTask:
    """Messages of one A2A task, collected from a thread."""

    thread: Sequence[AnyMessage]
    """All messages of the thread that were read."""

    own: list[AnyMessage] = field(default_factory=list)
    answers: list[AnyMessage] = field(default_factory=list)


class TaskLedger:
    """The A2A tasks that one caller has with one agent."""

    def __init__(self, conversations: Conversations, agent_id: str) -> None:
        self.conversations = conversations
        self.client = conversations.client
        self.agent_id = agent_id

    async def read(self, task_id: str) -> TaskRecord | None:
        """Return a task, or None if the caller has no such task with this agent."""
        seq = read_task_id(self.client, self.agent_id, task_id)
        if seq is None:
            return None
        try:
            chain = (await self.client.call("network.why", {"seq": seq}))["chain"]
        except UnknownMessage:
            return None
        root = message_from_wire(chain[0])
        # The hub returns the chain of any message that the caller may read. A task must start with a message from the
        # caller.
        if not self._is_own(root) or root.seq != seq:
            return None
        messages = await self._read_thread(root.thread_id, root.seq)
        gathered = next((task for task in self._gather(messages) if task.own[0].seq == seq), None)
        return await self.judge(gathered) if gathered is not None else None

    async def find(self, conversation: str | None) -> list[GatheredTask]:
        """Return the messages of each task in one conversation, or in all conversations if ``conversation`` is None.
        The tasks are sorted by their newest message, newest first.
        """
        threads = [direct_thread(self.client.agent_id, self.agent_id, conversation)] if conversation else None
        tasks: list[GatheredTask] = []
        room = MAX_READ
        for thread_id in threads if threads is not None else await self._find_threads():
            if room <= 0:
                break
            try:
                messages = await self._read_thread(thread_id, 0, room)
            except UnknownMessage:
                continue  # the thread is empty
            room -= len(messages)
            tasks += self._gather(messages)
        return sorted(tasks, key=newest_of, reverse=True)[:MAX_LISTED]

    async def call_off(self, task: TaskRecord) -> None:
        """Record that the caller has cancelled a task. Call this method when no reaction is running that could be
        cancelled.
        """
        await self.client.record(_journal_of(task.id), CALLED_OFF, {}, record_id=f"a2a-off-{task.id}")

    async def _find_threads(self) -> list[str]:
        prefix, threads = f"{direct_thread(self.client.agent_id, self.agent_id)}:", list[str]()
        async for page in self.client.pages("network.list_threads", {"limit": PAGE}):
            threads += [thread["thread_id"] for thread in page["threads"] if thread["thread_id"].startswith(prefix)]
            if len(threads) >= MAX_THREADS:
                break
        return threads[:MAX_THREADS]

    def _gather(self, thread: Sequence[AnyMessage]) -> Iterable[GatheredTask]:
        """Group the messages of a thread by task. The thread may start at any message. Tasks are sorted by their first
        message.
        """
        tasks: dict[int, GatheredTask] = {}
        root_of: dict[int, int] = {}
        """Seq of the first message of the task that contains a message, by the seq of this message."""
        for message in thread:
            if self._is_own(message):
                root = read_task_mark(message)
                if root is None:
                    # A message that was sent through another protocol names no task. If it is a reply, it belongs to
                    # the task of the message that it answers.
                    root = root_of.get(message.reply_to or 0, message.seq)
                elif root not in tasks:
                    continue  # the task of this message starts before the first message that was read
                tasks.setdefault(root, GatheredTask(thread)).own.append(message)
            elif message.sender_id == self.agent_id:
                trigger = next((seq for seq in (message.reply_to, message.cause) if seq in root_of), None)
                if trigger is None:
                    continue  # the agent sent this message on its own initiative
                root = root_of[trigger]
                tasks[root].answers.append(message)
            else:
                continue
            root_of[message.seq] = root
        return tasks.values()

    async def _read_thread(self, thread_id: str, since: int, most: int = sys.maxsize) -> list[AnyMessage]:
        """Return the messages of a thread from the seq ``since`` on, ascending. If the thread has more than ``most``
        messages, return the newest of them.
        """
        newer: list[AnyMessage] = []
        async for page in self.client.pages("network.history", {"thread_id": thread_id, "limit": PAGE}):
            messages = [message_from_wire(message) for message in page["messages"]]
            newer = [message for message in messages if message.seq >= since] + newer
            if not messages or messages[0].seq <= since or len(newer) >= most:
                break
        return newer[-most:]

    async def judge(self, gathered: GatheredTask) -> TaskRecord:
        """Return the current state of a task. The outcomes of the caller's messages are read in the order of the
        messages.
        """
        root, caller = gathered.own[0], self.client.agent_id
        messages = {message.seq: message for message in (*gathered.own, *gathered.answers)}
        requests = {answer.seq for answer in gathered.answers if is_request(answer)}
        ended: QuestionEnded | None = None
        is_begun = True
        # The first message without an outcome is active. The agent's answers to later messages are read after its
        # outcome.
        for active in gathered.own:
            if active.reply_to in requests:
                continue  # a decision on an approval request starts no reaction
            stored = QuestionStored(active.seq, root.thread_id, True)
            question = self.conversations.open(self.agent_id, stored, gathered.thread)
            answers, ended = await question.read_outcome()
            messages |= {
                answer.seq: answer for answer in answers
            }  # an answer may belong to this message and to an earlier one
            if ended is None:
                is_begun = await self._is_begun(active.seq)
                break
        task_id = make_task_id(self.client, self.agent_id, root.seq)
        return TaskRecord(
            task_id,
            caller,
            self.agent_id,
            [messages[seq] for seq in sorted(messages)],
            active,
            ended,
            is_begun,
            await self._is_called_off(task_id),
        )

    async def _is_begun(self, seq: int) -> bool:
        status = await self.client.call("network.message_status", {"seq": seq})
        return any("reaction_status" in recipient for recipient in status["recipients"])

    async def _is_called_off(self, task_id: str) -> bool:
        args = {"reaction": _journal_of(task_id), "agent_id": self.client.agent_id, "limit": 1}
        return bool((await self.client.call("network.records", args))["records"])

    def _is_own(self, message: AnyMessage) -> bool:
        """Return whether the caller sent a message to this agent as part of a conversation."""
        return (
            message.sender_id == self.client.agent_id
            and message.to == agent_address(self.agent_id)
            and bool(conversation_of(message.thread_id))
        )


def newest_of(gathered: GatheredTask) -> int:
    """Return the seq of the newest message of a task."""
    return max(message.seq for message in (*gathered.own, *gathered.answers))


def _journal_of(task_id: str) -> str:
    return f"a2a-{task_id}"
