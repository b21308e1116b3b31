"""Tests of links that log a person in to the page, made by `roundelay up`, `roundelay web` and the demo. docs/web.md."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from roundelay.connection import find_login_id
from roundelay.network.home import running_nodes
from tests.integration.test_demo import demo_process, read_until
from tests.support.announced import announced_node
from tests.support.command import command, invoke
from tests.support.node import running_node
from tests.support.terminals import command_at_terminal
from tests.support.wire import WireSession, expect_error, hello_frame, make_token

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/#login=([a-z0-9._-]+)~([\w-]{43})")


async def open_link(link: str, *, token: str | None = None) -> WireSession:
    """Use a link as a browser does. The hub's first frame has not been read yet."""
    found = LINK.fullmatch(link)
    assert found is not None, link
    page = await WireSession.open(found[1].replace("http", "ws") + "/", origin=found[1])
    new_token = token or make_token()
    await page.send_frame(hello_frame(found[2], kind="human", token=found[3], new_token=new_token))
    return page


async def test_up_prints_a_link_that_works_once_where_it_is_asked_to(tmp_path: Path) -> None:
    async with command("up", "--port", "0", "--web-link", "--log-level", "debug", cwd=tmp_path) as up:
        await up.line("^Roundelay is ready at ")
        link = (await up.error("^Open (http://.*)$"))[1]
        await up.error("once, within 10 minutes")
        page = await open_link(link)
        welcome = await page.expect("welcome")
        assert (welcome["agent_id"], welcome["is_operator"]) == (find_login_id(), True)
        second = await open_link(link)
        assert "roundelay web" in expect_error(await second.next_frame(), "not_authenticated")["message"]
        for session in (page, second):
            await session.close()
        await up.stop()
        code = link.rpartition("~")[2]
        assert "\n".join([*up.lines, *up.errors]).count(code) == 1, "a log holds no secret"


async def test_up_prints_a_link_at_a_terminal_and_none_without_the_page(tmp_path: Path) -> None:
    async with command_at_terminal(
        "up", "--port", "0", shows="Open http://127.0.0.1:", columns=200, cwd=tmp_path
    ) as up:
        up.process.terminate()
        await up.process.wait()
    shows = "In another terminal"
    async with command_at_terminal("up", "--port", "0", "--no-web", shows=shows, columns=200, cwd=tmp_path) as up:
        up.process.terminate()
        await up.process.wait()
        assert "http://" not in up.raw


async def test_an_id_that_is_no_person_s_gets_no_link_and_the_node_runs(tmp_path: Path) -> None:
    agent = f"{{id: {find_login_id()}, instruction: Greet., model: {{rules: []}}}}"
    (tmp_path / "roundelay.yaml").write_text(f"port: 0\nagents: [{agent}]\n")
    async with command("up", "--web-link", cwd=tmp_path) as up:
        await up.line("^Roundelay is ready at ")
        await up.error("is known here as agent, so no link was made; another one: roundelay web --as ID")
        await up.stop()


async def test_web_makes_links_for_the_login_user_and_for_others(tmp_path: Path) -> None:
    async with announced_node(tmp_path):
        own = await invoke("web")
        [link] = own.lines
        assert "within 10 minutes" in own.err
        page = await open_link(link)
        assert (await page.expect("welcome"))["is_operator"] is True
        await page.close()
        for flags, is_operator in (([], None), (["--operator"], True)):
            made = json.loads((await invoke("web", "--as", "mia", "--minutes", "60", "--json", *flags)).out)
            assert made.keys() == {"url", "agent_id", "kind", "operator", "expires_at"}
            page = await open_link(made["url"])
            welcome = await page.expect("welcome")
            assert (welcome["agent_id"], welcome.get("is_operator")) == ("mia", is_operator)
            await page.close()


async def test_an_operator_elsewhere_makes_links_by_a_token_of_its_own(tmp_path: Path) -> None:
    async with running_node() as node:
        host = await node.person("operator")
        await node.invite(host, "ops", operator=True)
        await node.invite(host, "mia")
        token = ("--url", node.url, "--token", node.token_of("ops"), "--as", "ops")
        [link] = (await invoke("web", *token)).lines
        page = await open_link(link)
        assert (await page.expect("welcome"))["is_operator"] is True
        await page.close()
        refused = await invoke("web", "--url", node.url, "--token", node.token_of("mia"), "--as", "mia", code=1)
        assert "operator" in refused.err


async def test_a_node_without_the_page_has_no_links() -> None:
    async with running_node(web=False) as node:
        host = await node.person("operator")
        await node.invite(host, "ops", operator=True)
        done = await invoke("web", "--url", node.url, "--token", node.token_of("ops"), "--as", "ops", code=1)
        assert "--no-web" in done.err
        assert done.out == ""


