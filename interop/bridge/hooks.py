"""One call of a coding agent's hook: shows new messages to its model once, and acknowledges messages that the host has
used.

A hook is a process that runs for half a second: the host starts it, reads its output and forgets it. Only later can the
bridge see whether the host used the output. Each session therefore keeps notes on disk about every output:

    fetched (only peeked; the hub delivers nothing)
      -> planned    on disk before a byte is printed. After a kill here it is shown again, unless a transcript has it
      -> printed    recorded when everything was written and flushed. From here on it counts as shown
      -> taken      the host has used it: its transcript has the mark, or a later hook runs if there is no transcript.
                    A new session, or a resumed one whose transcript lacks the mark, is shown it again
      -> acknowledged at the hub, durably. Only then does the sender see that it was handled

Nothing is lost when a hook, a host or the node is killed, and nothing is shown twice in one context. A hook never
breaks its host: after an error it prints nothing. Hosts cancel slow hooks and drop their output. A watchdog therefore
ends a hook that has nothing to print by its deadline.
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
"""Maximum time from the start of a hook's process until it prints, in seconds. Hosts cancel hooks after 5 s."""
TIMEOUT_VARIABLE = "ROUNDELAY_HOOK_TIMEOUT_S"
"""Environment variable that replaces `HOOK_TIMEOUT_S`, for machines that start processes slowly."""
PRINTING_S = 0.3
"""Part of `HOOK_TIMEOUT_S` that is reserved for writing notes and printing, in seconds."""
MAX_OUTPUT_CHARS = 8_000
"""Maximum length of one output, in characters. Claude Code writes output over 10,000 characters into a file instead."""
MAX_TEXT_CHARS = 4_000
"""Maximum length of one message in an output, escaped."""
MAX_FETCHED = 500
ENOUGH = 100
"""Number of messages after which no further page is read. It is more than fits into one output."""
_MARK = "\n(Roundelay's mark of this: {})"
MAX_STOPS = 8
"""Maximum number of consecutive times that a host is kept from stopping. After that it waits for its person."""
MAX_SHOWN = 1_000
KEPT_DAYS = 30
"""Days that the notes of a session are kept after its last hook."""


class HookOutput(Struct):
    """Messages that one hook has shown, or planned to show."""

    seqs: list[int]
    mark: str
    """Random text in the output. If a transcript contains this text, it contains the output."""
    is_start: bool
    offset: int
    """Length of the transcript before the output."""
    printed_at: float | None = None
    """Time when the output was complete, in seconds since the epoch. None before that."""
    transcript: str = ""
    """Path of the host's transcript, if there is one."""
    hook: tuple[int, str] = (0, "")
    """Process that prints the output."""
    gives_up_at: float = 0.0
    """Time when that process ends unless it has started to print, in seconds since the epoch."""

    @property
    def may_be_shown(self) -> bool:
        """Whether the host has the output, or may still get it from a running hook."""
        if self.printed_at is not None:
            return True
        if time.time() < self.gives_up_at and HostProcess(*self.hook).is_alive:
            return True
        # Claude Code also uses the output of a hook that was killed after printing.
        return self.mark.encode() in (_read_from(self.transcript, self.offset) or b"")


class SessionNotes(Struct, rename={"outputs": "tellings"}):
    """Notes of a session: outputs whose result is unknown, and seqs in the session's context. Stored as JSON with
    the field names of earlier versions.
    """

    pid: int
    started: str
    epoch: str = ""
    outputs: list[HookOutput] = []
    """Outputs for which it is not known yet whether the host has used them."""
    taken: list[int] = []
    """Seqs to acknowledge."""
    shown: list[int] = []
    """Seqs that a tool has shown to the model. The model acknowledges them with the tool `ack`."""
    repeated: list[int] = []
    """Seqs that were shown a second time."""
    stops: int = 0
    problem: str = ""
    """Text of the last failure to reach the node, as shown to the person."""

    @property
    def in_context(self) -> set[int]:
        """Seqs that are, or may be, in the session's context."""
        return {*self.taken, *self.shown, *(seq for output in self.outputs for seq in output.seqs)}


