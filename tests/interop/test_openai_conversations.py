"""Tests of conversations, their items and the input of responses at OpenAI's endpoint, as the official client uses
them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from roundelay.agents.models.model import ModelDelta, ModelReply
from tests.interop.test_openai_api import Desk, desk, hears, in_turns
from tests.support.asked import invite
from tests.support.remote_team import Stepped


def texts(items: Any) -> list[tuple[str, str]]:
    return [(it.role, "".join(getattr(part, "text", "") for part in it.content)) for it in items]


async def refused(call: Any) -> tuple[int, str | None]:
    with pytest.raises(APIStatusError) as error:
        await call
    return error.value.status_code, error.value.code


async def test_a_conversation_is_created_asked_listed_changed_and_deleted() -> None:
    async with desk(hears) as it:
        conversations, create = it.client.conversations, it.client.responses.create
        made = await conversations.create(metadata={"topic": "tea"})
        assert made.id.startswith("conv_")
        assert (made.object, made.metadata) == ("conversation", {"topic": "tea"})
        assert await conversations.retrieve(made.id) == made
        assert [item async for item in conversations.items.list(made.id)] == []
        first = await create(model="bob", input="one", conversation=made.id)
        second = await create(model="bob", input="two", conversation={"id": made.id}, instructions="Be brief.")
        assert second.conversation is not None
        assert second.conversation.id == made.id
        said = [("user", "one"), ("assistant", "I hear one"), ("user", "two"), ("assistant", "I hear two")]
        listed = [item async for item in conversations.items.list(made.id, order="asc")]
        heard = texts(listed)
        assert heard[:3] == said[:3]
        assert heard[3][0] == "assistant"
        # An answer has the ID that its response shows.
        assert [listed[1].id, listed[3].id] == [first.output[0].id, second.output[0].id]
        newest_first = [item.id async for item in conversations.items.list(made.id, limit=1)]  # four pages
        assert newest_first == [item.id for item in reversed(listed)]
        page = await conversations.items.list(made.id, order="asc", limit=2, after=listed[0].id)
        assert ([item.id for item in page.data], page.has_more) == ([item.id for item in listed[1:3]], True)
        assert (page.first_id, page.last_id) == (listed[1].id, listed[2].id)  # type: ignore[attr-defined]  # sent by OpenAI too
        assert await conversations.items.retrieve(listed[1].id, conversation_id=made.id) == listed[1]
        changed = await conversations.update(made.id, metadata={"topic": "coffee"})
        assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"topic": "coffee"})
        assert (await conversations.retrieve(made.id)).metadata == {"topic": "coffee"}
        assert await refused(conversations.items.delete(listed[0].id, conversation_id=made.id)) == (405, None)
        ended = await conversations.delete(made.id)
        assert (ended.id, ended.deleted, ended.object) == (made.id, True, "conversation.deleted")
        gone = (404, "conversation_not_found")
        assert await refused(conversations.retrieve(made.id)) == gone
        assert await refused(conversations.delete(made.id)) == gone
        assert await refused(conversations.items.list(made.id)) == gone
        assert await refused(conversations.items.create(made.id, items=[{"role": "user", "content": "x"}])) == gone
        assert await refused(create(model="bob", input="three", conversation=made.id)) == gone
        # The messages stay in the ledger, and the responses can still be read.
        assert (await it.client.responses.retrieve(first.id)).output_text == "I hear one"
        assert ["one", "I hear one"] in [thread[:2] for thread in await it.threads()]


ITEMS: Any = [
    {"type": "message", "role": "user", "content": "My name is Mia."},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello Mia."}]},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "And:"}, {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}]},
]  # fmt: skip


async def test_items_that_are_added_are_told_to_the_next_agent_once() -> None:
    async with desk(hears) as it:
        conversations = it.client.conversations
        made = await conversations.create(items=ITEMS[:2])
        added = await conversations.items.create(made.id, items=ITEMS[2:])
        assert texts(added.data) == [("system", "Be brief."), ("user", "And:")]
        asked = await it.client.responses.create(model="bob", input="Who am I?", conversation=made.id)
        [told, _] = next(thread for thread in await it.threads() if "Who am I?" in thread[0])
        for word in (
            "user: My name is Mia.",
            "assistant: Hello Mia.",
            "Instructions of my client",
            "> Be brief.",
            "And:",
        ):
            assert told.count(word) == 1
        listed = [item async for item in conversations.items.list(made.id, order="asc")]
        assert texts(listed)[:5] == [
            ("user", "My name is Mia."), ("assistant", "Hello Mia."), ("system", "Be brief."), ("user", "And:"),
            ("user", "Who am I?"),
        ]  # fmt: skip
        assert listed[3].content[1].image_url == "https://example.org/a.png"  # type: ignore[union-attr]  # an image
        assert [item.id for item in listed[2:4]] == [item.id for item in added.data]
        [read] = [item async for item in it.client.responses.input_items.list(asked.id)]
        assert texts([read])[0][1] == "Who am I?"
        await it.client.responses.create(model="bob", input="And now?", conversation=made.id)
        thread = next(thread for thread in await it.threads() if "Who am I?" in thread[0])
        assert thread[2].endswith("And now?")
        assert "My name is Mia." not in thread[2]
        await conversations.items.create(made.id, items=ITEMS[:1])
        await it.client.responses.create(model="bob", input="Again?", conversation=made.id)
        thread = next(thread for thread in await it.threads() if "Who am I?" in thread[0])
        assert thread[4] == "My name is Mia.\n\nAgain?"


async def test_the_input_of_a_response_is_what_the_client_has_asked() -> None:
    async with desk(hears) as it:
        input_items = it.client.responses.input_items
        created = it.client.responses.create
        plain = await created(model="bob", input="one")
        history: Any = [
            *in_turns("a", "b"),
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "two"},
                    {"type": "input_image", "image_url": "https://example.org/x.png", "detail": "low"},
                ],
            },
        ]
        long = await created(model="bob", input=history, instructions="Be brief.")
        chat = await it.chat("three")
        for response_id, text in (
            (plain.id, "one"),
            (long.id, "two"),
            (chat.id.replace("chatcmpl-", "resp_"), "three"),
        ):
            page = await input_items.list(response_id)
            [item] = page.data
            assert texts([item]) == [("user", text)]
            assert (item.type, item.id, page.has_more) == ("message", f"msg_{response_id.removeprefix('resp_')}", False)
            assert [it async for it in input_items.list(response_id, after=item.id)] == []
        [item] = (await input_items.list(long.id)).data
        assert [part.type for part in item.content] == ["input_text", "input_image"]  # type: ignore[union-attr]  # a message
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
            status, _ = await refused(input_items.list(plain.id, **wrong))  # type: ignore[arg-type]  # a wrong order
            assert status == 400
        assert await refused(input_items.list(plain.id, after="msg_9")) == (404, "item_not_found")
        assert await refused(input_items.list("resp_999")) == (404, "response_not_found")


async def test_what_is_wrong_with_a_conversation_is_refused_and_leaves_nothing() -> None:
    async with desk(hears) as it:
        conversations = it.client.conversations
        wrong: list[dict[str, Any]] = [
            {"metadata": {str(number): "x" for number in range(17)}},
            {"metadata": {"k" * 65: "x"}},
            {"metadata": {"k": "x" * 513}},
            {"metadata": {"k": 1}},
            {"metadata": ["k"]},
            {"items": [{"role": "user", "content": "x"}] * 21},
            {"items": "x"},
            {"items": ["x"]},
            {"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
            {"items": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            {"items": [{"role": "robot", "content": "x"}]},
            {"items": [{"role": "user"}]},
            {"items": [{"role": "user", "content": []}]},
            {"items": [{"role": "user", "content": ""}]},
            {"extra_body": {"colour": 1}},
        ]
        for given in wrong:
            assert (await refused(conversations.create(**given)))[0] == 400, given
        assert (await refused(it.client.post("/conversations", body=[1], cast_to=object)))[0] == 400
        gone = (404, "conversation_not_found")
        for name in ("conv_none", "x y", "a:b", "%00", "é"):
            assert await refused(conversations.retrieve(name)) == gone, name
            assert await refused(conversations.items.list(name)) == gone, name
            assert await refused(conversations.update(name, metadata={})) == gone, name
        assert await it.threads() == []
        made = await conversations.create()
        assert (await refused(conversations.items.create(made.id, items=[])))[0] == 400
        assert await refused(conversations.items.retrieve("msg_1", conversation_id=made.id)) == (404, "item_not_found")


async def test_a_conversation_of_somebody_else_is_none() -> None:
    async with desk(hears) as it:
        made = await it.client.conversations.create(metadata={"a": "b"})
        await it.client.responses.create(model="bob", input="secret", conversation=made.id)
        async with AsyncOpenAI(api_key=await invite(it.node, "other"), base_url=f"{it.url}/v1") as other:
            gone = (404, "conversation_not_found")
            assert await refused(other.conversations.retrieve(made.id)) == gone
            assert await refused(other.conversations.items.list(made.id)) == gone
            assert await refused(other.conversations.delete(made.id)) == gone
            # The same name is a separate conversation for another caller.
            await other.responses.create(model="bob", input="mine", conversation=made.id)
            assert texts([item async for item in other.conversations.items.list(made.id, order="asc")])[0] == (
                "user",
                "mine",
            )
        assert ("user", "secret") in texts([item async for item in it.client.conversations.items.list(made.id)])


async def test_a_conversation_that_was_never_created_is_read_by_its_name() -> None:
    async with desk(hears) as it:
        await it.client.responses.create(model="bob", input="one", conversation="Tea Time")
        await it.chat("two", user="Tea Time")
        read = await it.client.conversations.retrieve("Tea Time")
        assert (read.id, read.metadata) == ("Tea Time", {})
        listed = [item async for item in it.client.conversations.items.list("Tea Time", order="asc")]
        assert texts(listed) == [
            ("user", "one"),
            ("assistant", "I hear one"),
            ("user", "two"),
            ("assistant", "I hear two"),
        ]
        await it.client.conversations.update("Tea Time", metadata={"a": "b"})
        assert (await it.client.conversations.retrieve("Tea Time")).metadata == {"a": "b"}


async def test_a_repeated_creation_makes_one_conversation() -> None:
    async with desk(hears) as it:
        key = {"Idempotency-Key": "k-1"}
        made = await it.client.conversations.create(metadata={"a": "b"}, extra_headers=key)
        assert await it.client.conversations.create(metadata={"a": "b"}, extra_headers=key) == made
        assert (await refused(it.client.conversations.create(metadata={"a": "c"}, extra_headers=key)))[0] == 409


async def test_a_hundred_and_more_items_are_listed_page_by_page() -> None:
    async with desk(hears) as it:
        made = await it.client.conversations.create()
        for number in range(7):
            items: Any = [{"role": "user", "content": f"{number}-{place}"} for place in range(20)]
            await it.client.conversations.items.create(made.id, items=items)
        listed = [item async for item in it.client.conversations.items.list(made.id, order="asc", limit=100)]
        assert texts(listed) == [("user", f"{number}-{place}") for number in range(7) for place in range(20)]
        assert len({item.id for item in listed}) == 140


# --- repeated streams


async def stream(it: Desk, response_id: str) -> list[Any]:
    return [event async for event in await it.client.responses.retrieve(response_id, stream=True)]


async def test_a_response_is_streamed_again_from_its_beginning() -> None:
    async with desk(hears) as it:
        made = await it.client.responses.create(model="bob", input="one", metadata={"a": "b"})
        events = await stream(it, made.id)
        assert [event.type for event in events] == [
            "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
            "response.output_text.delta", "response.output_text.done", "response.content_part.done",
            "response.output_item.done", "response.completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1].response
        assert (last.id, last.output_text, last.metadata) == (made.id, "I hear one", {"a": "b"})
        for after in (0, 3, 100):
            code = await refused(it.client.responses.retrieve(made.id, stream=True, starting_after=after))
            assert code == (400, "unsupported_parameter")
        assert await refused(it.client.responses.retrieve("resp_999", stream=True)) == (404, "response_not_found")
        failed = await it.client.responses.create(model="bob", input="break")
        assert (await stream(it, failed.id))[-1].type == "response.failed"


async def test_what_runs_in_the_background_is_streamed_until_its_end_and_who_leaves_stops_nothing() -> None:
    model = Stepped()
    async with desk(model) as it:
        made = await it.client.responses.create(model="bob", input="dig", background=True)
        tell = await model.asked.get()
        left = await it.client.responses.retrieve(made.id, stream=True)
        async for event in left:
            if event.type == "response.in_progress":
                break
        await left.close()
        reading = asyncio.create_task(stream(it, made.id))
        tell(ModelDelta(text="Gold"))
        model.reply.put_nowait(ModelReply("Gold."))
        events = await reading
        assert (events[-1].type, events[-1].response.output_text) == ("response.completed", "Gold.")
        assert (await it.client.responses.retrieve(made.id)).status == "completed"


# --- requests of chat pages


@pytest.mark.parametrize(
    "given", [{"user": ""}, {"user": None}, {"user": "", "metadata": {}}, {"metadata": {"conversation": ""}}]
)
async def test_an_empty_user_is_none(given: dict[str, Any]) -> None:
    async with desk(hears) as it:
        first = await it.chat("one", **given)
        assert first.choices[0].message.content == "I hear one"
        await it.chat("one", "I hear one", "two", **given)
        assert await it.threads() == [["one", "I hear one", "two", "I hear two"]]
        empty: Any = {"previous_response_id": "", "conversation": "", "instructions": "", **given}
        response = await it.client.responses.create(model="bob", input="three", **empty)
        assert (response.output_text, response.user) == ("I hear three", None)
        assert len(await it.threads()) == 2


TITLE_TASK = """### Task:
Generate a concise, 3-5 word title with an emoji summarizing the chat history.
### Output:
JSON format: { "title": "your concise title here" }
### Chat History:
<chat_history>
USER: one
ASSISTANT: I hear one
</chat_history>"""
"""The title request of Open WebUI (backend/open_webui/config.py, DEFAULT_TITLE_GENERATION_PROMPT_TEMPLATE),
shortened.
"""


async def test_a_chat_page_s_title_task_is_a_thread_of_its_own_and_the_chat_goes_on() -> None:
    async with desk(hears) as it:
        await it.chat("one", stream=False)
        titled = await it.chat(TITLE_TASK, stream=False, max_completion_tokens=1000)
        assert titled.choices[0].message.content.startswith("I hear ### Task:")
        await it.chat("one", "I hear one", "two")
        chat, task = await it.threads()
        assert chat == ["one", "I hear one", "two", "I hear two"]
        assert task[0] == TITLE_TASK
