"""Actions in the full-screen terminal that need a dialog, or that can outlive the pane in which they began."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from textual.screen import Screen

from roundelay.display.text import sanitize, sanitize_json
from roundelay.live_activity import LiveActivity
from roundelay.network.client import NetworkClient
from roundelay.runs.approvals import check_arguments, find_message, read_arguments
from roundelay.terminal.actions import decide_request, end_takeover, resume, start_takeover, stop_work
from roundelay.terminal.places import Place
from roundelay.tui.desk import Desk, InboxItem
from roundelay.tui.dialogs import Ask

TYPING_INTERVAL_S = 3.0


class DialogHost(Protocol):
    """Functions of `RoundelayTerminal` that actions use."""

    def work(self, do: Callable[..., Awaitable[object]], *args: object) -> None: ...

    def push_screen(self, screen: Screen[Any], callback: Callable[[Any], None]) -> object: ...

    async def show_sent(self, seq: int) -> None: ...


class PersonActions:
    """Actions of the person at the terminal. If the hub refuses a background action, the refusal is shown as a line."""

    def __init__(self, terminal: DialogHost, desk: Desk) -> None:
        self._terminal = terminal
        self._desk = desk
        self._typing_sent_at = 0.0

    def decide(self, word: str, seq: int, scope: str) -> None:
        """Decide on a request for approval. If necessary, ask the person for a reason or for other arguments."""

        def answer(text: str | None) -> None:
            if text is not None:
                self._terminal.work(self.send_decision, seq, f"/{word} {text}".strip())

        match word:
            case "deny":
                self._terminal.push_screen(Ask(f"Deny #{seq}. The reason, if you like:"), answer)
            case "edit":
                self._terminal.work(self._ask_arguments, seq, answer)
            case _:
                answer(scope)

    async def _ask_arguments(self, seq: int, answer: Any) -> None:
        call = read_arguments(await find_message(self._desk.client, seq))
        question = f"The arguments for {sanitize(call['tool'])}, as JSON:"
        self._terminal.push_screen(Ask(question, sanitize_json(call["arguments"])), answer)

    async def send_decision(self, seq: int, decision: str) -> None:
        """Send a decision: ``/approve ...``, ``/deny ...`` or ``/edit ...``. Raises `RoundelayError`."""
        if decision.startswith("/edit"):
            check_arguments(decision.removeprefix("/edit").strip())
        sent: list[int] = []
        client, activity = self._desk.client, self._desk.activity
        await decide_request(client, activity, seq, decision, lambda _, stored: sent.append(stored.seq))
        self._desk.show_line(f"#{seq} is decided: {decision.split()[0].removeprefix('/')}.")
        for it in sent:
            await self._terminal.show_sent(it)

    def resume_item(self, item: InboxItem) -> None:
        """Resume the conversation or the agent that an inbox item names. A dead letter is delivered again."""
        if item.kind == "dead_letter":
            self._terminal.work(self._deliver_again, item)
        elif item.kind in ("stopped", "budget"):
            self._terminal.work(self._resume_item, item)

    async def _deliver_again(self, item: InboxItem) -> None:
        args = {"seq": item.seq, **({"agent_id": item.agent_id} if item.agent_id else {})}
        await self._desk.client.call("network.retry_dead_letter", args)
        self._desk.show_line(f"#{item.seq} is delivered again.")
        self._desk.remove_item(item)

    async def _resume_item(self, item: InboxItem) -> None:
        await self.resume(str(item.root) if item.root is not None else item.agent_id)
        self._desk.remove_item(item)

    async def resume(self, what: str) -> None:
        """Resume an agent, or the conversation whose root has this sequence number. Raises `RoundelayError`."""
        self._desk.show_line(await resume(self._desk.client, what))

    def toggle_read_state(self, thread_id: str, name: str) -> None:
        row = self._desk.threads.get(thread_id)
        if row is not None:
            self._terminal.work(partial(self._desk.set_read_state, thread_id, **{name: not getattr(row, name)}))

    def name_thread(self, thread_id: str) -> None:
        def name(title: str | None) -> None:
            if title is not None:
                self._terminal.work(partial(self._desk.set_read_state, thread_id, title=title.strip()))

        row = self._desk.threads.get(thread_id)
        self._terminal.push_screen(Ask("What you call this thread:", row.title if row is not None else ""), name)

    def stop(self, thread_id: str) -> None:
        """Stop the work of agents in a thread."""
        self._terminal.work(self._change_thread, stop_work, thread_id)

    def toggle_takeover(self, thread_id: str) -> None:
        """Take over a thread after the person confirms, or end the takeover."""
        if thread_id in self._desk.activity.takeovers:
            self._terminal.work(self._change_thread, end_takeover, thread_id)
            return

        def confirm(answer: str | None) -> None:
            if answer is not None and answer.strip().lower() in ("", "y", "yes"):
                self._terminal.work(self._change_thread, start_takeover, thread_id)

        name = self._desk.name_thread(thread_id)
        self._terminal.push_screen(Ask(f"Take over {name}? Agents will not answer here. Enter: yes, Esc: no"), confirm)

    async def _change_thread(
        self, change: Callable[[NetworkClient, LiveActivity, str], Awaitable[str]], thread_id: str
    ) -> None:
        self._desk.show_line(await change(self._desk.client, self._desk.activity, thread_id))

    def send_typing(self, place: Place) -> None:
        """Signal to the readers of a destination's thread that this person is typing."""
        now = time.monotonic()
        # Skip a thread without messages, because it has no readers yet.
        if place.thread_id in self._desk.threads and now - self._typing_sent_at >= TYPING_INTERVAL_S:
            self._typing_sent_at = now
            self._terminal.work(partial(self._desk.client.signal, "typing", {}, thread_id=place.thread_id))
