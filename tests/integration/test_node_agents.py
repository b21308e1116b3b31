"""Tests of the agents of a node, which operators list, stop, restart and reload after a file change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.integration.test_up import ANN, ask, children, folder, node_up, team
from tests.support.command import invoke

__all__ = ["folder", "team"]


async def listed(url: str) -> dict[str, dict[str, Any]]:
    done = await invoke("agent", "list", "--json", "--url", url)
    return {it["agent_id"]: it for it in json.loads(done.out)["agents"]}


async def test_operators_stop_and_start_an_agent(team: Path) -> None:
    async with node_up(team) as (up, url):
        assert {it["state"] for it in (await listed(url)).values()} == {"running"}
        done = await invoke("agent", "stop", "ann", "--url", url)
        assert done.out == "ann is stopped.\n"
        assert set(children(up.pid)) == {"bob"}
        assert (await listed(url))["ann"]["state"] == "stopped"
        sent = await invoke("send", "ann", "hi", "--url", url)
        assert sent.lines[1:] == ["ann is offline. The message waits until ann joins."]
        assert len((await invoke("send", "bob", "hi", "--url", url)).lines) == 1
        asking = asyncio.create_task(ask(url, "ann", "hello"))
        assert (await invoke("agent", "start", "ann", "--url", url)).out == "ann is running.\n"
        assert await asking == "ann heard hello", "what was said meanwhile waited for it"
        before = children(up.pid)
        assert (await invoke("agent", "start", "ann", "--url", url)).out == "ann is running.\n"
        assert children(up.pid) == before
        assert (await invoke("agent", "restart", "ann", "--url", url)).out == "ann was restarted.\n"
        after = children(up.pid)
        assert (after["ann"] == before["ann"], after["bob"] == before["bob"]) == (False, True)
        assert await ask(url, "ann", "again") == "ann heard again"
        await up.stop()


async def test_an_agent_that_the_node_does_not_run_is_refused_with_those_that_it_runs(team: Path) -> None:
    async with node_up(team) as (up, url):
        done = await invoke("agent", "restart", "zoe", "--url", url, code=1)
        assert "no agent 'zoe'" in done.err
        assert "ann, bob" in done.err
        await up.stop()


async def test_only_operators_list_and_control_agents(folder: Path) -> None:
    async with node_up(folder) as (up, url):
        made = await invoke("token", "create", "tom", "--kind", "human", "--json", "--url", url)
        token = json.loads(made.out)["token"]
        for words in (["list"], ["stop", "ann"], ["reload", "ann"]):
            done = await invoke("agent", *words, "--as", "tom", "--token", token, "--url", url, code=1)
            assert "Only operators may call" in done.err
        assert set(children(up.pid)) == {"ann"}
        await up.stop()


async def test_a_changed_file_is_offered_and_applied_by_a_reload_alone(folder: Path) -> None:
    async with node_up(folder) as (up, url):
        assert (await listed(url))["ann"]["has_changed"] is False
        (folder / "ann.yaml").write_text(f"# a comment changes nothing\n{ANN}")
        assert (await listed(url))["ann"]["has_changed"] is False
        (folder / "ann.yaml").write_text(ANN.replace("ann heard", "ann took"))
        assert (await listed(url))["ann"]["has_changed"] is True
        await up.error("ann.yaml has changed; apply it: roundelay agent reload ann")
        assert "roundelay agent reload ann" in (await invoke("agent", "list", "--url", url)).out

        assert await ask(url, "ann", "hello") == "ann heard hello"
        os.kill(children(up.pid)["ann"], signal.SIGKILL)
        await up.error("Agent ann has ended with signal 9")
        assert await ask(url, "ann", "back") == "ann heard back", "a crash applies nothing"
        await invoke("agent", "restart", "ann", "--url", url)
        assert await ask(url, "ann", "anew") == "ann heard anew", "nor does a restart"

        done = await invoke("agent", "reload", "ann", "--url", url)
        assert done.out == "ann was reloaded with its current file.\n"
        assert await ask(url, "ann", "hello") == "ann took hello"
        assert (await listed(url))["ann"]["has_changed"] is False
        await up.stop()


async def test_a_wrong_file_is_refused_and_the_agent_goes_on(folder: Path) -> None:
    async with node_up(folder) as (up, url):
        before = children(up.pid)
        for text, part in (
            (ANN.replace("instruction", "instrction"), "did you mean"),
            (ANN.replace("id: ann", "id: zoe"), "no agent ann"),
            ("", ""),
        ):
            (folder / "ann.yaml").write_text(text)
            done = await invoke("agent", "reload", "ann", "--url", url, code=1)
            assert part in done.err
            assert "keeps running with the file that it loaded before" in done.err
        (folder / "ann.yaml").unlink()
        assert (await invoke("agent", "reload", "ann", "--url", url, code=1)).err
        assert children(up.pid) == before
        assert await ask(url, "ann", "hello") == "ann heard hello"
        await up.stop()


async def test_of_a_node_with_several_agents_in_its_file_the_changed_one_is_offered(team: Path) -> None:
    async with node_up(team) as (up, url):
        node = team / "roundelay.yaml"
        node.write_text(node.read_text().replace("bob heard", "bob took") + "name: elsewhere\n")
        found = await listed(url)
        assert (found["ann"]["has_changed"], found["bob"]["has_changed"]) == (False, True)
        await invoke("agent", "reload", "bob", "--url", url)
        assert await ask(url, "bob", "hello") == "bob took hello"
        await up.stop()


async def test_an_ended_process_waits_in_the_operators_inbox_until_its_file_is_right(team: Path) -> None:
    (team / "ann.yaml").write_text(f"{ANN}network_tools: [send_txt_message]\n")
    async with node_up(team) as (up, url):
        await up.error("Agent ann has ended with exit code 2 and is not started again")
        [item] = json.loads((await invoke("inbox", "--json", "--url", url)).out)["items"]
        assert (item["kind"], item["agent_id"], item["cause"]) == ("fault", "ann", "ended")
        assert "send_text_message" in item["reason"]
        assert "its process has ended" in (await invoke("agents", "--url", url)).out
        assert "its process has ended" in (await invoke("status", "--url", url)).out
        assert (await listed(url))["ann"]["state"] == "ended"
        (team / "ann.yaml").write_text(ANN)
        assert (await invoke("agent", "reload", "ann", "--url", url)).out == "ann was reloaded with its current file.\n"
        assert await ask(url, "ann", "hello") == "ann heard hello"
        assert json.loads((await invoke("inbox", "--json", "--url", url)).out)["items"] == []
        await up.stop()


async def test_a_removed_agent_is_not_started_again(team: Path) -> None:
    async with node_up(team) as (up, url):
        await invoke("call", "network.remove", "agent_id=ann", "--url", url)
        await up.error("Agent ann has ended and is not started again: it was removed from this network")
        found = await listed(url)
        assert (found["ann"]["state"], found["bob"]["state"]) == ("ended", "running")
        assert await ask(url, "bob", "hello") == "bob heard hello"
        await up.stop()
        assert not any("starts again in" in line for line in up.errors)
