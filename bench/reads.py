"""Whether a read costs more in a ledger of 1,000,000 messages than in one of 10,000: each read of the SQLite ledger by itself.

Both files are written here: 100 participants who write to each other in 1,000 threads, random ids, a record for each tenth message.
A read is timed as who awaits it sees it, the median of 200 at random places; the page cache of the system is warm.

    python bench/reads.py [--rows 1000000] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Raw

from roundelay.network.core.rows import MessageHead, Row, Span
from roundelay.network.core.sending import message_row
from roundelay.network.core.tables import LookupRequest
from roundelay.network.frames import SendFrame
from roundelay.network.ledger.sqlite import SQLiteLedger

PEOPLE, CONVERSATIONS, SMALL, TIMES, BATCH = 100, 20, 10_000, 200, 5_000


def name(number: int) -> str:
    return f"agent-{number:03d}"


def word(seq: int) -> str:
    return f"w{seq}w"


def make_row(seq: int, chance: random.Random) -> Row:
    sender = chance.randrange(PEOPLE)
    if seq % 10 == 0:
        return Row(
            seq=seq, at=seq, type="record", actor=name(sender), key=f"r:{chance.getrandbits(128):032x}", stream=f"reaction-{seq // 100}",
            label="result", digest="d", data=b'{"n":1}',
        )  # fmt: skip
    reader = (sender + 1 + chance.randrange(5)) % PEOPLE
    pair = "~".join(sorted((name(sender), name(reader))))
    to, thread = f"agent:{name(reader)}", f"direct:{pair}:talk-{chance.randrange(CONVERSATIONS)}"
    head = MessageHead(
        seq=seq, sender_id=name(sender), sender_kind="agent", kind="direct", to=to, thread_id=thread, root=seq, hops=0, label=seq, cause=None,
        excluded=(),
    )  # fmt: skip
    frame = SendFrame(
        message_id=f"{chance.getrandbits(128):032x}",
        to=to,
        content=Raw(json.dumps(f"{word(seq)} {'x' * 140}").encode()),
    )
    return message_row(head, frame, 1_700_000_000_000 + seq, name(sender), f"m:{frame.message_id}")


async def fill(path: Path, rows: int) -> tuple[SQLiteLedger, list[Row]]:
    """A ledger with so many rows, and some of them."""
    ledger = SQLiteLedger(path, new_epoch=lambda: "epoch", durability="normal")
    await ledger.open()
    chance, kept = random.Random(1), list[Row]()
    for start in range(1, rows + 1, BATCH):
        batch = [make_row(seq, chance) for seq in range(start, min(start + BATCH, rows + 1))]
        await ledger.append(batch, [])
        kept += chance.sample([it for it in batch if it.head is not None], 2)
    return ledger, kept


def list_reads(ledger: SQLiteLedger, kept: list[Row], rows: int) -> dict[str, Callable[[Row], Awaitable[object]]]:
    def spans(row: Row) -> list[Span]:
        return [Span(row.target, 0), Span("broadcast", 0)]

    def reader(row: Row) -> str:
        return row.target.removeprefix("agent:")

    return {
        "a thread's newest 50": lambda it: ledger.thread(it.stream, limit=50),
        "50 of a thread from its middle": lambda it: ledger.thread(it.stream, after=rows // 2, limit=50, newest=False),
        "what waits for a reader, 100 from a place": lambda it: ledger.inbox(spans(it), reader(it), it.seq, rows, 100),
        "a reader's newest 50, own ones too": lambda it: ledger.inbox(spans(it), reader(it), 0, rows, 50, newest=True),
        "a message by its id, and 9 ids that are new": lambda it: ledger.lookup(
            LookupRequest({(it.actor, it.key), *((it.actor, f"m:{random.getrandbits(128):032x}") for _ in range(9))}, set(), set())
        ),
        "the head of a cause": lambda it: ledger.lookup(LookupRequest(set(), {it.seq}, set())),
        "an agent's records of one kind, 50": lambda it: ledger.records(it.actor, "result", it.seq, 50),
        "a reaction's records": lambda it: ledger.reaction(f"reaction-{it.seq // 100}", 0, 50),
        "the newest heads of a thread": lambda it: ledger.newest_heads({it.stream: 0}, 20),
        "200 rows of the log": lambda it: ledger.rows(it.seq, 200),
        "a word that stands in one message": lambda it: ledger.search([word(it.seq)], spans(it), reader(it), limit=20),
        "three threads of a reader": lambda it: ledger.threads(spans(it), reader(it), among=[it.stream, "t", "u"]),
        "the newest 50 threads of a reader": lambda it: ledger.threads(spans(it), reader(it)),
        "the newest 50 threads of all": lambda it: ledger.all_threads(),
    }  # fmt: skip


WALKS = ("the newest 50 threads of a reader", "the newest 50 threads of all")
"""What costs by all that it is chosen from: asked for a few times."""


async def measure(path: Path, rows: int) -> dict[str, float]:
    """Microseconds of each read, the median."""
    ledger, kept = await fill(path, rows)
    chance, found = random.Random(2), dict[str, float]()
    await ledger.search(["w1w"], [Span("broadcast", 0)], name(0), limit=1)  # the first one fills the index of words
    for title, read in list_reads(ledger, kept, rows).items():
        times = []
        for it in chance.choices(kept, k=5 if title in WALKS else TIMES):
            started = time.perf_counter()
            await read(it)
            times.append(time.perf_counter() - started)
        found[title] = statistics.median(times) * 1e6
    await ledger.close()
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = await measure(Path(folder) / "small.db", SMALL)
        print(f"{SMALL:,} rows are measured; {options.rows:,} are written now, which takes about a minute.", flush=True)
        large = await measure(Path(folder) / "large.db", options.rows)
        size = (Path(folder) / "large.db").stat().st_size / options.rows
    print(f"{'read':46} {SMALL:>12,} {options.rows:>12,}   ratio")
    for title, us in large.items():
        print(f"{title:46} {small[title]:9.0f} us {us:9.0f} us   {us / small[title]:5.2f}")
    print(f"{size:.0f} bytes a row in the file")
    if options.json is not None:
        options.json.write_text(json.dumps({"small_us": small, "large_us": large, "bytes_a_row": size}, indent=1))


if __name__ == "__main__":
    asyncio.run(main())
