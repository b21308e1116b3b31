"""Tests of the real demo: its agents are processes, its node listens, and its answers are computed from the question."""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.models.model import (
    AssistantMessage,
    ModelRequest,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Call, Say
from roundelay.demo.agents import ANSWERS, DESK
from roundelay.demo.play import PERSON, DemoPlan, play, run_demo
from roundelay.demo.screen import BAR, DemoScreen
from roundelay.display.text import display_width
from roundelay.network.client import NetworkClient
from roundelay.network.home import running_nodes
from roundelay.network.messages import BaseMessage, DirectMessage
from tests.support.fake_openai import FakeOpenAI, Reply, calls, text
from tests.support.forks import Process, start_roundelay

START_TIMEOUT_S = 60.0


def run(plan: DemoPlan) -> tuple[list[BaseMessage], str]:
    """Run the demo, and return its messages and its screen."""
    shown = io.StringIO()
    return asyncio.run(play(plan, DemoScreen(shown))), shown.getvalue()


def places(messages: Iterable[BaseMessage]) -> Counter[tuple[str, str, str]]:
    """Count messages by sender, thread and text. The name of a reply thread contains a seq, which differs between
    runs.
    """
    return Counter((it.sender_id, re.sub(r"\d+", "N", it.thread_id), it.text) for it in messages)


def answers(messages: Iterable[BaseMessage]) -> list[str]:
    return [it.text for it in messages if it.to == f"agent:{PERSON}"]


def unbroken(screen: str) -> str:
    """Return the screen's text without its line breaks."""
    return " ".join(screen.replace("\n! ", " ").split())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[BaseMessage], str]:
    return run(DemoPlan())


def test_one_question_gives_direct_messages_a_broadcast_and_a_reply_thread(
    undisturbed: tuple[list[BaseMessage], str],
) -> None:
    messages = undisturbed[0]
    kinds = Counter(re.sub(r"\d+", "N", it.thread_id) for it in messages)
    assert kinds == {"direct:desk~zoe": 2, "broadcast": 1, "thread:N": 2, "direct:desk~numbers": 2}
    assert {it.sender_id for it in messages} == {PERSON, *ANSWERS}
    [answer] = answers(messages)
    assert "17 × 23 = 391" in answer
    assert "“roundelay” (9 letters)" in answer


class NarrowDemo(DemoScreen):
    """A terminal of 60 columns."""

    width = 60  # type: ignore[assignment]


def test_a_narrow_terminal_breaks_no_word_and_no_command() -> None:
    shown = io.StringIO()
    screen = NarrowDemo(shown)
    screen.node("ws://127.0.0.1:44497/")
    screen.member("numbers", 15982, "calculates with numbers and dates")
    screen.suggest("Next", [("kill an agent at its work", "roundelay demo --kill numbers --serve --now")])
    screen.suggest("Next", [("kill it", "roundelay demo --kill numbers")])
    assert shown.getvalue().splitlines() == [
        "Roundelay: a node at ws://127.0.0.1:44497/ and three agents",
        "on WebSockets",
        "  numbers  process 15982    calculates with numbers and",
        "                            dates",
        "Next",
        "  kill an agent at its work",
        "      roundelay demo --kill numbers --serve --now",
        "Next",
        "  kill it   roundelay demo --kill numbers",
    ]


def test_wide_characters_break_no_line_of_the_terminals() -> None:
    """Lines that the terminal itself wraps lack the bar, and could look like another message."""
    shown = io.StringIO()
    said = "表" * 45 + " #99 desk → zoe"
    NarrowDemo(shown).message(
        DirectMessage(
            seq=1, message_id="m", sender_id="zoe", sender_kind="human", to="agent:desk", thread_id="direct:desk~zoe", content=said,
            sent_at=0, root=1, hops=0,
        )
    )  # fmt: skip
    lines = shown.getvalue().splitlines()
    assert max(map(display_width, lines)) <= 60
    assert "".join(line.removeprefix(BAR) for line in lines if line.startswith(BAR)).replace(" ", "") == said.replace(
        " ", ""
    )


def test_screen_shows_each_message_with_its_thread_and_ends_with_the_totals(
    undisturbed: tuple[list[BaseMessage], str],
) -> None:
    messages, screen = undisturbed
    for message in messages:
        assert re.search(rf"^#{message.seq} {message.sender_id} .* in {message.thread_id}$", screen, re.MULTILINE)
    assert 'numbers calculate(expression="17 * 23") → 391' in screen
    assert re.search(r"^7 messages in 4 threads, 13 turns, 6 tool calls, ", screen, re.MULTILINE)
    assert "--kill numbers" in screen
    assert "\x1b" not in screen