def resolve_outputs(
    notes: SessionNotes, call: HookCall, host: Host, *, began_at: float, is_new_context: bool = False
) -> None:
    """Decide which outputs the host has used, and which must be shown again.

    ``is_new_context``: the session's context was just created, empty or from its transcript.
    """
    undecided = []
    for output in notes.outputs:
        is_taken = _is_taken(output, notes, call, host, began_at, is_new_context)
        if is_taken is None:
            undecided.append(output)
        elif is_taken:
            notes.taken += [seq for seq in output.seqs if seq not in notes.taken]
        else:
            notes.repeated = [*notes.repeated, *output.seqs][-MAX_SHOWN:]
    notes.outputs = undecided


def _is_taken(
    output: HookOutput, notes: SessionNotes, call: HookCall, host: Host, began_at: float, is_new_context: bool
) -> bool | None:
    """Return whether the host has used an output, or None if that is not known yet."""
    # Check only the part that the transcript has gained since then. An older copy of a mark proves nothing.
    transcript = _read_from(call.transcript, output.offset)
    if transcript is not None and output.mark.encode() in transcript:
        return True  # even if its hook was killed, because Claude Code uses the output of killed hooks
    if is_new_context:
        return False
    if output.printed_at is None:
        return False  # its hook ended before it had printed everything: hosts drop the output of a cancelled hook
    if began_at <= output.printed_at:
        # this hook ran in parallel with the other one, so the host may not have read the other hook's output yet
        return None
    if transcript is None or not host.keeps_transcript:
        return None if host.keeps_transcript and call.moment == "tool" else True
    if call.moment == "tool":
        return None  # within a turn, the transcript may not be up to date
    # The transcript lacks the mark, so show the messages again, but only once. A host that never writes them down would
    # otherwise see them forever.
    was_repeated = any(seq in notes.repeated for seq in output.seqs)
    return output.is_start or was_repeated


def _read_from(path: str, offset: int) -> bytes | None:
    """Return a transcript from an offset on. Return all of it if it has become shorter, or None if it is missing."""
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
    """Watchdog that ends this process if it has nothing to print by its deadline."""

    def __init__(self, host: Host) -> None:
        age_s, timeout_s = find_process_age_s(), _read_timeout_s()
        self.began_at = time.time() - age_s
        """Start time of this process, in seconds since the epoch."""
        self.ends_at = self.began_at + timeout_s
        self._host = host
        self._output = threading.Lock()
        """Held by the printing thread. It is never released, because the process ends after printing."""
        self._timer = threading.Timer(max(timeout_s - age_s, 0.0), self._give_up)
        # Use a daemon thread, so that the watchdog does not keep a finished process alive.
        self._timer.daemon = True
        self._timer.start()

    @property
    def left_s(self) -> float:
        """Remaining time for calls to the node, in seconds."""
        return self.ends_at - PRINTING_S - time.time()

    def print_and_end(self, plan: _Plan | None) -> NoReturn:
        """Print a plan, record that it was printed, and end the process. Print nothing after the deadline."""
        self._output.acquire()  # blocks if the watchdog holds it, because the process then ends
        if time.time() >= self.ends_at:
            self._print_nothing_and_end()
        with suppress(OSError):  # the host has ended, or the disk is full: messages without a record are shown again
            sys.stdout.write(self._host.quiet if plan is None or plan.answer is None else json.dumps(plan.answer))
            sys.stdout.flush()
            if plan is not None and plan.output is not None:
                plan.output.printed_at = time.time()
                write_private(plan.path, plan.notes)
        # Exit at once, because interpreter shutdown could take time or print more.
        os._exit(0)

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


def run_hook(host: Host, url: str | None = None) -> NoReturn:
    """Answer one call of a hook and end the process, always with exit code 0."""
    deadline = _Deadline(host)
    plan = None
    with ExitStack() as session:
        try:
            event = json.loads(sys.stdin.buffer.read() or b"{}")
            call = host.read(event) if isinstance(event, dict) else None
            # Hosts run hooks of parallel tools at the same time. Without the lock, two of them would show the same
            # message.
            path = session.enter_context(_lock_session(host, call)) if call is not None else None
            if call is not None and path is not None:
                project = find_project(host, find_folder(host, event.get("cwd")))
                plan = _make_plan(host, project, call, path, url, deadline)
        except Exception:
            if os.environ.get("ROUNDELAY_DEBUG", "") not in ("", "0"):
                raise
        deadline.print_and_end(plan)


