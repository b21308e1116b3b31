"""Test of replies that are looked up in their threads: the first decision counts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from roundelay.agents import replies
from roundelay.agents.replies import Replies
from roundelay.agents.values import Wait
from roundelay.network.client import History
from roundelay.network.messages import BaseMessage, message_from_wire

THREAD = "direct:bob~mia"


def say(seq: int, text: str) -> BaseMessage:
    return message_from_wire(
        {
            "seq": seq, "message_id": f"m{seq}", "kind": "direct", "sender_id": "mia", "sender_kind": "human", "to": "agent:bob",
            "thread_id": THREAD, "reply_to": 1, "root": 1, "hops": 0, "sent_at": seq, "content": text,
        }
    )  # fmt: skip


class Client:
    """A connection to a hub with one thread."""

    agent_id = "bob"

    def __init__(self, *messages: BaseMessage) -> None:
        self._messages = messages

    async def history(self, thread_id: str, *, before: int | None = None, limit: int = 50) -> History:
        if thread_id == "mod:network~bob":
            return History([], has_more=False)  # the network announces no decisions
        assert thread_id == THREAD
        earlier = [it for it in self._messages if before is None or it.seq < before]
        return History(earlier[-limit:], has_more=len(earlier) > limit)


async def test_of_several_decisions_the_first_holds_however_many_pages_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "PAGE", 2)
    client = Client(*(say(seq, text) for seq, text in enumerate(["/deny no", "hm", "well", "/approve"], start=2)))
    waiting = Replies(cast("Any", client), pause=lambda reaction: None, resume=lambda reaction: None)
    wait = Wait(questions={"a person": 1}, threads={"a person": THREAD}, until=0, is_approval=True)
    found, _ = await waiting.wait(wait, reaction="r", look_first=True, left_s=5)
    assert found["a person"].text == "/deny no"
