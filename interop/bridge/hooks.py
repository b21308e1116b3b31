"""What a hook of a coding agent does: it tells the model what others have written, once, and acknowledges what the host
is known to have taken.

A hook is a process of half a second that a host starts, reads and forgets. Whether the host took what was printed shows
only later, so each session keeps, on the disk, what was told to it:

    fetched (a look: the hub is told nothing)
      -> planned    on the disk before a byte is printed; after a kill here it is told again, unless a transcript shows it
      -> printed    noted when all of it was written and flushed: only from here on does it count as shown
      -> taken      the host goes on with it: its transcript shows it, or, of a host whose transcript does not, a later
                    hook runs; a session that begins anew, or is resumed without it in its transcript, is told again
      -> acknowledged at the hub, durably: only now does its sender see that it was handled

So the receipt comes after the fact, nothing is lost where a hook, a host or the node is killed, and nothing is told
twice in one context. A hook never breaks its host: what goes wrong makes it silent. Hosts cancel slow hooks and drop
what those have printed, so a watchdog ends a hook that has nothing to print by its deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
from msgspec import Struct

from roundelay.interop.rendering import OTHERS_WORDS, format_message, measure, plain
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.durable_files import make_folder
from roundelay.network.errors import ConnectError, Forbidden, NotAuthenticated, RetryLater, RoundelayError
from roundelay.network.home import home, token_path
from roundelay.network.messages import message_from_wire
from roundelay.network.platforms import CLOSE_ON_EXEC, find_process_age_s, lock_descriptor

from .hosts import HookCall, Host
from .participants import (
    HostProcess,
    claim_name,
    find_host_process,
    find_hub,
    find_own_process,
    find_project,
    make_card,
    remember_hub,
    write_private,
)

HOOK_TIMEOUT_S = 2.0
"""Time for a hook from the start of its process until it prints, in seconds. Hosts cancel hooks after 5 s."""
TIMEOUT_VARIABLE = "ROUNDELAY_HOOK_TIMEOUT_S"
"""Environment variable that replaces `HOOK_TIMEOUT_S`, for machines on which processes start slowly."""
PRINTING_S = 0.3
"""Part of this time that is kept for writing notes and printing, in seconds."""
MAX_TOLD_CHARS = 8_000
"""Of one telling as it is printed: Claude Code puts what is longer than 10,000 into a file instead."""
MAX_TEXT_CHARS = 4_000
"""Of one message in it, escaped."""
MAX_FETCHED = 500
ENOUGH = 100
"""More messages than have room in one telling."""
_MARK = "\n(Roundelay's mark of this: {})"
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
    """When the output was complete, in seconds since the epoch; None as long as that is unknown."""
    transcript: str = ""
    """The host's transcript, where it has one."""
    hook: tuple[int, str] = (0, "")
    """The process that prints this."""
    gives_up_at: float = 0.0
    """When that process ends if it has not begun to print, in seconds since the epoch."""

    @property
    def may_be_shown(self) -> bool:
        """Whether the host has the text, or a hook that is still alive is about to print it."""
        if self.printed_at is not None:
            return True
        if time.time() < self.gives_up_at and HostProcess(*self.hook).is_alive:
            return True
        # Claude Code also takes what a killed hook had printed.
        return self.mark.encode() in (_read_from(self.transcript, self.offset) or b"")


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
    problem: str = ""
    """Why the node could not be asked the last time, as the person was told."""

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
    if telling.printed_at is None:
        return False  # its hook ended before all was printed: hosts drop the output of a hook that they cancel
    if began_at <= telling.printed_at:
        return None  # this hook was under way beside the other: the host may not even have read that one
    if transcript is None or not host.keeps_transcript:
        return None if host.keeps_transcript and call.moment == "tool" else True
    if call.moment == "tool":
        return None  # a transcript may lag within a turn
    is_second = any(it in notes.repeated for it in telling.seqs)
    # a transcript that never shows it makes nobody repeat it for ever
    return telling.is_start or is_second


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


