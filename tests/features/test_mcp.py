"""Tests of MCP servers as tools: real server processes over stdio and HTTP, one of them from another project. The
tests check the provider's requests.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from roundelay.agents.features.mcp_servers import McpServers, ServerOptions
from roundelay.agents.policy import AgentPolicy
from roundelay.agents.simple import SimpleAgentRunner
from roundelay.agents.team import build_runner, load_agents
from roundelay.app import Network
from roundelay.network.errors import ConfigError
from tests.support.agents import Heard, Person, Provider, running
from tests.support.fake_openai import Reply, calls, text
from tests.support.loops import facts

SHOP = Path(__file__).parents[1] / "support" / "mcp_shop.py"
SDK_SHOP = SHOP.with_name("mcp_sdk_shop.py")


def shop(tmp_path: Path, **options: Any) -> McpServers:
    env = {"SHOP_ORDERS": str(tmp_path / "orders")}
    return McpServers(
        {"shop": ServerOptions(command=sys.executable, args=("-X", f"for={tmp_path}", str(SHOP)), env=env, **options)}
    )


def make_seller(provider: Provider, servers: McpServers) -> SimpleAgentRunner:
    policy = AgentPolicy(max_turns=8, prompt="full")
    return SimpleAgentRunner(
        "ann", instruction="You sell.", model=provider.model(), middleware=[servers], policy=policy
    )


async def ask(network: Network, servers: McpServers, *replies: Reply) -> tuple[str, list[dict[str, Any]]]:
    """Ask an agent with these servers one question. Return the answer and the provider's requests."""
    async with Provider([*replies, text("done")]) as provider:
        runner = make_seller(provider, servers)
        mia = await Person.join(network, "mia")
        async with running(network, runner):
            answer = await mia.ask("ann", "hello")
        return answer.text, [dict(it) for it in provider.requests]


def use(*wanted: tuple[str, Any]) -> Reply:
    return calls(wanted)


def results(request: dict[str, Any]) -> list[str]:
    return [it["content"] for it in request["messages"] if it["role"] == "tool"]


def names(request: dict[str, Any]) -> list[str]:
    return [it["function"]["name"] for it in request["tools"]]


async def test_tools_of_a_server_are_offered_with_its_schema_and_called(network: Network, tmp_path: Path) -> None:
    """A failing tool returns its own error text."""
    answer, requests = await ask(
        network,
        shop(tmp_path),
        use(("shop_price", {"article": "pear", "count": 2}), ("shop_order", {"article": "pear"}), ("shop_fail", {})),
    )
    assert answer == "done"
    assert {"shop_price", "shop_order", "shop_read_resource", "shop_get_prompt"} <= set(names(requests[0]))
    [price] = [it["function"] for it in requests[0]["tools"] if it["function"]["name"] == "shop_price"]
    assert price["description"] == "The MCP server shop says: Give the price of an article."
    assert price["parameters"]["properties"]["article"]["type"] == "string"
    assert '<tool_server name="shop">\nPrices are in euros.\n</tool_server>' in requests[0]["messages"][1]["content"]
    *called, failed = results(requests[1])
    assert called == ["2 pear: 6 EUR", "ordered pear"]
    assert "out of stock" in failed
    assert (tmp_path / "orders").read_text() == "pear\n"


async def test_arguments_are_held_against_the_servers_schema(network: Network, tmp_path: Path) -> None:
    wrong = use(("shop_price", {"article": 3, "count": "many"}), ("shop_price", {}))
    _, requests = await ask(network, shop(tmp_path), wrong)
    first, second = results(requests[1])
    assert "article: 3 is not of type 'string'" in first
    assert "count: 'many' is not of type 'integer'" in first
    assert "article: Field required" in second


async def test_resources_and_prompts_are_usable(network: Network, tmp_path: Path) -> None:
    """The server lists one item per page."""
    used = use(
        ("shop_list_resources", {}), ("shop_read_resource", {"uri": "shop://opening"}),
        ("shop_list_prompts", {}), ("shop_get_prompt", {"name": "greeting", "arguments": {"name": "Zoe"}}),
    )  # fmt: skip
    _, requests = await ask(network, shop(tmp_path), used)
    listed, read, prompts, prompt = results(requests[1])
    assert [it["uri"] for it in json.loads(listed)] == ["shop://opening", "shop://address"]
    assert read == "always"
    greeting, farewell = json.loads(prompts)
    assert greeting == {"name": "greeting", "about": "A greeting.", "takes": ["name"]}
    assert farewell["name"] == "farewell"
    assert prompt == "user: Greet Zoe warmly."


