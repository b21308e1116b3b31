"""Random conversations on a stepped hub, and an oracle that derives the open items of each conversation from the
ledger.

Agents start and finish reactions, ask each other, hand over, wait for approvals, acknowledge, fail, and are killed.
People create and end tasks and timers of the included mods. The hub is killed too, and its commits fail. The oracle
never calls the rules of `network.core.quiet`.
"""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from roundelay.mods.tasks import Tasks
from roundelay.mods.timers import TimersMod
from roundelay.network.core.entries import Peer
from roundelay.network.frames import Seq
from roundelay.network.mod import Change, Mod, operation
from roundelay.network.operations.open_items import _list_items
from tests.support.stepped_hub import SteppedHub

PEOPLE, REACTORS, PROGRAM = ("mia", "tom"), ("bob", "cat", "dan"), "coder"
LIMITS = {"sends_per_s": 1_000_000, "root_messages_per_s": 1_000_000, "max_root_messages": 1_000_000, "max_hops": 1000}
Item = tuple[str, str, int]
"""Kind, participant, and the seq of the message that the item is about. The participant of a task or timer is empty."""
ENDED = ("done", "failed", "cancelled")


class Errands(Mod):
    """Mod that opens and closes items, as a mod with tasks or timers does."""

    id = "errands"

    @operation("change")
    def add(self, change: Change, *, seq: Seq, key: str) -> dict[str, Any]:
        """Open an errand."""
        change.open_item(change.head(seq).root, key, "errand", seq=seq)
        return {}

    @operation("change")
    def end(self, change: Change, *, seq: Seq, key: str) -> dict[str, Any]:
        """Close an errand."""
        change.close_item(change.head(seq).root, key)
        return {}


