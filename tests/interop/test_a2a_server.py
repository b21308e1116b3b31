"""Tests of agents as A2A servers: the official client talks to them over both bindings, and the ledger matches its
results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError, AgentCardResolutionError
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskNotFoundError,
    TaskState,
    UnsupportedOperationError,
)
from a2a.utils.errors import A2AError, InvalidParamsError, TaskNotCancelableError

from roundelay.agents.models.model import Model, ModelDelta, ModelReply, ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import ScriptedModel, call, finish
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.tools import tool
from roundelay.interop.a2a.parts import make_parts, read_json, read_parts
from roundelay.interop.gateway import serve_gateway
from roundelay.interop.session_pool import MAX_CALLS
from roundelay.network.client import NetworkClient
from tests.support.a2a_kit_agent import kit_agent
from tests.support.asked import invite, working
from tests.support.gateways import gateway_process
from tests.support.node import Node, running_node
from tests.support.payloads import PAYLOADS, find_marks
from tests.support.remote_team import Stepped

BINDINGS = ("JSONRPC", "HTTP+JSON")


@asynccontextmanager
async def official(url: str, token: str, *, binding: str = "JSONRPC", streaming: bool = True) -> AsyncIterator[Client]:
    """Open the official client for one agent's card."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=20) as http:
        config = ClientConfig(httpx_client=http, streaming=streaming, supported_protocol_bindings=[binding])
        async with await ClientFactory(config).create_from_url(url) as client:
            yield client


@dataclass
class Desk:
    """A caller, the gateway, and a session with which the test reads the ledger."""

    node: Node
    url: str
    token: str
    ledger: NetworkClient

    def official(self, agent_id: str = "bob", **options: Any) -> Any:
        return official(f"{self.url}/a2a/{agent_id}", self.token, **options)


@asynccontextmanager
async def desk(model: Model | Callable[[ModelRequest], Any] | None, *, timeout_s: float = 40) -> AsyncIterator[Desk]:
    """Run the agent bob with this model, or the agent of the compatibility kit if there is no model."""
    async with asyncio.timeout(timeout_s), running_node() as node, serve_gateway(node.url) as url:
        token = await invite(node, "ui")
        made = model if hasattr(model, "complete") else ScriptedModel(model) if model is not None else None
        runners = [SimpleAgentRunner("bob", instruction="", description="Hears", model=made)] if made else []
        async with (
            working(node, *runners),
            NetworkClient("ui", node.url, kind=None, token=token.partition(":")[2], deliver=False) as ledger,
        ):
            yield Desk(node, url, token, ledger)


def hears(request: ModelRequest) -> Any:
    said = read_prompt(request).incoming_text
    return finish() if said == "nothing to say" else f"I hear {said}"


def say(text: str, message_id: str = "m-1", **more: str) -> SendMessageRequest:
    message = Message(message_id=message_id, role=Role.ROLE_USER, parts=[Part(text=text)], **more)
    return SendMessageRequest(message=message)


async def tell(client: Client, request: SendMessageRequest) -> list[StreamResponse]:
    return [it async for it in client.send_message(request)]


def assemble(events: list[StreamResponse]) -> Task:
    """Return the task that a client has after all updates, by the specification."""
    task = Task()
    artifacts: dict[str, list[Part]] = {}
    for event in events:
        if event.HasField("task"):
            task.CopyFrom(event.task)
            artifacts = {it.artifact_id: list(it.parts) for it in task.artifacts}
        elif event.HasField("status_update"):
            task.status.CopyFrom(event.status_update.status)
        elif event.HasField("artifact_update"):
            update = event.artifact_update
            known = artifacts.get(update.artifact.artifact_id, []) if update.append else []
            artifacts[update.artifact.artifact_id] = [*known, *update.artifact.parts]
    del task.artifacts[:]
    for artifact_id, parts in artifacts.items():
        task.artifacts.add(artifact_id=artifact_id, parts=parts)
    return task


