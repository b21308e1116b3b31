"""Write a run as one HTML file: the node's page (`roundelay.web`) with the rows of the run. The file opens from disk
without a network.

The file contains only the rows that the caller may read. From a ledger file, these are all rows. From a node, operators
get the whole log, agents get their messages and records, and other participants get their messages. The rows are
compressed and base64-encoded, so that text of a participant cannot become HTML. The page's content security policy
allows only the page's own scripts, and no requests.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from roundelay.agents.models.tokens import Prices, has_price_table
from roundelay.connection import READER_ID
from roundelay.network.core.rows import Row
from roundelay.network.errors import Forbidden, LedgerError, UnknownOperation
from roundelay.network.ledger.log_file import LogHead
from roundelay.runs.export import Part, read_messages, read_part
from roundelay.runs.lists import list_participants, list_threads
from roundelay.runs.node_source import LiveSource
from roundelay.runs.page_answers import MemoryLog, describe_run, make_message_row, make_record_row
from roundelay.runs.reading import Record, read_body, read_record
from roundelay.runs.source import Source
from roundelay.web import site

FORMAT = 2
MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of the rows as JSON, in bytes. A browser holds all rows in memory."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy of the page. The page may run its own scripts and the modules that they import. It may not
send requests or turn text into HTML. The nonce is created with the page, after all messages were written, so no
participant can have guessed it."""


@dataclass
class _PageRows:
    """Rows of a page. Messages and the bodies of records are kept as the bytes that the ledger contains."""

    head: int = 0
    size: int = 0
    messages: list[Raw] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    """Kinds of the participants, by id."""
    triggers: set[int] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    """Messages and records as log rows, for the explanations."""
    threads: set[str] = field(default_factory=set)

    def add_row(self, row: Row) -> None:
        self.head = max(self.head, row.seq)
        if row.type in ("message", "record"):
            self.rows.append(row)
        if row.type == "message":
            self.add_message(read_body(row), row.data)
        elif row.type == "record":
            self.add_record(row.stream, read_record(row), row.data)
        elif row.type == "registered":
            body = read_body(row)
            self.add_participant(str(body["agent_id"]), str(body["kind"]))

    def add_message(self, message: Mapping[str, Any], data: bytes) -> None:
        self._count_bytes(data)
        self.messages.append(Raw(data))
        self.triggers.add(int(message["seq"]))
        self.threads.add(str(message["thread_id"]))
        self.head = max(self.head, int(message["seq"]))
        self.add_participant(str(message["sender_id"]), str(message["sender_kind"]))

    def add_record(self, reaction: str, record: Record, data: bytes) -> None:
        self._count_bytes(data)
        self.add_participant(str(record["agent_id"]), "agent")

    def add_participant(self, agent_id: str, kind: str) -> None:
        # Skip the command that writes the page: it is not a participant of the run.
        if agent_id != READER_ID:
            # Keep the first kind: the writer of a record is only assumed to be an agent.
            self.kinds.setdefault(agent_id, kind)

    def _count_bytes(self, data: bytes) -> None:
        # Count while reading, so that a huge log is refused before it fills the memory.
        self.size += len(data)
        if self.size > MAX_BYTES:
            raise LedgerError(
                f"This run is larger than a page can hold ({MAX_BYTES // 1024**2} MB). Choose a part with --thread, "
                "--root, --from or --to, or open the whole file: roundelay view FILE.db"
            )


