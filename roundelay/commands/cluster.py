"""``roundelay cluster``: check, compare and move nodes on a shared log."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from roundelay.commands.options import debug_option, json_option, run
from roundelay.commands.output import show

if TYPE_CHECKING:
    from roundelay.network.cluster.shared_log import SharedLog

T = TypeVar("T")
DIFFERENT = 1
OFF_S = 10
"""Minimum clock difference to report, in seconds. Smaller differences can come from the network's delay."""
CHOOSING_S, ASK_AGAIN_S = 12.0, 1.0
"""Maximum wait for the servers to elect a leader, and the polling interval, in seconds. An election in NATS takes up to
ten seconds."""


@click.group(short_help="Check, compare and move nodes on a shared log.")
def cluster() -> None:
    """Check, compare and move nodes on a shared log. One node writes the log, and the others follow.

    `start` starts servers to try out a cluster. `status` shows the leader. `verify` compares a node's database with the
    log. `rebuild` builds a node's database from the log. `migrate` moves a network from a database into a log, or back.
    The page `cluster` of the documentation has the details.
    """


_log_option = click.option(
    "--log", "log_url", envvar="ROUNDELAY_LOG", required=True, metavar="URL", help="The shared log."
)


_db_option = click.option(
    "--db",
    type=click.Path(path_type=Path, dir_okay=False),
    default="roundelay.db",
    show_default=True,
    metavar="FILE",
    help="The node's database.",
)


def _use(log_url: str, work: Callable[[SharedLog], Coroutine[Any, Any, T]]) -> T:
    from roundelay.app import make_shared_log

    return run(work(make_shared_log(log_url)))


async def _refuse_missing(log: SharedLog) -> None:
    """Raise `LedgerError` if the log does not exist, before anything is created."""
    # Opening with creation would make an empty history, and every node with this address would follow that history.
    await _open(log)
    await log.close()


async def _open(log: SharedLog) -> None:
    """Open an existing log. Raises `LedgerError`."""
    from roundelay.network.cluster.shared_log import LogIncomplete
    from roundelay.network.errors import LedgerError

    try:
        await log.open(create=False)
    except LogIncomplete as error:
        raise LedgerError(
            f"There is no log {log.name}: check the address. "
            "The first node that starts with this address creates the log."
        ) from error


def _tell_progress(done: int, of: int) -> None:
    # In a log file, each progress step would be a separate line.
    if sys.stderr.isatty():
        click.echo(f"\r{done:,}{f' of {of:,}' if of else ''} rows", err=True, nl=False)


# --- servers


@cluster.command(short_help="Start NATS servers on this machine to try out a cluster.")
@click.option("--nodes", type=click.IntRange(1, 5), default=3, show_default=True, help="Number of servers.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default="nats",
    show_default=True,
    metavar="DIR",
    help="Folder for their data.",
)
@click.option(
    "--port", type=click.IntRange(1, 60_000), default=4222, show_default=True, help="Port of the first server."
)
@click.option("--stream", default="lab", show_default=True, help="Stream in the printed address.")
@debug_option
def start(nodes: int, folder: Path, port: int, stream: str) -> None:
    """Start NATS servers on this machine to try out a cluster. The servers run until you stop the command.

    The servers listen on the loopback address and need no password. With the same --dir, they start with their earlier
    data.
    """
    import asyncio

    from roundelay.network.errors import RoundelayError
    from roundelay.network.log_urls import read_log_url
    from roundelay.nodes.log_servers import find_server, log_url, running_servers
    from roundelay.nodes.processes import stop_signals, wait_for_first

    # A cluster with an even number of servers tolerates no more failures than a cluster with one server less.
    if nodes not in (1, 3, 5):
        raise click.UsageError(
            "Start 1, 3 or 5 servers. A majority of the servers must agree, so an even number adds no safety."
        )

    url = log_url(nodes, port, stream)
    read_log_url(url)  # reports a stream name that a node would reject

    async def watch(number: int, process: asyncio.subprocess.Process) -> None:
        code, place = await process.wait(), folder / f"n{number}"
        why = f"by signal {-code}" if code < 0 else f"with exit code {code}; {place / 'server.log'} may say why"
        others = "; the other servers keep running" if nodes > 1 else ""
        click.echo(f"* The NATS server in {place} has ended {why}{others}. It starts again with:", err=True)
        click.echo(f"*   {shlex.join([find_server(), '-c', str(place / 'server.conf')])}", err=True)

    async def watch_all(processes: list[asyncio.subprocess.Process]) -> None:
        await asyncio.gather(*(watch(number, it) for number, it in enumerate(processes, 1)))

    async def work() -> None:
        with stop_signals() as stopping:
            async with running_servers(folder, nodes, port) as ends:
                click.echo(f"{nodes} NATS server{'s are' if nodes > 1 else ' is'} ready in {folder}. A node:")
                click.echo(f"  roundelay up --db a.db --port 8700 --log '{url}'")
                # Only report a server that ended: the others still form a majority, and the user can start it again.
                await wait_for_first(stopping.wait(), watch_all(ends))
                if not stopping.is_set():
                    raise RoundelayError(
                        f"All NATS servers in {folder} have ended; the server.log of each may contain the reason."
                    )

    asyncio.run(work())


