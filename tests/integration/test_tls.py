"""Tests of a node with TLS: the clients that can reach it, the errors of others, and that nothing else changes."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path

import pytest

from roundelay.app import serve
from roundelay.network.client import NetworkClient
from roundelay.network.config import NodeConfig
from roundelay.network.errors import ConfigError, ConnectError
from roundelay.network.home import announce_node, running_nodes
from roundelay.network.tls import read_certificate, server_context
from roundelay.nodes.up import load_tls
from tests.support.certificates import make_certificate
from tests.support.command import command, invoke, run

AGENT = "port: 0\nagents: [{id: bob, instruction: Greet., model: {rules: [{do: [{say: 'bob heard {{ text }}'}]}]}}]\n"
TIMEOUT_S = 20.0


async def test_commands_and_agents_of_this_machine_reach_their_node_by_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").write_text(AGENT)
    # The certificate names a host other than its address.
    certificate, key = make_certificate(tmp_path, name="DNS:hub.example")
    # Other machines may connect, and with TLS this needs no further flag.
    async with command("up", "--host", "0.0.0.0", "--tls-cert", certificate, "--tls-key", key, cwd=tmp_path) as up:
        ready = await up.line(r"^Roundelay is ready at (wss://0\.0\.0\.0:(\d+)/) .*agents bob\)")
        url = f"wss://127.0.0.1:{ready[2]}/"
        assert [node.url for node in running_nodes()] == [url]
        async with asyncio.timeout(TIMEOUT_S), NetworkClient("mia", url, kind="human") as mia:
            await mia.send_text("bob", "hello")
            async for message in mia:
                assert message.text == "bob heard hello"
                break
        stranger = {"ROUNDELAY_HOME": str(tmp_path / "elsewhere")}
        listed, plain, unknown, misnamed = await asyncio.gather(
            invoke("agents"),
            invoke("agents", "--url", url.replace("wss:", "ws:"), code=3),
            invoke("agents", "--url", url, code=3, **stranger),
            invoke("agents", "--url", url, code=3, **stranger, SSL_CERT_FILE=str(certificate)),
        )
        assert "bob" in listed.out
        assert "write wss://" in plain.err
        assert "not trusted here" in unknown.err
        assert "SSL_CERT_FILE" in unknown.err
        assert "for another name" in misnamed.err
        await up.stop()
        assert up.errors == [], "clients that cannot connect are no news"


async def test_another_machine_trusts_it_by_ssl_cert_file(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    config = {"ROUNDELAY_TLS_CERT": str(certificate), "ROUNDELAY_TLS_KEY": str(key)}
    async with command("up", "--port", "0", cwd=tmp_path, **config) as up:
        url = (await up.line(r"ready at (wss://\S+) "))[1]
        token = json.loads((await invoke("token", "create", "eve", "--kind", "human", "--json")).out)["token"]
        stranger = {"ROUNDELAY_HOME": str(tmp_path / "elsewhere"), "SSL_CERT_FILE": str(certificate)}
        identity = ("--url", url, "--as", "eve", "--token", token)
        sent, status = await asyncio.gather(
            invoke("send", "broadcast", "hi", *identity, **stranger),
            invoke("status", "--over", "0.1", *identity, **stranger),
        )
        assert sent.out.startswith("Stored as #")
        assert "sessions" in status.out, "what everyone may see comes over https"
        await up.stop()


async def test_what_is_written_fast_arrives_whole_and_in_order(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    config = NodeConfig(port=0, db=tmp_path / "x.db", durability="memory")
    async with serve(config, tls=server_context(certificate, key)) as node:
        note = announce_node(node.url, tmp_path / "x.db.owner", certificate=read_certificate(certificate))
        async with (
            asyncio.timeout(TIMEOUT_S),
            NetworkClient("zoe", node.url, kind="human") as zoe,
            NetworkClient("bob", node.url) as bob,
        ):
            sizes = [number * 997 % 60_000 for number in range(400)]
            sending = asyncio.gather(*(zoe.send_text("bob", f"{n} {'x' * size}") for n, size in enumerate(sizes)))
            received: list[str] = []
            async for message in bob:
                received.append(message.text)
                if len(received) == len(sizes):
                    break
            await sending
        note.unlink()
    assert received == [f"{n} {'x' * size}" for n, size in enumerate(sizes)]


async def test_a_client_for_tls_says_so_when_nothing_is_encrypted(tmp_path: Path) -> None:
    async with serve(NodeConfig(port=0, db=tmp_path / "x.db", durability="memory")) as node:
        client = NetworkClient("bob", node.url.replace("ws:", "wss:"))
        with pytest.raises(ConnectError, match="write ws://"):
            await client.connect()


def test_only_the_nodes_own_certificate_is_taken_for_it(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other, _ = make_certificate(tmp_path, stem="other")
    chain = tmp_path / "chain.pem"
    chain.write_text(certificate.read_text() + other.read_text())
    assert read_certificate(chain) == certificate.read_text(), "an issuer in the chain is not the node"
    assert isinstance(server_context(chain, key), ssl.SSLContext)


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("cert.pem", "other.pem", "other.pem does not belong to the certificate"),
        ("cert.pem", "missing.pem", "Cannot read the private key"),
        ("missing.pem", "key.pem", "Cannot read the certificate"),
        ("key.pem", "key.pem", "contains no certificate"),
        ("cert.pem", "cert.pem", "contains no private key"),
        ("cert.pem", "locked.pem", "is encrypted"),
        (".", "key.pem", "Is a directory"),
        ("cert.pem", None, "needs tls_key too"),
        (None, "key.pem", "needs tls_cert too"),
    ],
)
def test_files_that_are_wrong_are_named(tmp_path: Path, cert: str | None, key: str | None, said: str) -> None:
    made = make_certificate(tmp_path)
    made[0].rename(tmp_path / "cert.pem")
    made[1].rename(tmp_path / "key.pem")
    make_certificate(tmp_path, stem="x")[1].rename(tmp_path / "other.pem")
    (tmp_path / "locked.pem").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    paths = {"tls_cert": cert, "tls_key": key}
    config = NodeConfig.model_validate({name: tmp_path / path for name, path in paths.items() if path is not None})
    with pytest.raises(ConfigError, match=said):
        load_tls(config)


async def test_a_wrong_pair_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "roundelay.yaml").write_text("port: 0\ntls_cert: cert.pem\n")
    done = await run("up", "--port", "0", cwd=tmp_path, code=2)
    assert done.err == "Error: tls_cert (cert.pem) needs tls_key too: the certificate's private key.\n"
    checks = json.loads((await invoke("doctor", "--json", cwd=tmp_path, code=1)).out)["checks"]
    assert [check["name"] for check in checks if check["status"] == "failed"] == ["tls"]
