"""Tests of remote A2A agents as participants: agents of another network, and servers made with the official SDK."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from roundelay.adapters.a2a import A2AAgent
from roundelay.agents.models.model import ModelDelta, ModelReply, ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.interop.gateway import serve_gateway
from roundelay.network.client import AnyMessage, NetworkClient, Signal
from roundelay.network.errors import ConfigError
from tests.crash.agent_process import agent_processes
from tests.support.a2a_elsewhere import sample_agent
from tests.support.agents import cancel
from tests.support.asked import invite, working
from tests.support.counts import Note
from tests.support.gateways import gateway_process
from tests.support.node import Node, node_process, running_node
from tests.support.payloads import PAYLOADS
from tests.support.remote_team import Stepped


def write_far(folder: Path, url: str, more: str = "token_env: FAR_TOKEN") -> Path:
    file = folder / "far.yaml"
    file.write_text(f"id: far\na2a: {{url: '{url}', {more}}}\n")
    return file


def read_far(folder: Path, url: str, token: str) -> A2AAgent:
    (folder / "token").write_text(f"{token}\n")
    [spec] = load_agents(write_far(folder, url, "token_file: token"))
    runner = build_runner(spec)
    assert isinstance(runner, A2AAgent)
    return runner


@asynccontextmanager
async def person(node: Node, agent_id: str = "mia") -> AsyncIterator[NetworkClient]:
    async with NetworkClient(agent_id, node.url, kind="human", token=node.owner_token) as client:
        yield client


async def ask(client: NetworkClient, text: Any, **options: Any) -> AnyMessage:
    stored = await client.send("agent:far", text, **options)
    return await hear(client, stored.seq)


async def hear(client: NetworkClient, seq: int) -> AnyMessage:
    async for delivery in client.deliveries():
        await delivery.ack()
        if delivery.message.reply_to == seq:
            return delivery.message
    raise AssertionError


async def count_online(client: NetworkClient) -> int:
    return len((await client.call("network.list_agents", {"online": True, "kind": "agent"}))["agents"])


async def test_an_agent_of_another_network_takes_part(tmp_path: Path) -> None:
    model = Stepped()
    async with asyncio.timeout(40), running_node() as there, running_node() as here, serve_gateway(there.url) as url:
        token = await invite(there, "ui")
        bob = SimpleAgentRunner("bob", instruction="", description="Digs", tags=["garden"], model=model)
        far = read_far(tmp_path, f"{url}/a2a/bob", token)
        async with working(there, bob), person(here) as mia, person(there, "ann") as ann:
            await far.prepare()
            async with working(here, far):
                [card] = [
                    it["card"] for it in (await mia.call("network.list_agents"))["agents"] if it["agent_id"] == "far"
                ]
                assert (card["description"], "garden" in card["tags"]) == ("Digs", True)
                await mia.call("network.watch", {"signals": True})
                asking = asyncio.create_task(ask(mia, "dig", conversation="tea"))
                (await model.asked.get())(ModelDelta(text="There is"))
                async for event in mia.events():
                    if isinstance(event, Signal) and event.kind == "delta":
                        assert [it["text"] for it in event.body["pieces"]] == ["There is"]
                        break
                model.reply.put_nowait(ModelReply("There is gold."))
                answer = await asking
                assert (answer.text, answer.sender_id, answer.thread_id) == (
                    "There is gold.",
                    "far",
                    "direct:far~mia:tea",
                )
                asking = asyncio.create_task(ask(mia, "more?", conversation="tea"))
                await model.asked.get()
                model.reply.put_nowait(ModelReply("No."))
                await asking
                [thread] = (await ann.call("network.list_threads"))["threads"]  # one context for one thread
                told = [it.text for it in (await ann.history(thread["thread_id"])).messages]
                assert told == ["dig", "There is gold.", "more?", "No."]
                stored = await mia.send("agent:far", "for ever", conversation="tea")
                await model.asked.get()
                status = await mia.call("network.message_status", {"seq": stored.seq})
                await cancel(mia, reaction=status["recipients"][0]["reaction"])
                while (await ann.call("network.open_reactions", {"agent_id": "bob"}))["reactions"]:
                    pass
                seq = (await ann.history(thread["thread_id"])).messages[-1].seq
                ended = (await ann.call("network.message_status", {"seq": seq}))["recipients"][0]
                assert ended["reaction_status"] == "cancelled"


async def test_an_agent_elsewhere_that_asks_back_is_answered_in_its_task(tmp_path: Path) -> None:
    async with asyncio.timeout(40), sample_agent("secret") as (url, sample), running_node() as here:
        for number, (said, answered) in enumerate([("ask", "Which one?"), ("the red one", "I heard the red one")]):
            far = read_far(tmp_path, url, "secret")  # a new process of the agent handles each message
            async with working(here, far), person(here) as mia:
                assert (await ask(mia, said, conversation="tea")).text == answered, number
        assert [said for _, said in sample.heard] == ["ask", "the red one"]
        assert len({context for context, _ in sample.heard}) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_server_of_the_sdks_own_kind_is_asked(tmp_path: Path, streaming: bool) -> None:
    async with (
        asyncio.timeout(60),
        sample_agent("secret", streaming=streaming) as (url, sample),
        running_node() as here,
        person(here) as mia,
    ):
        far = read_far(tmp_path, url, "secret")
        async with working(here, far):
            assert (await ask(mia, "hello")).text == "Hello World"
            assert (await ask(mia, "seventeen")).text == "I heard seventeen"
            failed = await ask(mia, "fail")
            assert failed.text == "far cannot answer right now; the operator has been notified."
            for payload in PAYLOADS[28:] if streaming else PAYLOADS[:2]:
                answer = await ask(mia, payload)
                assert (answer.sender_id, answer.kind, answer.metadata) == ("far", "direct", None)
                assert answer.text.startswith("I heard")
        contexts = {context for context, _ in sample.heard}
        assert len(contexts) == 1
        closed = read_far(tmp_path, url, "wrong")
        async with working(here, closed):
            assert "cannot answer right now" in (await ask(mia, "hello")).text


async def test_a_card_that_names_another_host_is_not_given_the_token(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(40),
        sample_agent("secret") as (other, heard),
        sample_agent("secret", card_url=f"{other}/") as (url, _),
        running_node() as here,
        working(here, read_far(tmp_path, url, "secret")),
        person(here) as mia,
    ):
        assert "cannot answer right now" in (await ask(mia, "hello")).text
    assert heard.heard == []


REFUSED = {
    "no address": ("a2a: {url: 'far.example'}", "must be http://HOST"),
    "a password": ("a2a: 'https://me:secret@far.example'", "without a user name or a password"),
    "open to all": ("a2a: {url: 'http://far.example', token_env: FAR_TOKEN}", "must be https://"),
    "a model of its own": ("a2a: 'https://far.example'\nmodel: {rules: []}", "has a2a, so it cannot have model"),
    "nothing at all": ("description: x", "needs instruction and model, or a2a"),
    "two tokens there": (
        "a2a: {url: 'https://far.example', token_env: TWO_TOKENS}",
        "TWO_TOKENS has a line break in its middle",
    ),
    "no token there": (
        "a2a: {url: 'https://far.example', token_env: NO_SUCH_TOKEN}",
        "variable NO_SUCH_TOKEN is missing or empty",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_file_is_refused_with_its_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWO_TOKENS", "secret\nsecret")
    text, sentence = REFUSED[name]
    file = tmp_path / "far.yaml"
    file.write_text(f"id: far\n{text}\n")
    with pytest.raises(ConfigError, match=sentence) as refused:
        build_runner(load_agents(file)[0])
    assert refused.value.line is not None


@pytest.mark.full
async def test_killed_in_the_middle_it_asks_for_the_task_that_it_has_begun(tmp_path: Path) -> None:
    """First the agent's process is killed, and then the remote gateway. The remote side gets one message, and this
    side one answer.
    """
    model = Stepped()
    async with (
        asyncio.timeout(90),
        running_node() as there,
        node_process(tmp_path / "here.db") as here,
        gateway_process(there.url) as gateway,
        working(there, SimpleAgentRunner("bob", instruction="", model=model)),
    ):
        token = await invite(there, "ui")
        file = write_far(tmp_path, f"http://127.0.0.1:{gateway.port}/a2a/bob")
        async with (
            agent_processes(tmp_path, FAR_TOKEN=token) as agents,
            person(here) as mia,
            person(there, "ann") as ann,
        ):
            alive = await agents.launch(file, here.url)
            while await count_online(mia) == 0:
                pass
            stored = await mia.send("agent:far", "dig")
            await model.asked.get()
            await alive.kill()
            alive = await agents.launch(file, here.url)
            while await count_online(mia) == 0:
                pass
            await gateway.kill()
            await gateway.start()
            model.reply.put_nowait(ModelReply("There is gold."))
            assert (await hear(mia, stored.seq)).text == "There is gold."
            said = [it.text for it in (await mia.history("direct:far~mia")).messages]
            assert said == ["dig", "There is gold."]
            [thread] = (await ann.call("network.list_threads"))["threads"]
            assert [it.text for it in (await ann.history(thread["thread_id"])).messages] == ["dig", "There is gold."]
            await alive.kill()


async def test_killed_in_the_middle_it_asks_a_server_that_knows_no_repeats_once(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(60),
        sample_agent("secret") as (url, sample),
        running_node() as here,
        agent_processes(tmp_path, FAR_TOKEN="secret") as agents,
        person(here) as mia,
    ):
        file = write_far(tmp_path, url)
        alive = await agents.launch(file, here.url)
        while await count_online(mia) == 0:
            pass
        stored = await mia.send("agent:far", "slow")
        while not (records := await read_records(mia, stored.seq)) or records[-1]["kind"] != "note":
            pass  # the task's ID is stored last
        await alive.kill()
        alive = await agents.launch(file, here.url)
        sample.may_answer.set()
        assert (await hear(mia, stored.seq)).text == "I heard slow"
        assert [said for _, said in sample.heard] == ["slow"]
        await alive.kill()


async def read_records(client: NetworkClient, seq: int) -> list[dict[str, Any]]:
    [recipient] = (await client.call("network.message_status", {"seq": seq}))["recipients"]
    if "reaction" not in recipient:
        return []
    found = await client.call("network.records", {"reaction": recipient["reaction"], "agent_id": "far"})
    return [it for it in found["records"] if "continues" not in str(it["body"])]


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_each_message_is_one_there_and_one_answer_here_whatever_is_killed(tmp_path: Path, note: Note) -> None:
    random, rounds, at_once = Random(11), 30, 3

    async def script(request: ModelRequest) -> str:
        await asyncio.sleep(0.2)
        return f"I hear {read_prompt(request).incoming_text}"

    async with (
        running_node() as there,
        node_process(tmp_path / "here.db") as here,
        gateway_process(there.url) as gateway,
        working(there, SimpleAgentRunner("bob", instruction="", model=ScriptedModel(script))),
    ):
        here.keeps_port = True
        token = await invite(there, "ui")
        file = write_far(tmp_path, f"http://127.0.0.1:{gateway.port}/a2a/bob")
        async with agent_processes(tmp_path, FAR_TOKEN=token) as agents, person(there, "ann") as ann:
            alive = await agents.launch(file, here.url)
            async with person(here) as mia:
                while await count_online(mia) == 0:
                    pass
                answered = dict[int, list[str]]()
                for number in range(rounds):
                    waiting = [
                        (await mia.send("agent:far", f"{number}-{place}", conversation=f"c{place}")).seq
                        for place in range(at_once)
                    ]
                    await asyncio.sleep(random.random() * 0.5)
                    match ("agent", "gateway", "node")[number % 3]:
                        case "agent":
                            await alive.kill()
                            alive = await agents.launch(file, here.url)
                        case "gateway":
                            await gateway.kill()
                            await gateway.start()
                        case _:
                            await here.kill9()
                            await here.restart()
                    async for delivery in mia.deliveries():
                        await delivery.ack()
                        answered.setdefault(delivery.message.reply_to or 0, []).append(delivery.message.text)
                        if all(seq in answered for seq in waiting):
                            break
            await alive.kill()
            wanted = [f"I hear {number}-{place}" for number in range(rounds) for place in range(at_once)]
            odd = {seq: texts for seq, texts in answered.items() if not texts[0].startswith("I hear")}
            assert odd == {}, [[line for line in it.told().splitlines() if "reach" in line][:3] for it in agents.lives]
            assert sorted(text for texts in answered.values() for text in texts) == sorted(wanted)
            told = list[str]()
            for thread in (await ann.call("network.list_threads"))["threads"]:
                told += [it.text for it in (await ann.history(thread["thread_id"], limit=500)).messages]
            assert sorted(told) == sorted([*wanted, *(it.removeprefix("I hear ") for it in wanted)])
    note(kills=rounds, messages=len(wanted), lost=0, doubled=0)
