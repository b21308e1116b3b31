"""Tests of `network.window`, which selects messages by heads in memory (`operations.recent`). Results equal a new
read of every message, and the number of reads does not grow with an agent's past.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from roundelay.app import Network
from roundelay.network.clock import random_id, system_clock
from roundelay.network.cluster.read_replica import ReadOnlyIndex
from roundelay.network.config import Limits
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.core.visibility import VISIBILITIES, readable_spans
from roundelay.network.errors import UnknownMessage
from roundelay.network.frames import Follows
from roundelay.network.hub.replica import ReplicaHub
from roundelay.network.operations import head_cache, views
from roundelay.network.operations.reading import Reading
from tests.support.counting_ledger import count_reads
from tests.support.counts import Note
from tests.support.random_network import EVERYBODY, RandomNetwork

PAGES, PAGE = 4, 5


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the page sizes, so that a short past reaches every limit."""
    monkeypatch.setattr(views, "PAGE", PAGE)
    monkeypatch.setattr(views, "SCANNED", PAGES * PAGE)
    monkeypatch.setattr(views, "THREADS_AT_ONCE", 3)
    monkeypatch.setattr(views, "ROWS_AT_ONCE", 2)


async def read_anew(
    reading: Reading, *, trigger: int, threads: Any = None, per_thread: int | None = None, visibility: Any = None
) -> dict[str, Any]:
    """Compute a window by reading the rows of every message."""
    view = await views.open_view(reading, trigger, visibility)
    named = threads if isinstance(threads, list) else None
    most = threads if isinstance(threads, int) else 100 if named is not None else 20
    chosen = await _choose(reading, view, named)
    shown: list[tuple[int, str, dict[str, Any]]] = []
    looked = 0
    ledger, room = reading.hub.ledger, reading.hub.limits.max_result_bytes
    for place, thread_id in enumerate(chosen):
        if len(shown) == most:
            break
        looked = place + 1
        page = await ledger.thread(thread_id, before=trigger + 1, limit=PAGE)
        admitted = await view.choose(page.rows)
        if not admitted:
            continue
        if page.has_more:
            half = max(1, len(admitted) // 2)
            admitted = admitted[max(range(half), key=lambda at: (admitted[at].seq & -admitted[at].seq, at)) :]
        first = (await ledger.thread(thread_id, limit=1, newest=False)) if page.has_more else page
        rows: list[Row] = []
        for row in reversed(admitted[-(per_thread or 10) :]):
            if sum(len(it.data) for it in rows) + len(row.data) > room:
                break
            rows.insert(0, row)
        room -= sum(len(row.data) for row in rows)
        entry: dict[str, Any] = {
            "thread_id": thread_id,
            "messages": [Raw(row.data) for row in rows],
            "omitted": len(admitted) - len(rows),
        }
        damaged = [row.seq for row in page.rows if row.is_damaged and rows and row.seq > rows[0].seq]
        shown.append((first.rows[0].seq, thread_id, {**entry, "damaged": damaged} if damaged else entry))
    further = list(chosen.values())[looked:]
    omitted = 0
    for heads in further:
        await view.load(heads)
        omitted += any([await view.shows(head) for head in heads])
    ordered = [entry for _, _, entry in sorted(shown, key=lambda it: it[:2])]
    return {"threads": ordered, "as_of": trigger, **({"omitted_threads": omitted} if omitted else {})}


async def _choose(reading: Reading, view: views.View, named: list[str] | None) -> dict[str, list[MessageHead]]:
    assert view.trigger is not None
    chosen: dict[str, list[MessageHead]] = {view.trigger.thread_id: []}
    participant = reading.hub.state.participant(reading.origin.agent_id)
    if named is not None or participant is None:
        return chosen | {thread_id: [] for thread_id in named or ()}
    spans, until = readable_spans(reading.hub.state, participant), view.trigger.seq
    for _ in range(PAGES):
        page = await reading.hub.ledger.inbox(spans, reading.origin.agent_id, 0, until, PAGE, newest=True)
        for row in reversed(page.rows):
            if row.head is not None:
                chosen.setdefault(row.stream, []).append(row.head)
        if not page.has_more:
            break
        until = page.rows[0].seq - 1
    return chosen


def ask(rng: Random, head: int, threads: list[str]) -> dict[str, Any]:
    """Return random arguments. Most refer to a recent message, as those of agents do."""
    args: dict[str, Any] = {
        "trigger": rng.randint(max(1, head - 6), head) if rng.random() < 0.8 else rng.randint(1, head)
    }
    if rng.random() < 0.5:
        args["threads"] = rng.randint(1, 8) if rng.random() < 0.6 else rng.sample(threads, min(3, len(threads)))
    if rng.random() < 0.4:
        args["per_thread"] = rng.randint(1, 7)
    if rng.random() < 0.6:
        args["visibility"] = rng.choice(VISIBILITIES)
    return args


async def compare(reading: Reading, args: dict[str, Any], counts: Counter[str]) -> None:
    try:
        expected = await read_anew(reading, **args)
    except UnknownMessage:
        if args["trigger"] > 1:  # this trigger does not belong to the agent
            await compare(reading, {**args, "trigger": args["trigger"] - 1}, counts)
        return
    found = await views.window(reading, **args)
    assert msgspec.json.encode(found).decode() == msgspec.json.encode(expected).decode(), (
        reading.origin.agent_id,
        args,
    )
    counts["windows"] += 1
    counts["threads"] += len(found["threads"])
    counts["messages left out"] += sum(it["omitted"] for it in found["threads"])
    counts["threads left out"] += found.get("omitted_threads", 0)


@pytest.mark.parametrize(
    ("kind", "conversations", "max_bytes"),
    [
        ("memory", 5, head_cache.MAX_BYTES),
        ("sqlite", 5, 20_000),
        *(pytest.param(*it, head_cache.MAX_BYTES, marks=pytest.mark.full) for it in [("memory", 1), ("sqlite", 1)]),
        *(pytest.param(*it, 20_000, marks=pytest.mark.full) for it in [("memory", 1), ("sqlite", 1), ("memory", 5)]),
        pytest.param("sqlite", 5, head_cache.MAX_BYTES, marks=pytest.mark.full),
    ],
)
def test_a_window_is_what_reading_every_message_anew_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    conversations: int,
    max_bytes: int,
    note: Note,
    make_network: Callable[..., RandomNetwork],
) -> None:
    """The past is random and grows. The runs include a small cache, and a hub that only reads."""
    monkeypatch.setattr(head_cache.RecentHeads.__init__, "__defaults__", (max_bytes,))
    counts: Counter[str] = Counter()
    for seed in range(2):
        rng = Random(f"{seed}{kind}{conversations}")
        network = make_network(rng, tmp_path / f"{seed}.db" if kind == "sqlite" else None, conversations)
        for number in range(300):
            network.step()
            if number % 4 == 3:
                threads = [it.thread_id for it in network.stepped.run(network.stepped.ledger.all_threads())]
                agent_id = rng.choice(EVERYBODY)
                args = ask(rng, network.hub.state.head, threads)
                network.stepped.run(compare(network.reading(agent_id), args, counts))
        if kind == "memory":
            rows = network.stepped.ledger._ledger
            for seq in rng.sample(range(20, network.hub.state.head), 12):
                rows.damage(seq)
            # With this count, the hub treats its data in memory as read before a restart.
            network.hub.registry.counts["recoveries"] += 1
        else:
            network.stepped.run(compare_at_a_reader(network, counts, rng))
        for _ in range(30):
            args = ask(rng, network.hub.state.head, threads)
            network.stepped.run(compare(network.reading(rng.choice(EVERYBODY)), args, counts))
    assert min(counts["windows"], 3 * counts["threads left out"], 3 * counts["messages left out"]) > 50, counts
    note(**counts)


