"""Implement ``roundelay doctor``: check the requirements of a node and its agents, and give advice for each problem.

The checks change nothing permanently. For the checks, the command writes and deletes a small file next to the database,
and sends two requests to each model.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import socket
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from roundelay.app import OWN_MODS, make_rights, make_shared_log
from roundelay.connection import READER_ID
from roundelay.network.blobs import blob_folder
from roundelay.network.client import NetworkClient
from roundelay.network.cluster.shared_log import LogIncomplete
from roundelay.network.config import NodeConfig, YamlNode, load_yaml, resolve_config
from roundelay.network.errors import ConfigError, ConnectError, LedgerError, ModError, RoundelayError
from roundelay.network.extras import how_to_add
from roundelay.network.home import find_url, is_loopback, node_at, running_nodes
from roundelay.network.ledger.blob_files import check_blobs
from roundelay.network.ledger.integrity import check_file, summarize
from roundelay.network.ledger.log_file import open_database
from roundelay.network.ledger.schema import open_to_read
from roundelay.network.ledger.storage_errors import explain
from roundelay.network.log_urls import hide_password
from roundelay.network.mod import add_mod_folder, load_mods
from roundelay.network.platforms import raise_file_limit, sync_descriptor, try_record_lock
from roundelay.network.text import count
from roundelay.nodes.check_result import Checked
from roundelay.nodes.hub_http import TIMEOUT_S, get_from_hub, is_hub_ready
from roundelay.nodes.model_check import check_model, check_named_model
from roundelay.nodes.up import (
    FEW_FILES,
    check_folder,
    describe_exposed,
    find_exposed,
    listening_url,
    load_tls,
    place_mod_error,
)

if TYPE_CHECKING:
    from roundelay.agents.simple import SimpleAgentRunner
    from roundelay.agents.team import AgentSpec

MIN_FREE_BYTES = 200 * 1024 * 1024
SLOW_SYNC_MS = 50.0
MAX_SKEW_S = 5.0
LOG_TIMEOUT_S = 15.0
LOCK_TIMEOUT_S = 1.0
"""Timeout for a read lock on the database, in seconds. A running node never blocks readers, so a longer wait means that
the lock is refused."""
REMAKE = "Stop the node, delete the file and start the node: it rebuilds the file from the log, and nothing is lost."
EARLIEST_S = 1_735_689_600
"""Start of the year 2025, in seconds since the Unix epoch. A clock with an earlier time was never set."""


async def examine(
    file: Path | None,
    *,
    url: str | None,
    model: str | None,
    base_url: str | None,
    timeout_s: float,
    env: Mapping[str, str],
    flags: Mapping[str, object],
) -> list[Checked]:
    """Run all checks, except those that depend on a failed check.

    For an agent's file, run only the checks of agents. ``flags`` take precedence over the environment, as for a node.
    """
    checks = [check_python(), check_packages()]
    config: NodeConfig | None = None
    try:
        if file is not None and _is_agents(file):
            checks += [check async for check in check_agents(file, timeout_s, url)]
            # An agent's file does not configure a node, so skip the checks of the node.
            return checks if model is None else [*checks, await check_named_model(model, base_url, timeout_s)]
        config, origins = resolve_config(file, env, flags)
        checks.append(
            Checked("config", "ok", f"{file} is valid." if file is not None else "No file; the defaults apply.")
        )
        checks.append(check_mods(config, origins["mods"]))
    except ConfigError as error:
        checks.append(Checked("config", "failed", str(error)))
    if config is not None:
        checks.append(check_database(config))
        # The checks below read the file. If the file is broken, each of them would report the same failure again.
        if checks[-1].status != "failed" and config.durability != "memory" and config.db.exists():
            shared = check_shared_log(config)
            checks += shared
            # Reading a large file takes seconds, which is too long for the event loop.
            integrity = await asyncio.to_thread(check_integrity, config.db, is_index=bool(shared))
            checks.append(integrity)
            if integrity.status != "failed":
                checks.append(check_retention(config))
                contents = await asyncio.to_thread(check_contents, config.db)
                checks += [] if contents is None else [contents]
        if config.log is not None:
            checks.append(await ask_shared_log(config.log))
        checks += [check_files(config), check_tls(config), check_page(config)]
        checks.append(check_secrets(config, file if origins["log"].startswith("file ") else None))
        checks.append(await check_port(config))
        if config.interop.serve:
            checks.append(await check_gateway(config))
    checks.append(await check_clock(url or find_url(), config))
    if config is not None and config.agents:
        checks += [check async for check in check_agents(config.agents, timeout_s, url)]
    if model is not None:
        checks.append(await check_named_model(model, base_url, timeout_s))
    return checks


def _is_agents(file: Path) -> bool:
    """Return whether a file declares an agent, which means that it has the key `id` or `instruction`. A node's file has
    neither.
    """
    value = load_yaml(file).value
    # Look only at the keys: otherwise one wrong field would make an agent's file look like a wrong node file.
    return isinstance(value, dict) and not {"id", "instruction"}.isdisjoint(value)


def check_python() -> Checked:
    python = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()}"
    return Checked("python", "ok", f"{python}, SQLite {sqlite3.sqlite_version}.")


def check_packages() -> Checked:
    """Check the packages that the installed package requires.

    Packages that only some systems need are optional: without them, the node is only slower.
    """
    installed, missing = [], []
    try:
        needs = [line.partition(";") for line in ["roundelay", *(requires("roundelay") or [])]]
    except PackageNotFoundError:
        needs = [("roundelay", "", "")]
    for need, _, marker in needs:
        name = re.split(r"[^\w.-]", need, maxsplit=1)[0]
        # Extras are optional for the user, so a missing extra is no failure.
        if "extra" not in marker:
            try:
                installed.append(f"{name} {version(name)}")
            except PackageNotFoundError:
                missing.append((name, marker))
    if needed := [name for name, marker in missing if not marker]:
        return Checked("packages", "failed", f"{', '.join(needed)} missing.", "Install: pip install roundelay")
    detail = f"{', '.join(installed)}."
    if missing:
        names = " ".join(name for name, _ in missing)
        return Checked("packages", "note", detail, f"Without {names} the node is slower: pip install {names}")
    return Checked("packages", "ok", detail)


def check_mods(config: NodeConfig, origin: str) -> Checked:
    """Check that each mod loads and that the rights name existing operations. ``origin`` is the place where `mods` was
    set.
    """
    try:
        add_mod_folder(config.folder)
        make_rights(config, load_mods(config.mods, OWN_MODS))
    except ConfigError as error:
        return Checked("mods", "failed", str(error))
    except ModError as error:
        return Checked("mods", "failed", str(place_mod_error(error, origin)))
    return Checked("mods", "ok", f"{', '.join(config.mods)} load." if config.mods else "There are none.")


def check_database(config: NodeConfig) -> Checked:
    """Check that the folder can store files durably, measure the speed, and check that the file is a database."""
    if config.durability == "memory":
        return Checked("database", "note", "durability is memory: all data is lost when the node stops.")
    db = config.db
    owner = Path(f"{db}.owner").resolve()
    # The database of a running node is locked, which is no problem. The result then shows that the file is in use.
    busy = next((node.url for node in running_nodes() if Path(node.owner_file) == owner), None)
    try:
        check_folder(db)
        # Measure in the nearest existing folder, because the node creates the missing folders itself.
        folder = next(parent for parent in db.resolve().parents if parent.exists())
        took_ms = _measure_sync(folder, db.name)
        free = shutil.disk_usage(folder).free
        size = _measure_database(db) if db.exists() else 0
    except LedgerError as error:
        return Checked("database", "failed", str(error))
    except sqlite3.Error as error:
        return Checked("database", "failed", str(explain(error, db, "read")))
    except OSError as error:
        return Checked("database", "failed", str(explain(error, db)))
    state = f"open in the node at {busy}" if busy else f"{size // 1024} KiB" if db.exists() else "will be made"
    detail = f"{db} ({state}); a durable write takes {took_ms:.1f} ms; {free // 2**20} MiB free."
    # This is only a note, because the node works until the disk is full.
    if free < MIN_FREE_BYTES:
        return Checked("database", "note", detail, "Make room: a full disk stops the node.")
    if took_ms > SLOW_SYNC_MS and config.durability == "full":
        return Checked("database", "note", detail, "The disk is slow to sync, and each commit waits for it.")
    return Checked("database", "ok", detail)


def check_shared_log(config: NodeConfig) -> list[Checked]:
    """Check which shared log the file indexes, and up to which record. Return an empty list for a node without a shared
    log."""
    db, log = config.db, None if config.log is None else hide_password(config.log)
    try:
        with open_database(db) as kept:
            place, head = kept.find_cursor(), next(kept.rows(), None)
    except LedgerError as error:
        return [] if log is None else [Checked("shared log", "failed", str(error), REMAKE)]
    # Neither the file nor the configuration mentions a shared log, so report nothing.
    if place is None and log is None:
        return []
    if place is None:
        if head is None:
            return [Checked("shared log", "ok", f"{db} is empty, and will be an index of {log}.")]
        # Using the file as an index would mix two histories under the same seqs.
        detail = f"{db} has a history of its own, but log names {log}. No node starts with both."
        return [Checked("shared log", "failed", detail, "Name a new file, or move it: roundelay cluster migrate.")]
    of = f"{db} is an index of the shared log of the network {place.name} (epoch {place.epoch}), up to record {place.position}"
    if log is None:
        return [
            Checked(
                "shared log", "failed", f"{of}.", "Name the address of the log: --log URL, log: URL, or ROUNDELAY_LOG."
            )
        ]
    filling = ", which is still being filled" if place.is_filling else ""
    compared = f"roundelay cluster verify --log '{log}' --db {db} compares them."
    return [Checked("shared log", "ok", f"{of}{filling}; log names {log}.", compared)]


async def ask_shared_log(url: str) -> Checked:
    """Check that the shared log answers, and describe how it stores its records."""
    name = hide_password(url)
    try:
        log = make_shared_log(url)
        try:
            async with asyncio.timeout(LOG_TIMEOUT_S):
                # A check must change nothing. Only the start of a node may create the log.
                await log.open(create=False)
                figures = await log.describe()
        finally:
            await log.close()
    except LogIncomplete:
        return Checked(
            "log", "note", f"The servers of {name} answer. The log does not exist yet; the first node creates it."
        )
    except (RoundelayError, TimeoutError) as error:
        return Checked("log", "failed", str(error) or f"{name} did not answer within {LOG_TIMEOUT_S:.0f} s.")
    room = f"{figures['bytes'] / 2**20:,.1f} of {figures['max_bytes'] / 2**20:,.0f} MiB"
    return Checked(
        "log", "ok", f"{name} answers: {figures['records']:,} records, {room}, durability {figures['durability']}."
    )


def check_integrity(db: Path, *, is_index: bool = False) -> Checked:
    """Check the whole database file for damage."""
    began = time.perf_counter()
    try:
        problems = check_file(db)
        # A damaged file may be unreadable as a log, so summarize only an intact file.
        unchecked = summarize(db).unchecked if not problems else None
    except LedgerError as error:
        return Checked("integrity", "failed", str(error))
    if problems:
        advice = REMAKE if is_index else "Stop the node and restore a backup: docs/operations.md."
        return Checked("integrity", "failed", f"{db} is damaged: {problems[0]}.", advice)
    old = (
        f"; rows up to #{unchecked} have no checksums, because an older version wrote them"
        if unchecked is not None
        else ""
    )
    took = f"checked in {time.perf_counter() - began:.1f} s"
    return Checked("integrity", "ok", f"Every page and row of {db} is intact ({took}){old}.")


def check_contents(db: Path) -> Checked | None:
    """Compare the contents of files with their checksums. Return None if there are no files."""
    try:
        found = check_blobs(db)
    except LedgerError as error:
        return Checked("contents", "failed", str(error))
    if found.damaged:
        names = ", ".join(name[:12] for name in found.damaged[:5])
        advice = f"Copy them from a backup into {blob_folder(db)}: docs/files.md."
        return Checked(
            "contents", "failed", f"{len(found.damaged)} contents of files are missing or damaged: {names}.", advice
        )
    if not found.count:
        return None
    return Checked("contents", "ok", f"{found.count} contents of files are right, {found.size / 2**20:.1f} MiB.")


def check_retention(config: NodeConfig) -> Checked:
    """Describe the retention rules, and report anything that prevents the deletion of old rows."""
    try:
        log = summarize(config.db)
    except LedgerError as error:
        return Checked("retention", "failed", str(error))
    retain = config.retain
    rules = [f"messages for {retain.days} days"] if retain.days is not None else []
    rules += [f"records for {retain.record_days} days"] if retain.record_days is not None else []
    rules += [f"at most {retain.bytes / 2**20:.1f} MiB"] if retain.bytes is not None else []
    kept = f"Kept: {', '.join(rules)}" if rules else "Everything is kept"
    since = f", since {time.strftime('%Y-%m-%d', time.localtime(log.oldest_at / 1000))}" if log.oldest_at else ""
    detail = f"{kept}; there are {log.used_bytes / 2**20:.1f} MiB{since}."
    if log.held_by is not None and log.held_at is not None and rules:
        held_days = (time.time() * 1000 - log.held_at) / 86_400_000
        # Open reactions are normal. Report only a reaction that is older than a retention rule allows.
        is_over = retain.bytes is not None and log.used_bytes > retain.bytes
        if is_over or held_days > min(retain.days or 36_500, retain.record_days or 36_500):
            advice = (
                f"Run {log.held_by} again, so that it ends the reaction; or remove {log.held_by}: docs/operations.md."
            )
            return Checked(
                "retention",
                "note",
                f"{detail} An open reaction of {log.held_by} prevents the deletion of more messages.",
                advice,
            )
    return Checked("retention", "ok", detail)


def check_files(config: NodeConfig) -> Checked:
    """Check that the node may open enough files for its connections."""
    limit = raise_file_limit()
    shown = "any number of files" if limit == sys.maxsize else f"{limit} files"
    detail = f"A process may open {shown}. Each connection counts as a file."
    # A node with a low connection limit needs few files, so compare both limits.
    if limit < min(FEW_FILES, config.limits.max_connections):
        return Checked("files", "note", detail, "Raise it where the node is started: ulimit -Hn 65536")
    if limit < config.limits.max_connections:
        return Checked("files", "ok", f"{detail} That is less than max_connections ({config.limits.max_connections}).")
    return Checked("files", "ok", detail)


def check_tls(config: NodeConfig) -> Checked:
    """Check that the certificate and the key match, or explain why the node needs neither."""
    try:
        tls, _ = load_tls(config)
    except ConfigError as error:
        return Checked("tls", "failed", str(error))
    if tls is not None:
        return Checked("tls", "ok", f"{config.tls_cert} and {config.tls_key} match.")
    if is_loopback(config.host):
        return Checked("tls", "ok", f"The node does not encrypt, but only this machine can reach {config.host}.")
    return Checked(
        "tls",
        "note",
        f"The node does not encrypt, and other machines can reach {config.host}.",
        "Set tls_cert and tls_key.",
    )


def check_page(config: NodeConfig) -> Checked:
    """Describe the host names at which browsers can reach the page."""
    if not config.web:
        return Checked("page", "ok", "The node serves no page.")
    if config.web_hosts:
        return Checked("page", "ok", f"Browsers reach it by {', '.join(config.web_hosts)}, and on this machine.")
    if config.behind_proxy:
        return Checked(
            "page",
            "note",
            "Only browsers on this machine can reach it, although the node is behind a proxy.",
            "Name the proxy's host: web_hosts: [hub.example.org]; or serve no page: web: false.",
        )
    return Checked("page", "ok", f"Browsers reach it by {config.host}.")


def check_secrets(config: NodeConfig, file: Path | None = None) -> Checked:
    """Check that only the owner can read the node's key, tokens and messages.

    ``file`` is the node's file if it names the shared log, because the log's address may contain a password.
    """
    has_password = config.log is not None and hide_password(config.log) != config.log
    if file is not None and has_password and file.stat().st_mode & 0o077:
        detail = f"{file} contains the password of the shared log, and other users may read the file."
        return Checked("secrets", "note", detail, f"chmod 600 {file}, or set ROUNDELAY_LOG instead.")
    if exposed := find_exposed(config):
        return Checked("secrets", "note", f"{describe_exposed(exposed)}.")
    return Checked("secrets", "ok", "Only their owner can read the node's files with keys, tokens or messages.")


def _measure_sync(folder: Path, name: str) -> float:
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name}-doctor-") as file:
        file.write(b"\0" * 4096)
        file.flush()
        try_record_lock(file.fileno())  # test a lock here, because the database file itself is read without locks
        began = time.perf_counter()
        sync_descriptor(file.fileno())
        return (time.perf_counter() - began) * 1000


def _measure_database(db: Path) -> int:
    with open_to_read(db, LOCK_TIMEOUT_S) as connection:
        connection.execute("PRAGMA schema_version").fetchone()
    if not os.access(db, os.W_OK):
        raise PermissionError(13, "Permission denied", str(db))
    return db.stat().st_size


async def check_port(config: NodeConfig) -> Checked:
    """Check that a node can listen at the address, or already listens there."""
    where = f"{config.host}:{config.port}"
    if (reason := _find_hindrance(config.host, config.port)) is None:
        return Checked("port", "ok", f"{where} is free.")
    url = listening_url(config)
    is_ready = await asyncio.to_thread(is_hub_ready, url)
    if (node := node_at(url)) is not None:
        database = Path(node.owner_file).with_suffix("")
        who = f"{where} is used by the node at {node.url} (process {node.pid}, database {database})"
        if is_ready:
            return Checked("port", "ok", f"{who}, which is ready.")
        state = "does not answer" if is_ready is None else "is not ready"
        return Checked("port", "note", f"{who}, which {state}.", "See its log.")
    if is_ready is None:
        return Checked(
            "port",
            "failed",
            f"{where} cannot be used: {reason}.",
            "Stop the program that uses it, or choose another port.",
        )
    if is_ready:
        return Checked("port", "ok", f"{where} is used by a Roundelay node, which is ready.")
    return Checked("port", "note", f"{where} is used by a Roundelay node that is not ready.", "See its log.")


async def check_gateway(config: NodeConfig) -> Checked:
    """Check that the gateway that `interop` configures can run, or already runs."""
    interop = config.interop
    where, served = f"{interop.host}:{interop.port}", " ".join(interop.serve)
    if find_spec("uvicorn") is None:
        return Checked("gateway", "failed", "The extra gateway is missing.", f"Run: {how_to_add('gateway')}")
    for node in running_nodes():
        if node.gateway and node.owner_file == f"{config.db.resolve()}.owner":
            try:
                await asyncio.to_thread(get_from_hub, node.gateway, "/healthz")
            except ConnectError:
                return Checked("gateway", "note", f"{node.gateway} does not answer.", "See the node's log.")
            return Checked("gateway", "ok", f"{node.gateway} answers ({served}).")
    if (reason := _find_hindrance(interop.host, interop.port)) is not None:
        detail = f"{where} cannot be used: {reason}."
        return Checked(
            "gateway", "failed", detail, "Stop the program that uses it, or choose another port under interop."
        )
    return Checked("gateway", "ok", f"{where} is free ({served}).")


def _find_hindrance(host: str, port: int) -> str | None:
    """Return why nothing can listen at the address, or None if the address is free."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            # Set the same option as the node, so that a port that a stopped node has just released counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    # A port above 65535 raises OverflowError instead of OSError.
    except (OSError, OverflowError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None


async def check_clock(url: str, config: NodeConfig | None) -> Checked:
    """Check that the clock is set, agrees with the hub's clock, and is not behind the last write to the database."""
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))
    if now < EARLIEST_S:
        return Checked("clock", "failed", f"It is {shown} here.", "Set the clock; times in the ledger would be wrong.")
    # The hub's timestamps never decrease. If the clock was set back, all new messages would have the same time.
    if config is not None and config.db.exists() and config.db.stat().st_mtime > now + MAX_SKEW_S:
        detail = f"It is {shown} here, and {config.db} was written later than that."
        return Checked(
            "clock", "note", detail, "The clock was set back. Timestamps stand still until the clock has caught up."
        )
    try:
        date_s = (await asyncio.to_thread(get_from_hub, url, "/healthz")).date_s
    except ConnectError:
        return Checked("clock", "ok", f"It is {shown}; no hub at {url} to compare with.")
    # A proxy in front of the hub may remove the header, and then the clocks cannot be compared.
    skew_s = now - date_s if date_s is not None else 0.0
    if abs(skew_s) > MAX_SKEW_S:
        detail = f"It is {shown} here, {abs(skew_s):.0f} s {'after' if skew_s > 0 else 'before'} the hub's clock."
        return Checked("clock", "note", detail, "Set both by NTP, or times that people read will differ.")
    return Checked("clock", "ok", f"It is {shown}, as at the hub.")


