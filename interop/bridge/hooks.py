"""Runs one hook call of a coding agent. The hook shows new messages to the agent's model, and acknowledges messages
that the host has used.

A hook is a process that runs for about half a second. The host starts the process and reads its output. The bridge can
see only later whether the host used the output. The bridge therefore keeps notes on disk about every output of a
session. An output goes through these states:

    fetched           messages were read without delivery (peek)
      -> planned      stored on disk before the hook prints. If the hook is killed now, the messages are shown again,
                      unless a transcript contains them
      -> printed      recorded after the output was flushed. The messages now count as shown
      -> taken        the host has used the output: its transcript contains the mark, or a later hook ran and there is
                      no transcript. A session whose transcript lacks the mark is shown the messages again
      -> acknowledged stored at the hub. Only now does the sender see the messages as handled

No message is lost when a hook, a host or the node is killed, and no message is shown twice in one context. A hook
that fails prints nothing, so that its host continues. Hosts cancel slow hooks and drop their output. A watchdog
therefore ends a hook that has nothing to print by its deadline.
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
"""Maximum time from the start of a hook's process until its output is printed, in seconds. Hosts cancel hooks after 5
s.
"""
TIMEOUT_VARIABLE = "ROUNDELAY_HOOK_TIMEOUT_S"
"""Environment variable that overrides `HOOK_TIMEOUT_S` on machines that start processes slowly."""
PRINTING_S = 0.3
"""Part of `HOOK_TIMEOUT_S` that is reserved for writing notes and printing, in seconds."""
MAX_OUTPUT_CHARS = 8_000
"""Maximum length of the output of one hook, in characters. Claude Code moves an output over 10,000 characters into a
file, so that its model does not read it.
"""
MAX_TEXT_CHARS = 4_000
"""Maximum length of one message in a hook's output after escaping, in characters."""
MAX_FETCHED = 500
ENOUGH = 100
"""Number of new messages after which a hook reads no further page. The output of one hook cannot contain more messages
anyway.
"""
_MARK = "\n(Roundelay's mark of this: {})"
MAX_STOPS = 8
"""Maximum number of consecutive times that a hook keeps its host from stopping. If the limit is reached, the host stops
and waits for its user.
"""
MAX_SHOWN = 1_000
KEPT_DAYS = 30
"""Number of days for which a session's notes are kept after its last hook."""


class HookOutput(Struct):
    """Messages that one hook has shown, or has planned to show."""

    seqs: list[int]
    mark: str
    """Random text that is part of the output. A transcript that contains this text contains the output."""
    is_start: bool
    offset: int
    """Length of the transcript in bytes before the output was printed."""
    printed_at: float | None = None
    """Time when the output was printed completely, in seconds since the epoch, or None before that."""
    transcript: str = ""
    """Path of the host's transcript, or an empty string if there is none."""
    hook: tuple[int, str] = (0, "")
    """Process of the hook that prints the output."""
    gives_up_at: float = 0.0
    """Time at which the hook's process ends if it has not started to print, in seconds since the epoch."""

    @property
    def may_be_shown(self) -> bool:
        """Whether the host has received the output, or may still receive it from a running hook."""
        if self.printed_at is not None:
            return True
        if time.time() < self.gives_up_at and HostProcess(*self.hook).is_alive:
            return True
        # Check the transcript too, because Claude Code uses the output of a hook that was killed after printing.
        return self.mark.encode() in (_read_from(self.transcript, self.offset) or b"")


class SessionNotes(Struct, rename={"outputs": "tellings"}):
    """Notes about one session: outputs whose fate is unknown, and seqs of messages in the session's context. The notes
    are stored as JSON with the field names of earlier versions.
    """

    pid: int
    started: str
    epoch: str = ""
    outputs: list[HookOutput] = []
    """Outputs for which the bridge does not know yet whether the host has used them."""
    taken: list[int] = []
    """Seqs of messages that the host has used, and that must be acknowledged."""
    shown: list[int] = []
    """Seqs of messages that a tool has shown to the model. The model acknowledges these messages with the
    tool `ack`.
    """
    repeated: list[int] = []
    """Seqs of messages that had to be shown a second time."""
    stops: int = 0
    problem: str = ""
    """Text of the last failure to reach the node, as the hook showed it to the user."""

    @property
    def in_context(self) -> set[int]:
        """Seqs of all messages that are, or may be, in the session's context."""
        return {*self.taken, *self.shown, *(seq for output in self.outputs for seq in output.seqs)}


