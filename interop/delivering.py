"""What a hook of a coding agent does: it tells the model what others have written, once, and acknowledges what the host
is known to have taken.

A hook is a process of half a second that a host starts, reads and forgets. Whether the host took what was printed shows
only later, so each session keeps, on the disk, what was told to it:

    fetched (a look: the hub is told nothing)
      -> planned    on the disk before a byte is printed; a hook killed here is told again, unless a transcript shows it
      -> printed    noted when all of it was written
      -> taken      the host goes on with it: its transcript shows it, or, of a host whose transcript does not, a later
                    hook runs; a session that begins anew, or is resumed without it in its transcript, is told again
      -> acknowledged at the hub, durably: only now does its sender see that it was handled

So the receipt comes after the fact, nothing is lost where a hook, a host or the node is killed, and nothing is told twice
in one context. A hook never breaks its host: what goes wrong makes it silent.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.durable_files import make_folder
from roundelay.network.errors import RoundelayError
from roundelay.network.home import find_url, home
from roundelay.network.messages import message_from_wire

from .hosts import HookCall, Host
from .participants import HostProcess, claim_name, find_host_process, find_project, make_card, write_private
from .rendering import THEIRS, plain, tell_message

TIME_S = 2.0
"""For all that a hook asks of the node."""
MAX_TOLD_CHARS = 8_000
"""Of one telling: Claude Code puts what is longer than 10,000 into a file instead."""
MAX_TEXT_CHARS = 4_000
MAX_FETCHED = 500
MAX_STOPS = 8
"""So often in a row a host is kept from stopping; then it waits for a person."""
MAX_SHOWN = 1_000
KEPT_DAYS = 30
"""A session's notes, after its last hook."""


class Telling(Struct):
    """What one hook told."""

    seqs: list[int]
    mark: str
    """Stands in the text, and so in a transcript that has it."""
    is_start: bool
    offset: int
    """Where the transcript ended."""
    printed_at: float | None = None


class Notes(Struct):
    """What a session was told, as far as it still matters."""

    pid: int
    started: str
    epoch: str = ""
    tellings: list[Telling] = []
    """Of which it is not known yet whether the host took them."""
    taken: list[int] = []
    """To be acknowledged."""
    shown: list[int] = []
    """By a tool, to the model: it says itself with `ack` what it has handled."""
    repeated: list[int] = []
    stops: int = 0
    is_away_told: bool = False

    @property
    def told(self) -> set[int]:
        """What stands in the session's context, or may."""
        return {*self.taken, *self.shown, *(seq for it in self.tellings for seq in it.seqs)}


def settle(notes: Notes, call: HookCall, host: Host, *, began_at: float, is_anew: bool = False) -> None:
    """Decide which tellings the host has taken, and which are to be told again; ``is_anew`` where the session's context
    has just been made, empty or from its transcript."""
    waiting = []
    for telling in notes.tellings:
        is_taken = _is_taken(telling, notes, call, host, began_at, is_anew)
        if is_taken is None:
            waiting.append(telling)
        elif is_taken:
            notes.taken += [it for it in telling.seqs if it not in notes.taken]
        else:
            notes.repeated = [*notes.repeated, *telling.seqs][-MAX_SHOWN:]
    notes.tellings = waiting


def _is_taken(
    telling: Telling, notes: Notes, call: HookCall, host: Host, began_at: float, is_anew: bool
) -> bool | None:
    """Whether the host took a telling; None where it does not show yet."""
    transcript = _read_from(call.transcript, telling.offset)
    if transcript is not None and telling.mark.encode() in transcript:
        return True  # be its hook killed: Claude Code takes what such a one has printed
    if is_anew:
        return False
    if telling.printed_at is not None and began_at <= telling.printed_at:
        return None  # this hook was under way beside the other: the host may not even have read that one
    if transcript is None or not host.keeps_transcript:
        if telling.printed_at is None:
            return False  # its hook was killed before it had printed, as far as anybody can tell
        return None if host.keeps_transcript and call.moment == "tool" else True
    if call.moment == "tool":
        return None  # a transcript may lag within a turn
    is_second = any(it in notes.repeated for it in telling.seqs)
    # a transcript that never shows it makes nobody repeat it for ever
    return telling.printed_at is not None and (telling.is_start or is_second)


def _read_from(path: str, offset: int) -> bytes | None:
    """A transcript from where it ended at the telling; all of it if it was made anew since. None where there is
    none."""
    if not path:
        return None
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(offset if offset <= size else 0)
            return file.read()
    except OSError:
        return None