def test_readme_shows_what_the_screen_shows(undisturbed: tuple[list[BaseMessage], str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```text\n(#.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    varying = re.compile(r"(?<=#)\d+|(?<=thread:)\d+|[\d.]+ s$", re.MULTILINE)
    screen = varying.sub("N", undisturbed[1]).splitlines()
    for line in varying.sub("N", shown).splitlines():
        assert line in screen or line == "  ..."


@pytest.mark.full
def test_a_question_that_nobody_can_answer_is_answered_so() -> None:
    messages, _ = run(DemoPlan("Will it rain?", thinking_s=0.02))
    [answer] = answers(messages)
    assert "None of us can answer that" in answer


@pytest.mark.parametrize(
    "agent_id", [it if it == "numbers" else pytest.param(it, marks=pytest.mark.full) for it in ANSWERS]
)
def test_an_agent_killed_at_its_work_changes_no_message(
    agent_id: str, undisturbed: tuple[list[BaseMessage], str]
) -> None:
    # The pause is long enough for an interruption on a busy machine.
    messages, screen = run(DemoPlan(kill=agent_id, thinking_s=0.4))
    assert places(messages) == places(undisturbed[0])
    first, second = re.findall(rf"{agent_id}(?:, process| is back as process) (\d+)", screen)
    assert first != second
    assert "continues its reaction: 1 turn of its reaction is in the ledger" in unbroken(screen)
    assert re.search(r"^7 messages in 4 threads, 13 turns, 6 tool calls, ", screen, re.MULTILINE)


@pytest.mark.full
async def test_the_same_team_runs_on_a_real_models_api() -> None:
    shown = io.StringIO()
    async with FakeOpenAI(play_a_model) as server:
        messages = await play(DemoPlan("What is 6 * 7?", model="any", base_url=server.base_url), DemoScreen(shown))
    assert answers(messages) == ["6 × 7 = 42. (numbers checked its part: it is right.)"]
    assert {body["model"] for body in server.requests} == {"any"}


def play_a_model(body: dict[str, Any]) -> Reply:
    """Return the reply of the demo's scripts to a provider's request, in the provider's format."""
    messages: list[Any] = []
    for it in body["messages"]:
        match it["role"]:
            case "system":
                messages.append(SystemMessage(it["content"]))
            case "user":
                messages.append(UserMessage(it["content"]))
            case "tool":
                messages.append(ToolMessage(it["tool_call_id"], it["content"]))
            case _:
                made = [
                    ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"])
                    for c in it.get("tool_calls", ())
                ]
                messages.append(AssistantMessage(it.get("content"), tuple(made)))
    [agent_id] = [name for name in ANSWERS if f'Your id in this network is "{name}"' in messages[0].content]
    actions = ANSWERS[agent_id](read_prompt(ModelRequest(messages)))
    said = [it.text for it in actions if isinstance(it, Say)]
    return text(said[0]) if said else calls([(it.tool, it.arguments) for it in actions if isinstance(it, Call)])


def test_a_missing_key_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_demo(None, model="any") == 1
    [sentence] = capsys.readouterr().err.splitlines()
    assert "OPENAI_API_KEY is not set" in sentence
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("question", "kill", "word"), [(" ", None, "empty"), (None, "nobody", "nobody")])
def test_wrong_use_is_refused_at_once(
    question: str | None, kill: str | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(question, kill=kill) == 2
    printed = capsys.readouterr()
    assert word in printed.err
    assert printed.out == ""


def test_the_address_of_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(None, base_url="http://127.0.0.1:9/v1") == 2
    printed = capsys.readouterr()
    assert "add --model NAME" in printed.err
    assert printed.out == ""


@asynccontextmanager
async def demo_process(folder: Path, *options: str) -> AsyncIterator[Process]:
    """Run the command with its temporary files in a folder of the test."""
    process = await start_roundelay(
        "demo", *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(folder)},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def read_until(process: Process, wanted: str) -> str:
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(START_TIMEOUT_S):
        while wanted not in seen:
            line = await process.stdout.readline()
            assert line, f"the demo ended: {seen}"
            seen += line.decode()
    return seen


def list_pids(screen: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"process (\d+)", screen)]


async def test_command_ends_by_itself_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with demo_process(tmp_path, "What is 6 * 7?") as process:
        async with asyncio.timeout(START_TIMEOUT_S):
            out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert "6 × 7 = 42" in out.decode()
    assert not any(map(is_running, list_pids(out.decode())))
    assert os.listdir(tmp_path) == []


@pytest.mark.full
async def test_interrupted_command_leaves_nothing_behind(tmp_path: Path) -> None:
    async with demo_process(tmp_path) as process:
        screen = await read_until(process, "desk → everyone")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(START_TIMEOUT_S):
            assert await process.wait() == 130
    assert len(list_pids(screen)) == len(ANSWERS)
    assert not any(map(is_running, list_pids(screen)))
    assert os.listdir(tmp_path) == []


async def test_agents_end_when_the_demo_is_killed(tmp_path: Path) -> None:
    async with demo_process(tmp_path) as process:
        pids = list_pids(await read_until(process, "desk → everyone"))
        watched = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        await process.wait()
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(START_TIMEOUT_S):
        for descriptor in watched:
            ended = loop.create_future()
            loop.add_reader(descriptor, lambda ended=ended: ended.done() or ended.set_result(None))
            await ended
            loop.remove_reader(descriptor)
            os.close(descriptor)


@pytest.mark.full
async def test_with_serve_others_join_and_ask(tmp_path: Path) -> None:
    async with demo_process(tmp_path, "--serve") as process:
        await read_until(process, "runs until Ctrl-C")
        [node] = running_nodes()
        async with NetworkClient("bob", kind="human") as bob:
            await bob.send_text(DESK, "What is 6 * 7?")
            async for message in bob:
                if message.to == "agent:bob":
                    assert message.text.startswith("6 × 7 = 42. (numbers")
                    break
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(START_TIMEOUT_S):
            assert await process.wait() == 0
    assert running_nodes() == []
    assert not is_running(node.pid)
    assert os.listdir(tmp_path) == []
