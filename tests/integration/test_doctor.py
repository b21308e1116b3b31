"""Tests that `roundelay doctor` leaves no files behind."""

from __future__ import annotations

from pathlib import Path

from tests.support.announced import announced_node
from tests.support.command import invoke


def list_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


async def test_a_folder_that_a_node_would_make_is_not_made(tmp_path: Path) -> None:
    done = await invoke("doctor", cwd=tmp_path, ROUNDELAY_PORT="0", ROUNDELAY_DB="new/folder/team.db")
    assert "new/folder/team.db (will be made)" in done.out
    assert list_files(tmp_path) == []


async def test_a_file_where_the_folder_is_to_be_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = await invoke("doctor", cwd=tmp_path, code=1, ROUNDELAY_PORT="0", ROUNDELAY_DB="file/team.db")
    assert "file/team.db cannot be written" in done.out


AGENT = "id: desk\ninstruction: You are at the desk.\ntools: [desk_tools:look_up]\nmodel: {rules: []}\n"


async def test_an_agents_file_is_looked_at_as_such(tmp_path: Path) -> None:
    (tmp_path / "desk.yaml").write_text(AGENT)
    done = await invoke("doctor", "desk.yaml", cwd=tmp_path, code=1)
    assert "agent desk desk.yaml:3: agent desk: the tool 'desk_tools:look_up'" in done.out
    (tmp_path / "desk_tools.py").write_text("def look_up(order: str) -> str:\n    return order\n")
    done = await invoke("doctor", "desk.yaml", cwd=tmp_path)
    assert "ok     agent desk 1 tool of its own; its model is a script." in done.out
    assert "database" not in done.out
    (tmp_path / "desk.yaml").write_text(AGENT.replace("instruction", "instuction"))
    done = await invoke("doctor", "desk.yaml", cwd=tmp_path, code=1)
    assert 'desk.yaml:2: unknown key "instuction"; did you mean "instruction"?' in done.out


async def test_the_network_tools_of_an_agent_are_checked_against_a_node_that_is_named(tmp_path: Path) -> None:
    agent = tmp_path / "desk.yaml"
    agent.write_text(AGENT.replace("tools: [desk_tools:look_up]", "network_tools: [finish, send_txt_message]"))
    done = await invoke("doctor", "desk.yaml", cwd=tmp_path)
    assert (
        "note   agent desk The names in network_tools were not checked, because only a running node knows them."
        in done.out
    )
    async with announced_node(tmp_path) as node:
        done = await invoke("doctor", "desk.yaml", "--url", node.url, cwd=tmp_path, code=1)
        assert 'desk.yaml:3: Agent desk: network_tools names "send_txt_message"' in done.out
        agent.write_text(agent.read_text().replace("txt", "text"))
        done = await invoke("doctor", "desk.yaml", "--url", node.url, cwd=tmp_path)
        assert f"ok     agent desk The hub at {node.url} has its network_tools." in done.out


async def test_a_proxy_without_a_name_for_browsers_is_noted(tmp_path: Path) -> None:
    places = {"cwd": tmp_path, "ROUNDELAY_PORT": "0", "ROUNDELAY_BEHIND_PROXY": "true"}
    assert "web_hosts: [hub.example.org]" in (await invoke("doctor", **places)).out
    named = await invoke("doctor", **places, ROUNDELAY_WEB_HOSTS="hub.lan")
    assert "ok     page       Browsers reach it by hub.lan" in named.out
    without = await invoke("doctor", **places, ROUNDELAY_WEB="false")
    assert "ok     page       The node serves no page." in without.out