def find_folder(host: Host, cwd: object = None) -> Path:
    """Return the folder in which a host works. ``cwd`` from the hook's event may be wrong, because JSON cannot
    contain a path that is not UTF-8.
    """
    chosen = os.environ.get("CLAUDE_PROJECT_DIR") if host.name == "claude" else None
    folder = chosen or (cwd if isinstance(cwd, str) else "")
    return Path(folder) if folder and os.path.isdir(folder) else Path.cwd()


class _Plan(NamedTuple):
    """Planned output of a hook. Its notes are already on disk."""

    answer: object
    """None: print only the output that the host expects from a hook without messages."""
    output: HookOutput | None
    notes: SessionNotes
    path: Path


def _make_plan(host: Host, project: Path, call: HookCall, path: Path, url: str | None, deadline: _Deadline) -> _Plan:
    process = find_host_process()
    notes = _load(path, process)
    is_start = call.moment == "start" and call.source != "compact"
    is_new_context = is_start or (notes.pid, notes.started) != process
    # Resolve earlier outputs before asking the node. Used messages are then acknowledged in the same call.
    resolve_outputs(notes, call, host, began_at=deadline.began_at, is_new_context=is_new_context)
    notes.shown = [*([] if is_new_context else notes.shown), *sorted(call.shown)][-MAX_SHOWN:]
    if is_start:
        drop_old(path.parent)
    if call.moment != "stop":
        notes.stops = 0  # the host has worked since then, so it may be kept from stopping again
    notes.pid, notes.started = process
    text, seqs, problem = "", list[int](), ""
    agent_id = claim_name(host, project, process)
    hub = find_hub(agent_id, url)
    try:
        messages, network = asyncio.run(_ask_node(host, project, agent_id, hub, notes, deadline.left_s))
        # Remember only a hub that answered. A wrong address must not be tried again next time.
        remember_hub(agent_id, hub)
        if call.moment != "stop" or notes.stops < MAX_STOPS:
            text, seqs = compose_text(agent_id, network, messages, is_start=call.moment == "start")
    except (RoundelayError, TimeoutError, OSError) as error:
        problem = f"Roundelay: {describe_problem(error, agent_id, hub)}"
    # Show a failure once. Otherwise, an unreachable node would add a line after every tool.
    notice = problem if host.shows_notices and problem != notes.problem else ""
    notes.problem = problem
    output = None
    if seqs:
        output = HookOutput(
            seqs,
            secrets.token_hex(8),
            call.moment == "start",
            _size(call.transcript),
            transcript=call.transcript,
            hook=find_own_process(),
            gives_up_at=deadline.ends_at,
        )
        text += _MARK.format(output.mark)
        notes.outputs.append(output)
        notes.stops += call.moment == "stop"
    # Write the notes before printing. After a kill, the next hook then finds a planned output and resolves it.
    write_private(path, notes)
    answer = host.answer(call.event, call.moment, text) if text else {"systemMessage": notice} if notice else None
    return _Plan(answer, output, notes, path)


def describe_problem(error: Exception, agent_id: str, url: str) -> str:
    """Return why a node could not be reached or refused a participant, and how to fix the problem."""
    match error:
        case Forbidden():
            return (
                f"{agent_id} may not join at {plain(url)}: {plain(error)} Ask its operator; `roundelay bridge remove` "
                "removes the bridge from a project."
            )
        case NotAuthenticated():
            return (
                f"{agent_id} may not join at {plain(url)}: {plain(error)} `roundelay token create {agent_id}` makes "
                f"a token for it there; save the token in {token_path(url, agent_id)}."
            )
        case ConnectError() | RetryLater() | TimeoutError() | OSError():
            return f"the node at {plain(url)} is away; messages wait there. `roundelay up` starts one here."
        case _:
            return plain(error)


async def _ask_node(
    host: Host, project: Path, agent_id: str, url: str, notes: SessionNotes, timeout_s: float
) -> tuple[list[AnyMessage], str]:
    """Acknowledge messages that the host has used. Return the messages to show, and the network's name."""
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
        if notes.epoch != epoch:  # in another history, the same seqs belong to other messages
            notes.epoch, notes.outputs, notes.taken, notes.shown, notes.repeated = epoch, [], [], [], []
        in_context, new = notes.in_context, list[AnyMessage]()
        # Unacknowledged messages that are already in the context may fill whole pages before the new messages.
        async for page in client.pages("network.receive", {"limit": MAX_FETCHED, "peek": True}):
            seqs = [message["seq"] for message in page["messages"]]
            if done := [seq for seq in seqs if seq in notes.taken]:
                await client.call("network.acknowledge", {"seqs": done})
            new += [message_from_wire(message) for message in page["messages"] if message["seq"] not in in_context]
            # Read at least up to the last used seq. Otherwise that message would stay unacknowledged and be delivered
            # again.
            if len(new) >= ENOUGH and page["next"] >= max(notes.taken, default=0):
                break
        notes.taken = []
        return new, client.welcome.network.name