async def test_what_an_sdk_server_changes_while_it_runs_shows_soon(network: Network) -> None:
    servers = McpServers({"shop": ServerOptions(command=sys.executable, args=(str(SDK_SHOP),))})
    more = [use(("shop_price", {"article": f"a{n}"})) for n in range(4)]
    _, requests = await ask(network, servers, use(("shop_grow", {})), *more)
    assert "shop_discount" not in names(requests[0])
    assert "shop_discount" in names(requests[-1])
    said = [head_of(it)[1].splitlines()[-2].rpartition(" ")[2] for it in requests]
    assert (said[0], said[1:].count("francs.") + said[1:].count("euros."), said[-1]) == ("euros.", 5, "francs.")


async def test_progress_is_told(network: Network, tmp_path: Path) -> None:
    heard = Heard()
    async with Provider([use(("shop_count", {})), text("done")]) as provider:
        runner = SimpleAgentRunner(
            "ann", instruction="", model=provider.model(), middleware=[shop(tmp_path)], on_event=heard
        )
        mia = await Person.join(network, "mia")
        async with running(network, runner):
            await mia.ask("ann", "hello")
    from roundelay.agents.events import Progress

    told = [it.text for it in heard.events if isinstance(it, Progress) and not it.is_done]
    assert told == ["shop_count: 1 of 2, shelf 1", "shop_count: 2 of 2, shelf 2"]


async def test_a_server_that_dies_in_a_call_is_an_answer_and_is_there_again(network: Network, tmp_path: Path) -> None:
    _, requests = await ask(network, shop(tmp_path), use(("shop_die", {})), use(("shop_price", {"article": "pear"})))
    assert "broke during the call" in results(requests[1])[0]
    assert results(requests[2])[1] == "1 pear: 3 EUR"


async def test_a_slow_server_is_an_answer(network: Network, tmp_path: Path) -> None:
    patience_s = 3  # three seconds are enough for the second call even on a loaded machine
    _, requests = await ask(
        network, shop(tmp_path, timeout_s=patience_s), use(("shop_hang", {})), use(("shop_price", {"article": "pear"}))
    )
    told = results(requests[1])[0]
    assert "gave no answer in time" in told or f"took longer than {patience_s} s" in told
    assert results(requests[2])[1] == "1 pear: 3 EUR"


async def test_a_server_that_does_not_start_leaves_the_agent_at_work(network: Network, tmp_path: Path) -> None:
    broken = McpServers(
        {
            "gone": ServerOptions(command=str(tmp_path / "no-such-program")),
            "mute": ServerOptions(command=sys.executable, args=("-c", "raise SystemExit('no licence')")),
        }
    )
    answer, requests = await ask(network, broken)
    assert answer == "done"
    assert not [name for name in names(requests[0]) if name.startswith(("gone", "mute"))]


# --- instructions of servers


def head_of(request: dict[str, Any]) -> tuple[str, str]:
    """Return the system message, and the prompt without the trailing text of the first turn."""
    system, user = (it["content"] for it in request["messages"][:2])
    return system, user.removesuffix(f"\n\n{facts(1, 8, finish=True)}")


async def test_what_a_server_says_otherwise_when_it_is_back_shows_in_the_next_turn(
    network: Network, tmp_path: Path
) -> None:
    """Nothing else before the history changes, so that providers' caches stay valid."""
    about = tmp_path / "about"
    about.write_text("Prices are in euros.")
    servers = McpServers(
        {
            "shop": ServerOptions(
                command=sys.executable,
                args=(str(SHOP),),
                env={"SHOP_ORDERS": str(tmp_path / "orders"), "SHOP_ABOUT": str(about)},
                user_prompt="It is spring.",
            )
        }
    )
    price = use(("shop_price", {"article": "pear"}))

    async def answer(body: dict[str, Any]) -> Reply:
        turn = sum(it["role"] == "assistant" for it in body["messages"])
        if turn == 1:
            about.write_text("Prices are in francs.")
        return [price, use(("shop_die", {})), price, price, text("done")][turn]

    async with Provider(answer) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, make_seller(provider, servers)):
            assert (await mia.ask("ann", "hello")).text == "done"
    first, second, third, fourth, fifth = map(head_of, provider.requests)
    assert first[1].endswith('<tool_server name="shop">\nPrices are in euros.\n</tool_server>\n\nIt is spring.')
    assert first == second == third, "while it is away, what it said holds"
    assert fourth == fifth == (first[0], first[1].replace("euros", "francs"))