async def compare_at_a_reader(network: RandomNetwork, counts: Counter[str], rng: Random) -> None:
    def describe_leader() -> Follows:
        return Follows("a:8700", 1)

    inner = network.stepped.ledger._ledger
    index = ReadOnlyIndex(inner, epoch="e1", name="lab", describe_leader=describe_leader)
    network.stepped.loop.in_threads += 1
    hub = ReplicaHub(index, limits=Limits(), clock=system_clock, new_id=random_id, follows=describe_leader)
    await hub.start()
    threads = [it.thread_id for it in await index.all_threads()]
    for _ in range(20):
        await compare(network.reading(rng.choice(EVERYBODY), hub), ask(rng, hub.state.head, threads), counts)
    await hub.close()
    network.stepped.loop.in_threads -= 1


def react(network: RandomNetwork, person: str, conversation: str, **args: Any) -> Counter[str]:
    """Send a message to the agent, and return the number of reads for its window."""
    sent = network.send(person, "agent:desk", conversation=conversation)
    return count_reads(network, views.window(network.reading("desk"), trigger=sent["seq"], **args))[1]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("is_of_one_person", [True, False])
def test_what_a_reaction_reads_does_not_grow_with_the_agents_past(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    is_of_one_person: bool,
    note: Note,
    make_network: Callable[..., RandomNetwork],
) -> None:
    monkeypatch.undo()  # this call restores the real limits
    network = make_network(Random(1), tmp_path / "ledger.db" if kind == "sqlite" else None)
    people = ["tom"] if is_of_one_person else ["mia", *(f"person{number}" for number in range(20))]
    for person in people[1:]:
        network.join(person, "human")
    read: dict[int, Counter[str]] = {}
    made = 0
    for past in (1, 100, 1000):
        while made < past:
            made += 1
            network.send(people[made % len(people)], "agent:desk", conversation=f"c{made}")
        react(network, "tom", f"before{past}")  # these reactions fill the memory
        read[past] = react(network, "tom", f"now{past}")
    most = read[100]
    assert read[1000]["heads"] == most["heads"] == read[1]["heads"], read
    assert read[1000]["calls"] <= most["calls"], read
    assert max(it["rows"] for it in read.values()) <= 20 + 4, read
    assert most["heads"] <= 1 + 1, read
    note(calls=most["calls"], rows=most["rows"], heads=most["heads"])


