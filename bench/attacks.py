"""What a careless or hostile participant can do to a hub: a registry of attacks, each one function.

    python bench/attacks.py NAME URL

Such a process prepares its attack, says so by a line, waits for a line, attacks for at most 10 s, and ends. `harm` runs each against
a node of its own and measures what it does to others. To add one, write a generator function under `@attack`: what stands before its
`yield` prepares and is not measured, what stands after it attacks, and ends by itself. Participants are agents with the hub's default limits.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from bare import Bare
from wire import LoadError, encode_masked_frame, make_message_id, websocket_request

MAX_ATTACK_S = 10.0
"""How long an attack may last."""
UNREAD_S = 4.0
"""How long a client that reads nothing stays: less than `stall_timeout_ms`, so that the hub has no reason to end it."""
FLOOD_S = 5.0
"""How long a flood lasts."""
HALF_OPEN = 3000
HALF_OPEN_S = 8.0
ASKED = 64
"""How many calls it makes meanwhile: as many as the hub performs of one session at a time."""


@dataclass(frozen=True)
class Attack:
    """``run(url)`` prepares up to its ``yield`` and attacks after it."""

    name: str
    what: str
    run: Callable[[str], Iterator[None]]


ATTACKS: dict[str, Attack] = {}


def attack(name: str, what: str) -> Callable[[Callable[[str], Iterator[None]]], Callable[[str], Iterator[None]]]:
    """Register an attack under its name, with one line that says what it does."""

    def register(run: Callable[[str], Iterator[None]]) -> Callable[[str], Iterator[None]]:
        ATTACKS[name] = Attack(name, what, run)
        return run

    return register


# -- on memory: results that nobody reads


@attack("unread-histories", f"one session asks {ASKED} times for a history of 4 MB and reads nothing")
def ask_histories(url: str) -> Iterator[None]:
    thread = _fill_thread(url)
    session = Bare(url, "reader")
    yield
    _ask_and_wait([session], "network.history", thread_id=thread, limit=500)


@attack("eight-sessions", f"eight sessions of one agent ask {ASKED} times each for a history of 4 MB and read nothing")
def ask_histories_eight_times(url: str) -> Iterator[None]:
    thread = _fill_thread(url)
    sessions = [Bare(url, "reader") for _ in range(8)]
    yield
    _ask_and_wait(sessions, "network.history", thread_id=thread, limit=500)


@attack(
    "many-readers", f"32 agents ask {ASKED} times each for a list of 300 agents with cards of 15 KB and read nothing"
)
def ask_agents_from_everywhere(url: str) -> Iterator[None]:
    _show_cards(url)
    sessions = [Bare(url, f"reader-{number}") for number in range(32)]
    yield
    _ask_and_wait(sessions, "network.list_agents")


@attack("many-channels", f"eight sessions ask {ASKED} times each for a list of 10,000 channels and read nothing")
def ask_channels(url: str) -> Iterator[None]:
    makers = [Bare(url, f"maker-{number}") for number in range(10)]  # each may create a thousand
    for start in range(0, 10_000, 250):
        maker = makers[start // 1000]
        for number in range(start, start + 250):
            maker.call("channels.create", name=f"channel-{number}", topic="x" * 1000)
        refused = [answer for answer in maker.hear_answers(250) if answer["type"] != "result"]
        if refused:
            raise LoadError(f"a channel could not be made: {refused[0]}")
    sessions = [Bare(url, "reader") for _ in range(8)]
    yield
    _ask_and_wait(sessions, "channels.list")


@attack(
    "large-cards",
    f"eight sessions ask {ASKED} times each for a list of 300 agents with cards of 15 KB and read nothing",
)
def ask_agents(url: str) -> Iterator[None]:
    _show_cards(url)
    sessions = [Bare(url, "reader") for _ in range(8)]
    yield
    _ask_and_wait(sessions, "network.list_agents")


# -- on the doors: connections that never say who they are


@attack(
    "half-open", f"{HALF_OPEN} connections ask for a session and never say hello; whichever is ended is opened anew"
)
def keep_half_open(url: str) -> Iterator[None]:
    address, request = urlsplit(url), websocket_request(url)
    yield
    open_now: set[socket.socket] = set()
    until = time.monotonic() + HALF_OPEN_S
    with selectors.DefaultSelector() as selector:
        while time.monotonic() < until:
            for _ in range(min(HALF_OPEN - len(open_now), 64)):
                opened = socket.socket()
                opened.setblocking(False)
                opened.connect_ex((address.hostname or "", address.port or 0))
                selector.register(opened, selectors.EVENT_WRITE)
                open_now.add(opened)
            for key, events in selector.select(0 if len(open_now) < HALF_OPEN else 0.01):
                opened = cast("socket.socket", key.fileobj)
                try:
                    if events & selectors.EVENT_WRITE:
                        opened.send(request)
                        selector.modify(opened, selectors.EVENT_READ)
                        continue
                    answer = opened.recv(4096)
                except OSError:
                    answer = b""
                if not answer.startswith(b"HTTP/1.1 101") or b"\x88" in answer:  # closed, with a close frame or without
                    selector.unregister(opened)
                    opened.close()
                    open_now.discard(opened)
    for opened in open_now:
        opened.close()


def _fill_thread(url: str) -> str:
    """A thread of 4 MB that the agent ``reader`` may read; gives its id."""
    reader, writer = Bare(url, "reader"), Bare(url, "writer")
    for number in range(20):
        writer.say(type="send", message_id=f"fill-{number}", to="agent:reader", content="x" * 200_000)
    answers = writer.hear_answers(20)
    reader.say(type="ack", seq=max(answer["seq"] for answer in answers))
    for _ in answers:
        while reader.hear()["type"] != "deliver":
            pass
    reader.close()
    writer.close()
    return "direct:reader~writer"


def _show_cards(url: str) -> None:
    for number in range(300):
        Bare(url, f"agent-{number}", card={"description": "x" * 15_000}).close()


def _ask_and_wait(sessions: list[Bare], op: str, **args: object) -> None:
    for _ in range(ASKED):
        for session in sessions:
            session.call(op, **args)
    time.sleep(UNREAD_S)


# -- on the writer and the loop: as much as fits through the socket


def flood(name: str, what: str, make_frame: Callable[[bytes], bytes]) -> None:
    """Register a flood: one session sends frames as fast as the hub takes them, each made for an id of its own, and reads the answers."""

    def run(url: str) -> Iterator[None]:
        Bare(url, "zed").close()
        session = Bare(url, "flooder")
        session.call("channels.create", name="flooded")
        session.hear_answers(1)
        mask = os.urandom(4)

        def make_block() -> bytes:
            frames = [make_frame(make_message_id())]
            size = len(frames[0])
            frames += [make_frame(make_message_id()) for _ in range((1 << 17) // size)]
            return b"".join(encode_masked_frame(frame, mask) for frame in frames)

        blocks = [make_block() for _ in range(64)]
        yield
        threading.Thread(target=_drain, args=(session,), daemon=True).start()
        deadline_s = time.monotonic() + FLOOD_S
        # one thread sends: another may cut it off, since `sendall` waits for as long as the hub does not read
        sending = threading.Thread(target=_send_blocks, args=(session, blocks, make_block, deadline_s), daemon=True)
        sending.start()
        sending.join(FLOOD_S + 1)
        session.close()

    attack(name, what)(run)


def _send_blocks(session: Bare, blocks: list[bytes], make_block: Callable[[], bytes], deadline_s: float) -> None:
    try:
        for number in itertools.count():
            if time.monotonic() > deadline_s:
                return
            session.socket.sendall(blocks[number] if number < len(blocks) else make_block())
    except OSError:
        return


def _drain(session: Bare) -> None:
    try:
        while session.socket.recv(1 << 18):
            pass
    except OSError:
        return


def _send(message_id: bytes, to: str = "agent:zed", size: int = 200, **more: object) -> bytes:
    frame = {"type": "send", "message_id": message_id.decode(), "to": to, "content": "x" * size, **more}
    return json.dumps(frame).encode()


def _call(call_id: bytes, op: str, **args: object) -> bytes:
    return json.dumps({"type": "call", "call_id": call_id.decode(), "op": op, "args": args}).encode()


def _record(record_id: bytes) -> bytes:
    frame = {
        "type": "record",
        "record_id": record_id.decode(),
        "reaction": "r",
        "kind": "note",
        "body": {"x": "x" * 150},
    }
    return json.dumps(frame).encode()


_DEEP = b'{"type":"send","message_id":"deep","to":"agent:zed","content":' + b"[" * 1000 + b"]" * 1000 + b"}"

flood("sends", "sends of 200 bytes, as fast as possible", _send)
flood("large-sends", "sends of 200 KB, as fast as possible", lambda it: _send(it, size=200_000))
flood("broadcasts", "broadcasts of 200 bytes, as fast as possible", lambda it: _send(it, to="broadcast"))
flood("records", "records, as fast as possible", _record)
flood("no-json", "frames of 2,000 brackets that are no JSON", lambda _: b"{" * 2000)
flood("brackets", "frames of 250 KB of brackets that are no JSON", lambda _: b"{" * 250_000)
flood("deep-nesting", "sends nested 1,000 deep", lambda _: _DEEP)
flood("unknown-fields", "sends with a field that there is not", lambda it: _send(it, colour=1))
flood("unknown-recipients", "sends to nobody", lambda it: _send(it, to="agent:nobody"))
flood(
    "topics", "calls that set a channel's topic", lambda it: _call(it, "channels.set_topic", name="flooded", topic="x")
)
flood("acks", "acks of what was never delivered", lambda _: b'{"type":"ack","seq":9007199254740991}')
flood("idle-acks", "acks that acknowledge nothing new", lambda _: b'{"type":"ack","seq":0}')
flood("nacks", "nacks of what was never delivered", lambda _: b'{"type":"nack","seq":1,"reason":"x"}')
flood("signals", "signals to one agent", lambda _: b'{"type":"signal","to":"agent:zed","kind":"typing","body":{}}')


@attack("joins", "connections that say hello and close, one after another")
def join_and_leave(url: str) -> Iterator[None]:
    Bare(url, "flooder").close()
    yield
    deadline_s = time.monotonic() + FLOOD_S
    while time.monotonic() < deadline_s:
        Bare(url, "flooder").close()


def main() -> None:
    name, url = sys.argv[1:]
    running = ATTACKS[name].run(url)
    next(running)
    print("prepared", flush=True)
    sys.stdin.readline()
    next(running, None)


if __name__ == "__main__":
    main()
