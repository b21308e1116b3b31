"""Middleware that limits the tokens of the conversation in a reaction's first prompt. The trigger's thread has priority
over all other threads.

This module is pure: the same window of the conversation always leads to the same prompt, so a resumed reaction can
rebuild its prompt. The prompt states the number of omitted messages ("12 earlier messages omitted") and marks shortened
messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import Field

from roundelay.agents.middleware import Middleware
from roundelay.agents.models.tokens import MESSAGE_TOKENS, Count, load_count
from roundelay.agents.options import IN_CODE, checked
from roundelay.network.messages import BaseMessage, Message, MessageThread

_M = TypeVar("_M", bound=BaseMessage)


def _check_sizes(max_tokens: int, per_thread: int | None, per_message: int | None, encoding: str | None) -> None:
    thread_tokens = max_tokens if per_thread is None else per_thread
    if thread_tokens > max_tokens:
        raise ValueError(f"per_thread must be at most max_tokens ({max_tokens})")
    if per_message is not None and per_message > thread_tokens:
        raise ValueError(f"per_message must be at most the tokens of a thread ({thread_tokens})")


class PromptBudget(Middleware):
    """Limits the prompt's messages to ``max_tokens``. The trigger has priority (at most half of the tokens), followed
    by the trigger's thread and the other threads. Newer messages have priority over older ones.

    ``per_thread`` limits each thread. ``per_message`` limits each message except the trigger; longer messages are
    shortened. ``count``, or an ``encoding`` of `tiktoken`, counts the tokens. Without ``count`` and ``encoding``, the
    number of tokens is estimated.
    """

    @checked(_check_sizes)
    def __init__(
        self,
        max_tokens: Annotated[int, Field(ge=100)],
        *,
        per_thread: Annotated[int, Field(ge=50)] | None = None,
        per_message: Annotated[int, Field(ge=30)] | None = None,
        encoding: str | None = None,
        count: Annotated[Count | None, IN_CODE] = None,
    ) -> None:
        self._max_tokens = max_tokens
        self._per_thread = min(per_thread or max_tokens, max_tokens)
        self._per_message = min(per_message or self._per_thread // 2, self._per_thread)
        self._count = count or load_count(encoding)

    def select_messages(
        self, threads: Mapping[str, MessageThread], trigger: BaseMessage
    ) -> tuple[Mapping[str, MessageThread], BaseMessage]:
        trigger = self._cut(trigger, self._max_tokens // 2)
        left = self._max_tokens - self._measure(trigger)
        chosen: dict[str, MessageThread] = {}
        # Give tokens to the trigger's thread first, and then to the threads with the newest messages.
        ordered = sorted(
            threads, key=lambda thread_id: threads[thread_id].messages[-1].seq if threads[thread_id].messages else 0
        )[::-1]
        ordered.sort(key=lambda thread_id: thread_id != trigger.thread_id)
        for thread_id in ordered:
            shown, tokens = self._fit_thread(threads[thread_id], min(left, self._per_thread))
            left -= tokens
            chosen[thread_id] = shown  # a thread without messages counts as omitted
        return {thread_id: chosen[thread_id] for thread_id in threads}, trigger

    def _fit_thread(self, thread: MessageThread, room: int) -> tuple[MessageThread, int]:
        """Return the newest messages that fit into ``room`` tokens, and the number of tokens that they use together."""
        messages: list[Message] = []
        used = 0
        for message in reversed(thread.messages):
            shown = self._cut(message, self._per_message)
            size = self._measure(shown)
            if used + size > room:
                break
            messages.insert(0, shown)
            used += size
        omitted = thread.omitted + len(thread.messages) - len(messages)
        return MessageThread(thread_id=thread.thread_id, messages=messages, omitted=omitted), used

    def _measure(self, message: BaseMessage) -> int:
        return MESSAGE_TOKENS + self._count(message.text)

    def _cut(self, message: _M, max_tokens: int) -> _M:
        """Shorten a message to the longest beginning that fits into ``max_tokens``, and mark the cut."""
        text, room = message.text, max_tokens - MESSAGE_TOKENS
        if self._count(text) <= room:
            return message
        # Use a binary search, because counting tokens is slow and a text may have a million characters.
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(_write_cut(text, middle)) <= room:
                low = middle
            else:
                high = middle - 1
        return message.model_copy(update={"content": _write_cut(text, low), "text_representation": None})


def _write_cut(text: str, chars: int) -> str:
    return f"{text[:chars]}\n[cut here: the first {chars} of {len(text)} characters]"
