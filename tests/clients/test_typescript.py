"""Tests of the TypeScript client with real nodes: its own tests in node's test runner, and losses of nodes,
connections and programs.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roundelay.network.asyncapi import asyncapi_document
from tests.crash.test_takeovers import OWNER, cluster, find_leader, join, pause, resume
from tests.suites.environment import node_modules_of
from tests.support.counts import Note
from tests.support.node import ProcessNode, node_process
from tests.support.page_modules import NODE, run_module
from tests.support.proxy import Fault, chaos_proxy
from tests.support.typescript import CLIENT, Program, copy_programs, running_program, start_program, use_client
from tests.support.typescript_types import write_types

TIMEOUT_S = 60.0
TESTS_TIMEOUT_S = 120.0
STORED_BETWEEN = 20
"""Number of messages that are stored before the next kill, so that sends and deliveries are in progress."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return use_client(tmp_path_factory)


async def run_tests(client: Path, db: Path, **environment: str) -> None:
    tests = find(client, "*.test.ts")
    async with node_process(db) as node:
        process = await asyncio.create_subprocess_exec(
            NODE, "--test", "--test-isolation=none", "--test-timeout=30000", *tests, cwd=client,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"NODE_URL": node.url, "OWNER_TOKEN": node.owner_token} | environment,
        )  # fmt: skip
        async with asyncio.timeout(TESTS_TIMEOUT_S):
            said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-8000:]


async def test_the_clients_own_tests_pass(client: Path, tmp_path: Path) -> None:
    await run_tests(client, tmp_path / "node.db")


@pytest.mark.full
async def test_they_pass_with_the_sockets_of_another_package(client: Path, tmp_path: Path) -> None:
    await run_tests(client, tmp_path / "node.db", WS_MODULE=str(node_modules_of("typescript") / "ws" / "wrapper.mjs"))


def find_node20() -> str | None:
    """Return the path of a node without its own WebSocket (version 20 or 21), or None."""
    found = shutil.which("node")
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10).stdout if found else ""
    return found if re.match(r"v2[01]\.", told) else None