@pytest.mark.usefixtures("real_processes")
async def test_a_link_is_opened_in_the_browser_of_the_machine(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o755)
    async with announced_node(tmp_path):
        done = await invoke("web", "--open", BROWSER=f"{browser} %s")
        assert opened.read_text() == done.lines[0]


async def test_the_demo_shows_its_team_on_the_page(tmp_path: Path) -> None:
    async with demo_process(tmp_path, "--web") as process:
        shown = await read_until(process, "That link logs you in as zoe")
        found = LINK.search(shown)
        assert found is not None
        page = await open_link(found[0])
        assert (await page.expect("welcome"))["agent_id"] == "zoe"
        assert (await page.call("network.list_threads"))["threads"]
        await page.close()
        process.terminate()
        assert await process.wait() == 0
    assert running_nodes() == []


@pytest.mark.parametrize("public_url", ["https://hub.example.org", "http://192.168.1.20:8700/hub/"])
async def test_links_name_the_public_address_of_the_node(tmp_path: Path, public_url: str) -> None:
    file = tmp_path / "roundelay.yaml"
    file.write_text(f"port: 0\npublic_url: {public_url}\n")
    async with command("up", file, "--web-link", cwd=tmp_path) as up:
        ready = await up.line(r"^Roundelay is ready at (ws://\S+) ")
        opened = await up.error("^Open ")
        assert opened.string.startswith(f"Open {public_url.rstrip('/')}/#login=")
        [link] = (await invoke("web", "--as", "mia", "--url", ready[1])).lines
        assert link.startswith(f"{public_url.rstrip('/')}/#login=mia~")
        done = await invoke("web", "--as", "mia", "--qr", "--url", ready[1])
        code = [line for line in done.err.splitlines() if set(line) <= set("\u2588\u2580\u2584 ") and line]
        assert len(code) > 15
        assert len({len(line) for line in code}) == 1
        await up.stop()


@pytest.mark.parametrize(
    "wrong", ["hub.example.org", "ftp://hub.example.org", "https://", "https://a b", "https://x?y"]
)
async def test_a_wrong_public_address_is_refused_with_its_line(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "roundelay.yaml").write_text(f"port: 0\npublic_url: '{wrong}'\n")
    done = await invoke("up", cwd=tmp_path, code=2)
    assert "roundelay.yaml:2" in done.err
    assert "public_url" in done.err


async def test_up_opens_the_page_of_a_new_network_and_only_then(tmp_path: Path) -> None:
    """Other users can read the browser's command line, so it contains no code. Only the owner can read the file with
    the code.
    """
    seen, home = tmp_path / "seen", tmp_path / "home"
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$1" >{seen}\nfile="${{1#file://}}"\ncat "$file" >>{seen}\nstat -c %a "$file" >>{seen}\n'
    )
    browser.chmod(0o755)
    desktop = {"BROWSER": f"{browser} %s", "DISPLAY": ":99", "ROUNDELAY_HOME": str(home)}
    for is_new in (True, False):
        async with command_at_terminal(
            "up", "--port", "0", shows="In another terminal", columns=200, cwd=tmp_path, **desktop
        ) as up:
            up.process.terminate()
            await up.process.wait()
        assert seen.exists() == is_new
        assert not list(home.glob("open-*")), "a node that has stopped leaves no code"
        if is_new:
            address, page, mode = seen.read_text().splitlines()
            assert "~" not in address.rpartition("/")[2]
            link = re.search(r"url=(http://[^\"]+)", page)
            assert link is not None
            assert LINK.fullmatch(link[1])
            assert mode == "600"
            seen.unlink()


def name_dev_script(folder: Path) -> str:
    return os.path.relpath(Path(__file__).parents[2] / "dev", folder)


async def test_up_names_the_script_of_the_clone_that_started_it(tmp_path: Path) -> None:
    dev = name_dev_script(tmp_path)
    async with command_at_terminal(
        "up", "--port", "0", shows="In another terminal", columns=400, cwd=tmp_path, ROUNDELAY_DEV="1"
    ) as up:
        await up.shows(re.escape(f"another one: {dev} roundelay web"))
        await up.shows(re.escape(f"In another terminal: {dev} roundelay chat"))


@pytest.mark.parametrize(("variable", "value"), [("DISPLAY", None), ("SSH_CONNECTION", "10.0.0.1 1 10.0.0.2 22")])
async def test_up_opens_nothing_where_nobody_would_see_it(tmp_path: Path, variable: str, value: str | None) -> None:
    seen = tmp_path / "seen"
    desktop = {"BROWSER": f"touch {seen} %s", "DISPLAY": ":99", "WAYLAND_DISPLAY": ""} | {variable: value or ""}
    environment = {name: text for name, text in desktop.items() if text}
    async with command_at_terminal(
        "up", "--port", "0", shows="In another terminal", columns=200, cwd=tmp_path, **environment
    ) as up:
        up.process.terminate()
        await up.process.wait()
    assert not seen.exists()