def deliver(host: Host, url: str | None = None) -> None:
    """Answer one call of a hook, and leave the process: with 0, whatever happens."""
    began_at = time.time() - time.process_time()  # loading took most of this process's life
    said = host.quiet
    try:
        told = json.loads(sys.stdin.buffer.read() or b"{}")
        call = host.read(told) if isinstance(told, dict) else None
        if call is not None:
            folder = os.environ.get("CLAUDE_PROJECT_DIR") or told.get("cwd") or os.getcwd()
            project = find_project(host, Path(folder))
            with _own_session(host, call) as path:
                if path is not None:
                    _deliver(host, project, call, path, url or find_url(), began_at)
                    return
    except Exception:
        if os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0"):
            raise
    _say(said)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _deliver(host: Host, project: Path, call: HookCall, path: Path, url: str, began_at: float) -> None:
    process = find_host_process()
    notes = _load(path, process)
    is_start = call.moment == "start" and call.source != "compact"
    is_anew = is_start or (notes.pid, notes.started) != process
    settle(notes, call, host, began_at=began_at, is_anew=is_anew)
    notes.shown = [*([] if is_anew else notes.shown), *sorted(call.shown)][-MAX_SHOWN:]
    if is_start:
        _drop_old(path.parent)
    if call.moment != "stop":
        notes.stops = 0
    notes.pid, notes.started = process
    text, seqs, notice = "", list[int](), ""
    agent_id = claim_name(host, project, process)
    try:
        messages, network = asyncio.run(_ask_node(host, project, agent_id, url, notes))
        notes.is_away_told = False
        if call.moment != "stop" or notes.stops < MAX_STOPS:
            text, seqs = compose(agent_id, network, messages, is_start=call.moment == "start")
    except (RoundelayError, TimeoutError, OSError):
        notice = "" if notes.is_away_told else "Roundelay: the node is away; what others write waits there."
        notes.is_away_told = True
    telling = None
    if seqs:
        telling = Telling(seqs, secrets.token_hex(8), call.moment == "start", _size(call.transcript))
        text = f"{text}\n(Roundelay's mark of this: {telling.mark})"
        notes.tellings.append(telling)
        notes.stops += call.moment == "stop"
    write_private(path, notes)
    answer = host.answer(call.event, call.moment, text) if text else {"systemMessage": notice} if notice else None
    _say(host.quiet if answer is None else json.dumps(answer, ensure_ascii=False))
    if telling is not None:
        telling.printed_at = time.time()
        write_private(path, notes)
    os._exit(0)  # between the note and the end there is nothing that could take time


async def _ask_node(host: Host, project: Path, agent_id: str, url: str, notes: Notes) -> tuple[list[AnyMessage], str]:
    """Acknowledge what was taken, and give what is to be told."""
    async with (
        asyncio.timeout(TIME_S),
        NetworkClient(
            agent_id,
            url,
            card=make_card(host, project),
            deliver=False,
            reconnect=False,
            connect_timeout_s=TIME_S,
        ) as client,
    ):
        epoch = client.welcome.network.epoch
        if notes.epoch != epoch:  # another history: its numbers mean others
            notes.epoch, notes.tellings, notes.taken, notes.shown, notes.repeated = epoch, [], [], [], []
        page = await client.call("network.receive", {"limit": MAX_FETCHED, "peek": True})
        unhandled = {it["seq"]: it for it in page["messages"]}
        if done := [it for it in notes.taken if it in unhandled]:
            await client.call("network.acknowledge", {"seqs": done})
        told, notes.taken = notes.told, []
        return [message_from_wire(it) for seq, it in unhandled.items() if seq not in told], client.welcome.network.name


def compose(
    agent_id: str, network: str, messages: list[AnyMessage], *, is_start: bool = False
) -> tuple[str, list[int]]:
    """What the model is told, and of which messages; the rest waits for the next hook."""
    lines, seqs, chars = [], list[int](), 0
    for message in messages:
        line = tell_message(message, MAX_TEXT_CHARS)
        if seqs and chars + len(line) > MAX_TOLD_CHARS:
            break
        lines.append(line)
        seqs.append(message.seq)
        chars += len(line)
    who = f"You are {agent_id} in the Roundelay network {plain(network)}, beside other agents and people"
    if not seqs:
        return (f"{who} (MCP server roundelay)." if is_start else ""), []
    count = "A message has" if len(seqs) == 1 else f"{len(seqs)} messages have"
    rest = len(messages) - len(seqs)
    more = f" {rest} more will follow." if rest else ""
    head = f"{who}. {count} come for you.{more} {THEIRS} Answer with the tool reply where one asks for it."
    return "\n".join([head, *lines]), seqs


class BridgedClient(NetworkClient):
    """The session of a host's MCP server. What its hooks have told and not acknowledged yet is not shown again."""

    host_process: HostProcess

    async def call(self, op: str, args: Mapping[str, Any] | None = None, *, call_id: str | None = None) -> Any:
        answer = await super().call(op, args, call_id=call_id)
        if op == "network.receive" and not (args or {}).get("peek"):
            told = _told_to(self.host_process)
            answer["messages"] = [it for it in answer["messages"] if it["seq"] not in told]
        return answer


def make_bridged_client(host: Host, url: str | None = None) -> BridgedClient:
    """The session of the MCP server that a host has started here."""
    project = find_project(host, Path(os.environ.get("CLAUDE_PROJECT_DIR") or os.getcwd()))
    process = find_host_process()
    client = BridgedClient(claim_name(host, project, process), url, card=make_card(host, project), deliver=False)
    client.host_process = process
    return client


def _told_to(process: HostProcess) -> set[int]:
    """What the hooks of a host's process have told, in whichever of its sessions."""
    told = set()
    for path in (home() / "bridge" / "sessions").glob("*.json"):
        notes = _load(path, process)
        if (notes.pid, notes.started) == process:
            told |= {seq for it in notes.tellings for seq in it.seqs} | set(notes.taken)
    return told


@contextmanager
def _own_session(host: Host, call: HookCall) -> Iterator[Path | None]:
    """A session's notes, for one hook at a time; None where another one is at it: that one tells."""
    name = hashlib.sha256(f"{host.name}/{call.session}".encode()).hexdigest()[:32]
    folder = home() / "bridge" / "sessions"
    make_folder(folder)
    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield None
    else:
        yield folder / f"{name}.json"
    finally:
        os.close(descriptor)


def _load(path: Path, process: HostProcess) -> Notes:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Notes)
    except (OSError, ValueError, msgspec.MsgspecError):
        return Notes(*process)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def _drop_old(folder: Path) -> None:
    oldest = time.time() - KEPT_DAYS * 86_400
    for path in folder.iterdir():
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
