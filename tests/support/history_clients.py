"""Sequential models of a task and of a note, and real client processes whose calls are checked against these models.

A process writes each call and each result to its log. A process ends as `kill -9` ends it, in the middle of a call,
at the steps that the test chooses. A call without a result in the log may have taken effect, at once or later, or
never.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from roundelay.network.client import NetworkClient
from roundelay.network.errors import ConnectError, Forbidden, InvalidArguments
from tests.support.histories import Call, is_linearizable

TASK_OPS = {"claim": 6.0, "release": 4.0, "complete": 0.3}
NOTE_OPS = {"read": 2.0, "write": 1.0, "append": 1.0, "patch": 1.0}
SHARED = 4
"""Number of tasks and notes that the clients use at the same time. A small number makes calls meet."""
MAX_LIFE_S = 0.02
"""Maximum time between the start of a call and the death of its process."""

Result = str | list[Any]
"""JSON value. Results are compared after a round trip through a log file."""


def task_step(state: tuple[str, str], call: Call) -> tuple[tuple[str, str], Result]:
    """Apply an operation to the sequential task, whose state is (state, holder). Return the new state and the result."""
    kind, holder = state
    me = call.client
    if call.op == "claim":
        if kind == "open" or (kind == "claimed" and holder == me):
            return ("claimed", me), [True, me]
        return state, [False, holder if kind == "claimed" else ""]
    if call.op == "release":
        if kind == "claimed":
            return (("open", ""), "open") if holder == me else (state, "refused")
        return state, kind
    if kind == "done":
        return state, "done" if holder == me else "refused"
    if kind == "open" or holder == me:
        return ("done", me), "done"
    return state, "refused"


def note_step(state: tuple[int, str], call: Call) -> tuple[tuple[int, str], Result]:
    """Apply an operation to the sequential note, whose state is (version, text). Return the new state and the result."""
    version, text = state
    args = call.args
    if call.op == "read":
        return state, [version, text]
    if call.op == "write":
        if args["expected_version"] != version:
            return state, ["conflict", version, text]
        return (version + 1, args["text"]), [version + 1]
    if call.op == "append":
        return (version + 1, f"{text.rstrip()}\n\n{args['text']}"), [version + 1]
    if text.count(args["find"]) != 1:
        return state, "refused"
    return (version + 1, text.replace(args["find"], args["replace"])), [version + 1]


async def perform(client: NetworkClient, op: str, args: dict[str, Any], call_id: str | None = None) -> Result:
    """Call an operation of the mod `tasks` or `notes`, and return its result in the form of the models."""
    try:
        value = await client.call(op, args, call_id=call_id)
    except (Forbidden, InvalidArguments):
        return "refused"
    match op:
        case "tasks.claim":
            return [value["is_claimed"], value.get("holder", "")]
        case "tasks.release" | "tasks.complete":
            return str(value["state"])
        case "notes.read":
            return [value["version"], value["text"]]
    if value.get("is_conflict"):
        return ["conflict", value["version"], value["current"]]
    return [value["version"]]


class NoteWriter:
    """A client's view of one note: the last version and text that it has read."""

    def __init__(self) -> None:
        self._version, self._text = 1, ""

    def choose(self, chance: random.Random, mark: str) -> tuple[str, dict[str, Any]]:
        """Return an operation and its arguments. ``mark`` is a text that no other operation writes."""
        match chance.choices(list(NOTE_OPS), list(NOTE_OPS.values()))[0]:
            case "write":
                return "write", {"text": f"{self._text[-200:]} {mark}", "expected_version": self._version}
            case "append":
                return "append", {"text": mark}
            case "patch":
                return "patch", {"find": self._text[-20:] or "first", "replace": mark}
        return "read", {}

    def learn(self, op: str, result: Result) -> None:
        if op == "read":
            self._version, self._text = result
        elif result != "refused":
            self._version = result[result[0] == "conflict"]


def check(histories: dict[str, list[Call]]) -> int:
    """Raise `AssertionError` unless each history is linearizable. Return the number of operations."""
    for name, calls in histories.items():
        start, step = (("open", ""), task_step) if name.startswith("tasks") else ((1, "first"), note_step)
        assert is_linearizable(calls, start, step), (name, sorted(calls, key=lambda call: call.called))
    return sum(map(len, histories.values()))