def test_under_current_no_other_thread_is_read(
    monkeypatch: pytest.MonkeyPatch, make_network: Callable[..., RandomNetwork]
) -> None:
    monkeypatch.undo()
    network = make_network(Random(1))
    for number in range(300):
        network.send("tom", "agent:desk", conversation=f"c{number}")
    read = react(network, "tom", "new", visibility="current")
    assert (read["rows"], read["heads"]) == (2, 1), read  # the trigger's head and its row


def read_window(network: RandomNetwork, trigger: int, **args: Any) -> dict[str, list[int]]:
    """Return the seqs in a window of the agent, by thread."""
    found = network.stepped.run(views.window(network.reading("desk"), trigger=trigger, **args))
    decoded = msgspec.json.decode(msgspec.json.encode(found))
    return {it["thread_id"]: [message["seq"] for message in it["messages"]] for it in decoded["threads"]}


def test_per_other_limits_threads_outside_the_place_of_the_trigger(
    monkeypatch: pytest.MonkeyPatch, make_network: Callable[..., RandomNetwork]
) -> None:
    monkeypatch.undo()
    network = make_network(Random(1))
    for agent_id in ("tom", "desk"):
        network.call(agent_id, "channels.create" if agent_id == "tom" else "channels.join", name="yard")
    posts = [network.send("tom", "channel:yard")["seq"] for _ in range(2)]
    replies = [network.send("tom", "channel:yard", reply_to=posts[0])["seq"] for _ in range(2)]
    private = [network.send("tom", "agent:desk")["seq"] for _ in range(3)]
    last = network.send("tom", "channel:yard")["seq"]
    assert read_window(network, last, per_other=1) == {
        "channel:yard": [*posts, last],
        f"thread:{posts[0]}": replies,
        "direct:desk~tom": private[-1:],
    }
    assert read_window(network, private[-1], per_other=1) == {
        "direct:desk~tom": private,
        "channel:yard": posts[-1:],
        f"thread:{posts[0]}": replies[-1:],
    }


def test_after_hides_older_messages_of_the_own_thread(
    monkeypatch: pytest.MonkeyPatch, make_network: Callable[..., RandomNetwork]
) -> None:
    monkeypatch.undo()
    network = make_network(Random(1))
    aside = network.send("tom", "agent:desk", conversation="aside")["seq"]
    seqs = [network.send("tom", "agent:desk")["seq"] for _ in range(4)]
    assert read_window(network, seqs[-1], after=seqs[1]) == {
        "direct:desk~tom": seqs[2:],
        "direct:desk~tom:aside": [aside],
    }
    assert read_window(network, seqs[-1], after=seqs[-1]) == {"direct:desk~tom:aside": [aside]}


async def test_a_window_says_whether_anybody_else_is_there() -> None:
    async with Network.open() as network:
        desk, tom = await network.join("desk"), await network.join("tom", kind="human")
        seq = (await tom.send_text("desk", "Hello")).seq
        assert (await desk.window(seq)).is_alone
        await network.join("mia", kind="human")
        assert (await desk.window(seq)).is_alone  # a replay of this message reads the same window
        later = (await tom.send_text("desk", "Hello again")).seq
        assert not (await desk.window(later)).is_alone
