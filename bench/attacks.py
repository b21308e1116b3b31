"""What a careless or hostile participant can do to a hub: a registry of attacks, each one function.

    python bench/attacks.py NAME URL

Such a process prepares its attack, says so by a line, waits for a line, attacks for at most 10 s, and ends. `harm` runs each against
a node of its own and measures what it does to others. To add one, write a generator function under `@attack`: what stands before its
`yield` prepares and is not measured, what stands after it attacks, and ends by itself. Participants are agents with the hub's default limits.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bare import Bare
from wire import LoadError

MAX_ATTACK_S = 10.0
"""How long an attack may last."""
UNREAD_S = 4.0
"""How long a client that reads nothing stays: less than `stall_timeout_ms`, so that the hub has no reason to end it."""
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
    maker = Bare(url, "maker")
    for start in range(0, 10_000, 250):
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


def main() -> None:
    name, url = sys.argv[1:]
    running = ATTACKS[name].run(url)
    next(running)
    print("prepared", flush=True)
    sys.stdin.readline()
    next(running, None)


if __name__ == "__main__":
    main()