# --- status


@cluster.command(short_help="Show the leader and how far behind each node is.")
@_log_option
@json_option
@debug_option
def status(log_url: str, as_json: bool) -> None:
    """Show the leader, how far each follower is behind, and the state of the log's servers.

    The command listens to the nodes' heartbeats for 1.5 seconds. While the servers elect a leader, it retries.
    """
    import asyncio
    import time

    from roundelay.app import make_shared_log
    from roundelay.network.cluster.log_copies import list_nodes
    from roundelay.network.cluster.shared_log import LogElectionPending

    async def look(log: SharedLog) -> dict[str, Any]:
        await _open(log)
        try:
            nodes = [
                {"node": it.node, "leads": it.leads, "behind": it.behind, "ahead_ms": it.ahead_ms}
                for it in await list_nodes(log)
            ]
            return {"log": log.name, "nodes": nodes, **await log.describe()}
        finally:
            await log.close()

    async def look_patiently() -> dict[str, Any]:
        until, is_told = time.monotonic() + CHOOSING_S, False
        while True:
            try:
                return await look(make_shared_log(log_url))
            except LogElectionPending as error:
                choosing = f"{error} They may be electing a leader, which takes up to ten seconds"
                if time.monotonic() > until:
                    raise LogElectionPending(f"{choosing}. Ask again.") from error
                # Print this line once: the log is polled every second.
                if not is_told:
                    click.echo(f"* {choosing}; the command asks them again.", err=True)
                    is_told = True
            await asyncio.sleep(ASK_AGAIN_S)

    found = run(look_patiently())
    show(found, lambda _: _describe(found), as_json=as_json)


def _describe(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['log']}: {found['records']:,} records, {found['bytes'] / 2**20:.1f} of "
        f"{found['max_bytes'] / 2**20:,.0f} MiB, {found['engine']}, {found['replicas']} "
        f"replica{'s' if found['replicas'] > 1 else ''}",
        f"  durability {found['durability']}" + (f": {found['doubt']}" if found["doubt"] else ""),
    ]
    for server in found["servers"]:
        behind = server.get("records_behind", 0)
        state = (
            "leads the stream" if server["leads"] else "up to date" if server["is_current"] else "unreachable or behind"
        )
        syncs = f", syncs {server['syncs']}" if server.get("syncs") else ""
        lines.append(f"  server {server['name']}: {state}{f', {behind:,} records behind' if behind else ''}{syncs}")
    for node in found["nodes"]:
        state = "leads" if node["leads"] else f"follows, {node['behind']:,} records behind"
        off_s = round(node["ahead_ms"] / 1000)
        # Small differences come from the delay of the heartbeat, so show only large ones.
        clock = f", its clock {abs(off_s):,} s {'ahead of' if off_s > 0 else 'behind'} the one here"
        lines.append(f"  node {node['node']}: {state}{clock if abs(off_s) > OFF_S else ''}")
    return lines if found["nodes"] else [*lines, "  no node reports its state"]


@cluster.command(short_help="Compare a node's database with the shared log.")
@_log_option
@_db_option
@json_option
@debug_option
def verify(log_url: str, db: Path, as_json: bool) -> None:
    """Compare a node's database with the shared log: every row, and every value of its tables.

    The node may be running. If the two differ, the command shows the first difference and exits with 1.
    """

    async def look(log: SharedLog) -> Any:
        from roundelay.network.cluster.log_copies import compare

        await _refuse_missing(log)
        return await compare(log, db, _tell_progress)

    found = _use(log_url, look)
    _show_copied(found, as_json, f"{db} equals the log up to record {found.position:,}")


