"""Tests of the interface for mods: a message from a hook or an operation has a cause, counts in its conversation's
budget, and is sent once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from msgspec import Meta, Struct

from roundelay.app import Network
from roundelay.network.client import AnyMessage, NetworkClient
from roundelay.network.clock import system_clock
from roundelay.network.config import Limits, Quota
from roundelay.network.core.mod import load_mods
from roundelay.network.core.rows import Row
from roundelay.network.errors import BudgetExhausted, IdConflict, LoopStopped, ModError, UnknownMessage
from roundelay.network.frames import Seq
from roundelay.network.mod import AfterContext, Change, Mod, operation


class Tasks(Mod):
    """Mod that answers in its own thread: after IO, from a hook, and in operations."""

    id = "tasks"

    async def after(self, context: AfterContext, message: Row) -> None:
        if b"please" in message.data:
            context.submit({"to": message.actor, "seq": message.seq})
        if b"unknown cause" in message.data:
            context.submit({"to": message.actor, "seq": message.seq - 1})

    def apply_entry(self, change: Change, payload: Any) -> None:
        change.answer(payload["to"], "done", cause=payload["seq"])

    def apply(self, change: Change, message: Row) -> None:
        if message.target == "mod:tasks":
            change.answer(message.actor, "seen", cause=message.seq)

    @operation("change")
    def twice(self, change: Change, *, name: str) -> dict[str, int]:
        """Write two messages, the second in answer to the first."""
        first = change.post(f"channel:{name}", "first")
        second = change.post(f"channel:{name}", "second", reply_to=first.seq, cause=first.seq)
        return {"first": first.seq, "second": second.seq}

    @operation("change")
    def note(self, change: Change, *, about: Seq | None = None, all_of: list[Seq] = []) -> dict[str, int]:  # noqa: B006
        """Answer the caller, about some messages."""
        row = change.answer(change.origin.agent_id, [change.head(seq).seq for seq in all_of], cause=about)
        return {"seq": row.seq}

    @operation("change")
    def guess(self, change: Change, *, about: Annotated[int, Meta(ge=0, le=99)]) -> dict[str, int]:
        """Answer with a cause that is a plain integer and not marked as a message."""
        return {"seq": change.answer(change.origin.agent_id, "?", cause=about).seq}


class Echo(Mod):
    """Mod that answers in the channel, in the same commit as the message."""

    id = "echo"

    def apply(self, change: Change, message: Row) -> None:
        if message.target.startswith("channel:"):
            change.post(message.target, "echo", reply_to=message.seq, cause=message.seq)


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open(mods=["channels", Tasks()]) as opened:
        yield opened


async def next_of(client: NetworkClient, text: object) -> AnyMessage:
    async with asyncio.timeout(5):
        async for message in client:
            if message.content == text:
                return message
    raise AssertionError


async def test_an_answer_after_io_follows_from_the_message_that_it_was_done_for(network: Network) -> None:
    ann = await network.join("ann")
    await network.join("bob")
    asked = await ann.send_text("bob", "please")
    answer = await next_of(ann, "done")
    assert (answer.cause, answer.root, answer.hops) == (asked.seq, asked.seq, 1)


async def test_an_answer_to_a_message_that_is_not_known_is_not_sent(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    ann = await network.join("ann")
    await network.join("bob")
    await ann.send_text("bob", "unknown cause")
    await ann.send_text("bob", "please")
    answer = await next_of(ann, "done")
    assert answer.cause == answer.root != 0
    assert "docs/mods.md" in caplog.text
    with pytest.raises(UnknownMessage):
        await ann.call("tasks.guess", {"about": answer.root})


async def test_messages_are_known_by_arguments_of_type_seq(network: Network) -> None:
    ann = await network.join("ann")
    seqs = [(await ann.send("agent:ann", text)).seq for text in ("one", "two", "three")]
    seq = (await ann.call("tasks.note", {"about": seqs[0], "all_of": seqs[1:]}))["seq"]
    answer = await next_of(ann, seqs[1:])
    assert (answer.seq, answer.cause) == (seq, seqs[0])


async def test_a_hook_answers_the_message_that_it_is_shown_in_that_messages_own_commit() -> None:
    async with Network.open(mods=["channels", Echo()]) as network:
        ann = await network.join("ann")
        await ann.call("channels.create", {"name": "dev"})
        asked = await ann.post("dev", "hi")
        answer = await next_of(ann, "echo")
        assert (answer.seq, answer.cause, answer.root, answer.reply_to) == (asked.seq + 1, *[asked.seq] * 3)
        posted = await ann.call("channels.post", {"name": "dev", "text": "by an operation"})
        assert (await next_of(ann, "echo")).cause == posted["seq"]


async def test_an_operation_sends_two_messages_the_second_in_answer_to_the_first(network: Network) -> None:
    ann, bob = await network.join("ann"), await network.join("bob")
    for client, op in ((ann, "channels.create"), (bob, "channels.join")):
        await client.call(op, {"name": "dev"})
    sent = await ann.call("tasks.twice", {"name": "dev"})
    first, second = await next_of(bob, "first"), await next_of(bob, "second")
    assert (first.seq, second.seq) == (sent["first"], sent["second"])
    assert (second.cause, second.reply_to, second.thread_id) == (first.seq, first.seq, f"thread:{first.seq}")
    assert first.message_id != second.message_id


async def test_what_a_mod_answers_counts_in_the_budget_and_the_stop_is_told() -> None:
    async with Network.open(mods=[Tasks()], limits=Limits(max_root_messages=4)) as network:
        ann = await network.join("ann")
        root = (await ann.send("mod:tasks", "hi")).seq  # message 1, and the answer is 2
        last = (await ann.send("mod:tasks", "more", cause=root)).seq + 1  # message 3, and the answer is 4
        for _ in range(2):
            with pytest.raises(LoopStopped):
                await ann.send("mod:tasks", "too much", cause=root)
        mia = await network.join("mia", kind="human")
        await mia.call("network.resume_root", {"root": root})
        await ann.send("mod:tasks", "again", cause=root)
        notices = [event for event in ann._events if getattr(event, "kind", "") == "loop_stopped"]
        assert [(notice.body["root"], notice.body["seq"]) for notice in notices] == [(root, last)]  # type: ignore[union-attr]


async def test_a_hook_that_exceeds_the_budget_refuses_the_message_and_the_readers_are_told_what_was_stored() -> None:
    async with Network.open(mods=[Tasks()], limits=Limits(max_root_messages=3)) as network:
        ann = await network.join("ann")
        root = (await ann.send("mod:tasks", "hi")).seq  # message 1, and the answer is 2
        with pytest.raises(LoopStopped):  # would be message 3, and the mod's answer message 4
            await ann.send("mod:tasks", "one more", cause=root)
        async with asyncio.timeout(5):
            async for event in ann.events():
                if getattr(event, "kind", "") == "loop_stopped":
                    break
        assert event.body["seq"] == root + 1  # type: ignore[union-attr]
        assert (await ann.call("network.info"))["head"] == root + 2  # the notice to ann is stored
        told = await ann.call("network.history", {"thread_id": "mod:network~ann"})
        assert [message["seq"] for message in told["messages"]] == [root + 2]
        stored = await ann.send("agent:ann", "the last one", cause=root)  # the refused message used nothing up
        assert stored.seq == root + 3


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_call_that_is_repeated_after_its_result_is_forgotten_stores_nothing_twice(
    tmp_path: Path, *, is_stored: bool
) -> None:
    late = 0

    @asynccontextmanager
    async def opened() -> AsyncIterator[NetworkClient]:
        path = tmp_path / "node.db" if is_stored else None
        async with Network.open(
            path, mods=["channels", Tasks()], clock=lambda: system_clock() + late, durability="normal"
        ) as network:
            yield await network.join("ann")

    async def calls(ann: NetworkClient) -> list[Any]:
        return [
            await ann.call("channels.create", {"name": "dev"}, call_id="c"),
            await ann.call("channels.post", {"name": "dev", "text": "hi"}, call_id="p"),
            await ann.call("tasks.note", {}, call_id="n"),
            await ann.call("tasks.twice", {"name": "dev"}, call_id="t"),
        ]

    async with opened() as ann:
        created, posted, noted, two = await calls(ann)
        head = (await ann.call("network.info"))["head"]
        assert await calls(ann) == [created, posted, noted, two]
        late = 25 * 3600 * 1000
        if not is_stored:
            again = await calls(ann)
    if is_stored:
        async with opened() as ann:
            again = await calls(ann)
            assert (await ann.call("network.info"))["head"] == head
            with pytest.raises(IdConflict):
                await ann.call("channels.post", {"name": "dev", "text": "other"}, call_id="p")
            # A client's own message with the same ID is a different message.
            assert not (await ann.send("channel:dev", "mine", message_id="p")).duplicate
    assert again[1] == {**posted, "duplicate": True}
    assert again[2] == {"seq": noted["seq"], "thread_id": "mod:tasks~ann", "duplicate": True}
    assert again[3] == {"seq": two["first"], "thread_id": "channel:dev", "duplicate": True}
    assert again[0]["duplicate"] is True


# -- work outside the commit, and a hub that dies meanwhile


class Printing(Mod):
    """Mod that works in ``after`` once the test allows it. Unfinished work of an earlier process is done with the
    next message (docs/mods.md).
    """

    id = "printing"

    def __init__(self, *, may_work: bool, keeps_list: bool) -> None:
        self.printed: list[int] = []
        self.began = asyncio.Event()
        self._may_work = may_work
        self._keeps_list = keeps_list

    def apply(self, change: Change, message: Row) -> None:
        if self._keeps_list:
            change.put(f"todo/{message.seq}", True)

    async def after(self, context: AfterContext, message: Row) -> None:
        left = [
            int(key.rpartition("/")[2]) for key, _ in context.state.items("mod") if key.startswith("printing/todo/")
        ]
        self.began.set()
        if not self._may_work:
            await asyncio.Event().wait()  # the hub ends here
        for seq in sorted({*left, message.seq} - set(self.printed)):
            self.printed.append(seq)
            context.submit({"seq": seq})

    def apply_entry(self, change: Change, payload: Any) -> None:
        change.put(f"todo/{payload['seq']}", None)


@pytest.mark.parametrize(("keeps_list", "is_done_later"), [(False, False), (True, True)])
async def test_after_is_not_repeated_but_for_what_the_mod_keeps_a_list_of(
    tmp_path: Path, keeps_list: bool, is_done_later: bool
) -> None:
    before = Printing(may_work=False, keeps_list=keeps_list)
    async with Network.open(tmp_path / "team.db", mods=["channels", before]) as network:
        lost = await (await network.join("ann")).broadcast("print me")
        await before.began.wait()
    again = Printing(may_work=True, keeps_list=keeps_list)
    async with Network.open(tmp_path / "team.db", mods=["channels", again]) as network:
        ann = await network.join("ann")
        assert again.printed == []
        next_one = await ann.broadcast("me too")
        await ann.call("network.info")
        assert again.printed == ([lost.seq, next_one.seq] if is_done_later else [next_one.seq])
        await ann.broadcast("and me")
        await ann.call("network.info")
        assert len(again.printed) == len(set(again.printed)), "what was done is not done again"


async def test_what_a_mod_sends_and_keeps_counts_for_whoever_it_is_for() -> None:
    class Notes(Mod):
        id = "notes"

        @operation("change")
        def keep(self, change: Change, *, text: str) -> dict[str, Any]:
            """Keep a text."""
            change.put("note", text)
            return {}

    async with Network.open(mods=["channels", Tasks(), Notes()], quotas={"ann": Quota(messages_per_day=6)}) as network:
        ann, mia = await network.join("ann"), await network.join("mia", kind="human")

        async def used() -> tuple[int, int]:
            [use] = (await mia.call("network.quotas", {"agent_id": "ann"}))["quotas"]
            return use["messages"], use["bytes"]

        heard = ann.__aiter__()
        # This message counts, and so do the hook's answer and the message after the IO.
        await ann.send("mod:tasks", "please")
        assert [(await anext(heard)).content for _ in range(2)] == ["seen", "done"]
        assert (await used())[0] == 3
        before = await used()
        await ann.call("notes.keep", {"text": "x" * 5000})
        after = await used()
        assert after[0] == before[0]
        assert after[1] - before[1] > 5000
        await ann.call("tasks.note", {"all_of": []})
        await ann.send("agent:mia", "the fifth")
        with pytest.raises(BudgetExhausted, match="messages_per_day"):
            await ann.send("mod:tasks", "it and its answer are one too many")
        await ann.send("agent:mia", "the sixth")
        with pytest.raises(BudgetExhausted, match="messages_per_day"):
            await ann.call("tasks.note", {"all_of": []})
        [use] = (await mia.call("network.quotas", {"agent_id": "mia"}))["quotas"]
        assert use["messages"] == 0


async def test_hubs_after_the_first_declare_no_types_of_their_own_and_leave_none() -> None:
    async def count_types() -> int:
        async with Network.open(mods=["channels", "discovery", Tasks()]) as network:
            await (await network.join("ann")).call("channels.create", {"name": "dev"})
            return len(Struct.__subclasses__())

    first = await count_types()
    assert {await count_types() for _ in range(3)} == {first}


async def test_installed_package_provides_the_documented_mod_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mod is the one with a screen in docs/mods.md, which has at most 60 lines."""
    page = (Path(__file__).parents[2] / "docs/mods.md").read_text(encoding="utf-8")
    program = page.partition("## A screen")[2].partition("```python\n")[2].partition("```")[0]
    assert len(program.splitlines()) <= 60
    (tmp_path / "wishes_package.py").write_text(program)
    info = tmp_path / "wishes_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wishes-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[roundelay.mods]\nwishes = wishes_package:Wishes\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with Network.open(mods=["channels", "wishes"]) as network:
        ann = await network.join("ann")
        await ann.call("wishes.add", {"text": "tea"})
        await ann.call("wishes.grant", {"wish": 1})
        [wish] = (await ann.call("wishes.list"))["wishes"]
        screens = (await ann.call("network.screens"))["screens"]
    assert (wish["text"], wish["state"], wish["by"]) == ("tea", "granted", "ann")
    assert [it["title"] for it in screens if it["op"].startswith("wishes.")] == ["Wishes"]
    with pytest.raises(ModError, match=r"No mod is called 'wish'; installed are .*wishes"):
        load_mods(["wish"], {})