async def check_agents(source: Path | Iterable[YamlNode], timeout_s: float, url: str | None) -> AsyncIterator[Checked]:
    """Check each agent: its tools load, the hub at ``url`` has its network tools, and its model can call a tool.

    Agents with the same model share one request.
    """
    from roundelay.agents.team import build_runner, load_agents

    try:
        specs = load_agents(source)
    except ConfigError as error:
        yield Checked("agents", "failed", str(error))
        return
    checked: dict[str, Checked] = {}
    for spec in specs:
        name = f"agent {spec.id}"
        try:
            # Building the agent imports its tools and creates its model. This reports a missing package or key before
            # the model is asked.
            runner = build_runner(spec)
        except ConfigError as error:
            yield Checked(name, "failed", str(error))
            continue
        if spec.network_tools is not None:
            yield await check_network_tools(spec, runner, url)
        if spec.a2a is not None:
            yield Checked(name, "ok", f"A remote agent at {spec.a2a.url}. Its card is read when the agent starts.")
            continue
        if spec.adapter is not None:
            # Only the agent's framework knows its model, so skip the request to the model.
            yield Checked(name, "ok", f"{spec.adapter} creates it. Its model was not checked.")
            continue
        if spec.model.openai is None and spec.model.local is None:
            yield Checked(name, "ok", f"{count(len(runner.tools), 'tool')} of its own; its model is a script.")
            continue
        settings = spec.model.model_dump_json()  # agents with equal settings share one check
        if settings not in checked:
            checked[settings] = await check_model(name, runner.model, timeout_s)
        yield replace(checked[settings], name=name)


async def check_network_tools(spec: AgentSpec, runner: SimpleAgentRunner, url: str | None) -> Checked:
    """Check that the hub at ``url`` has the operations that an agent's ``network_tools`` names."""
    name = f"agent {spec.id}"
    if url is None:
        unknown = "The names in network_tools were not checked, because only a running node knows them."
        return Checked(name, "note", unknown, "Pass the address of that node: --url URL")
    try:
        # Connect with the reader id of the commands, which is hidden in lists of participants.
        async with asyncio.timeout(TIMEOUT_S), NetworkClient(READER_ID, url, kind="service", reconnect=False) as client:
            try:
                runner.check_network(client)
            except ConfigError as error:
                return Checked(name, "failed", str(spec.find_node("network_tools").error(str(error))))
    except (RoundelayError, TimeoutError) as error:
        return Checked(
            name, "note", f"The names in network_tools are not checked: {str(error) or 'the hub is silent.'}"
        )
    return Checked(name, "ok", f"The hub at {url} has its network_tools.")
