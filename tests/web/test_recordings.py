"""Tests of `roundelay export --format html`, the page of a finished run, opened from disk. The page shows the content
of the ledger, even hostile content, and contacts no server.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from roundelay.agents.reaction_ids import derived_id
from roundelay.network.core.rows import MessageHead, Row
from roundelay.network.ledger.log_file import LogHead, encode_head, encode_row
from tests.support.command import command, invoke
from tests.support.refund import LAST, refund
from tests.web.browsers import LOST_CONNECTION, Watched
from tests.web.conftest import OpenWindow
from tests.web.payloads import OBJECTS, TEXTS, arm
from tests.web.screens import Screen, log_in
from tests.web.team import BANK, WebNode, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")
SCREENS = ["#/threads", "#/timeline", "#/agents", "#/cost", "#/search"]


@dataclass
class Recorded:
    """An exported page, and the seqs of the messages in it by text."""

    path: Path
    seqs: dict[str, int]

    @property
    def url(self) -> str:
        return self.path.as_uri()


async def export(ledger: Path, *options: str) -> Path:
    path = ledger.parent / f"{len(list(ledger.parent.iterdir()))}.html"
    await invoke("export", "--format", "html", "--db", ledger, "-o", path, *options)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    async with refund(folder / "team.db") as run:
        seqs = run.seqs
    return Recorded(await export(folder / "team.db"), seqs)


class RecordedScreen(Screen):
    async def show(self, url: str, place: str) -> None:
        await self.page.goto(f"{url}{place}")
        await expect(self.nav).to_be_visible()


@pytest.mark.parametrize("browser", ["chromium", pytest.param("firefox", marks=pytest.mark.full)], indirect=True)
async def test_a_run_opens_from_disk_with_every_screen(open_window: OpenWindow, recorded: Recorded) -> None:
    window = await open_window("file://")
    page, screen = window.page, RecordedScreen(window.page)
    await screen.show(recorded.url, "")
    await expect(screen.nav.get_by_role("link")).to_have_text(["Threads", "Agents", "Cost", "Timeline", "Search"])
    threads = page.get_by_role("complementary", name="Threads")
    await expect(threads.get_by_role("link", name=re.compile("desk and mia"))).to_be_visible()
    await screen.show(recorded.url, "#/thread/direct%3Adesk~mia")
    await expect(page.get_by_role("main").get_by_text("Refund order 12").first).to_be_visible()
    await expect(page.get_by_role("main").get_by_role("textbox")).to_have_count(0)
    last = next(seq for text, seq in recorded.seqs.items() if text == LAST)
    await screen.show(recorded.url, f"#/why/{last}")
    await expect(page.get_by_role("main").get_by_text("auditor").first).to_be_visible()
    await screen.show(recorded.url, "#/timeline")
    await page.get_by_role("region", name="Reactions").get_by_role("button", name=re.compile("^desk")).click()
    await expect(page.get_by_role("region", name="The chosen reaction").get_by_text("Tool look").first).to_be_visible()
    await screen.show(recorded.url, "#/cost")
    await expect(page.get_by_role("row", name=re.compile("^finance"))).to_contain_text("scripted")
    await screen.show(recorded.url, "#/agents")
    await expect(page.get_by_role("main").get_by_text("finance").first).to_be_visible()
    await screen.show(recorded.url, "#/search?q=order")
    await expect(page.get_by_role("main").get_by_text("Refund order 12").first).to_be_visible()
    assert_alone(window, recorded.path)


# --- hostile content


THERE = "https://elsewhere.invalid"
HOSTILE = [
    *TEXTS,
    "</script><!-- <script>RUN</script> -->",
    "]]></script><script>RUN</script>",
    "<!--<script>RUN",
    "\\u003c/script>",
]


def write_hostile(path: Path, there: str) -> None:
    """Write a log in which each participant's text, each name and each ID is a payload."""
    with path.open("wb") as file:
        file.write(encode_head(LogHead(epoch="e", name=f"{arm(HOSTILE[0], 0, there)}")) + b"\n")
        for row in make_rows([str(arm(it, number, there)) for number, it in enumerate(HOSTILE)], there):
            file.write(encode_row(row) + b"\n")


def name_reaction(number: int) -> str:
    return f"r{number} {arm(HOSTILE[number], number, THERE)}"