async def until_piece(events: AsyncIterator[StreamResponse]) -> list[StreamResponse]:
    """Return the events up to the first piece of an artifact. The working state may come as an event or with the
    task.
    """
    seen = [await anext(events)]
    while not seen[-1].HasField("artifact_update"):
        assert seen[-1].status_update.status.state == TaskState.TASK_STATE_WORKING
        seen.append(await anext(events))
    return seen


def texts(task: Task) -> list[str]:
    return ["".join(part.text for part in it.parts) for it in task.artifacts]


def state(task: Task) -> str:
    return TaskState.Name(task.status.state).removeprefix("TASK_STATE_")


@pytest.mark.parametrize("binding", BINDINGS)
async def test_the_official_client_asks_in_a_context_and_finds_its_tasks_again(binding: str) -> None:
    async with desk(hears) as it:
        for streaming in (False, True):
            context = f"tea-{streaming}".lower()
            async with it.official(binding=binding, streaming=streaming) as client:
                one = assemble(await tell(client, say("one", f"one-{streaming}", context_id=context)))
                two = assemble(await tell(client, say("two", f"two-{streaming}", context_id=context)))
                assert [(state(task), texts(task)) for task in (one, two)] == [
                    ("COMPLETED", ["I hear one"]),
                    ("COMPLETED", ["I hear two"]),
                ]
                again = assemble(await tell(client, say("one", f"one-{streaming}", context_id=context)))
                assert (again.id, texts(again)) == (one.id, ["I hear one"])  # a repeat refers to the same task
                found = await client.get_task(GetTaskRequest(id=one.id))
                assert (found.context_id, texts(found), [part.text for part in found.history[0].parts]) == (
                    context,
                    ["I hear one"],
                    ["one"],
                )
                listed = await client.list_tasks(ListTasksRequest(context_id=context, page_size=1))
                assert ([task.id for task in listed.tasks], listed.total_size) == ([two.id], 2)
                rest = await client.list_tasks(ListTasksRequest(context_id=context, page_token=listed.next_page_token))
                assert ([task.id for task in rest.tasks], rest.next_page_token) == ([one.id], "")
                silent = assemble(await tell(client, say("nothing to say", f"silent-{streaming}", context_id=context)))
                assert (state(silent), texts(silent)) == ("COMPLETED", [])
                [why] = silent.status.message.parts
                assert why.text == "It has finished without an answer."
            thread = await it.ledger.history(f"direct:bob~ui:{context}")
            told = ["one", "I hear one", "two", "I hear two", "nothing to say"]
            assert [message.text for message in thread.messages] == told
            assert thread.messages[0].message_id == f"one-{streaming}"
        page = await it.ledger.call("network.receive", {"peek": True})
        while page["messages"]:  # messages count as handled once the client has received them
            page = await it.ledger.call("network.receive", {"peek": True})


async def test_the_card_says_what_the_agent_says_of_itself_and_that_it_takes_a_token() -> None:
    async with desk(hears) as it, httpx.AsyncClient(headers={"Authorization": f"Bearer {it.token}"}) as http:
        card = await A2ACardResolver(http, f"{it.url}/a2a/bob").get_agent_card()
        assert (card.name, card.description) == ("bob", "Hears")
        assert [(one.protocol_binding, one.protocol_version) for one in card.supported_interfaces] == [
            ("JSONRPC", "1.0"),
            ("HTTP+JSON", "1.0"),
        ]
        assert (card.capabilities.streaming, card.capabilities.push_notifications) == (True, False)
        assert [list(one.schemes) for one in card.security_requirements] == [["token"]]
        for agent_id in ("nobody", "ui"):  # the caller is not an agent
            with pytest.raises(AgentCardResolutionError) as refused:
                await A2ACardResolver(http, f"{it.url}/a2a/{agent_id}").get_agent_card()
            assert refused.value.status_code == 404