async def write_page(source: Source, part: Part, *, now_s: float, nonce: str) -> str:
    """Return the page as HTML. Raises `UnknownMessage` if the part has no messages, and `LedgerError` if the page would
    be too large."""
    rows = _PageRows()
    is_operator = True
    try:
        head, part_rows = await read_part(source, part)
        network = {"name": head.name, "epoch": head.epoch}
        async for row in part_rows:
            rows.add_row(row)
    except (Forbidden, UnknownOperation):  # the caller is not an operator
        assert isinstance(source, LiveSource)
        is_operator = False
        info = source.client.welcome.network
        network = {"name": info.name, "epoch": info.epoch}
        await _read_own(source, part, rows)
    if not rows.messages and not part.is_whole:
        raise part.not_found()
    log = MemoryLog(LogHead(epoch=network["epoch"], name=network["name"]), rows.rows)
    caller = source.client.agent_id if isinstance(source, LiveSource) else READER_ID
    data = {
        "format": FORMAT,
        "network": network,
        "head": rows.head,
        "made_at": int(now_s * 1000),
        "viewer": {"agent_id": caller if caller != READER_ID else "", "is_operator": is_operator},
        "part": part.describe(),
        "agents": await _describe_participants(source, rows, is_whole=part.is_whole),
        "readers": await _read_readers(source, rows),
        "messages": rows.messages,
        **await describe_run(log, Prices()),
        "has_prices": has_price_table(),
    }
    return make_page(msgspec.json.encode(data), nonce)


async def _read_own(source: LiveSource, part: Part, rows: _PageRows) -> None:
    """Read the rows that a caller may see who is not an operator: messages, and the caller's own records."""
    async for message in read_messages(source, part):
        data = message.model_dump_json(exclude_none=True).encode()
        rows.add_message(message.model_dump(), data)
        rows.rows.append(make_message_row(message, data))
    own = source.client.agent_id
    # `usage` names ended reactions, and `open_reactions` names the rest.
    names = {(own, name) async for page in source.usage(None, 0) for name in page["reactions"]}
    for reaction in await source.read_reactions(sorted(names | await source.open_reactions())):
        # Skip records whose message is not on the page, because they would explain nothing.
        if reaction.trigger in rows.triggers:
            for record in reaction.records:
                data = msgspec.json.encode(record["body"])
                rows.add_record(reaction.reaction, record, data)
                rows.rows.append(make_record_row(reaction.reaction, record, data))


async def _describe_participants(source: Source, rows: _PageRows, *, is_whole: bool) -> list[dict[str, object]]:
    """Return the participants of the whole run, or of the part that the page contains.

    The cards come from the hub, because a log does not contain cards.
    """
    cards: dict[str, object] = {}
    if isinstance(source, LiveSource):
        for it in await list_participants(source.client):
            if is_whole or it["agent_id"] in rows.kinds:
                rows.kinds[it["agent_id"]] = it["kind"]
                cards[it["agent_id"]] = it.get("card")
    return [
        {"agent_id": it, "kind": kind, "state": "offline", **({"card": cards[it]} if cards.get(it) else {})}
        for it, kind in sorted(rows.kinds.items())
    ]


async def _read_readers(source: Source, rows: _PageRows) -> dict[str, list[str]]:
    """Return the readers of the page's threads from the hub, because a log does not contain readers."""
    threads = await list_threads(source.client) if isinstance(source, LiveSource) else []
    return {it["thread_id"]: it["readers"] for it in threads if it["thread_id"] in rows.threads}


def make_page(rows: bytes, nonce: str, folder: Path = site.FOLDER) -> str:
    """Return the node's page as one HTML file that embeds the rows and all scripts and styles."""
    contents = site.read_contents(folder)
    places = {
        name: f"data:text/javascript;base64,{b64encode(body).decode()}"
        for name, body in contents.items()
        if name.endswith(".js")
    }
    imports = site.list_imports(folder, places)
    # Leave out modules that the entry module does not import, to keep the file small.
    needed = {places[site.ENTRY], *(imports[it] for it in site.list_modules(contents, imports))}
    import_map = json.dumps({"imports": {name: place for name, place in imports.items() if place in needed}})
    styles = "".join(contents[name].decode() for name in site.list_styles(contents))
    # Store no time in the compressed data, so that the same run always produces the same file.
    packed = b64encode(gzip.compress(rows, mtime=0)).decode()
    return site.fill_template(
        folder,
        [
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(nonce=nonce)}">',
            f'<style nonce="{nonce}">{styles}</style>',
            f'<script type="importmap" nonce="{nonce}">{import_map}</script>',
            f'<script type="application/octet-stream" id="recording">{packed}</script>',
            f'<script type="module" nonce="{nonce}">import "#{site.ENTRY}";</script>',
        ],
    )
