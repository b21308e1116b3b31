"""Writes a run out as one page for a browser, which opens from disk and asks nobody for anything: the node's page
(`roundelay.web`) on rows that stand in the file.

What the page holds is what the caller may read: of a ledger's file everything, of a node the log for operators, and for
others their messages and, if they are agents, their own records. The rows are packed and written in letters that no
reader of HTML takes for anything else, so nothing that a participant wrote can leave its place; the page's own policy
lets it run its own scripts alone, and ask no address.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Raw

from roundelay.agents.models.model import Usage
from roundelay.agents.models.tokens import Prices, has_price_table
from roundelay.connection import READER_ID
from roundelay.network.core.rows import Row
from roundelay.network.errors import Forbidden, LedgerError, UnknownOperation
from roundelay.runs.export import Part, read_messages, read_part
from roundelay.runs.lists import list_participants, list_threads
from roundelay.runs.node_source import LiveSource
from roundelay.runs.reading import Record, read_body, read_record
from roundelay.runs.source import Source
from roundelay.web import site

FORMAT = 1
MAX_BYTES = 256 * 1024 * 1024
"""Of the rows, as JSON: a browser holds them all at once."""
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the page may do: run its own scripts, and the modules that these import; ask no address; make no text HTML. The
nonce is made when the page is, after everything that participants wrote."""


@dataclass
class _PageRows:
    """What a page holds of a run. Messages and the bodies of records are carried as they are stored."""

    head: int = 0
    size: int = 0
    messages: list[Raw] = field(default_factory=list)
    records: list[dict[str, object]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    """Who takes part, and as what."""
    used: set[tuple[str, Usage]] = field(default_factory=set)
    triggers: set[int] = field(default_factory=set)
    threads: set[str] = field(default_factory=set)

    def take_row(self, row: Row) -> None:
        self.head = max(self.head, row.seq)
        if row.type == "message":
            self.take_message(read_body(row), row.data)
        elif row.type == "record":
            self.take_record(row.stream, read_record(row), row.data)
        elif row.type == "registered":
            body = read_body(row)
            self.take_participant(str(body["agent_id"]), str(body["kind"]))

    def take_message(self, message: Mapping[str, Any], data: bytes) -> None:
        self._take(data)
        self.messages.append(Raw(data))
        self.triggers.add(int(message["seq"]))
        self.threads.add(str(message["thread_id"]))
        self.head = max(self.head, int(message["seq"]))
        self.take_participant(str(message["sender_id"]), str(message["sender_kind"]))

    def take_record(self, reaction: str, record: Record, data: bytes) -> None:
        self._take(data)
        self.records.append({**record, "reaction": reaction, "body": Raw(data)})
        self.take_participant(str(record["agent_id"]), "agent")
        self.used |= set(_list_used(record["body"]))

    def take_participant(self, agent_id: str, kind: str) -> None:
        if agent_id != READER_ID:
            self.kinds.setdefault(agent_id, kind)

    def _take(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > MAX_BYTES:
            raise LedgerError(
                f"This run is larger than a page can hold ({MAX_BYTES // 1024**2} MB); choose a part by --thread, "
                "--root, --from or --to, or look at the whole: roundelay view FILE.db"
            )


async def write_page(source: Source, part: Part, *, now_s: float, nonce: str) -> str:
    """Give the page. Raises `UnknownMessage` if nothing is of that thread or root, `LedgerError` for what is too
    large."""
    rows = _PageRows()
    is_operator = True
    try:
        head, found = await read_part(source, part)
        network = {"name": head.name, "epoch": head.epoch}
        async for row in found:
            rows.take_row(row)
    except (Forbidden, UnknownOperation):  # no operator
        assert isinstance(source, LiveSource)
        is_operator = False
        info = source.client.welcome.network
        network = {"name": info.name, "epoch": info.epoch}
        await _read_own(source, part, rows)
    if not rows.messages and not part.is_whole:
        raise part.not_found()
    prices = Prices()
    usd = {_name_usage(model, usage): prices.cost(model, usage) for model, usage in rows.used}
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
        "records": rows.records,
        "has_prices": has_price_table(),
        "usd": {name: float(it) for name, it in usd.items() if it is not None},
    }
    return make_page(msgspec.json.encode(data), nonce)


async def _read_own(source: LiveSource, part: Part, rows: _PageRows) -> None:
    """Read what somebody may see who is no operator: the messages, and an agent's own records."""
    async for message in read_messages(source, part):
        rows.take_message(message.model_dump(), message.model_dump_json(exclude_none=True).encode())
    own = source.client.agent_id
    named = {(own, name) async for page in source.usage(None, 0) for name in page["reactions"]}
    for reaction in await source.read_reactions(sorted(named | await source.open_reactions())):
        if reaction.trigger in rows.triggers:
            for record in reaction.records:
                rows.take_record(reaction.reaction, record, msgspec.json.encode(record["body"]))
    rows.records.sort(key=lambda it: cast(int, it["seq"]))


async def _describe_participants(source: Source, rows: _PageRows, *, is_whole: bool) -> list[dict[str, object]]:
    """Give who is registered, of a part of the run only who has a part in it. A log does not hold their cards."""
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
    """Give who reads the threads of which messages are held. A log does not tell."""
    threads = await list_threads(source.client) if isinstance(source, LiveSource) else []
    return {it["thread_id"]: it["readers"] for it in threads if it["thread_id"] in rows.threads}


def _list_used(body: object) -> Iterator[tuple[str, Usage]]:
    """Give what models a record tells of, each with what one call of it used."""
    if not isinstance(body, dict):
        return
    reply = body.get("reply")
    used = body.get("used")
    for it in (reply, *(used if isinstance(used, list) else ())):
        if isinstance(it, dict) and isinstance(it.get("model"), str) and isinstance(it.get("usage"), dict):
            names = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens")
            tokens = [it["usage"].get(name, 0) for name in names]
            if all(isinstance(count, int) and 0 <= count < 2**53 for count in tokens):
                yield it["model"], Usage(*tokens)


def _name_usage(model: str, usage: Usage) -> str:
    """Return the name by which the page finds a price: `nameUse` of core/pricing.js."""
    tokens = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    return json.dumps([model, *tokens], ensure_ascii=False, separators=(",", ":"))


def make_page(rows: bytes, nonce: str, folder: Path = site.FOLDER) -> str:
    """Give the node's page, with every file of it and these rows in it."""
    contents = site.read_contents(folder)
    places = {
        name: f"data:text/javascript;base64,{b64encode(body).decode()}"
        for name, body in contents.items()
        if name.endswith(".js")
    }
    imports = site.list_imports(folder, places)
    needed = {places[site.ENTRY], *(imports[it] for it in site.list_modules(contents, imports))}
    import_map = json.dumps({"imports": {name: place for name, place in imports.items() if place in needed}})
    styles = "".join(contents[name].decode() for name in site.list_styles(contents))
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