async def test_a_task_is_its_callers_alone() -> None:
    async with desk(hears) as it, it.official() as client:
        task = assemble(await tell(client, say("secret")))
        stranger = await invite(it.node, "eve")
        async with official(f"{it.url}/a2a/bob", stranger) as other:
            for asking in (
                other.get_task(GetTaskRequest(id=task.id)),
                other.cancel_task(CancelTaskRequest(id=task.id)),
                tell(other, say("and?", task_id=task.id)),
                anext(aiter(other.subscribe(SubscribeToTaskRequest(id=task.id)))),
            ):
                with pytest.raises(TaskNotFoundError):
                    await asking
            assert list((await other.list_tasks(ListTasksRequest())).tasks) == []
            assert list((await other.list_tasks(ListTasksRequest(context_id=task.context_id))).tasks) == []
        for header in ("", "Bearer x", f"Bearer eve:{it.token.partition(':')[2]}", "Bearer ui:x"):
            async with httpx.AsyncClient(headers={"Authorization": header} if header else {}) as http:
                for answer in (
                    await http.get(f"{it.url}/a2a/bob/.well-known/agent-card.json"),
                    await http.get(f"{it.url}/a2a/bob/tasks/{task.id}", headers={"A2A-Version": "1.0"}),
                    await http.post(f"{it.url}/a2a/bob/", json={"jsonrpc": "2.0", "id": 1, "method": "ListTasks"}),
                ):
                    assert (answer.status_code, "WWW-Authenticate" in answer.headers) == (401, True)


async def test_what_is_wrong_is_said_as_the_protocol_says_it() -> None:
    async with desk(hears) as it, it.official() as client:
        done = assemble(await tell(client, say("one", context_id="tea")))
        refused: list[tuple[type[A2AError], SendMessageRequest]] = [
            (UnsupportedOperationError, say("more", "m-2", task_id=done.id)),
            (InvalidParamsError, say("more", "m-2", task_id=done.id, context_id="coffee")),
            (TaskNotFoundError, say("more", "m-2", task_id="7-0123456789abcdef")),
            (InvalidParamsError, say("more", "m-2", context_id="Tea time")),
            (InvalidParamsError, say("more", "mü")),
            (InvalidParamsError, SendMessageRequest(message=Message(message_id="m-2", role=Role.ROLE_AGENT, parts=[Part(text="x")]))),
            (InvalidParamsError, SendMessageRequest(message=Message(message_id="m-2", role=Role.ROLE_USER, parts=[Part()]))),
            (InvalidParamsError, say("x" * 300_000, "m-2")),
        ]  # fmt: skip
        for kind, request in refused:
            with pytest.raises(kind) as told:
                await tell(client, request)
            assert len(told.value.message) > 15
        with pytest.raises(TaskNotCancelableError):
            await client.cancel_task(CancelTaskRequest(id=done.id))
        with pytest.raises(UnsupportedOperationError):
            await anext(aiter(client.subscribe(SubscribeToTaskRequest(id=done.id))))
        async with it.official() as other:
            # A different message under a known ID.
            assert texts(assemble(await tell(other, say("two")))) == ["I hear two"]
        [thread] = [
            one
            for one in (await it.ledger.call("network.list_threads"))["threads"]
            if one["thread_id"].endswith(":tea")
        ]
        assert thread["messages"] == 2


async def test_a_task_streams_is_cancelled_and_says_so() -> None:
    model = Stepped()
    async with desk(model) as it, it.official() as client:
        events = aiter(client.send_message(say("dig")))
        task = (await anext(events)).task
        (await model.asked.get())(ModelDelta(text="There is"))
        piece = (await until_piece(events))[-1].artifact_update
        assert (piece.artifact.parts[0].text, piece.append, piece.last_chunk) == ("There is", False, False)
        cancelled = await client.cancel_task(CancelTaskRequest(id=task.id))
        rest = [event async for event in events]
        assert (state(cancelled), rest[-1].status_update.status.state) == ("CANCELED", TaskState.TASK_STATE_CANCELED)
        assert state(await client.get_task(GetTaskRequest(id=task.id))) == "CANCELED"
        events = aiter(client.send_message(say("again", "m-2")))
        seen = [await anext(events)]
        show = await model.asked.get()
        for piece in ("There", " is"):
            show(ModelDelta(text=piece))
            seen += await until_piece(events)
        model.reply.put_nowait(ModelReply("There is gold."))
        seen += [event async for event in events]
        assert texts(assemble(seen)) == ["There is gold."]