def _show_copied(found: Any, as_json: bool, told: str) -> None:
    # Scripts can test this field or the exit code instead of parsing the text of the difference.
    value = {**found._asdict(), "is_equal": not found.difference}
    line = f"{told}: {found.rows:,} rows, {found.values:,} values."
    show(value, lambda _: [line if not found.difference else f"They differ: {found.difference}."], as_json=as_json)
    if found.difference:
        raise SystemExit(DIFFERENT)


# --- rebuilding and moving


@cluster.command(short_help="Build or update a node's database from the shared log.")
@_log_option
@_db_option
@json_option
@debug_option
def rebuild(log_url: str, db: Path, as_json: bool) -> None:
    """Build a node's database from the log, or update it, before the node starts.

    A node does the same when it starts. Unlike a node, this command never becomes the leader, and it ends when the
    database is complete. The node must not be running meanwhile. If the command is interrupted, run it again to
    continue.
    """
    import time

    async def work(log: SharedLog) -> Any:
        from roundelay.network.cluster.log_copies import rebuild_index

        await _refuse_missing(log)
        return await rebuild_index(log, db)

    started = time.monotonic()
    reader = _use(log_url, work)
    value = {"database": str(db), "position": reader.position, "seconds": round(time.monotonic() - started, 3)}
    show(value, lambda _: [f"{db} is at record {reader.position:,} of the log."], as_json=as_json)


@cluster.command(short_help="Move a network between a node's database and a shared log.")
@click.option("--from", "source", required=True, metavar="FILE|URL", help="A database, or a shared log.")
@click.option("--to", "target", required=True, metavar="URL|FILE", help="A shared log that is new, or a new database.")
@json_option
@debug_option
def migrate(source: str, target: str, as_json: bool) -> None:
    """Move a network from a node's database into a shared log, or from a log into a database, with the same seqs.

    No node may use the source or the target meanwhile. If the command is interrupted, run it again to continue. At the
    end, the command compares everything. The source is not changed. Never start a node with the source again: the node
    would begin a second history.
    """
    if _is_log(source) == _is_log(target):
        raise click.UsageError(
            "One of --from and --to is a shared log (nats://... or postgres://...), the other one a database."
        )
    if _is_log(target):
        # Refuse before the target is opened: otherwise the user would have to remove an empty log by hand.
        _refuse_index(Path(source))

        async def fill(log: SharedLog) -> Any:
            from roundelay.network.cluster.log_copies import fill_log

            return await fill_log(Path(source), log, _tell_progress)

        done = _use(target, fill)
        owner = Path(f"{source}.owner")
        # The owner's token is a separate file next to the database, so the copy does not contain the token.
        kept = f"is in {owner}: copy that" if owner.exists() else f"is not beside it in {owner}: put that"
        told = f"{source} is in the log (its owner's token {kept} beside each node's database, as FILE.owner)"
    else:

        async def make_database(log: SharedLog) -> Any:
            from roundelay.network.cluster.log_copies import export_database
            from roundelay.network.cluster.shared_log import UnusableLog

            await _refuse_missing(log)
            try:
                return await export_database(log, Path(target), _tell_progress)
            except UnusableLog as error:  # in this command, the option for the database is --to
                raise UnusableLog(str(error).replace("--db", "--to")) from error

        done = _use(source, make_database)
        owner = Path(f"{target}.owner")
        kept = f"its owner's token is in {owner}" if owner.exists() else f"copy a node's .owner file to {owner}"
        told = f"{target} contains everything from the log ({kept})"
    _show_copied(done, as_json, told)


def _refuse_index(db: Path) -> None:
    """Raise `LedgerError` for a database that was built from a shared log: its rows belong to that log."""
    from roundelay.network.errors import LedgerError
    from roundelay.network.ledger.log_file import open_database

    with open_database(db) as kept:
        place = kept.find_cursor()
    if place is not None:
        raise LedgerError(
            f"{db} is only a node's index of the shared log of {place.name}. Make a database from that log, and move "
            "that database: roundelay cluster migrate --from URL --to FILE"
        )


def _is_log(place: str) -> bool:
    return "://" in place