class _Deadline:
    """Ends this process when it has nothing to print by its deadline."""

    def __init__(self, host: Host) -> None:
        age_s, timeout_s = find_process_age_s(), _read_timeout_s()
        self.began_at = time.time() - age_s
        """When this process was started, in seconds since the epoch."""
        self.ends_at = self.began_at + timeout_s
        self._host = host
        self._output = threading.Lock()
        """Held by whoever prints. It is never released: the process ends with what was printed."""
        self._timer = threading.Timer(max(timeout_s - age_s, 0.0), self._give_up)
        self._timer.daemon = True
        self._timer.start()

    @property
    def left_s(self) -> float:
        """Time for asking the node, in seconds."""
        return self.ends_at - PRINTING_S - time.time()

    def print_and_end(self, plan: _Plan | None) -> NoReturn:
        """Print what was planned, note it once the output is complete, and leave the process. Prints nothing if the
        deadline has passed."""
        self._output.acquire()  # waits for ever if the watchdog has it: the process is about to end
        if time.time() >= self.ends_at:
            self._print_nothing_and_end()
        with suppress(OSError):  # the host is gone, or the disk is full: what is not noted is told again
            sys.stdout.write(self._host.quiet if plan is None or plan.answer is None else json.dumps(plan.answer))
            sys.stdout.flush()
            if plan is not None and plan.telling is not None:
                plan.telling.printed_at = time.time()
                write_private(plan.path, plan.notes)
        os._exit(0)  # between the note and the end there is nothing that could take time, or say something more

    def _give_up(self) -> None:
        if self._output.acquire(blocking=False):
            self._print_nothing_and_end()

    def _print_nothing_and_end(self) -> NoReturn:
        with suppress(OSError):
            os.write(1, self._host.quiet.encode())
        os._exit(0)


def _read_timeout_s() -> float:
    try:
        chosen = float(os.environ.get(TIMEOUT_VARIABLE, ""))
    except ValueError:
        return HOOK_TIMEOUT_S
    return chosen if 0 < chosen <= threading.TIMEOUT_MAX else HOOK_TIMEOUT_S


def deliver(host: Host, url: str | None = None) -> NoReturn:
    """Answer one call of a hook, and leave the process: with 0, whatever happens."""
    deadline = _Deadline(host)
    plan = None
    with ExitStack() as session:
        try:
            told = json.loads(sys.stdin.buffer.read() or b"{}")
            call = host.read(told) if isinstance(told, dict) else None
            path = session.enter_context(_own_session(host, call)) if call is not None else None
            if call is not None and path is not None:
                project = find_project(host, find_folder(host, told.get("cwd")))
                plan = _plan(host, project, call, path, url, deadline)
        except Exception:
            if os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0"):
                raise
        deadline.print_and_end(plan)


def find_folder(host: Host, told: object = None) -> Path:
    """Where a host works. What it tells of that is not always a folder: JSON holds no name that is not UTF-8."""
    chosen = os.environ.get("CLAUDE_PROJECT_DIR") if host.name == "claude" else None
    folder = chosen or (told if isinstance(told, str) else "")
    return Path(folder) if folder and os.path.isdir(folder) else Path.cwd()


class _Plan(NamedTuple):
    """What a hook is about to print, on the disk already."""

    answer: object
    """None: nothing but what the host wants of a hook that has nothing to say."""
    telling: Telling | None
    notes: Notes
    path: Path


def _plan(host: Host, project: Path, call: HookCall, path: Path, url: str | None, deadline: _Deadline) -> _Plan:
    process = find_host_process()
    notes = _load(path, process)
    is_start = call.moment == "start" and call.source != "compact"
    is_anew = is_start or (notes.pid, notes.started) != process
    settle(notes, call, host, began_at=deadline.began_at, is_anew=is_anew)
    notes.shown = [*([] if is_anew else notes.shown), *sorted(call.shown)][-MAX_SHOWN:]
    if is_start:
        drop_old(path.parent)
    if call.moment != "stop":
        notes.stops = 0
    notes.pid, notes.started = process
    text, seqs, problem = "", list[int](), ""
    agent_id = claim_name(host, project, process)
    hub = find_hub(agent_id, url)
    try:
        messages, network = asyncio.run(_ask_node(host, project, agent_id, hub, notes, deadline.left_s))
        remember_hub(agent_id, hub)
        if call.moment != "stop" or notes.stops < MAX_STOPS:
            text, seqs = compose(agent_id, network, messages, is_start=call.moment == "start")
    except (RoundelayError, TimeoutError, OSError) as error:
        problem = f"Roundelay: {describe_problem(error, agent_id, hub)}"
    notice = problem if host.shows_notices and problem != notes.problem else ""
    notes.problem = problem
    telling = None
    if seqs:
        telling = Telling(
            seqs,
            secrets.token_hex(8),
            call.moment == "start",
            _size(call.transcript),
            transcript=call.transcript,
            hook=find_own_process(),
            gives_up_at=deadline.ends_at,
        )
        text += _MARK.format(telling.mark)
        notes.tellings.append(telling)
        notes.stops += call.moment == "stop"
    write_private(path, notes)
    answer = host.answer(call.event, call.moment, text) if text else {"systemMessage": notice} if notice else None
    return _Plan(answer, telling, notes, path)


def describe_problem(error: Exception, agent_id: str, url: str) -> str:
    """Why a node was not reached or does not let somebody in, and what to do about it."""
    match error:
        case Forbidden():
            return (
                f"{agent_id} is not let in at {plain(url)}: {plain(error)} Ask its operator; `roundelay bridge remove` "
                "takes the bridge out of a project."
            )
        case NotAuthenticated():
            return (
                f"{agent_id} is not let in at {plain(url)}: {plain(error)} `roundelay token create {agent_id}` makes "
                f"it a token there; save that in {token_path(url, agent_id)}."
            )
        case ConnectError() | RetryLater() | TimeoutError() | OSError():
            return f"the node at {plain(url)} is away; what others write waits there. `roundelay up` starts one here."
        case _:
            return plain(error)