def resolve_outputs(
    notes: SessionNotes, call: HookCall, host: Host, *, began_at: float, is_new_context: bool = False
) -> None:
    """Decide for each output whether the host has used it or its messages must be shown again.

    ``is_new_context`` means that the session's context was just created, either empty or from its transcript.
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
    """Return whether the host has used an output, or None if the answer is not known yet."""
    # Check only the part of the transcript that is newer than the output. A copy of the mark in an older part may come
    # from an earlier output.
    transcript = _read_from(call.transcript, output.offset)
    if transcript is not None and output.mark.encode() in transcript:
        return True  # Claude Code uses the output even if the hook was killed
    if is_new_context:
        return False
    if output.printed_at is None:
        return False  # hosts drop the output of a hook that was cancelled while printing
    if began_at <= output.printed_at:
        # This hook ran in parallel with the hook that printed the output. The host may not have read that output yet.
        return None
    if transcript is None or not host.keeps_transcript:
        return None if host.keeps_transcript and call.moment == "tool" else True
    if call.moment == "tool":
        return None  # during a turn, the transcript may not be up to date
    # The transcript lacks the mark, so show the messages again, but only once. Otherwise a host that never records
    # outputs would be shown the messages at every hook.
    was_repeated = any(seq in notes.repeated for seq in output.seqs)
    return output.is_start or was_repeated


def _read_from(path: str, offset: int) -> bytes | None:
    """Return the contents of a transcript from an offset on. If the transcript is shorter than the offset, return all
    of it. Return None if the transcript is missing.
    """
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
    """Watchdog that ends a hook's process if the hook has nothing to print by its deadline."""

    def __init__(self, host: Host) -> None:
        age_s, timeout_s = find_process_age_s(), _read_timeout_s()
        self.began_at = time.time() - age_s
        """Time at which this process started, in seconds since the epoch."""
        self.ends_at = self.began_at + timeout_s
        self._host = host
        self._output = threading.Lock()
        """Lock of the thread that prints. The lock is never released, because the process ends after printing."""
        self._timer = threading.Timer(max(timeout_s - age_s, 0.0), self._give_up)
        # Use a daemon thread, so that a waiting watchdog does not keep a finished process alive.
        self._timer.daemon = True
        self._timer.start()

    @property
    def left_s(self) -> float:
        """Time that remains for calls to the node, in seconds."""
        return self.ends_at - PRINTING_S - time.time()

    def print_and_end(self, plan: _Plan | None) -> NoReturn:
        """Print the planned output, record that it was printed, and end the process. After the deadline, print only the
        output of a hook without messages.
        """
        self._output.acquire()  # if the watchdog holds the lock, the process ends here
        if time.time() >= self.ends_at:
            self._print_nothing_and_end()
        with suppress(OSError):  # host ended or disk full: the messages are shown again
            sys.stdout.write(self._host.quiet if plan is None or plan.answer is None else json.dumps(plan.answer))
            sys.stdout.flush()
            if plan is not None and plan.output is not None:
                plan.output.printed_at = time.time()
                write_private(plan.path, plan.notes)
        # Exit without interpreter shutdown, which could take time or print more.
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
    """Run one hook call and end the process. The exit code is always 0."""
    deadline = _Deadline(host)
    plan = None
    with ExitStack() as session:
        try:
            event = json.loads(sys.stdin.buffer.read() or b"{}")
            call = host.read(event) if isinstance(event, dict) else None
            # Hosts run the hooks of parallel tools at the same time. Without the lock, two hooks would show the same
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
    """Return the folder in which a host works. The ``cwd`` of a hook's event may not exist, because JSON cannot contain
    a path that is not UTF-8.
    """
    chosen = os.environ.get("CLAUDE_PROJECT_DIR") if host.name == "claude" else None
    folder = chosen or (cwd if isinstance(cwd, str) else "")
    return Path(folder) if folder and os.path.isdir(folder) else Path.cwd()


class _Plan(NamedTuple):
    """Planned output of a hook. The notes about the output are already on disk."""

    answer: object
    """Output to print. If the answer is None, the hook prints only what the host expects from a hook without
    messages.
    """
    output: HookOutput | None
    notes: SessionNotes
    path: Path


def _make_plan(host: Host, project: Path, call: HookCall, path: Path, url: str | None, deadline: _Deadline) -> _Plan:
    process = find_host_process()
    notes = _load(path, process)
    is_start = call.moment == "start" and call.source != "compact"
    is_new_context = is_start or (notes.pid, notes.started) != process
    # Resolve earlier outputs before calling the node. The same call can then acknowledge the messages that were used.
    resolve_outputs(notes, call, host, began_at=deadline.began_at, is_new_context=is_new_context)
    notes.shown = [*([] if is_new_context else notes.shown), *sorted(call.shown)][-MAX_SHOWN:]
    if is_start:
        drop_old(path.parent)
    if call.moment != "stop":
        notes.stops = 0  # the host worked again, so the next stop may be prevented
    notes.pid, notes.started = process
    text, seqs, problem = "", list[int](), ""
    agent_id = claim_name(host, project, process)
    hub = find_hub(agent_id, url)
    try:
        messages, network = asyncio.run(_ask_node(host, project, agent_id, hub, notes, deadline.left_s))
        # Store only a hub that answered, so that the next hook does not try a wrong address again.
        remember_hub(agent_id, hub)
        if call.moment != "stop" or notes.stops < MAX_STOPS:
            text, seqs = compose_text(agent_id, network, messages, is_start=call.moment == "start")
    except (RoundelayError, TimeoutError, OSError) as error:
        problem = f"Roundelay: {describe_problem(error, agent_id, hub)}"
    # Show the same failure only once. Otherwise an unreachable node would add a line after every tool call.
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
    # Write the notes before printing. If this process is killed, the next hook finds the planned output and resolves
    # it.
    write_private(path, notes)
    answer = host.answer(call.event, call.moment, text) if text else {"systemMessage": notice} if notice else None
    return _Plan(answer, output, notes, path)