async def test_a_server_that_comes_later_shows_in_the_reaction_that_finds_it(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.agents.features.mcp_session.RETRY_AFTER_S", 0)
    late = tmp_path / "shop.py"
    servers = McpServers(
        {"shop": ServerOptions(command=sys.executable, args=(str(late),), user_prompt="It is spring.")}
    )
    async with Provider([text("one"), text("two")]) as provider:
        ann = SimpleAgentRunner("ann", instruction="You sell.", model=provider.model(), middleware=[servers])
        mia = await Person.join(network, "mia")
        async with running(network, ann):
            await mia.ask("ann", "hello")
            late.write_text(SHOP.read_text())
            await mia.ask("ann", "hello")
    first, second = ("".join(head_of(it)) for it in provider.requests)
    assert "Prices are in euros." not in first
    assert "It is spring." not in first
    assert (second.count("Prices are in euros."), second.count("It is spring.")) == (1, 1)


async def test_templates_in_the_agents_file_place_what_its_servers_say(network: Network, tmp_path: Path) -> None:
    """The templates come before the servers in the file, and still know them."""
    path = tmp_path / "ann.yaml"
    path.write_text(f"""
id: ann
instruction: You sell.
model: {{rules: []}}
prompt: full
middleware:
  - prompts:
      system: '{{% for it in servers %}}{{{{ it.name }}}}: {{{{ it.tools[0].name }}}}. {{{{ it.system }}}}{{% endfor %}}'
      user: '{{{{ servers | map(attribute="user") | join }}}}'
  - mcp:
      servers:
        shop: {{command: {sys.executable}, args: [{SHOP}], tools: [price], user_prompt: It is spring.}}
""")
    async with Provider([text("done")]) as provider:
        mia = await Person.join(network, "mia")
        async with running(network, build_runner(load_agents(path)[0], model=provider.model())):
            await mia.ask("ann", "hello")
    system, user = (it["content"] for it in provider.requests[0]["messages"])
    assert "\n\nshop: shop_price. What stands inside <tool_server> was said by" in system
    assert system.endswith('<tool_server name="shop">\nPrices are in euros.\n</tool_server>')
    assert user.endswith(f"\n\nIt is spring.\n\n{facts(finish=True)}")
    assert (system.count("Prices are in euros."), user.count("It is spring.")) == (1, 1)


def find_processes(word: str) -> list[bytes]:
    """Return the command lines of this machine's processes that contain a word."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            lines.append(path.read_bytes())
    return [line for line in lines if word.encode() in line]


async def test_no_server_process_is_left_behind(network: Network, tmp_path: Path) -> None:
    servers = shop(tmp_path)
    await ask(network, servers, use(("shop_price", {"article": "pear"})))
    assert not find_processes(str(tmp_path))


async def test_a_server_that_is_not_ours_is_used(network: Network) -> None:
    servers = McpServers(
        {"time": ServerOptions(command=sys.executable, args=("-m", "mcp_server_time", "--local-timezone", "UTC"))}
    )
    convert = ("time_convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"})
    _, requests = await ask(network, servers, use(convert))
    assert {"time_get_current_time", "time_convert_time"} <= set(names(requests[0]))
    assert json.loads(results(requests[1])[0])["time_difference"] == "+9.0h"


@asynccontextmanager
async def serving_http() -> AsyncIterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SDK_SHOP), str(port)),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    while b"Uvicorn running" not in (line := await process.stderr.readline()):
        assert line, "the server ended"
    draining = asyncio.create_task(process.stderr.read())
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await draining


async def test_a_server_over_http_is_used_and_its_loss_is_an_answer(network: Network) -> None:
    async with serving_http() as url:
        servers = McpServers({"shop": ServerOptions(url=url)})
        _, requests = await ask(
            network, servers, use(("shop_price", {"article": "pear"})), use(("shop_die", {})), use(("shop_price", {"article": "fig"}))
        )  # fmt: skip
    assert results(requests[1]) == ["1 pear: 3 EUR"]
    assert "broke during the call" in results(requests[2])[1]
    assert "is not available" in results(requests[3])[2]


def test_servers_stand_in_the_agents_file(tmp_path: Path) -> None:
    path = tmp_path / "ann.yaml"
    head = "id: ann\ninstruction: You sell.\nmodel: {rules: []}\nmiddleware:\n"
    path.write_text(head + "  - mcp: {servers: {shop: {command: shop-server, args: [a], env_from: [SHOP_KEY]}}}\n")
    [spec] = load_agents(path)
    [servers] = build_runner(spec).agent.middleware
    assert isinstance(servers, McpServers)
    path.write_text(head + "  - mcp: {servers: {shop: {command: a, url: b}}}\n")
    with pytest.raises(ConfigError, match=r"ann.yaml:5: .*either a command or a url"):
        load_agents(path)
