"""CPU time for rendering a long conversation, and for selecting its messages by a budget."""

from __future__ import annotations

import time
from typing import Any

from servers import Subject
from table import Line

from roundelay.agents.features.prompt_budget import PromptBudget
from roundelay.agents.prompt import ConversationPrompt
from roundelay.network.messages import DirectMessage, MessageThread

THREADS, PER_THREAD = 20, 10
BUDGET = 6000  # tokens, about half of all messages
HUB = Subject("hub normal", "normal")
AGENT_ID, ASKER_ID = "keeper", "asker"
TIMEOUT_S = 30.0
_TEXT = (
    "The delivery of Monday came without the papers for customs, and the driver says that <no one> asked him for them. "
)


class Rendering:
    """Measures the milliseconds of CPU time to render a conversation prompt with 20 threads of 10 messages in jinja's
    sandbox, and to select about half of the messages by a budget.
    """

    name = "prompt"

    def __init__(self, times: int) -> None:
        self._times = times
        self._ms: list[float] = []
        self._choosing_ms: list[float] = []
        self._chars = 0
        self._chosen = 0

    def run_round(self, number: int) -> str:
        threads = {thread.thread_id: thread for thread in map(_make_thread, range(THREADS))}
        incoming = _make_message(THREADS - 1, PER_THREAD)
        prompt = ConversationPrompt()
        self._chars = len(prompt.render(threads, incoming.thread_id, incoming))
        started_s = time.process_time()
        for _ in range(self._times):
            prompt.render(threads, incoming.thread_id, incoming)
        self._ms.append((time.process_time() - started_s) / self._times * 1000)
        budget = PromptBudget(BUDGET)
        started_s = time.process_time()
        for _ in range(self._times):
            chosen, _incoming = budget.select_messages(threads, incoming)
        self._choosing_ms.append((time.process_time() - started_s) / self._times * 1000)
        self._chosen = sum(len(it.messages) for it in chosen.values())
        return f"{self._ms[-1]:.2f} ms CPU for {self._chars:,} characters"

    def lines(self) -> list[Line]:
        title = f"rendering {THREADS} threads of {PER_THREAD} messages"
        chosen = f"{self._chosen} of {THREADS * PER_THREAD} messages"
        return [
            Line("rendering", title, self._ms, 3.0, None, True, "ms", f"{self._chars:,} characters"),
            Line("prompt_budget", "choosing among them by a budget", self._choosing_ms, None, None, True, "ms", chosen),
        ]

    def details(self) -> dict[str, Any]:
        return {"characters": self._chars, "ms": self._ms, "choosing_ms": self._choosing_ms}


def _make_thread(number: int) -> MessageThread:
    messages = [_make_message(number, place) for place in range(PER_THREAD)]
    return MessageThread(thread_id=messages[0].thread_id, messages=[*messages])


def _make_message(number: int, place: int) -> DirectMessage:
    seq = number * (PER_THREAD + 1) + place + 1
    other = f"colleague-{number:02d}"
    sender, to = (other, AGENT_ID) if place % 2 == 0 else (AGENT_ID, other)
    text = _TEXT * 2 if place % 3 == 0 else _TEXT
    return DirectMessage(
        seq=seq, message_id=f"m{seq}", sender_id=sender, sender_kind="agent", to=f"agent:{to}",
        thread_id=f"direct:{other}~{AGENT_ID}", root=1, hops=0, sent_at=0, content={"text": f"{seq}: {text}"},
    )  # fmt: skip