def make_rows(payloads: list[str], there: str) -> Iterator[Row]:
    seq = 0
    for number, payload in enumerate(payloads):
        agent, thread = f"agent {payload}", ("channel:all" if number % 2 else f"channel:{payload}")
        reaction, content = name_reaction(number), arm(OBJECTS[number % len(OBJECTS)], number, there)
        asked = seq = seq + 1
        yield write_message(seq, f"mia {payload}", "human", thread, payload if number % 3 else content, payload)
        usage = {"prompt_tokens": 10, "completion_tokens": 2}
        calls = [{"id": payload, "name": payload, "arguments": payload}]
        at = {"turn": 1, "call": 0}
        for kind, body in (
            ("started", {"trigger": asked, "thread_id": thread, "as_of": asked, "manifest": [asked], "config_hash": payload}),
            ("thinking", {"turn": 1, "text": payload}),
            ("model_reply", {"turn": 1, "agent": agent, "reply": {"text": payload, "tool_calls": calls, "usage": usage, "model": payload}}),
            ("waiting", {**at, "questions": {payload: asked}, "until": 9, "is_approval": True}),
            ("approval", {**at, "is_approved": True, "by": payload, "seq": asked, "at": 1, "arguments": payload, "reason": payload}),
            ("tool_started", {**at, "tool": payload, "args": payload}),
            ("tool_result", {**at, "tool": payload, "content": payload, "ok": number % 2 == 0}),
            ("review", {"turn": 1, "answer": payload, "correction": payload, "notes": [payload]}),
            ("model_failed", {"turn": 2, "failure": "server", "reason": payload}),
            (payload, {"turn": 1, payload: payload}),
        ):  # fmt: skip
            seq += 1
            yield write_record(seq, agent, reaction, kind, body)
        seq += 1
        yield write_message(
            seq, agent, "agent", thread, payload, payload, cause=asked, message_id=derived_id(reaction, "", 1, 0)
        )
        seq += 1
        yield write_record(
            seq, agent, reaction, "finished", {"status": "failed", "reason": payload, "turns": 1, "usage": usage}
        )


def write_message(seq: int, sender: str, kind: str, thread: str, content: object, payload: str, **more: Any) -> Row:
    root = more.get("cause", seq)
    body = {
        "seq": seq, "message_id": f"{payload} {seq}", "kind": "channel", "sender_id": sender, "sender_kind": kind, "to": thread,
        "thread_id": thread, "root": root, "hops": 0, "sent_at": 1_700_000_000_000 + seq * 1000, "content": content,
        "metadata": {payload: payload, "title": payload}, "requires_response": [payload], **more,
    }  # fmt: skip
    head = MessageHead(
        seq=seq, sender_id=sender, sender_kind=kind, kind="channel", to=thread, thread_id=thread, root=root, hops=0,
        label=seq, cause=more.get("cause"),
    )  # fmt: skip
    data = msgspec.json.encode(body)
    return Row(
        seq=seq, at=body["sent_at"], type="message", actor=sender, stream=thread, target=thread, head=head, data=data
    )  # type: ignore[arg-type]