@pytest.mark.full
async def test_node_20_takes_part_with_the_sockets_of_another_package(client: Path, tmp_path: Path) -> None:
    """Without the package, the error says what is missing."""
    if (node20 := find_node20()) is None:
        pytest.skip("node is none of 20 or 21 here")
    script = """
        import { connect, makeToken } from "roundelay-client";
        import { fileStore } from "roundelay-client/node";
        const { WebSocket } = await import(process.env.WS_MODULE);
        const options = { url: process.env.NODE_URL, kind: "agent", outbox: fileStore("outbox20") };
        await connect({ ...options, agentId: "ann", token: makeToken() }).catch((error) => console.log(error.code));
        const join = (agentId) => connect({ ...options, agentId, token: makeToken(), WebSocket });
        const [ann, ben] = [await join("ann"), await join("ben")];
        await ann.send("agent:ben", "hello");
        const { value } = await ben.deliveries().next();
        value.ack();
        console.log(value.message.content);
        await Promise.all([ann.close(), ben.close()]);
    """
    async with node_process(tmp_path / "node.db") as node:
        places = {"NODE_URL": node.url, "WS_MODULE": str(node_modules_of("typescript") / "ws" / "wrapper.mjs")}
        process = await asyncio.create_subprocess_exec(
            node20, "--input-type=module", "--eval", script, cwd=client, env=os.environ | places,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(TIMEOUT_S):
            said, errors = await process.communicate()
    assert (said.decode().split("\n"), errors) == (["invalid_arguments", "hello", ""], b"")


async def test_the_example_echoes_also_when_it_is_started_again(client: Path, tmp_path: Path) -> None:
    async with node_process(tmp_path / "node.db") as node:
        host = await node.person("host")
        for text in ("one", "two"):
            settings = {"NODE_URL": node.url, "TOKEN_FILE": str(tmp_path / "echo.token")}
            async with running_program(client, "echo.ts", **settings) as echo:
                if text == "one":
                    await echo.heard("text")
                sent = await host.send("agent:echo", text)
                answer = (await host.expect("deliver"))["message"]
                assert (answer["content"], answer["reply_to"]) == (text, sent["seq"])


# --- stored messages, deliveries and printed results after losses


@dataclass
class Story:
    """Two programs, of which one sends numbers to the other. The output of both programs is compared with the node's
    log.
    """

    folder: Path
    scratch: Path
    node: ProcessNode
    tokens: dict[str, str] = field(default_factory=dict)
    said: list[int] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0

    def environment(self, agent: str, url: str) -> dict[str, str]:
        return {"NODE_URL": url, "AGENT": agent, "TOKEN": self.tokens[agent]}

    async def begin(self) -> None:
        """Register both programs. An operator creates the sender's token, because only agents can bind an ID by first
        use.
        """
        host = await self.node.person("host")
        sender = await self.node.invite(host, "ann", kind="service")
        await sender.close()
        receiver = await self.node.agent("ben")
        await receiver.close()
        self.tokens = self.node.tokens

    async def start_sender(self, url: str, last: int | None = None) -> Program:
        first = self.said[-1] + 1 if self.said else 0
        limits = {"FIRST": str(first)} | ({} if last is None else {"LAST": str(last)})
        told = {"TO": "agent:ben", "OUTBOX": str(self.scratch / "outbox"), **limits}
        return await start_program(self.folder, "sender.ts", **self.environment("ann", url), **told)

    def note(self, sender: Program) -> None:
        """Record the output of a sender that has ended."""
        assert not sender.named("refused"), sender.lines
        self.said += sender.named("said")
        for stored in sender.named("stored"):
            assert self.stored.setdefault(stored["id"], stored["seq"]) == stored["seq"]
            self.duplicates += stored["duplicate"]

    async def check(self, receiver: Program, note: Note, **counts: object) -> None:
        host = await self.node.person("host")
        await host.send("agent:ben", {"n": "the end"})
        assert await receiver.wait() == 0, receiver.errors
        log = await read_log(host, "ann")
        numbers = [it["content"]["n"] for it in log]
        got = [it for it in receiver.named("got") if it["sender"] == "ann"]
        twice = len(got) - len({it["seq"] for it in got})
        lost = set(self.stored.items()) - {(it["message_id"], it["seq"]) for it in log}
        doubled = len(numbers) - len(set(numbers))
        note(
            **counts, said=len(self.said), stored=len(self.stored), answered_again=self.duplicates,
            acknowledged_lost=len(lost), sent_twice=doubled, delivered_twice=twice,
        )  # fmt: skip
        assert (lost, doubled, twice) == (set(), 0, 0)
        assert numbers == sorted(numbers)
        assert set(self.said) <= set(numbers)  # each message is stored before it is sent, and is sent in the end
        assert [it["n"] for it in got] == numbers
        assert [it["seq"] for it in got] == [it["seq"] for it in log]


async def read_log(host: Any, sender: str) -> list[dict[str, Any]]:
    """Return all messages of a sender in the ledger."""
    found: list[dict[str, Any]] = []
    after = 0
    while (page := await host.call("network.log", {"after": after, "limit": 500}))["messages"]:
        found += [it for it in page["messages"] if it["sender_id"] == sender]
        after = page["next"]
    return found


@asynccontextmanager
async def running_story(client: Path, scratch: Path, **options: Any) -> AsyncIterator[Story]:
    async with node_process(scratch / "node.db", **options) as node:
        node.keeps_port = True
        story = Story(client, scratch, node)
        await story.begin()
        yield story


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.timeout(1800)
async def test_no_kill_of_a_node_or_of_a_sender_loses_or_doubles_a_message(
    client: Path, tmp_path: Path, note: Note, rounds: int
) -> None:
    async with running_story(client, tmp_path) as story:
        node = story.node
        sender = await story.start_sender(node.url)
        async with running_program(client, "receiver.ts", **story.environment("ben", node.url)) as receiver:
            killed_senders = 0
            for number in range(rounds):
                await sender.heard("stored", len(sender.named("stored")) + STORED_BETWEEN)
                await receiver.heard("got", len(receiver.named("got")) + 1)
                await node.kill9()
                if number % 3 == 2:  # nobody answers now, so messages remain in the outbox
                    await sender.kill9()
                    story.note(sender)
                    sender = await story.start_sender(node.url)
                    killed_senders += 1
                await node.restart()
                if number % 4:  # otherwise the programs reconnect after their delay
                    for program in (sender, receiver):
                        program.tell(wake=True)
            await sender.heard("stored", len(sender.named("stored")) + STORED_BETWEEN)
            sender.tell(stop=True)
            assert await sender.wait() == 0, sender.errors
            story.note(sender)
            left = sender.named("began")[0]
            await story.check(receiver, note, kills=rounds, killed_senders=killed_senders, left_by_the_last=left)


async def test_what_is_said_again_after_a_lost_answer_is_there_once(client: Path, tmp_path: Path, note: Note) -> None:
    """Each connection is cut after a number of bytes of the hub's answers, mostly in the middle of an answer."""
    scripts = [(Fault("cut" if n % 2 else "reset", "down", 16_000 + 37 * n),) for n in range(5)]
    async with (
        running_story(client, tmp_path) as story,
        chaos_proxy(story.node.url, scripts) as proxy,
        running_program(client, "receiver.ts", **story.environment("ben", story.node.url)) as receiver,
    ):
        sender = await story.start_sender(proxy.url)
        async with asyncio.timeout(TIMEOUT_S):
            await proxy.is_exhausted.wait()
        sender.tell(stop=True)
        assert await sender.wait() == 0, sender.errors
        story.note(sender)
        assert story.duplicates
        await story.check(receiver, note, cuts=len(proxy.log))


@pytest.mark.parametrize("rounds", [1, pytest.param(30, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
async def test_of_nodes_that_share_a_log_the_next_one_is_gone_to_and_nothing_is_lost_or_doubled(
    client: Path, tmp_path: Path, note: Note, rounds: int
) -> None:
    """Sender and receiver know both nodes, and the leader is killed repeatedly."""
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        await find_leader(nodes)
        settings = {"NODE_URL": ",".join(it.url for it in nodes)}
        to = {"AGENT": "ann", "KIND": "human", "TOKEN": OWNER, "TO": "agent:ben", "OUTBOX": str(tmp_path / "outbox")}
        async with running_program(client, "receiver.ts", **settings, AGENT="ben", TOKEN="b" * 43) as receiver:
            await receiver.heard("began")
            async with running_program(client, "sender.ts", **settings, **to) as sender:
                for _ in range(rounds):
                    await sender.heard("stored", len(sender.named("stored")) + STORED_BETWEEN)
                    leader = await find_leader(nodes)
                    await leader.end()
                    await leader.start()
                await sender.heard("stored", len(sender.named("stored")) + STORED_BETWEEN)
                sender.tell(stop=True)
                assert await sender.wait() == 0, sender.errors
            async with join(nodes, "host") as host:
                log = await read_log(host, "ann")
                await host.send("agent:ben", {"n": "the end"})
            assert await receiver.wait() == 0, receiver.errors
    said, stored = sender.named("said"), sender.named("stored")
    numbers = [it["content"]["n"] for it in log]
    got = [it["seq"] for it in receiver.named("got") if it["sender"] == "ann"]
    note(takeovers=rounds, said=len(said), stored=len(stored), in_the_log=len(log), delivered=len(got))
    assert numbers == said
    assert {it["seq"] for it in stored} == {it["seq"] for it in log}
    assert got == [it["seq"] for it in log]


async def test_who_knows_the_old_leader_alone_goes_to_the_new_one(client: Path, tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", "b") as (_, nodes):
        old = await find_leader(nodes)
        [new] = [it for it in nodes if it is not old]
        to = {"AGENT": "ann", "KIND": "human", "TOKEN": OWNER, "TO": "agent:ann", "OUTBOX": str(tmp_path / "outbox")}
        async with running_program(client, "sender.ts", **to, NODE_URL=old.url) as sender:
            await sender.heard("stored", STORED_BETWEEN)
            pause(old)
            await find_leader([new])
            resume(old)
            await sender.heard("stored", len(sender.named("stored")) + 2 * STORED_BETWEEN)
            sender.tell(stop=True)
            assert await sender.wait() == 0, sender.errors
        async with join([new], "host") as host:
            log = await read_log(host, "ann")
    assert [it["content"]["n"] for it in log] == sender.named("said")
    assert {it["seq"] for it in sender.named("stored")} == {it["seq"] for it in log}


def test_a_message_of_which_the_disk_takes_a_part_is_refused_and_leaves_the_others_readable(
    client: Path, tmp_path: Path
) -> None:
    """A write may store only a part of its data, and report it only by the returned count."""
    script = f"""
        import {{ fileStore }} from "roundelay-client/node";
        const store = fileStore({json.dumps(str(tmp_path / "outbox"))});
        store.setItem("small", "kept");
        try {{ store.setItem("large", "x".repeat(100_000)); process.exit(3); }} catch (error) {{ console.log(error.code); }}
    """
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    command = [NODE, "--input-type=module", "--eval", script]
    done = subprocess.run(command, cwd=client, capture_output=True, text=True, timeout=30, preexec_fn=limit)
    assert (done.returncode, done.stdout.strip()) == (0, "EFBIG"), done.stderr
    [kept] = (tmp_path / "outbox").iterdir()
    assert json.loads(kept.read_text())["value"] == "kept"


async def test_a_reader_that_stands_still_is_behind_and_misses_nothing(
    client: Path, tmp_path: Path, note: Note
) -> None:
    body = "x" * 100_000
    async with running_story(client, tmp_path, durability="memory", limits={"session_queue_bytes": 65_536}) as story:
        host = await story.node.person("host")
        async with running_program(client, "receiver.ts", **story.environment("ben", story.node.url)) as receiver:
            await receiver.heard("began")
            receiver.process.send_signal(signal.SIGSTOP)
            sent = [(await host.send("agent:ben", {"n": n, "body": body}))["seq"] for n in range(150)]
            receiver.process.send_signal(signal.SIGCONT)
            await receiver.heard("got", len(sent))
            assert [it["seq"] for it in receiver.named("got")] == sent
            behind = [it for it in receiver.named("notice") if it["kind"] == "behind"]
            assert behind
            note(behind=len(behind), delivered=len(sent))
            await host.send("agent:ben", {"n": "the end"})
            assert await receiver.wait() == 0
            assert set(receiver.named("state")) <= {"ended"}  # never offline


async def test_in_another_ledger_a_reactor_begins_anew(client: Path, tmp_path: Path) -> None:
    """The fencing token and the open messages belong to the lost ledger. The client must neither be refused because
    of them nor send them to the new one.
    """
    async with running_story(client, tmp_path) as story:
        node = story.node
        host = await node.person("host")
        await host.send("agent:ben", "held")
        async with running_program(client, "reactor.ts", **story.environment("ben", node.url)) as reactor:
            [held] = await reactor.heard("got")
            await node.kill9()
            for path in find(tmp_path, "node.db*"):
                path.unlink()
            await node.restart()
            before, after = await reactor.heard("online", 2)
            assert before["epoch"] != after["epoch"]
            assert (before["fence"], after["fence"]) == (1, 1)
            assert after["cursor"]["epoch"] == after["epoch"]
            host = await node.person("host")
            sent = [(await host.send("agent:ben", text))["seq"] for text in ("anew", "the end")]
            assert await reactor.wait() == 0, reactor.errors
            got = reactor.named("got")
            assert [(it["seq"], it["was_stale"]) for it in got] == [
                (held["seq"], None),
                (sent[0], True),
                (sent[1], False),
            ]
            status = await host.call("network.message_status", {"seq": sent[1]})
            assert [it["state"] for it in status["recipients"]] == ["handled"]


def find(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


# --- types and package


def test_the_types_are_those_of_the_hub() -> None:
    written = (CLIENT / "src" / "protocol.ts").read_text(encoding="utf-8")
    assert written == write_types(), (
        "run: python -m tests.support.typescript_types > clients/typescript/src/protocol.ts"
    )


BUILT_IN = {"Record"}


def test_every_type_that_the_types_name_is_declared() -> None:
    """Without a compiler, this check finds the error `Cannot find name 'Follows'` of `tsc`."""
    written = (CLIENT / "src" / "protocol.ts").read_text(encoding="utf-8")
    code = re.sub(r'/\*.*?\*/|"(?:[^"\\]|\\.)*"', "", written, flags=re.DOTALL)
    declared = set(re.findall(r"export (?:interface|type) (\w+)", code))
    named = set(re.findall(r"\b[A-Z]\w*", code))
    assert named - declared - BUILT_IN == set()


def test_what_the_sources_import_of_the_types_is_there() -> None:
    exported = set(re.findall(r"export (?:interface|type) (\w+)", (CLIENT / "src" / "protocol.ts").read_text("utf-8")))
    found = 0
    for path in (CLIENT / "src").glob("*.ts"):
        for names in re.findall(
            r'(?:import|export) (?:type )?\{([^}]*)\} from "\./protocol\.[jt]s"', path.read_text("utf-8")
        ):
            wanted = {it.removeprefix("type ").split(" as ")[0].strip() for it in names.split(",") if it.strip()}
            assert wanted <= exported, path.name
            found += len(wanted)
    assert found > 0


async def test_a_frame_is_read_by_what_the_hub_always_gives() -> None:
    """`core/frames.js` must require the same fields of each frame as asyncapi.json, and know every kind."""
    shapes = await run_module('import { SHAPES } from "#core/frames.js";', "() => SHAPES")
    schemas = asyncapi_document()["components"]["schemas"]
    of_frames = {
        "welcome": "WelcomeFrame", "stored": "StoredFrame", "deliver": "DeliverFrame", "result": "ResultFrame",
        "error": "ErrorFrame", "signal": "SignalOutFrame", "presence": "PresenceFrame", "notice": "NoticeFrame",
        "deliver.message": "WireMessage", "welcome.network": "NetworkInfo",
    }  # fmt: skip
    assert set(shapes) == set(of_frames)
    for name, schema in of_frames.items():
        properties = schemas[schema]["properties"]
        required = {it: properties[it] for it in schemas[schema]["required"] if it != "type"}
        assert set(shapes[name]) == set(required), name
        for given, kind in shapes[name].items():
            types = required[given].get("type") or ("object" if "$ref" in required[given] else None)
            expected = types or ("string" if "enum" in required[given] else "any")
            assert kind == expected, f"{name}.{given}"


def test_the_readme_shows_the_examples_as_they_are() -> None:
    shown = re.findall(r"```(?:ts|js)\n(.*?)```", (CLIENT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    page = (CLIENT / "examples" / "page.html").read_text(encoding="utf-8")
    script = textwrap.dedent(page.partition('<script type="module">\n')[2].partition("</script>")[0])
    assert shown == [(CLIENT / "examples" / "echo.ts").read_text(encoding="utf-8"), script]


def test_nothing_is_needed_beside_it() -> None:
    told = json.loads((CLIENT / "package.json").read_text(encoding="utf-8"))
    assert "dependencies" not in told
    assert told["private"] is True
    assert "registry" not in json.dumps(told)


@pytest.mark.full
def test_the_package_is_typed_and_packed_as_its_users_have_it(client: Path, tmp_path: Path) -> None:
    """The test compiles the sources with strict TypeScript and packs them with `npm pack`. Then it checks and runs
    the test programs and the examples against the package.
    """
    modules = node_modules_of("typescript")
    tree = tmp_path / "client"
    shutil.copytree(CLIENT, tree, ignore=shutil.ignore_patterns("dist", "node_modules"))
    (tree / "node_modules").symlink_to(modules)
    tsc = [NODE, modules / "typescript" / "bin" / "tsc"]
    run(*tsc, "--project", tree)
    npm = [NODE, Path(NODE).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"]
    run(*npm, "pack", "--silent", "--pack-destination", tmp_path, cwd=tree)
    [archive] = tmp_path.glob("*.tgz")
    user = tmp_path / "user"
    user.mkdir()
    copy_programs(user)
    run(*npm, "install", "--silent", "--offline", "--no-audit", "--no-fund", "--no-package-lock", archive, cwd=user)
    installed = user / "node_modules" / "roundelay-client"
    assert not (installed / "src").exists()
    assert not [
        it for it in user.glob("node_modules/*") if it.name != "roundelay-client" and not it.name.startswith(".")
    ]
    (user / "node_modules" / "@types").symlink_to(modules / "@types")
    (user / "node_modules" / "undici-types").symlink_to(modules / "undici-types")
    options = "--noEmit --strict --module nodenext --target es2023 --lib es2024,esnext.disposable,dom --types node --noUncheckedIndexedAccess"
    run(*tsc, *options.split(), "--allowImportingTsExtensions", *find(user, "*.ts"), cwd=user)


def run(*command: Any, cwd: Path | None = None) -> None:
    path = f"{Path(NODE).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(it) for it in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
