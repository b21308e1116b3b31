"""Compares a ledger after a crash with everything that the peers received: the evidence for promise P1, and for one
answer per message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.network.ledger.sqlite import SQLiteLedger
from tests.crash.peers import Peer


@dataclass(frozen=True)
class Kept:
    """Counts of the comparison: acknowledged messages and, of these, lost ones, duplicates and ones with another seq;
    deliveries, and deliveries of messages that do not exist; and stored messages without an answer.
    """

    epoch: str
    acknowledged: int
    lost: int
    doubled: int
    moved: int
    delivered: int
    delivered_and_lost: int
    of_nobody: int

    def counts(self) -> dict[str, int]:
        """For `Note`."""
        return {name: count for name, count in vars(self).items() if name != "epoch"}

    def assert_kept(self) -> None:
        assert self.acknowledged > 0
        wrong = (self.lost, self.doubled, self.moved, self.delivered_and_lost, self.of_nobody)
        assert wrong == (0, 0, 0, 0, 0), self


async def look_through(db: Path, senders: Sequence[Peer], ear: Peer) -> Kept:
    """Open the ledger as a hub does, and compare. By now, every sender has the answer to each of its messages."""
    ledger = SQLiteLedger(db, new_epoch=lambda: "renewed")
    meta, _ = await ledger.open()
    rows = [row for row in await ledger.rows(0, 10_000_000) if row.type == "message"]
    await ledger.close()
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        found.setdefault((row.actor, row.key[2:]), []).append(row.seq)
    lost = doubled = moved = acknowledged = 0
    for peer in senders:
        for message_id, answers in peer.answers.items():
            assert all(answer["type"] == "stored" for answer in answers), answers
            seqs = found.pop((peer.agent_id, message_id), [])
            acknowledged += 1
            lost += not seqs
            doubled += len(seqs) > 1
            moved += {answer["seq"] for answer in answers} != set(seqs)
    by_seq = {row.seq: (row.actor, row.key[2:]) for row in rows}
    unkept = sum(by_seq.get(heard.seq) != (heard.sender_id, heard.message_id) for heard in ear.heard)
    return Kept(meta.epoch, acknowledged, lost, doubled, moved, len(ear.heard), unkept, len(found))