async def test_a_call_that_waits_for_a_person_is_not_decided_by_a_client() -> None:
    dug = list[str]()

    @tool(needs_approval=True)
    def dig(place: str) -> str:
        """Dig."""
        dug.append(place)
        return "gold"

    def script(request: ModelRequest) -> Any:
        return call("dig", place="garden") if len(request.messages) < 3 else "Done"

    async with asyncio.timeout(40), running_node() as node, serve_gateway(node.url) as url:
        token = await invite(node, "mia", kind="human")
        bob = SimpleAgentRunner("bob", instruction="", model=ScriptedModel(script), tools=[dig])
        async with working(node, bob), official(f"{url}/a2a/bob", token) as client:
            waiting = assemble(await tell(client, say("dig", context_id="tea")))
            assert state(waiting) == "AUTH_REQUIRED"
            for number, text in enumerate(("/approve", "/approve always", "yes")):
                assert (
                    state(assemble(await tell(client, say(text, f"d-{number}", task_id=waiting.id)))) == "AUTH_REQUIRED"
                )
            person = NetworkClient("mia", node.url, kind=None, token=token.partition(":")[2])
            async with person:
                [asked] = (await person.call("network.approvals"))["approvals"]
                assert not dug
                listening = aiter(client.subscribe(SubscribeToTaskRequest(id=waiting.id)))
                assert state((await anext(listening)).task) == "AUTH_REQUIRED"
                await person.send("agent:bob", "/deny", reply_to=asked["seq"])
                async for event in listening:
                    if event.HasField("artifact_update"):
                        break
        assert not dug


async def test_a_stream_goes_on_after_the_gateway_was_killed() -> None:
    model, seen = Stepped(), list[StreamResponse]()
    async with asyncio.timeout(90), running_node() as node, gateway_process(node.url) as gateway:
        token = await invite(node, "ui")
        url = f"http://127.0.0.1:{gateway.port}/a2a/bob"
        async with working(node, SimpleAgentRunner("bob", instruction="", model=model)):
            async with official(url, token) as client:
                events = aiter(client.send_message(say("dig")))
                seen.append(await anext(events))
                show = await model.asked.get()
                show(ModelDelta(text="There is"))
                seen += await until_piece(events)
                await gateway.kill()
                with pytest.raises(A2AClientError):
                    await anext(events)
            show(ModelDelta(text=" gold"))  # nobody listens
            await gateway.start()
            async with official(url, token) as client:
                task_id = seen[0].task.id
                events = aiter(client.subscribe(SubscribeToTaskRequest(id=task_id)))
                seen.append(await anext(events))
                show(ModelDelta(text=" in the"))
                model.reply.put_nowait(ModelReply("There is gold in the garden."))
                seen += [event async for event in events]
                held, known = assemble(seen), await client.get_task(GetTaskRequest(id=task_id))
            assert texts(held) == texts(known) == ["There is gold in the garden."]
            assert state(held) == state(known) == "COMPLETED"
            assert [it.metadata["seq"] for it in known.artifacts] == [seen[-1].status_update.metadata["seq"]]


async def test_a_question_of_the_agent_waits_for_the_caller_and_others_who_listen_are_told() -> None:
    async with desk(None) as it, kit_agent(it.node.url), it.official("kit") as client:
        asked = assemble(await tell(client, say("begin", "tck-input-required-1")))
        assert (state(asked), asked.status.message.parts[0].text) == ("INPUT_REQUIRED", "What more?")
        listening = aiter(client.subscribe(SubscribeToTaskRequest(id=asked.id)))
        assert state((await anext(listening)).task) == "INPUT_REQUIRED"
        done = assemble(await tell(client, say("go on", "tck-complete-task-1", task_id=asked.id)))
        assert (done.id, state(done), texts(done)) == (asked.id, "COMPLETED", ["Hello from TCK"])
        assert state(assemble([StreamResponse(task=asked), *[one async for one in listening]])) == "COMPLETED"
        found = await client.get_task(GetTaskRequest(id=asked.id))
        said = [(one.role == Role.ROLE_USER, one.parts[0].text) for one in found.history]
        assert said == [(True, "begin"), (False, "What more?"), (True, "go on")]
        again = assemble(await tell(client, say("go on", "tck-complete-task-1", task_id=asked.id)))
        assert texts(again) == ["Hello from TCK"]
        other = assemble(await tell(client, say("begin", "tck-input-required-2")))
        assert state(await client.cancel_task(CancelTaskRequest(id=other.id))) == "CANCELED"
        assert state(await client.get_task(GetTaskRequest(id=other.id))) == "CANCELED"


