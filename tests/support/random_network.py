"""A network with a random history on a stepped hub: direct threads, changing channels, broadcasts and replies."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from roundelay.network.core.entries import Origin, Peer
from roundelay.network.hub import Hub
from roundelay.network.operations.reading import Reading
from tests.support.stepped_hub import SteppedHub

PEOPLE = ("mia", "tom", "una")
PROGRAMS = ("bob", "desk", "eve")
EVERYBODY = (*PEOPLE, *PROGRAMS)
CHANNELS = ("dev", "ops")
LIMITS = {
    "sends_per_s": 1_000_000,
    "root_messages_per_s": 1_000_000,
    "max_root_messages": 1_000_000,
    "max_hops": 1_000_000,
}


class RandomNetwork:
    """A network whose ``rng`` selects the participant and the action of each `step`. ``conversations`` limits the
    direct threads per pair.
    """

    def __init__(self, rng: Random, path: Path | None = None, conversations: int = 1) -> None:
        self.stepped = SteppedHub(LIMITS, path)
        self.rng = rng
        self._conversations = conversations
        self._sessions: dict[str, Any] = {}
        self._number = 0
        self.refused = 0
        for agent_id in EVERYBODY[:-1]:
            self.join(agent_id)

    @property
    def hub(self) -> Hub:
        return self.stepped.hub

    def join(self, agent_id: str, kind: str = "") -> None:
        connection, session = self.stepped.connect()
        connection.peer = Peer(is_trusted=True, administers=False)  # people are not operators
        kind = kind or ("human" if agent_id in PEOPLE else "agent")
        hello = {"type": "hello", "protocol": 1, "agent_id": agent_id, "kind": kind}
        self.stepped.receive(session, hello)
        self.stepped.loop.step()
        assert connection.frames[0]["type"] == "welcome", connection.frames
        self._sessions[agent_id] = (connection, session)

    def perform(self, agent_id: str, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame, and return its answer."""
        self._number += 1
        name = "call_id" if frame["type"] == "call" else "message_id"
        connection, session = self._sessions[agent_id]
        connection.take_frames()
        self.stepped.receive(session, {name: f"n{self._number}", **frame})
        self.stepped.loop.step()
        answers = [it for it in connection.take_frames() if it.get(name) == f"n{self._number}"]
        answer: dict[str, Any] = answers[0]
        self.refused += answer["type"] == "error"
        return answer

    def call(self, agent_id: str, op: str, /, **args: Any) -> dict[str, Any]:
        return self.perform(agent_id, {"type": "call", "op": op, "args": args})

    def perform_record(self, agent_id: str, frame: dict[str, Any]) -> dict[str, Any]:
        """Store a record, and return the answer."""
        connection, session = self._sessions[agent_id]
        connection.take_frames()
        self.stepped.receive(session, {"type": "record", **frame})
        self.stepped.loop.step()
        answer: dict[str, Any] = next(
            it for it in connection.take_frames() if it.get("record_id") == frame["record_id"]
        )
        return answer

    def send(self, agent_id: str, to: str, /, **more: Any) -> dict[str, Any]:
        return self.perform(
            agent_id, {"type": "send", "to": to, "content": f"word{self.rng.randrange(5)} said", **more}
        )

    def readable(self, agent_id: str) -> list[int]:
        """Return the seqs that a participant can read through a client's calls."""
        seqs: list[int] = []
        listed = self.call(agent_id, "network.list_threads", limit=500)["value"]["threads"]
        for thread in listed:
            page = self.call(agent_id, "network.history", thread_id=thread["thread_id"], limit=500)
            seqs += [it["seq"] for it in page.get("value", {"messages": []})["messages"]]
        return sorted(seqs)

    def step(self) -> None:
        """Let one random participant act."""
        rng, who = self.rng, self.rng.choice(list(self._sessions))
        dice = rng.random()
        more: dict[str, Any] = {}
        known = self.hub.state.head
        if dice < 0.75:
            # The hub refuses a cause that the sender may not read, without any effect.
            if rng.random() < 0.5 and known > 5:
                more["cause"] = rng.randint(max(1, known - 12), known)
            place = rng.random()
            if place < 0.6:
                to = f"agent:{rng.choice(list(self._sessions))}"
                if self._conversations > 1 and rng.random() < 0.8:
                    more["conversation"] = f"c{rng.randrange(self._conversations)}"
            elif place < 0.75:
                to = "broadcast"
                if rng.random() < 0.3:
                    more["exclude_agent_ids"] = [rng.choice(EVERYBODY[:-1])]
            else:
                to = f"channel:{rng.choice(CHANNELS)}"
            if to[0] in "bc" and rng.random() < 0.4 and known > 5:
                more["reply_to"] = rng.randint(max(1, known - 25), known)
                more.pop("exclude_agent_ids", None)
            self.send(who, to, **more)
        elif dice < 0.97:
            name = rng.choice(CHANNELS)
            op = rng.choice(("create", "join", "join", "leave", "set_history", "invite"))
            if op in ("set_history", "create"):
                more["history"] = rng.choice(("since_join", "members"))
            if op == "invite":
                more["agent_id"] = rng.choice(list(self._sessions))
            self.call(who, f"channels.{op}", name=name, **more)
        elif EVERYBODY[-1] not in self._sessions:
            self.join(EVERYBODY[-1])

    def reading(self, agent_id: str, hub: Hub | None = None) -> Reading:
        """Return the context that a read operation of this participant gets."""
        return Reading(Origin("", agent_id, "human" if agent_id in PEOPLE else "agent"), (hub or self.hub).view)

    def close(self) -> None:
        self.stepped.close()
