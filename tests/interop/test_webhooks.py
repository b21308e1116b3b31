"""Tests of webhooks as a receiver gets them that has only HTTP and the official Standard Webhooks library."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from roundelay.interop.gateway import serve_gateway
from roundelay.interop.webhooks.delivery import WebhookPace
from roundelay.interop.webhooks.posts import WebhookUrl, is_public
from roundelay.network.backoff import Backoff
from roundelay.network.errors import ConfigError, InvalidArguments
from tests.interop.test_http_api import Caller, join
from tests.support.forks import Process, start_python
from tests.support.node import Node, node_process, running_node
from tests.support.payloads import PAYLOADS, find_marks
from tests.support.webhook_receiver import SECRET, Receiver
from tests.support.wire import WireSession

QUICK = WebhookPace(Backoff(0.01, 0.05, factor=1))


@asynccontextmanager
async def gateway_to(node: Node, file: Path, pace: WebhookPace = QUICK) -> AsyncIterator[httpx2.AsyncClient]:
    serving = serve_gateway(node.url, webhooks_file=file, webhook_hosts=["127.0.0.1"], pace=pace)
    async with serving as url, httpx2.AsyncClient(base_url=url, timeout=40) as http:
        yield http


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    async with made.listening():
        yield made


async def register(hook: Caller, url: str) -> dict[str, Any]:
    value: dict[str, Any] = await hook.post("/v1/webhook", {"url": url, "secret": SECRET}, 201)
    return value


async def state_of(sender: WireSession, seq: int) -> str:
    [recipient] = (await sender.call("network.message_status", {"seq": seq}))["recipients"]
    return str(recipient["state"])


async def wait_for_state(sender: WireSession, seq: int, state: str) -> None:
    async with asyncio.timeout(30):
        while await state_of(sender, seq) != state:
            pass


async def wait_for_status(hook: Caller, **wanted: Any) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            status: dict[str, Any] = await hook.get("/v1/webhook")
            if wanted.items() <= status.items():
                return status


async def test_each_message_is_posted_signed_in_order_and_handled_when_the_receiver_has_taken_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        taken = asyncio.Event()
        receiver.answers = lambda *_: 503 if not taken.is_set() else 200
        made = await register(hook, receiver.url)
        assert made.pop("secret") == SECRET
        assert await hook.get("/v1/webhook") | {"why": "", "failing_since": None} == made
        seqs = [(await mia.send("agent:hook", number))["seq"] for number in range(5)]
        await mia.send("agent:mia", "for another")
        await receiver.wait_for(3)
        # The receiver got the first message again and again, and no other one before it.
        assert set(receiver.contents()) == {0}
        # The receiver did not accept these messages, so the hub does not report them as accepted.
        assert [await state_of(mia, seq) for seq in seqs] == ["queued"] * 5
        assert (await wait_for_status(hook, why="it answered 503"))["failing_since"] is not None
        taken.set()
        await wait_for_state(mia, seqs[-1], "handled")
        assert list(dict.fromkeys(receiver.contents())) == [0, 1, 2, 3, 4]
        assert len({webhook_id for webhook_id, _ in receiver.got}) == 5  # a repeat has the ID of the first request
        _, body = receiver.got[-1]
        [message] = [it for it in (await hook.get("/v1/messages", after=0))["messages"] if it["seq"] == seqs[-1]]
        assert body["data"] == message
        assert (body["type"], body["participant"], body["network"]) == ("message", "hook", "contract")
        assert (await wait_for_status(hook, why=""))["failing_since"] is None


async def test_what_a_receiver_refuses_becomes_a_dead_letter_and_the_next_ones_come(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        receiver.answers = lambda _, body: 500 if str(body["data"]["content"]).startswith("poison") else 200
        await register(hook, receiver.url)
        poison, good = [(await mia.send("agent:hook", text))["seq"] for text in ("poison", "good")]
        await wait_for_state(mia, good, "handled")
        assert receiver.contents() == ["poison"] * 5 + ["good"]
        assert await state_of(mia, poison) == "dead"
        [letter] = (await mia.call("network.dead_letters", {"agent_id": "hook"}))["dead_letters"]
        assert (letter["seq"], letter["reason"]) == (poison, "The webhook refused it: it answered 500.")
        for number in range(4):  # four failures in a row mean that the receiver is broken
            await mia.send("agent:hook", f"poison {number}")
        status = await wait_for_status(hook, state="paused")
        assert status["why"] == "3 messages in a row were refused; it answered 500"
        receiver.answers = lambda *_: 200
        await hook.post("/v1/webhook/resume", {})
        await receiver.wait_for(6 + 15 + 1)
        assert receiver.contents()[-1] == "poison 3"


async def test_gone_ends_it_a_redirect_is_not_followed_and_a_receiver_that_is_away_for_long_is_paused(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with (
        running_node() as node,
        gateway_to(node, tmp_path / "hooks", WebhookPace(Backoff(0.01, 0.01), give_up_s=0.3)) as http,
    ):
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        receiver.answers = lambda *_: 307
        await register(hook, receiver.url)
        seq = (await mia.send("agent:hook", "x"))["seq"]
        status = await wait_for_status(hook, state="paused", why="it answered 307")
        assert {body["data"]["seq"] for _, body in receiver.got} == {seq}
        assert status["failing_since"] > 0
        assert await state_of(mia, seq) == "queued"
        receiver.answers = lambda *_: 410
        await hook.post("/v1/webhook/resume", {})
        await wait_for_status(hook, state="gone", why="it answered 410")
        receiver.answers = lambda *_: None  # the receiver closes the connection without an answer
        tried = await hook.post("/v1/webhook/test", {})
        assert tried == {"answer": "away", "told": "no answer (RemoteProtocolError)"}
        receiver.answers = lambda *_: 200
        await register(hook, receiver.url)
        await wait_for_state(mia, seq, "handled")
        assert (await hook.ask("DELETE", "/v1/webhook", 200)) == {"removed": True}
        await hook.get("/v1/webhook", 404)


async def test_one_receiver_that_hangs_harms_no_other(tmp_path: Path, receiver: Receiver) -> None:
    hanging = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hanging.wait()
        writer.close()

    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        slow, quick, mia = await join(node, http, "slow"), await join(node, http, "quick"), await node.person("mia")
        await register(slow, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook")
        await register(quick, receiver.url)
        for number in range(20):
            await mia.send("agent:slow", number)
            last = (await mia.send("agent:quick", number))["seq"]
        await wait_for_state(mia, last, "handled")
        assert receiver.contents() == list(range(20))
        hanging.set()
        server.close()


async def test_a_registration_is_durable_its_secrets_are_not_shown_and_others_see_nothing_of_it(
    tmp_path: Path, receiver: Receiver
) -> None:
    file = tmp_path / "hooks"
    async with running_node() as node:
        async with gateway_to(node, file) as http:
            hook, other, mia = await join(node, http, "hook"), await join(node, http, "other"), await node.person("mia")
            await register(hook, receiver.url)
            assert file.stat().st_mode & 0o777 == 0o600
            with pytest.raises(ConfigError, match="Another gateway uses the webhooks"):
                await gateway_to(node, file).__aenter__()
            operator = Caller(http, "mia", node.owner_token)
            assert [it["participant"] for it in (await operator.get("/v1/webhooks"))["webhooks"]] == ["hook"]
            assert (await operator.get("/v1/webhook", participant="hook"))["url"] == receiver.url
            refused = await operator.post("/v1/webhook", {"url": receiver.url}, 403)
            assert "operators' tokens must not be stored" in refused["error"]["message"]
            await other.get("/v1/webhooks", 403)
            await other.get("/v1/webhook", 403, participant="hook")
            await other.ask("DELETE", "/v1/webhook", 403, params={"participant": "hook"})
            await other.post("/v1/webhook/resume", {"participant": "hook"}, 403)
            await other.get("/v1/webhook", 404)
            told = json.dumps([await hook.get("/v1/webhook"), await operator.get("/v1/webhooks")])
            assert SECRET not in told
            assert node.tokens["hook"] not in told
            chosen = await other.post("/v1/webhook", {"url": receiver.url}, 201)
            assert chosen["secret"].startswith("whsec_")
            await other.ask("DELETE", "/v1/webhook", 200)
        seq = (await mia.send("agent:hook", "while no gateway runs"))["seq"]
        async with gateway_to(node, file):
            await wait_for_state(mia, seq, "handled")
        assert receiver.contents() == ["while no gateway runs"]


async def test_a_token_that_is_revoked_pauses_its_webhook(tmp_path: Path, receiver: Receiver) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        await register(hook, receiver.url)
        await mia.send("agent:hook", "x")
        await receiver.wait_for(1)
        await mia.call("network.revoke_token", {"agent_id": "hook"})
        operator = Caller(http, "mia", node.owner_token)
        async with asyncio.timeout(30):
            while (await operator.get("/v1/webhook", participant="hook"))["state"] != "paused":
                pass


REFUSED_URLS = (
    "http://example.org/hook", "https://127.0.0.1/hook", "https://localhost/hook", "https://[::1]/", "https://10.1.2.3/", "https://192.168.0.1/",
    "https://169.254.169.254/latest/meta-data", "https://[fe80::1]/", "https://[::ffff:127.0.0.1]/", "https://[64:ff9b::7f00:1]/", "https://[2002:7f00:1::]/", "https://[fec0::1]/", "https://[3fff::1]/", "https://[::7f00:1]/",
    "https://0x7f.1/", "https://2130706433/", "https://127.1/", "https://0.0.0.0/", "https://100.64.0.1/", "https://192.88.99.1/", "https://192.0.0.9/", "https://198.18.0.1/", "https://[2001:20::1]/", "https://[5f00::1]/", "https://224.0.0.1/", "https://user:secret@example.org/",
    "https://example.org/#part", "ftp://example.org/", "https:///hook", "file:///etc/passwd", "https://exa mple.org/", "https://example.org:99999/", "",
)  # fmt: skip


async def test_a_url_that_leads_to_this_machine_or_its_networks_is_refused(tmp_path: Path) -> None:
    async with (
        running_node() as node,
        serve_gateway(node.url, webhooks_file=tmp_path / "hooks") as url,
        httpx2.AsyncClient(base_url=url, timeout=40) as http,
    ):
        hook = await join(node, http, "hook")
        for tried in REFUSED_URLS:
            error = (await hook.post("/v1/webhook", {"url": tried}, 400))["error"]
            assert error["code"] == "invalid_arguments", tried
        await hook.get("/v1/webhook", 404)
    print(f"{len(REFUSED_URLS)} urls")
    assert is_public("93.184.215.14")
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")


@pytest.mark.parametrize("path", ["/v1/webhook", "/v1/webhook/check"])
async def test_nobody_learns_which_names_a_network_has_for_itself(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *rest: Any, **options: Any) -> Any:
        if host == "vault.corp.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", port))]
        if host == "nobody.corp.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, port, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook = await join(node, http, "hook")
        told = [
            (await hook.post(path, {"url": f"https://{name}.corp.example/"}, 400))["error"]["message"].replace(
                name, "NAME"
            )
            for name in ("vault", "nobody")
        ]
    assert told[0] == told[1]


async def test_a_name_that_changes_its_address_gains_nothing(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request resolves and checks the name again, and uses exactly the checked address."""
    answers, looked_up = ["93.184.215.14", "127.0.0.1"], []
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *rest: Any, **options: Any) -> Any:
        if host != "rebind.example":
            return real(host, port, *rest, **options)
        looked_up.append(answers.pop(0) if answers else "127.0.0.1")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (looked_up[-1], port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, mia = await join(node, http, "hook"), await node.person("mia")
        await register(hook, f"https://rebind.example:{receiver.port}/hook")
        await mia.send("agent:hook", "x")
        status = await wait_for_status(
            hook,
            why="rebind.example is unknown, or has an address that is not public. An operator may allow it in webhook_hosts.",
        )
        assert status["failing_since"] is not None
    assert looked_up[0] == "93.184.215.14"
    assert receiver.got == []
    target = WebhookUrl.read("https://rebind.example/", frozenset({"rebind.example"}))
    assert await target.find_addresses() == ["127.0.0.1"]
    with pytest.raises(InvalidArguments):
        await WebhookUrl.read("https://rebind.example/", frozenset()).find_addresses()


async def test_no_text_of_another_stands_anywhere_but_in_its_message(tmp_path: Path, receiver: Receiver) -> None:
    async with running_node() as node, gateway_to(node, tmp_path / "hooks") as http:
        hook, eve = await join(node, http, "hook"), await node.agent("eve")
        await register(hook, receiver.url)
        for text in PAYLOADS:
            await eve.send("agent:hook", text)
        await receiver.wait_for(len(PAYLOADS))
        assert receiver.contents() == list(PAYLOADS)
        for (_, body), headers in zip(receiver.got, receiver.heads, strict=True):
            assert set(find_marks(body)) == {"data.content"}
            assert not list(find_marks(headers))
            assert body["data"]["sender_id"] == "eve"
        print(f"{len(PAYLOADS)} payloads")


async def kill_in_rounds(tmp_path: Path, rounds: int, per_round: int) -> None:
    """Kill gateway, receiver and node in turn while messages arrive. The ledger shows the results."""
    rng, file, log = random.Random(5), tmp_path / "hooks", tmp_path / "taken"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own_port = free.getsockname()[1]

    async def spawn(*command: str) -> Process:
        process = await start_python(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert b"ready" in await asyncio.wait_for(process.stdout.readline(), 60)
        return process

    async def spawn_receiver() -> Process:
        return await spawn("-m", "tests.support.webhook_receiver", str(port), str(log), SECRET)

    async def spawn_gateway() -> Process:
        return await spawn(
            "-m", "roundelay", "gateway", "--node", node.url, "--port", str(own_port), "--serve", "webhooks",
            "--webhooks", str(file), "--webhook-host", "127.0.0.1",
        )  # fmt: skip

    async with AsyncExitStack() as stack:
        node = await stack.enter_async_context(node_process(tmp_path / "node.db"))
        node.keeps_port = True
        processes = {"receiver": await spawn_receiver(), "gateway": await spawn_gateway()}
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{own_port}", timeout=40) as http:
                hook = await join(node, http, "hook")
                await register(hook, f"http://127.0.0.1:{port}/hook")
                seqs: list[int] = []
                looked = ahead = 0
                for number in range(rounds):
                    mia = await node.person("mia")
                    seqs += [(await mia.send("agent:hook", f"{number}.{it}"))["seq"] for it in range(per_round)]
                    await wait_for_state(mia, seqs[-rng.randrange(1, per_round + 1)], "handled")
                    victim = ("gateway", "receiver", "node")[number % 3]
                    if victim == "node":
                        await node.kill9()
                        await node.restart()
                    else:
                        processes[victim].send_signal(signal.SIGKILL)
                        await processes[victim].wait()
                    mia = await node.person("mia")
                    for seq in seqs[-per_round:]:  # a handled message was accepted before
                        if await state_of(mia, seq) == "handled":
                            looked += 1
                            ahead += f" {seq}\n" not in log.read_text()
                    if victim == "gateway":
                        processes["gateway"] = await spawn_gateway()
                    elif victim == "receiver":
                        processes["receiver"] = await spawn_receiver()
                        # The hub delivers at once, and does not wait for the next retry.
                        await hook.post("/v1/webhook/resume", {})
                await wait_for_state(await node.person("mia"), seqs[-1], "handled")
        finally:
            for process in processes.values():
                process.kill()
                await process.wait()
    taken = [line.split() for line in log.read_text().splitlines()]
    order = list(dict.fromkeys(int(seq) for _, seq in taken))
    ids = {(webhook_id, seq) for webhook_id, seq in taken}
    print(
        f"{rounds} kills, {len(seqs)} messages, {len(taken)} posts taken, {len(taken) - len(ids)} repeats, "
        f"{looked} receipts looked at, {ahead} ahead of the truth"
    )
    assert order == seqs
    assert len(ids) == len(seqs)
    assert ahead == 0


async def test_nothing_is_lost_and_repeats_have_the_same_id_while_all_are_killed(tmp_path: Path) -> None:
    await kill_in_rounds(tmp_path, rounds=3, per_round=20)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_nothing_is_lost_in_sixty_kills(tmp_path: Path) -> None:
    await kill_in_rounds(tmp_path, rounds=60, per_round=40)