def write_record(seq: int, agent: str, reaction: str, kind: str, body: object) -> Row:
    at = 1_700_000_000_000 + seq * 1000
    return Row(
        seq=seq,
        at=at,
        type="record",
        actor=agent,
        key="r:x",
        stream=reaction,
        label=kind,
        data=msgspec.json.encode(body),
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def hostile(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Path]:
    ledger = tmp_path_factory.mktemp("hostile") / "log.jsonl"
    write_hostile(ledger, THERE)
    yield await export(ledger)


@pytest.mark.parametrize("browser", ["chromium", pytest.param("firefox", marks=pytest.mark.full)], indirect=True)
@pytest.mark.full
async def test_nothing_that_participants_wrote_runs_or_asks(open_window: OpenWindow, hostile: Path) -> None:
    """The screens show payloads in IDs, threads, texts, metadata, tools, arguments, results, reasons, models and
    kinds of records.
    """
    window = await open_window("file://")
    screen = RecordedScreen(window.page)
    await screen.show(hostile.as_uri(), "#/threads")
    links = window.page.get_by_role("list", name="Conversations").get_by_role("link")
    await expect(links.first).to_be_visible()
    places = await links.evaluate_all("links => links.map(it => it.getAttribute('href'))")
    assert len([it for it in places if it.startswith("#/thread/")]) >= len(HOSTILE) // 2
    each = range(len(HOSTILE))
    whys = [f"#/why/{13 * number + 12}" for number in each]
    chosen = [f"#/timeline?{urlencode({'reaction': name_reaction(number)})}" for number in each]
    groups = [f"#/cost?by={by}" for by in ("agent", "model", "thread", "root", "day")]
    told = await tour(window.page, [*SCREENS, *groups, *places, *whys, *chosen, "#/search?q=onerror", "#/agents"])
    shown = {
        place: "onerror" in told[place] for place in ("#/search?q=onerror", "#/agents", "#/cost?by=model", "#/timeline")
    }
    assert all(shown.values()), shown
    assert all("Steps of the reaction" in told[it] for it in whys)
    assert all("Denied" in told[it] or "Approved" in told[it] for it in chosen)
    await settle(window.page)
    assert await window.page.evaluate("globalThis.whatRan ?? []") == []
    assert_alone(window, hostile)


async def tour(page: Page, places: list[str]) -> dict[str, str]:
    """Open each screen, wait until it is loaded and drawn, and return its text."""
    go = """async (place) => {
      location.hash = place;
      const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      const main = document.getElementById("main");
      const lacks = () => !main.textContent || main.querySelector(".loading");
      do { await drawn(); await drawn(); } while (lacks());
      return main.textContent;
    }"""
    return {place: await page.evaluate(go, place) for place in places}


async def settle(page: Page) -> None:
    """Wait until the page is painted and has started all its requests."""
    await page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def assert_alone(window: Watched, path: Path) -> None:
    asked = {it.split("#")[0] for it in window.requested if not it.startswith(("data:", "blob:"))}
    assert asked <= {path.as_uri()}  # Firefox does not report requests for files


async def test_the_file_holds_no_word_of_a_participant_outside_of_its_rows(hostile: Path) -> None:
    """The rows are compressed, so the HTML of the file contains only the page's own words."""
    text = await asyncio.to_thread(hostile.read_text, encoding="utf-8")
    assert "elsewhere.invalid" not in text
    [rows] = re.findall(r'<script type="application/octet-stream" id="recording">(.*?)</script>', text)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", rows)
    assert len(re.findall("<script", text)) == 3


# --- exported files and live nodes


@pytest.mark.full
async def test_what_nobody_had_decided_is_offered_to_nobody(open_window: OpenWindow, tmp_path: Path) -> None:
    async with team_up(tmp_path, [BANK]) as node, node.client("mia") as mia:
        await mia.send("agent:bank", "pay ann 5")
        async for message in mia:
            if message.sender_id == "bank":
                break
    window = await open_window("file://")
    screen = RecordedScreen(window.page)
    await screen.show((await export(tmp_path / "team.db")).as_uri(), "#/thread/direct%3Abank~mia")
    card = window.page.get_by_label("Approval of pay")
    await expect(card).to_contain_text("No decision yet when this was recorded")
    await expect(card.get_by_role("button")).to_have_count(0)


async def test_the_page_on_a_file_is_only_looked_at(
    open_window: OpenWindow, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("viewed")
    async with refund(folder / "team.db"):
        pass
    async with command("view", str(folder / "team.db"), "--no-open") as view:
        link = (await view.line("^(http://.*)$"))[1]
        window = await open_window(link.partition("/#")[0])
        page, screen = window.page, RecordedScreen(window.page)
        await page.goto(link)
        await expect(screen.nav.get_by_role("link")).to_have_text(["Threads", "Agents", "Cost", "Timeline", "Search"])
        await screen.open_thread("direct:desk~mia")
        await expect(page.get_by_role("main").get_by_text("Refund order 12").first).to_be_visible()
        await expect(page.get_by_role("main").get_by_role("textbox")).to_have_count(0)
        await screen.go("#/timeline")
        await expect(page.get_by_role("region", name="Reactions").get_by_role("button")).to_have_count(2)
        window.allowed = LOST_CONNECTION
        await view.stop()
        await expect(page.get_by_text("The program that shows this file has ended")).to_be_visible()


@pytest.mark.full
async def test_the_timeline_of_a_live_node_is_for_operators(open_window: OpenWindow, shared_team: WebNode) -> None:
    node = shared_team
    boss, ann = await open_window(node.origin), await open_window(node.origin)
    await log_in(boss.page, await node.link("tia", operator=True))
    await log_in(ann.page, await node.link("tom"))
    thread = await Screen(ann.page).open_thread("direct:echo~tom")
    await thread.say("What did you do?")
    await expect(thread.message("You wrote: What did you do?")).to_be_visible()
    screen = RecordedScreen(boss.page)
    await screen.nav.get_by_role("link", name="Timeline").click()
    await expect(
        boss.page.get_by_role("region", name="Reactions").get_by_role("button", name=re.compile("^echo")).first
    ).to_be_visible()
    await expect(RecordedScreen(ann.page).nav.get_by_role("link", name="Timeline")).to_have_count(0)