class QuietRun:
    """One random run. `step` lets one random participant act, and `drain` lets all participants finish."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.hub = SteppedHub(LIMITS, mods=[Errands(), Tasks(), TimersMod()])
        self.sessions: dict[str, tuple[Any, Any]] = {}
        self.inbox: dict[str, list[int]] = {name: [] for name in REACTORS}
        self.reactions: dict[str, dict[str, int]] = {name: {} for name in REACTORS}
        """Open reactions of each agent, with their triggers, as the agent knows them."""
        self.served_since: dict[str, int] = {}
        """Newest seq when a reactor first joined, by agent."""
        self.errands: dict[tuple[int, str], tuple[int, str]] = {}
        """Message of each open item, and who opened it, by root and key."""
        self.tasks: dict[int, tuple[int, str, str]] = {}
        """Message, creator and state of each task, according to the results of the calls."""
        self.timers: dict[int, tuple[int, str]] = {}
        """Message and recipient of each timer that was not cancelled."""
        self.restored: dict[tuple[str, int], int] = {}
        """Dead letters that were restored, with the newest seq at that time."""
        self.removed: dict[str, int] = {}
        self.repeated: set[tuple[str, int]] = set()
        self._number = 0
        for name in (*PEOPLE, PROGRAM, *REACTORS):
            self.join(name)

    # --- frames

    def join(self, name: str) -> None:
        connection, session = self.hub.connect()
        connection.peer = Peer(is_trusted=True)
        kind = "human" if name in PEOPLE else "agent"
        hello = {"type": "hello", "protocol": 1, "agent_id": name, "kind": kind, "instance": f"{name}-{self._number}"}
        self.hub.receive(session, {**hello, "role": "reactor" if name in REACTORS else "observer"})
        self.hub.loop.step()
        if connection.closed is not None:  # the hub has closed the connection because of a failed commit
            return
        welcome = connection.frames[0]
        assert welcome["type"] == "welcome", welcome
        self.sessions[name] = connection, session
        if name in REACTORS:
            self.served_since.setdefault(name, welcome["head"])
            self.reactions[name] = {it["reaction"]: it["trigger"] for it in welcome["open_reactions"]}
            self.inbox[name] = []
        self.read()

    def read(self) -> None:
        """Process the frames that the hub has written to all sessions."""
        for name, (connection, _) in list(self.sessions.items()):
            for frame in connection.take_frames():
                if frame["type"] == "deliver" and name in REACTORS and frame["message"]["sender_id"] != name:
                    seq = frame["message"]["seq"]
                    if seq not in self.inbox[name]:
                        self.inbox[name].append(seq)
                    if frame["attempt"] > 1:
                        self.repeated.add((name, seq))
            if connection.closed is not None:
                del self.sessions[name]

    def give(self, name: str, frame: dict[str, Any]) -> dict[str, Any] | None:
        """Send a frame. Return the frame's answer, or None if the frame has none."""
        if name not in self.sessions:
            return None
        connection, session = self.sessions[name]
        self.read()
        if name not in self.sessions:
            return None
        self.hub.receive(session, frame)
        self.hub.loop.step()
        keys = {key: frame[key] for key in ("message_id", "call_id", "record_id") if key in frame}
        answer = next((it for it in connection.frames if keys and keys.items() <= it.items()), None)
        self.read()
        return answer

    def number(self) -> str:
        self._number += 1
        return f"n{self._number}"

    def send(self, name: str, to: str, **more: Any) -> dict[str, Any] | None:
        return self.give(name, {"type": "send", "message_id": self.number(), "to": to, "content": "words", **more})

    def call(self, name: str, op: str, **args: Any) -> dict[str, Any] | None:
        return self.give(name, {"type": "call", "call_id": self.number(), "op": op, "args": args})

    def record(self, name: str, reaction: str, kind: str, **body: Any) -> bool:
        frame = {"type": "record", "record_id": self.number(), "reaction": reaction, "kind": kind, "body": body}
        answer = self.give(name, frame)
        return answer is not None and answer["type"] == "stored"

    # --- random events

    def step(self) -> None:
        rng = self.rng
        for name in (*PEOPLE, PROGRAM, *REACTORS):
            if name not in self.sessions and name not in self.removed and rng.random() < 0.5:
                self.join(name)
        happens = (
            [self.write] * 3 + [self.start] * 5 + [self.work] * 8 + [self.finish] * 4 + [self.acknowledge] * 3
            + [self.refuse] * 3 + [self.answer] * 3 + [self.errand] * 2 + [self.task] * 8 + [self.timer] * 3 + [self.wait] * 3
            + [self.kill, self.kill_hub, self.fail_commit, self.restore, self.restore, self.remove]
        )  # fmt: skip
        happening = rng.choice(happens)
        # After a failed commit, no row shows whether these calls took effect, so the oracle could not know.
        if self.hub.ledger.failing is None or happening not in (
            self.errand,
            self.task,
            self.timer,
            self.restore,
            self.remove,
        ):
            happening()

    def write(self) -> None:
        """Let a person or a program start a conversation or continue one."""
        who = self.rng.choice((*PEOPLE, PROGRAM))
        more = self._cause()
        if self.rng.random() < 0.3:
            self.send(who, "broadcast", **more)
        else:
            self.send(who, f"agent:{self.rng.choice((*REACTORS, *PEOPLE, PROGRAM))}", **more)

    def _cause(self) -> dict[str, Any]:
        head = self.hub.hub.state.head
        # The hub refuses a cause that the sender may not read, without any effect.
        return {"cause": self.rng.randint(max(1, head - 10), head)} if self.rng.random() < 0.4 and head else {}

    def start(self) -> None:
        name = self.rng.choice(REACTORS)
        if self.inbox[name]:
            seq = self.rng.choice(self.inbox[name])
            reaction = f"r{self.number()}"
            if self.record(name, reaction, "started", trigger=seq):
                self.inbox[name].remove(seq) if seq in self.inbox[name] else None
                self.reactions[name][reaction] = seq

    def work(self) -> None:
        """An agent sends something in a reaction, or waits for somebody."""
        name = self.rng.choice(REACTORS)
        if not self.reactions[name]:
            return
        reaction, trigger = self.rng.choice(sorted(self.reactions[name].items()))
        kind = self.rng.choice(("hand over", "hand over", "ask", "ask a person", "all", "approval", "result"))
        others = [it for it in REACTORS if it != name]
        place = {"turn": 1, "call": 0}
        match kind:
            case "hand over":
                self.send(name, f"agent:{self.rng.choice(others)}", cause=trigger)
            case "ask":
                to = self.rng.choice((*others, PROGRAM))
                stored = self.send(name, f"agent:{to}", cause=trigger, requires_response=True)
                if stored is not None and stored["type"] == "stored":
                    self.record(name, reaction, "tool_started", **place)
                    self.record(name, reaction, "waiting", **place, questions={to: stored["seq"]})
            case "ask a person":
                names = self.rng.sample((*PEOPLE, PROGRAM, *others), 2)
                self.send(name, "broadcast", cause=trigger, requires_response=names)
            case "all":
                self.send(name, "broadcast", cause=trigger)
            case "approval":
                stored = self.send(name, f"agent:{self.rng.choice(PEOPLE)}", cause=trigger, requires_response=True)
                if stored is not None and stored["type"] == "stored":
                    self.record(name, reaction, "tool_started", **place)
                    questions = {"mia": stored["seq"]}
                    self.record(name, reaction, "waiting", **place, questions=questions, is_approval=True, until=1)
            case "result":
                self.record(name, reaction, "tool_result", **place)

    def finish(self) -> None:
        name = self.rng.choice(REACTORS)
        if self.reactions[name]:
            reaction, trigger = self.rng.choice(sorted(self.reactions[name].items()))
            if self.rng.random() < 0.5:
                self.send(name, f"agent:{self.rng.choice((*PEOPLE, *REACTORS))}", cause=trigger, reply_to=trigger)
            if self.record(name, reaction, "finished", status="completed"):
                self.reactions[name].pop(reaction, None)

    def acknowledge(self) -> None:
        name = self.rng.choice(REACTORS)
        if self.inbox[name]:
            seq = self.rng.choice(self.inbox[name])
            only = self.rng.random() < 0.5
            self.give(name, {"type": "ack", "seq": seq, "only": only})
            # An ack up to a seq may have been sent before a repeated delivery, so the hub leaves repeated messages
            # open.
            left = [it for it in self.inbox[name] if it != seq]
            self.inbox[name] = left if only else [it for it in left if it > seq or (name, it) in self.repeated]

    def refuse(self) -> None:
        """An agent fails, once or until the message is a dead letter."""
        name, times = self.rng.choice(REACTORS), self.rng.choice((1, 1, 5))
        if not self.inbox[name]:
            return
        seq, retry_ms = self.rng.choice(self.inbox[name]), self.rng.choice((0, 0, 400))
        for _ in range(times):
            if seq in self.inbox[name]:
                self.inbox[name].remove(seq)
                self.give(name, {"type": "nack", "seq": seq, "reason": "no", "retry_after_ms": retry_ms})
                self.hub.loop.step(0.01 + retry_ms / 1000)
                self.read()

    def answer(self) -> None:
        """Let a person or the program answer a question by reply, by cause, or by a message to the same place."""
        who = self.rng.choice((*PEOPLE, PROGRAM))
        asked = sorted(seq for kind, name, seq in self.expected().get(None, set()) if (kind, name) == ("question", who))
        if not asked:
            return
        row = self.message(asked[0])
        to = f"agent:{row['sender_id']}" if row["kind"] == "direct" else row["to"]
        named = self.rng.choice(({"reply_to": row["seq"]}, {"cause": row["seq"]}, {}))
        self.send(who, to, **named)

    def choose_message(self, who: str) -> int:
        """Return one of the newest messages that the participant may read. If there is none, the participant writes
        one. Return 1, which is no message, if the hub refuses it.
        """
        messages = [json.loads(it.data) for it in self.rows() if it.type == "message"]
        places = "broadcast", f"agent:{who}"
        seqs = [it["seq"] for it in messages if it["sender_id"] == who or it["to"] in places]
        if seqs:
            return self.rng.choice(seqs[-6:])
        stored = self.send(who, f"agent:{self.rng.choice(REACTORS)}")
        return stored["seq"] if stored is not None and stored["type"] == "stored" else 1

    def errand(self) -> None:
        who, key = self.rng.choice(PEOPLE), self.rng.choice("ab")
        seq = self.choose_message(who)
        if self.rng.random() < 0.5:
            answer = self.call(who, "errands.add", seq=seq, key=key)
            if answer is not None and answer["type"] == "result":
                self.errands[self.message(seq)["root"], key] = seq, who
        else:
            answer = self.call(who, "errands.end", seq=seq, key=key)
            if answer is not None and answer["type"] == "result":
                self.errands.pop((self.message(seq)["root"], key), None)

    def task(self) -> None:
        """Let a person create a task, or let somebody end or reopen a task."""
        rng = self.rng
        if not self.tasks or rng.random() < 0.3:
            who = rng.choice(PEOPLE)
            seq = self.choose_message(who)
            assignee = rng.choice(("", *REACTORS, *PEOPLE))
            others = [rng.choice(sorted(self.tasks))] if self.tasks and rng.random() < 0.3 else []
            answer = self.call(who, "tasks.create", title="job", assignee=assignee, depends_on=others, cause=seq)
            if answer is not None and answer["type"] == "result":
                self.tasks[answer["value"]["task"]] = seq, who, answer["value"]["state"]
            return
        number = rng.choice(sorted(self.tasks))
        op = rng.choice(("claim", "complete", "fail", "release", "cancel", "reopen"))
        more = {"reason": "no"} if op == "fail" else {}
        creator = self.tasks[number][1]
        self.change_task(rng.choice((creator, creator, *PEOPLE, *REACTORS)), f"tasks.{op}", number, **more)

    def change_task(self, who: str, op: str, number: int, **more: Any) -> None:
        answer = self.call(who, op, task=number, **more)
        if answer is not None and answer["type"] == "result":
            seq, creator, _ = self.tasks[number]
            self.tasks[number] = seq, creator, answer["value"]["state"]

    def timer(self) -> None:
        """Let a person create a timer that is due within three seconds, or cancel a timer."""
        rng = self.rng
        if not self.timers or rng.random() < 0.6:
            who = rng.choice(PEOPLE)
            seq = self.choose_message(who)
            to, minutes = rng.choice((*REACTORS, *PEOPLE)), rng.choice((0.001, 0.01, 0.05))
            answer = self.call(who, "timers.create", text="now", in_minutes=minutes, to=to, cause=seq)
            if answer is not None and answer["type"] == "result":
                self.timers[answer["value"]["timer"]] = seq, to
        else:
            number = rng.choice(sorted(self.timers))
            answer = self.call(rng.choice(PEOPLE), "timers.cancel", timer=number)
            if answer is not None and answer["type"] == "result":
                del self.timers[number]

    def wait(self) -> None:
        """Let time pass, so that the hub stores ack cursors and redelivers failed messages."""
        self.hub.loop.step(self.rng.choice((0.1, 0.6, 2.0)))
        self.read()

    def kill(self) -> None:
        name = self.rng.choice(REACTORS)
        if name in self.sessions:
            _, session = self.sessions.pop(name)
            self.hub.hub.disconnect(session)
            self.hub.loop.step()

    def kill_hub(self) -> None:
        self.hub.crash() if self.rng.random() < 0.7 else self.hub.restart()
        self.sessions.clear()

    def fail_commit(self) -> None:
        self.hub.fail_commit(self.rng.choice(("before", "after")))

    def restore(self) -> None:
        dead = [key for table, key in self.stored("dead") if table == "dead"]
        if dead and "mia" in self.sessions:
            name, _, seq = self.rng.choice(dead).partition("/")
            head = self.hub.hub.state.head
            answer = self.call("mia", "network.retry_dead_letter", seq=int(seq), agent_id=name)
            if answer is not None and answer["type"] == "result":
                self.restored[name, int(seq)] = head

    def remove(self) -> None:
        if not self.removed and "mia" in self.sessions and self.rng.random() < 0.2:
            answer = self.call("mia", "network.remove", agent_id="dan")
            if answer is not None and answer["type"] == "result":
                self.removed["dan"] = self.hub.hub.state.head
                self.inbox["dan"], self.reactions["dan"] = [], {}

    # --- the oracle

    def stored(self, table: str) -> list[tuple[str, str]]:
        return [(table, key) for key in self.hub.ledger._ledger._tables[table]]

    def table(self, name: str) -> dict[str, Any]:
        tables: dict[str, dict[str, Any]] = self.hub.ledger._ledger._tables
        return tables[name]

    def rows(self) -> list[Any]:
        rows: list[Any] = self.hub.run(self.hub.ledger.rows(0, 1_000_000))
        return rows

    def message(self, seq: int) -> dict[str, Any]:
        message: dict[str, Any] = next(json.loads(it.data) for it in self.rows() if it.seq == seq)
        return message

    def expected(self) -> dict[int | None, set[Item]]:
        """Return the open items by root, from the rows, the stored cursors and the calls to mods. The key None holds
        all open items.
        """
        rows = self.rows()
        messages = {it.seq: json.loads(it.data) for it in rows if it.type == "message"}
        registered = {json.loads(it.data)["agent_id"]: it.seq for it in rows if it.type == "registered"}
        open_items: set[tuple[int, Item]] = set()
        started: dict[tuple[str, str], tuple[int, int]] = {}
        triggers: dict[tuple[str, int], int] = {}
        dead: set[tuple[str, int]] = set()
        for row in rows:
            body = json.loads(row.data)
            if row.type == "record" and row.label == "started":
                started[row.actor, row.stream] = body["trigger"], row.seq
                triggers[row.actor, body["trigger"]] = row.seq
            elif row.type == "record" and row.label == "finished":
                started.pop((row.actor, row.stream), None)
            elif row.type == "dead" and body.get("event") != "withdrawn":
                letter = body["agent_id"], body["seq"]
                dead.add(letter)
                self_closed = [key for key, (trigger, _) in started.items() if (key[0], trigger) == letter]
                for key in self_closed:
                    del started[key]
        for (name, _), (trigger, _) in started.items():
            if name not in self.removed:
                open_items.add((messages[trigger]["root"], ("reaction", name, trigger)))
        floors, attempts = self.table("floor"), self.table("attempt")
        for seq, message in messages.items():
            for name in self._recipients(message, registered):
                if name in self.removed:
                    continue
                if name in REACTORS and seq > self.served_since.get(name, 2**60):
                    revived = attempts.get(f"{name}/{seq}")
                    if revived is not None and revived.is_revived:
                        handled = triggers.get((name, seq), 0) > self.restored.get((name, seq), 2**60)
                    else:
                        floor = floors.get(name)
                        handled = (floor is not None and floor.is_handled(seq)) or (name, seq) in dead
                        handled = handled or (name, seq) in triggers
                    if not handled:
                        open_items.add((message["root"], ("delivery", name, seq)))
                elif message["sender_id"] in self.removed:
                    continue  # the answer is not required any more
                elif self._is_asked(message, name) and not self._is_answered(messages, message, name):
                    open_items.add((message["root"], ("question", name, seq)))
        for (root, _), (seq, _) in self.errands.items():
            open_items.add((root, ("errand", "", seq)))
        for seq, _, state in self.tasks.values():
            if state not in ENDED:
                open_items.add((messages[seq]["root"], ("task", "", seq)))
        sent = [it["content"] for it in messages.values() if it["sender_id"] == "timers"]
        for number, (seq, to) in self.timers.items():
            if to not in self.removed and not any(re.match(rf"Reminder {number}\b", it) for it in sent):
                open_items.add((messages[seq]["root"], ("timer", "", seq)))
        found: dict[int | None, set[Item]] = {None: {item for _, item in open_items}}
        for root, item in open_items:
            found.setdefault(root, set()).add(item)
        return found

    @staticmethod
    def _recipients(message: dict[str, Any], registered: dict[str, int]) -> list[str]:
        if message["kind"] in ("direct", "mod"):
            name = message["to"].removeprefix("agent:")
            return [name] if name != message["sender_id"] else []
        return [name for name, at in registered.items() if at < message["seq"] and name != message["sender_id"]]

    @staticmethod
    def _is_asked(message: dict[str, Any], name: str) -> bool:
        required = message.get("requires_response", False)
        return name in required if isinstance(required, list) else required and message["kind"] == "direct"

    @staticmethod
    def _is_answered(messages: dict[int, dict[str, Any]], asked: dict[str, Any], name: str) -> bool:
        for seq, message in messages.items():
            if seq <= asked["seq"] or message["sender_id"] != name:
                continue
            if message.get("reply_to") == asked["seq"] or (name == PROGRAM and message.get("cause") == asked["seq"]):
                return True
            if asked["kind"] == "direct" and message["thread_id"] == asked["thread_id"]:
                return True
        return False

    def check(self) -> int:
        """Compare the hub with the oracle, conversation by conversation. Return the number of open conversations."""
        for _ in range(20):
            head, rows, expected = self.hub.hub.state.head, self.rows(), self.expected()
            if self.hub.hub.state.head == head == max((it.seq for it in rows), default=0):
                break
            # A timer fired while the oracle read the rows, so its commit is not among them.
            self.hub.loop.step()
        state = self.hub.hub.state
        roots = {it.head.root for it in rows if it.head is not None}
        for root in roots:
            found = {
                (
                    "reaction" if it.kind == "approval" else it.kind,
                    "" if it.kind in ("task", "timer") else it.agent_id,
                    it.seq,
                )
                for it in _list_items(state, root, "")
            }
            assert found == expected.get(root, set()), (root, found, expected.get(root, set()))
            assert bool(state.open_in(root)) == bool(found)
        return len(expected) - 1

    def drain(self) -> None:
        """Let all participants join again and finish their open items."""
        self.hub.ledger.failing = None
        for _ in range(60):
            for name in (*PEOPLE, PROGRAM, *REACTORS):
                if name not in self.sessions and name not in self.removed:
                    self.join(name)
            self.hub.loop.step(5)
            self.read()
            for name in REACTORS:
                for reaction in sorted(self.reactions[name]):
                    if self.record(name, reaction, "finished", status="completed"):
                        self.reactions[name].pop(reaction, None)
                for seq in list(self.inbox[name]):
                    self.give(name, {"type": "ack", "seq": seq, "only": True})
                    self.inbox[name].remove(seq)
            for (root, key), (seq, who) in list(self.errands.items()):
                answer = self.call(who, "errands.end", seq=seq, key=key)
                if answer is not None and answer["type"] == "result":
                    del self.errands[root, key]
            for number, (_, creator, state) in self.tasks.items():
                if state not in ENDED:
                    self.change_task(creator, "tasks.cancel", number)
            for _, name, seq in sorted(self.expected()[None]):
                if name in (*PEOPLE, PROGRAM):
                    row = self.message(seq)
                    to = f"agent:{row['sender_id']}" if row["kind"] == "direct" else row["to"]
                    self.send(name, to, reply_to=seq)
            self.hub.loop.step(1)
            self.read()
            if self.check() == 0:
                return
        raise AssertionError(f"still open: {self.expected()[None]}")