async def test_contents_come_through_as_parts_and_back() -> None:
    contents: list[Any] = [
        "text",
        {"text": "two", "files": [{"name": "a.txt", "media_type": "text/plain", "data": "YQ=="}]},
        {"files": [{"url": "https://example.com/a"}]},
        {"a": [1, 2.5, None, True, {"b": "c"}]},
        [1],
        {"text": 5},
        {},
    ]
    for content in contents:
        assert read_parts(make_parts(content)) == content
    image = {"images": ["data:image/png;base64,iVBORw0KGgo="]}
    [part] = make_parts(image)
    assert (part.raw[:4], part.media_type) == (b"\x89PNG", "image/png")
    async with desk(None) as it, kit_agent(it.node.url), it.official("kit") as client:
        files = assemble(await tell(client, say("x", "tck-artifact-file"))).artifacts[0].parts
        assert [(one.filename, one.raw, one.media_type) for one in files] == [("output.txt", b"output", "text/plain")]
        [data] = assemble(await tell(client, say("x", "tck-artifact-data"))).artifacts[0].parts
        assert read_json(data.data) == {"key": "value", "count": 42}


@pytest.mark.parametrize("value", ["[" * 100_000, "NaN", "1e400", '"\\ud800"', "nothing"])
async def test_what_is_no_json_is_refused_in_the_words_of_the_binding(value: str) -> None:
    given = '{"message": {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": "x"}], "metadata": {"a": VALUE}}}'
    given = given.replace("VALUE", value)
    headers = {"A2A-Version": "1.0", "Content-Type": "application/json"}
    async with desk(hears) as it, httpx.AsyncClient(headers={"Authorization": f"Bearer {it.token}", **headers}) as http:
        call = '{"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": GIVEN}'.replace("GIVEN", given)
        told = await http.post(f"{it.url}/a2a/bob/", content=call)
        assert (told.status_code, told.json()["error"]["code"]) == (200, -32700)
        for path in ("message:send", "message:stream"):
            told = await http.post(f"{it.url}/a2a/bob/{path}", content=given)
            assert (told.status_code, told.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
        told = await http.get(f"{it.url}/a2a/bob/tasks", params={"pageToken": "9" * 5000})
        assert (told.status_code, told.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")


async def test_calls_that_their_caller_has_given_up_hold_no_place() -> None:
    async with desk(hears) as it, httpx.AsyncClient(headers={"Authorization": f"Bearer {it.token}"}) as http:
        async with working(it.node, SimpleAgentRunner("away", instruction="", model=ScriptedModel(hears))):
            pass
        async with it.official("away", streaming=False) as client:
            waiting = [asyncio.create_task(tell(client, say("x", f"w-{n}"))) for n in range(MAX_CALLS)]
            while len((await it.ledger.call("network.list_threads"))["threads"]) < MAX_CALLS:
                pass
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
        while (await http.get(f"{it.url}/a2a/bob/.well-known/agent-card.json")).status_code == 429:
            pass


async def test_to_list_tasks_by_their_state_reads_each_message_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    read, count, ask = 0, 150, NetworkClient.call

    async def call(client: NetworkClient, operation: str, *args: Any, **options: Any) -> Any:
        nonlocal read
        result = await ask(client, operation, *args, **options)
        read += len(result["messages"]) if operation == "network.history" else 0
        return result

    async with desk(hears) as it:
        async with working(it.node, SimpleAgentRunner("away", instruction="", model=ScriptedModel(hears))):
            pass
        for number in range(count):
            await it.ledger.send("agent:away", "x", conversation="tea", message_id=f"l-{number}")
        monkeypatch.setattr(NetworkClient, "call", call)
        async with it.official("away") as client:
            listed = await client.list_tasks(ListTasksRequest(status=TaskState.TASK_STATE_SUBMITTED, page_size=1))
        assert (listed.total_size, read <= 12 * count) == (count, True), read


async def test_a_task_that_a_person_has_taken_over_is_not_said_to_be_cancelled() -> None:
    model = Stepped()
    async with desk(model) as it, it.official() as client:
        events = aiter(client.send_message(say("dig", context_id="tea")))
        task = (await anext(events)).task
        await model.asked.get()
        await client.cancel_task(CancelTaskRequest(id=task.id))
        async with NetworkClient("mia", it.node.url, kind="human", token=it.node.owner_token) as mia:
            await mia.call("network.take", {"thread_id": "direct:bob~ui:tea"})
            held = assemble(await tell(client, say("dig deeper", "m-2", context_id="tea")))
            assert state(held) == "INPUT_REQUIRED"
            with pytest.raises(TaskNotCancelableError):
                await client.cancel_task(CancelTaskRequest(id=held.id))
            await mia.call("network.give", {"thread_id": "direct:bob~ui:tea"})
            await model.asked.get()
            assert state(await client.cancel_task(CancelTaskRequest(id=held.id))) == "CANCELED"


async def test_a_task_that_was_taken_over_at_work_goes_on_when_it_is_given_back() -> None:
    model = Stepped()
    async with desk(None) as it:
        async with working(it.node, SimpleAgentRunner("bob", instruction="", model=model)), it.official() as client:
            events = aiter(client.send_message(say("dig", context_id="tea")))
            seen = [await anext(events)]
            await model.asked.get()
            async with NetworkClient("mia", it.node.url, kind="human", token=it.node.owner_token) as mia:
                await mia.call("network.take", {"thread_id": "direct:bob~ui:tea"})
                seen += [one async for one in events]
        assert state(assemble(seen)) == "INPUT_REQUIRED"
        task_id = seen[0].task.id
        async with NetworkClient("mia", it.node.url, kind="human", token=it.node.owner_token) as mia:
            await mia.call("network.give", {"thread_id": "direct:bob~ui:tea"})
        async with it.official() as client:
            events = aiter(client.subscribe(SubscribeToTaskRequest(id=task_id)))
            seen = [await anext(events)]
            assert state(assemble(seen)) == "WORKING"  # the task's state is WORKING although its agent is offline
            async with working(it.node, SimpleAgentRunner("bob", instruction="", model=model)):
                await model.asked.get()
                assert state(await client.get_task(GetTaskRequest(id=task_id))) == "WORKING"
                model.reply.put_nowait(ModelReply("There is gold."))
                done = assemble(seen + [one async for one in events])
        assert (state(done), texts(done)) == ("COMPLETED", ["There is gold."])


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.full)])
async def test_others_words_stand_in_parts_alone(step: int) -> None:
    """An agent's text is only its artifact, whatever it looks like. An agent's text never becomes a status, another
    task or another sender.
    """
    allowed = {"task.artifacts[].parts[].text", "task.history[].parts[].text", "artifactUpdate.artifact.parts[].text"}
    async with desk(hears) as it:
        for number, payload in enumerate(PAYLOADS[::step]):
            async with it.official(binding=BINDINGS[number % 2], streaming=number % 4 != 1) as client:
                events = await tell(client, say(payload, f"p-{number}", context_id="tea"))
                task = assemble(events)
                assert state(task) == "COMPLETED"
                for event in events:
                    assert set(find_marks(read_json(event))) <= allowed
                [artifact] = (await client.get_task(GetTaskRequest(id=task.id))).artifacts
                assert artifact.metadata["sender"] == "bob"
        history = await it.ledger.history("direct:bob~ui:tea", limit=200)
        assert len(history.messages) == 2 * len(PAYLOADS[::step])
    print(f"{number + 1} payloads")
