"""Test of kills of the node, the gateway and the agent during completions: each key has one message and one answer."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI

from roundelay.network.client import NetworkClient
from tests.crash.agent_process import AgentProcess, AgentProcesses, agent_processes
from tests.support.asked import invite
from tests.support.counts import Note
from tests.support.fake_openai import FakeOpenAI, Reply, text
from tests.support.gateways import GatewayProcess, gateway_process
from tests.support.node import ProcessNode, node_process
from tests.support.openai_rules import Body

ROUNDS = 36
AT_ONCE = 4
VICTIMS = ("node", "gateway", "agent")
AGENT = 'id: bob\ninstruction: Answer.\nmodel: {{openai: {{name: fake, base_url: "{base_url}"}}}}\n'


async def ask(client: AsyncOpenAI, key: str, *, stream: bool) -> str:
    """Repeat a request with its key until it gets an answer."""
    messages = [{"role": "user", "content": f"question {key}"}]
    while True:
        try:
            answer = await client.chat.completions.create(
                model="bob", messages=messages, stream=stream, extra_headers={"Idempotency-Key": key}
            )  # type: ignore[call-overload]  # a dict is a message
            if not stream:
                return str(answer.choices[0].message.content)
            said = ""
            async for chunk in answer:
                said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                if chunk.choices and chunk.choices[0].finish_reason == "stop":
                    return said  # if this chunk is missing, the connection was lost
        except APIStatusError as error:
            if error.status_code != 503:
                raise
        except APIError:
            pass  # the gateway is down, so the client retries
        await asyncio.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_a_key_gives_one_message_and_one_answer_whatever_is_killed(tmp_path: Path, note: Note) -> None:
    random, asked = Random(7), Counter[str]()

    def script(body: Body) -> Reply:
        # Earlier questions of the caller come before the last one.
        key = re.findall(r"question (k-[\w-]+)", str(body["messages"]))[-1]
        asked[key] += 1  # a repeated request gives another answer, so the ledger shows which one was used
        return text(f"answer {asked[key]} to {key}", delay_s=0.15)

    async with FakeOpenAI(script) as model, node_process(tmp_path / "node.db") as node:
        node.keeps_port = True
        file = tmp_path / "bob.yaml"
        file.write_text(AGENT.format(base_url=model.base_url))
        token = await invite(node, "ui")
        async with gateway_process(node.url) as gateway, agent_processes(tmp_path) as agents:
            alive = await agents.launch(file, node.url)
            client = AsyncOpenAI(api_key=token, base_url=f"http://127.0.0.1:{gateway.port}/v1", max_retries=0)
            assert await ask(client, "k-0", stream=False) == "answer 1 to k-0"
            answers: dict[str, str] = {}
            for number in range(ROUNDS):
                keys = [f"k-{number}-{place}" for place in range(AT_ONCE)]
                asking = [
                    asyncio.create_task(ask(client, key, stream=place % 2 == 0)) for place, key in enumerate(keys)
                ]
                await asyncio.sleep(random.random() * 0.4)
                alive = await kill(VICTIMS[number % len(VICTIMS)], node, gateway, agents, alive, file)
                answers |= zip(keys, await asyncio.gather(*asking), strict=True)
                # All processes are up again.
                answers[f"k-{number}-then"] = await ask(client, f"k-{number}-then", stream=False)
            streamed = 0
            for key, answer in answers.items():
                again = await ask(client, key, stream=False)
                streamed += again != answer
                assert answer.endswith(again), key  # a stream may also contain text from before a kill
            await client.close()
            secret = token.partition(":")[2]
            async with NetworkClient("ui", node.url, kind=None, token=secret, deliver=False) as ledger:
                stored, replies = await read_all(ledger)
    assert stored == Counter(dict.fromkeys([*answers, "k-0"], 1))
    assert replies == Counter(dict.fromkeys([*answers, "k-0"], 1))
    twice = sum(count > 1 for count in asked.values())
    note(kills=ROUNDS, keys=len(answers), asked_again=twice, shown_with_what_was_begun=streamed)


async def kill(
    victim: str, node: ProcessNode, gateway: GatewayProcess, agents: AgentProcesses, alive: AgentProcess, file: Path
) -> AgentProcess:
    if victim == "node":
        await node.kill9()
        await node.restart()
    elif victim == "gateway":
        await gateway.kill()
        await gateway.start()
    else:
        await alive.kill()
        return await agents.launch(file, node.url)
    return alive


async def read_all(ledger: NetworkClient) -> tuple[Counter[str], Counter[str]]:
    """Return how often each key's question is stored, and how often it is answered."""
    stored, replies = Counter[str](), Counter[str]()
    before, has_more = None, True
    while has_more:
        args = {"limit": 100} | ({"before": before} if before is not None else {})
        page = await ledger.call("network.list_threads", args)
        for thread in page["threads"]:
            before = thread["last_seq"]
            messages = (await ledger.history(thread["thread_id"])).messages
            keys = {it.seq: it.message_id for it in messages if it.sender_id == "ui"}
            stored.update(keys.values())
            replies.update(keys[it.reply_to] for it in messages if it.reply_to in keys)
        has_more = page["has_more"]
    return stored, replies