async def _ask_node(
    host: Host, project: Path, agent_id: str, url: str, notes: Notes, timeout_s: float
) -> tuple[list[AnyMessage], str]:
    """Acknowledge what was taken, and give what is to be told."""
    async with (
        asyncio.timeout(max(timeout_s, 0.0)),
        NetworkClient(
            agent_id,
            url,
            card=make_card(host, project),
            deliver=False,
            reconnect=False,
            connect_timeout_s=max(timeout_s, 0.01),
        ) as client,
    ):
        epoch = client.welcome.network.epoch
        if notes.epoch != epoch:  # another history: its numbers mean others
            notes.epoch, notes.tellings, notes.taken, notes.shown, notes.repeated = epoch, [], [], [], []
        told, untold = notes.told, list[AnyMessage]()
        # What was told and is not acknowledged may fill pages before what is new.
        async for page in client.pages("network.receive", {"limit": MAX_FETCHED, "peek": True}):
            seqs = [it["seq"] for it in page["messages"]]
            if done := [it for it in seqs if it in notes.taken]:
                await client.call("network.acknowledge", {"seqs": done})
            untold += [message_from_wire(it) for it in page["messages"] if it["seq"] not in told]
            if len(untold) >= ENOUGH and page["next"] >= max(notes.taken, default=0):
                break
        notes.taken = []
        return untold, client.welcome.network.name


def compose(
    agent_id: str, network: str, messages: list[AnyMessage], *, is_start: bool = False
) -> tuple[str, list[int]]:
    """What the model is told, and of which messages; the rest waits for the next hook. With its mark it is no longer
    than `MAX_TOLD_CHARS`."""
    who = f"You are {agent_id} in the Roundelay network {plain(network)[:100]}, beside other agents and people"
    if not messages:
        return (f"{who} (MCP server roundelay)." if is_start else ""), []

    def begin(told: int, has_more: bool) -> str:
        count = "A message has" if told == 1 else f"{told} messages have"
        more = " More wait: the next hooks tell them, and check shows them." if has_more else ""
        return f"{who}. {count} come for you.{more} {OTHERS_WORDS} Answer with the tool reply where one asks for it."

    lines, seqs = list[str](), list[int]()
    room = MAX_TOLD_CHARS - measure(begin(len(messages), True)) - len(_MARK.format("0" * 16))
    for message in messages:
        line = format_message(message, MAX_TEXT_CHARS, hint="; history shows them")
        room -= measure(line) + 1
        if seqs and room < 0:
            break
        lines.append(line)
        seqs.append(message.seq)
    return "\n".join([begin(len(seqs), len(seqs) < len(messages)), *lines]), seqs


def list_shown_seqs(process: HostProcess, *, with_shown: bool = False) -> set[int]:
    """What the hooks of a host's process have told, in whichever of its sessions; ``with_shown`` also what a tool has
    shown there. Leaves out what a hook noted and did not print."""
    told = set()
    for path in (home() / "bridge" / "sessions").glob("*.json"):
        notes = _load(path, process)
        if (notes.pid, notes.started) == process:
            told |= {seq for it in notes.tellings if it.may_be_shown for seq in it.seqs} | set(notes.taken)
            told |= set(notes.shown) if with_shown else set()
    return told


@contextmanager
def _own_session(host: Host, call: HookCall) -> Iterator[Path | None]:
    """A session's notes, for one hook at a time; None where another one is at it: that one tells."""
    name = hashlib.sha256(f"{host.name}/{call.session}".encode()).hexdigest()[:32]
    folder = home() / "bridge" / "sessions"
    make_folder(folder)
    with _try_lock(folder / f"{name}.lock") as is_locked:
        yield folder / f"{name}.json" if is_locked else None


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Whether a lock was free, and is held now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        is_free = False
        with suppress(BlockingIOError, FileNotFoundError):
            lock_descriptor(descriptor)
            # one that was unlinked after it was opened locks nothing: who comes next makes another
            is_free = os.path.samestat(os.fstat(descriptor), path.stat())
        yield is_free
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


def drop_old(folder: Path) -> None:
    """Delete the notes of sessions that have ended long ago, and their locks, which nobody holds then."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for lock in folder.glob("*.lock"):
        notes = lock.with_suffix(".json")
        used = notes if notes.exists() else lock
        if used.stat().st_mtime < oldest:
            with _try_lock(lock) as is_free:
                if is_free:
                    notes.unlink(missing_ok=True)
                    lock.unlink()