def describe_problem(error: Exception, agent_id: str, url: str) -> str:
    """Return why a node could not be reached or why it refused a participant, and how to fix the problem."""
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
            return (
                f"the node at {plain(url)} cannot be reached. Messages wait there until it is back. `roundelay up` "
                "starts a node on this machine."
            )
        case _:
            return plain(error)


async def _ask_node(
    host: Host, project: Path, agent_id: str, url: str, notes: SessionNotes, timeout_s: float
) -> tuple[list[AnyMessage], str]:
    """Acknowledge the messages that the host has used. Return the messages to show, and the name of the network."""
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
        if notes.epoch != epoch:  # in a different history, the same seqs name other messages
            notes.epoch, notes.outputs, notes.taken, notes.shown, notes.repeated = epoch, [], [], [], []
        in_context, new = notes.in_context, list[AnyMessage]()
        # Read several pages. Unacknowledged messages that are already in the context may fill the first pages.
        async for page in client.pages("network.receive", {"limit": MAX_FETCHED, "peek": True}):
            seqs = [message["seq"] for message in page["messages"]]
            if done := [seq for seq in seqs if seq in notes.taken]:
                await client.call("network.acknowledge", {"seqs": done})
            new += [message_from_wire(message) for message in page["messages"] if message["seq"] not in in_context]
            # Read at least up to the last seq that was used. Otherwise that message would stay unacknowledged and be
            # delivered again.
            if len(new) >= ENOUGH and page["next"] >= max(notes.taken, default=0):
                break
        notes.taken = []
        return new, client.welcome.network.name


def compose_text(
    agent_id: str, network: str, messages: list[AnyMessage], *, is_start: bool = False
) -> tuple[str, list[int]]:
    """Return the text for the model, and the seqs of the messages that the text contains. The next hook shows the
    remaining messages.

    The text and its mark together are at most `MAX_OUTPUT_CHARS` characters long.
    """
    who = f"You are {agent_id} in the Roundelay network {plain(network)[:100]}, together with other agents and people"
    if not messages:
        return (f"{who} (MCP server roundelay)." if is_start else ""), []

    def make_head(shown: int, has_more: bool) -> str:
        count = "A message has" if shown == 1 else f"{shown} messages have"
        more = " More messages wait. The next hooks show them, and check shows them now." if has_more else ""
        return (
            f"{who}. {count} arrived for you.{more} {OTHERS_WORDS} If a message asks for an answer, use the tool reply."
        )

    lines, seqs = list[str](), list[int]()
    # Reserve room for the longest header, because the number of messages that fit is known only at the end.
    room = MAX_OUTPUT_CHARS - measure(make_head(len(messages), True)) - len(_MARK.format("0" * 16))
    for message in messages:
        line = format_message(message, MAX_TEXT_CHARS, hint="; history shows them")
        room -= measure(line) + 1
        # Always show the first message. Otherwise a message that is too long would block all later messages.
        if seqs and room < 0:
            break
        lines.append(line)
        seqs.append(message.seq)
    return "\n".join([make_head(len(seqs), len(seqs) < len(messages)), *lines]), seqs


def list_shown_seqs(process: HostProcess, *, with_shown: bool = False) -> set[int]:
    """Return the seqs of all messages that a host process's hooks have shown, in any session. ``with_shown`` adds the
    messages that a tool has shown. Planned outputs that were never printed are not included.
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
    """Lock a session for one hook, and yield the path of the session's notes. Yield None if another hook holds the
    lock, because that hook shows the messages.
    """
    # Hash the session id. The host chooses the id, which may contain characters that are invalid in file names.
    name = hashlib.sha256(f"{host.name}/{call.session}".encode()).hexdigest()[:32]
    folder = home() / "bridge" / "sessions"
    make_folder(folder)
    with _try_lock(folder / f"{name}.lock") as is_locked:
        yield folder / f"{name}.json" if is_locked else None


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file until the block ends. Yield whether the lock was acquired."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOSE_ON_EXEC, 0o600)
    try:
        is_free = False
        with suppress(BlockingIOError, FileNotFoundError):
            lock_descriptor(descriptor)
            # Check that the file still exists under its path. An unlinked file locks nothing, because the next hook
            # creates a new file.
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
    """Delete the notes and lock files of sessions whose last hook ran more than `KEPT_DAYS` days ago."""
    oldest = time.time() - KEPT_DAYS * 86_400
    for lock in folder.glob("*.lock"):
        notes = lock.with_suffix(".json")
        used = notes if notes.exists() else lock
        if used.stat().st_mtime < oldest:
            with _try_lock(lock) as is_free:
                if is_free:
                    notes.unlink(missing_ok=True)
                    lock.unlink()
