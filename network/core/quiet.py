"""Whether a conversation is quiet: nothing of it is open. Pure.

A conversation has open items in three tables. A mod opens items in ``open_item``, an unanswered question to a person is
in ``question``, and a running reaction is in ``reaction``. `State` groups these values by the root of their
conversation, so a conversation is quiet when its group is empty. Each write updates one group. Nothing is scanned.
"""

from __future__ import annotations

from roundelay.network.errors import InvalidArguments

from .limits import ROW_BYTES
from .open_items import OpenItem
from .state import State
from .tables import TableWrite

MAX_ITEM_KEY, MAX_ITEM_KIND, MAX_ITEM_NOTE = 128, 32, 200
"""Maximum lengths of an item's key, kind and note, in characters."""
MAX_MOD_ITEMS = 10_000
"""Maximum number of open items of one mod."""


class ItemChanges:
    """The part of `ChangeSet` that opens and closes the items of a mod."""

    state: State
    stamp: int
    mod_id: str
    _unpaid_bytes: int

    def add_writes(self, writes: list[TableWrite]) -> None:
        raise NotImplementedError

    def open_item(
        self, root: int, key: str, kind: str, who: str = "", note: str = "", *, seq: int | None = None
    ) -> None:
        """Open an item of a conversation, or replace the item with the same key. `mod.Change` explains the arguments."""
        if not 0 < root <= self.state.head:
            raise InvalidArguments(f"There is no conversation {root}. A conversation is named by its first message.")
        if not 0 < len(key) <= MAX_ITEM_KEY or not 0 < len(kind) <= MAX_ITEM_KIND:
            raise InvalidArguments(
                f"An open item needs a key of 1 to {MAX_ITEM_KEY} characters and a kind of 1 to {MAX_ITEM_KIND}. "
                f"These have {len(key)} and {len(kind)}."
            )
        full_key = _key(self.mod_id, root, key)
        before: OpenItem | None = self.state.get("open_item", full_key)
        if before is None and len(self.state.open_items_of(self.mod_id)) >= MAX_MOD_ITEMS:
            raise InvalidArguments(
                f"The mod {self.mod_id} has {MAX_MOD_ITEMS} open items, the maximum. Close some of them."
            )
        # A replaced item keeps its time: the conversation has waited for it since then.
        at = self.stamp if before is None else before.at
        item = OpenItem(root, kind, at, root if seq is None else seq, who, note[:MAX_ITEM_NOTE])
        self._unpaid_bytes += len(full_key) + len(kind) + len(who) + len(item.note) + ROW_BYTES
        self.add_writes([TableWrite("open_item", full_key, item)])

    def close_item(self, root: int, key: str) -> None:
        """Close an item of the mod. Does nothing if the item is not open."""
        full_key = _key(self.mod_id, root, key)
        if self.state.get("open_item", full_key) is not None:
            self.add_writes([TableWrite("open_item", full_key, None)])


def _key(mod_id: str, root: int, key: str) -> str:
    return f"{mod_id}/{root:016d}/{key}"
