"""Tasks of A2A, read from the ledger: nothing about a task is kept anywhere else.

A context is a conversation of the caller with an agent, a task begins with a message of the caller in it. What belongs
to the task: that message, what the caller adds to the task (``a2a`` in the metadata names it), and what the agent
answers to these. What the agent asks the caller is a question, all else that it answers an artifact. A task's id is
made of its first message's ``seq`` and of who may ask for it, so it is the same whenever and wherever it is read.
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
"""Conversations in which tasks are looked for, the newest."""
MAX_READ = 20_000
"""Messages of these in which tasks are looked for, the newest of each conversation."""
MAX_LISTED = 1000
"""Tasks that are listed, the newest."""
CALLED_OFF = "a2a_called_off"
"""The kind of the caller's record that it wants no more of a task for which nothing runs."""

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
    """The id of the task that begins with this message of the caller to this agent."""
    parts = "\x1f".join(("a2a-task", client.welcome.network.epoch, client.agent_id, agent_id, str(seq)))
    return f"{seq}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def read_task_id(client: NetworkClient, agent_id: str, task_id: str) -> int | None:
    """The seq of the message that a task begins with; None where it is no task of this caller with this agent."""
    digits = task_id.partition("-")[0]
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16):
        return None
    seq = int(digits)
    return seq if make_task_id(client, agent_id, seq) == task_id else None