def compose_text(
    agent_id: str, network: str, messages: list[AnyMessage], *, is_start: bool = False
) -> tuple[str, list[int]]:
    """Return the text for the model, and the seqs of the messages in it. The remaining messages wait for the next hook.

    Text and mark together are at most `MAX_OUTPUT_CHARS` long.
    """
    who = f"You are {agent_id} in the Roundelay network {plain(network)[:100]}, beside other agents and people"
    if not messages:
        return (f"{who} (MCP server roundelay)." if is_start else ""), []

    def make_head(shown: int, has_more: bool) -> str:
        count = "A message has" if shown == 1 else f"{shown} messages have"
        more = " More wait: the next hooks tell them, and check shows them." if has_more else ""
        return f"{who}. {count} come for you.{more} {OTHERS_WORDS} Answer with the tool reply where one asks for it."

    lines, seqs = list[str](), list[int]()
    # Reserve room for the longest header. The number of messages that fit is known only at the end.
    room = MAX_OUTPUT_CHARS - measure(make_head(len(messages), True)) - len(_MARK.format("0" * 16))
    for message in messages:
        line = format_message(message, MAX_TEXT_CHARS, hint="; history shows them")
        room -= measure(line) + 1
        # Always show the first message. A message that never fits would block all messages behind it.
        if seqs and room < 0:
            break
        lines.append(line)
        seqs.append(message.seq)
    return "\n".join([make_head(len(seqs), len(seqs) < len(messages)), *lines]), seqs


def list_shown_seqs(process: HostProcess, *, with_shown: bool = False) -> set[int]:
    """Return the seqs that the hooks of a host's process have shown in any session. ``with_shown`` adds seqs that a
    tool has shown. Planned outputs that were never printed are not included.
    """
    seqs = set()
    for path in (home() / "bridge" / "sessions").glob("*.json"):
        notes = _load(path, process)
        if (notes.pid, notes.started) == process:
            seqs |= {seq for output in notes.outputs if output.may_be_shown for seq in output.seqs} | set(notes.taken)
            seqs |= set(notes.shown) if with_shown else set()
    return seqs


@contextmanager
def _lock_session(host: Host, call: HookCall) -> Iterator[Path | None]:
    """Lock a session for one hook and yield the path of its notes. Yield None if another hook runs, because that
    hook shows the messages.
    """
    # Hash the session id. The host chooses it, and it may contain characters that are invalid in file names.
    name = hashlib.sha256(f"{host.name}/{call.session}".encode()).hexdigest()[:32]
    folder = home() / "bridge" / "sessions"
    make_folder(folder)
    with _try_lock(folder / f"{name}.lock") as is_locked:
        yield folder / f"{name}.json" if is_locked else None


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Take a lock until the block ends, if it is free. Yield whether it was free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        is_free = False
        with suppress(BlockingIOError, FileNotFoundError):
            lock_descriptor(descriptor)
            # A file that was unlinked after it was opened locks nothing, because the next hook creates another file.
            is_free = os.path.samestat(os.fstat(descriptor), path.stat())
        yield is_free
    finally:
        os.close(descriptor)


def _load(path: Path, process: HostProcess) -> SessionNotes:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SessionNotes)
    except (OSError, ValueError, msgspec.MsgspecError):
        return SessionNotes(*process)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size if path else 0
    except OSError:
        return 0


def drop_old(folder: Path) -> None:
    """Delete the notes and locks of sessions that ended long ago."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for lock in folder.glob("*.lock"):
        notes = lock.with_suffix(".json")
        used = notes if notes.exists() else lock
        if used.stat().st_mtime < oldest:
            with _try_lock(lock) as is_free:
                if is_free:
                    notes.unlink(missing_ok=True)
                    lock.unlink()