# --- processes


@dataclass(frozen=True)
class Orders:
    """Orders for one process. ``deaths`` are the steps in which the process dies."""

    name: str
    url: str
    token: str
    seed: int
    steps: range
    deaths: frozenset[int]
    things: tuple[str, ...]
    log: Path


def run_client(orders: Orders) -> None:
    asyncio.run(_run_client(orders))


async def _run_client(orders: Orders) -> None:
    log = os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random(f"{orders.seed} {orders.name} {orders.steps.start}")
    writers: dict[str, NoteWriter] = {}
    async with _join(orders) as client:
        for step in orders.steps:
            first = step * (len(orders.things) - SHARED) // orders.steps.stop
            thing = orders.things[first + chance.randrange(SHARED)]
            mod, _, name = thing.partition("/")
            if mod == "tasks":
                op, args = chance.choices(list(TASK_OPS), list(TASK_OPS.values()))[0], {"task": int(name)}
            else:
                writer = writers.setdefault(thing, NoteWriter())
                op, args = writer.choose(chance, f"[{orders.name}-{step}]")
                args["note"] = name
            os.write(log, json.dumps([step, thing, op, args, time.monotonic()]).encode() + b"\n")
            if step in orders.deaths:
                # A thread kills the process at a random moment: before, in or after the frame, or in a later call.
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(chance.uniform(0, MAX_LIFE_S), os.kill, kill).start()
            result = await perform(client, f"{mod}.{op}", args)
            os.write(log, json.dumps([step, result, time.monotonic()]).encode() + b"\n")
            if mod == "notes":
                writer.learn(op, result)


@asynccontextmanager
async def _join(orders: Orders) -> AsyncIterator[NetworkClient]:
    client = NetworkClient(orders.name, orders.url, token=orders.token)
    while True:
        try:
            await client.connect()
            break
        except ConnectError:  # the hub was killed and restarts
            await asyncio.sleep(0.05)
    try:
        yield client
    finally:
        await client.close()


def read_log(name: str, file: Path) -> tuple[list[tuple[str, Call]], int]:
    """Return the calls of a process by thing, and its next step. Ignore a torn last line, because the process died
    before the call.
    """
    begun: dict[int, tuple[str, Call]] = {}
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else ():
        if not line.endswith(b"\n"):
            break
        match json.loads(line):
            case [int(step), str(thing), op, args, called]:
                begun[step] = (thing, Call(name, op, called, math.inf, None, args))
            case [int(step), result, returned]:
                thing, call = begun[step]
                begun[step] = (thing, Call(name, call.op, call.called, returned, result, call.args))
    return list(begun.values()), max(begun, default=-1) + 1


@dataclass
class ClientProcesses:
    """Client processes that call operations on shared tasks and notes, and die in between."""

    folder: Path
    things: tuple[str, ...]
    steps: int
    chance: random.Random
    histories: dict[str, list[Call]] = field(default_factory=dict)
    kills: int = 0
    ends: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _context: Any = field(default_factory=lambda: multiprocessing.get_context("forkserver"))

    async def live(self, name: str, url: str, token: str, deaths: int) -> None:
        """Run one client until it has called all its operations, in as many processes as it takes."""
        self._context.set_forkserver_preload(["roundelay.network.client.client", "websockets.asyncio.client"])
        dies_at = frozenset(self.chance.sample(range(self.steps), deaths))
        step, life = 0, 0
        while True:
            log = self.folder / f"{name}-{life}.jsonl"
            orders = Orders(name, url, token, life, range(step, self.steps), dies_at, self.things, log)
            process: ForkServerProcess = self._context.Process(target=run_client, args=(orders,))
            process.start()
            try:
                await _wait_until_readable(process.sentinel)
            finally:
                process.kill()
                process.join()
            calls, reached = read_log(name, log)
            for thing, call in calls:
                self.histories.setdefault(thing, []).append(call)
            step, life = max(step, reached), life + 1
            self.ends += 1
            self.has_ended.set()
            if process.exitcode == 0:
                return
            assert process.exitcode == -signal.SIGKILL, f"{name} has ended with exit code {process.exitcode}"
            self.kills += 1


async def _wait_until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    loop.add_reader(descriptor, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(descriptor)