@dataclass(frozen=True)
class TaskRecord:
    """A task as the ledger has it now."""

    id: str
    caller: str
    agent_id: str
    messages: Sequence[AnyMessage]
    """Ascending; the first is the one that it begins with."""

    active: AnyMessage
    """Of the caller's messages the first of which something is to come, or else the last."""

    ended: QuestionEnded | None
    """How that has ended, if nothing is to come of any."""

    is_begun: bool
    """The agent works on it, or has."""

    is_called_off: bool

    @property
    def root(self) -> AnyMessage:
        return self.messages[0]

    @property
    def context_id(self) -> str:
        return conversation_of(self.root.thread_id)

    @property
    def asked(self) -> AnyMessage | None:
        """What the agent has asked last, while it is not answered: the caller for an answer, or a person to decide."""
        answered = {it.reply_to for it in self.messages if it.sender_id == self.caller}
        last = next((it for it in reversed(self.messages) if it.sender_id == self.agent_id), None)
        return last if last is not None and self.is_question(last) and last.seq not in answered else None

    def is_question(self, message: AnyMessage) -> bool:
        """Whether a message of the agent asks for something, and is no result."""
        if message.sender_id != self.agent_id:
            return False
        asked = message.requires_response
        return asked is True or (isinstance(asked, list) and self.caller in asked) or is_request(message)

    @property
    def state(self) -> State:
        if self.is_called_off:
            return CANCELED
        ended = _ENDS[self.ended.status] if self.ended is not None else None
        if self.asked is not None and is_request(self.asked):
            return ended if ended is not None else AUTH_REQUIRED
        if self.asked is not None and ended in (None, COMPLETED):
            return INPUT_REQUIRED
        return ended if ended is not None else WORKING if self.is_begun else SUBMITTED

    @property
    def results(self) -> list[AnyMessage]:
        """What the agent has answered, ascending."""
        return [it for it in self.messages if it.sender_id == self.agent_id and not self.is_question(it)]

    def make_status(self) -> TaskStatus:
        state = self.state
        status = TaskStatus(state=state, timestamp=datetime.fromtimestamp(self.messages[-1].sent_at / 1000, UTC))
        if self.asked is not None and state in INTERRUPTED:
            status.message.CopyFrom(self.make_message(self.asked))
        elif self.is_called_off or (self.ended is not None and self.ended.status != "answered"):
            reason = SENTENCES["cancelled"] if self.ended is None or self.is_called_off else self.ended.reason
            status.message.CopyFrom(self._say(reason))
        return status

    def make_artifact(self, number: int, message: AnyMessage) -> Artifact:
        """An answer as an artifact, the ``number``-th of the task from 1 on."""
        shown = message.text_representation if not isinstance(message.content, str) else None
        return Artifact(
            artifact_id=f"answer-{number}",
            name=f"Answer of {self.agent_id}",
            description=shown,
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
        """The task itself. Its history is what caller and agent have said to each other, but for the results."""
        said = [it for it in self.messages if it.sender_id == self.caller or self.is_question(it)]
        shown = said if history_length is None else said[len(said) - min(history_length, len(said)) :]
        return Task(
            id=self.id,
            context_id=self.context_id,
            status=self.make_status(),
            artifacts=[self.make_artifact(n, it) for n, it in enumerate(self.results, 1)] if with_artifacts else [],
            history=[self.make_message(it) for it in shown],
            metadata={"seq": self.messages[-1].seq},
        )

    def _say(self, sentence: str) -> Message:
        return Message(
            message_id=f"{self.id}-{TaskState.Name(self.state)}",
            context_id=self.context_id,
            task_id=self.id,
            role=Role.ROLE_AGENT,
            parts=make_parts(sentence),
            metadata={"sender": "network"},
        )


def is_request(message: AnyMessage) -> bool:
    """Whether an agent asks a person in it to decide on a call."""
    return message.sender_kind == "agent" and isinstance((message.metadata or {}).get("approval"), dict)


def describe(message: AnyMessage) -> dict[str, Any]:
    """What of a message stands in the metadata of what is made of it."""
    return {"seq": message.seq, "sender": message.sender_id}


def read_task_mark(message: AnyMessage) -> int | None:
    """The task to which its sender has added a message."""
    mark = (message.metadata or {}).get("a2a")
    seq = mark.get("task") if isinstance(mark, dict) else None
    return seq if isinstance(seq, int) else None


@dataclass
class GatheredTask:
    """Messages that belong together: of the caller, and what the agent says to them."""

    said: Sequence[AnyMessage]
    """What was read of their thread."""

    own: list[AnyMessage] = field(default_factory=list)
    answers: list[AnyMessage] = field(default_factory=list)


class TaskLedger:
    """The tasks of one caller with one agent."""

    def __init__(self, conversations: Conversations, agent_id: str) -> None:
        self.conversations = conversations
        self.client = conversations.client
        self.agent_id = agent_id

    async def read(self, task_id: str) -> TaskRecord | None:
        """The task; None where the caller has no such one with this agent."""
        seq = read_task_id(self.client, self.agent_id, task_id)
        if seq is None:
            return None
        try:
            chain = (await self.client.call("network.why", {"seq": seq}))["chain"]
        except UnknownMessage:
            return None
        root = message_from_wire(chain[0])
        if not self._is_own(root) or root.seq != seq:
            return None
        said = await self._read_thread(root.thread_id, root.seq)
        found = next((it for it in self._gather(said) if it.own[0].seq == seq), None)
        return await self.judge(found) if found is not None else None

    async def find(self, conversation: str | None) -> list[GatheredTask]:
        """What belongs together, of all tasks that are looked for, the one with the newest message first."""
        threads = [direct_thread(self.client.agent_id, self.agent_id, conversation)] if conversation else None
        found: list[GatheredTask] = []
        room = MAX_READ
        for thread_id in threads if threads is not None else await self._find_threads():
            if room <= 0:
                break
            try:
                said = await self._read_thread(thread_id, 0, room)
            except UnknownMessage:
                continue  # nothing was said there
            room -= len(said)
            found += self._gather(said)
        return sorted(found, key=newest_of, reverse=True)[:MAX_LISTED]

    async def call_off(self, task: TaskRecord) -> None:
        """Keep that the caller wants no more of a task for which nothing runs."""
        await self.client.record(_journal_of(task.id), CALLED_OFF, {}, record_id=f"a2a-off-{task.id}")

    async def _find_threads(self) -> list[str]:
        prefix, found = f"{direct_thread(self.client.agent_id, self.agent_id)}:", list[str]()
        async for page in self.client.pages("network.list_threads", {"limit": PAGE}):
            found += [it["thread_id"] for it in page["threads"] if it["thread_id"].startswith(prefix)]
            if len(found) >= MAX_THREADS:
                break
        return found[:MAX_THREADS]

    def _gather(self, said: Sequence[AnyMessage]) -> Iterable[GatheredTask]:
        """What belongs together of what a thread has from a message on, by the first message of each."""
        tasks: dict[int, GatheredTask] = {}
        task_of: dict[int, int] = {}  # of each message
        for message in said:
            if self._is_own(message):
                root = read_task_mark(message)
                if root is None:
                    root = task_of.get(message.reply_to or 0, message.seq)
                elif root not in tasks:
                    continue  # of a task that begins before
                tasks.setdefault(root, GatheredTask(said)).own.append(message)
            elif message.sender_id == self.agent_id:
                at = next((it for it in (message.reply_to, message.cause) if it in task_of), None)
                if at is None:
                    continue  # it says so by itself
                root = task_of[at]
                tasks[root].answers.append(message)
            else:
                continue
            task_of[message.seq] = root
        return tasks.values()

    async def _read_thread(self, thread_id: str, since: int, most: int = sys.maxsize) -> list[AnyMessage]:
        """What it has from a seq on, ascending: the newest ``most`` of it."""
        found: list[AnyMessage] = []
        async for page in self.client.pages("network.history", {"thread_id": thread_id, "limit": PAGE}):
            messages = [message_from_wire(it) for it in page["messages"]]
            found = [it for it in messages if it.seq >= since] + found
            if not messages or messages[0].seq <= since or len(found) >= most:
                break
        return found[-most:]

    async def judge(self, gathered: GatheredTask) -> TaskRecord:
        """How far a task has got."""
        root, caller = gathered.own[0], self.client.agent_id
        messages = {it.seq: it for it in (*gathered.own, *gathered.answers)}
        requests = {it.seq for it in gathered.answers if is_request(it)}
        ended: QuestionEnded | None = None
        is_begun = True
        for active in gathered.own:
            if active.reply_to in requests:
                continue  # it decides on a call, and begins nothing
            stored = QuestionStored(active.seq, root.thread_id, True)
            question = self.conversations.open(self.agent_id, stored, gathered.said)
            answers, ended = await question.read_outcome()
            messages |= {it.seq: it for it in answers}  # also what answers an earlier question and this one
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
        return any("reaction_status" in it for it in status["recipients"])

    async def _is_called_off(self, task_id: str) -> bool:
        args = {"reaction": _journal_of(task_id), "agent_id": self.client.agent_id, "limit": 1}
        return bool((await self.client.call("network.records", args))["records"])

    def _is_own(self, message: AnyMessage) -> bool:
        """Whether it is the caller's to this agent, in a conversation."""
        return (
            message.sender_id == self.client.agent_id
            and message.to == agent_address(self.agent_id)
            and bool(conversation_of(message.thread_id))
        )


def newest_of(gathered: GatheredTask) -> int:
    """The seq of what was said last."""
    return max(it.seq for it in (*gathered.own, *gathered.answers))


def _journal_of(task_id: str) -> str:
    return f"a2a-{task_id}"
