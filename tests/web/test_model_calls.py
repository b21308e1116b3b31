"""Tests of the costs of model calls on the page, and of the exact prompt of an agent that stores it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.support.command import run
from tests.support.fake_openai import FakeOpenAI, text
from tests.web.conftest import OpenWindow
from tests.web.screens import Screen, log_in
from tests.web.team import WebNode, streaming, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def ask(team: WebNode, agent_id: str, question: str) -> int:
    """Ask an agent, and return the seq of its answer."""
    async with team.client("tom") as tom:
        await tom.send(f"agent:{agent_id}", question)
        async with tom.receive() as answer:
            return answer.seq


@pytest.mark.full
async def test_the_page_shows_the_dollars_of_the_cost_command(tmp_path: Path, open_window: OpenWindow) -> None:
    """A model without a known price has a hint instead."""
    pytest.importorskip("genai_prices")
    answers = [replace(text("Tea."), usage=(123_456, 789)) for _ in range(2)]
    async with FakeOpenAI(answers) as server:
        models = {"desk": "gpt-4o-mini", "odd": "no-such-model-at-all"}
        agents = [
            {"id": agent_id, "instruction": "x", "model": {"openai": {"name": name, "base_url": server.base_url}}}
            for agent_id, name in models.items()
        ]
        async with team_up(tmp_path, agents=agents) as team:
            seqs = {agent_id: await ask(team, agent_id, "Tea?") for agent_id in models}
            own = {"ROUNDELAY_HOME": str(tmp_path / "home")}
            report = json.loads((await run("cost", "--json", cwd=tmp_path, **own)).out)
            table = (await run("cost", cwd=tmp_path, **own)).out
            usd = {it["agent"]: it["usd"] for it in report["groups"]}
            assert usd["desk"] > 0.001
            dollars = f"${usd['desk']:.4f}"
            assert dollars in table  # the page shows the same text as the command prints

            window = await open_window(team.origin)
            page = window.page
            screen = Screen(page)
            await log_in(page, await team.link("olga", operator=True))
            await screen.go("#/cost")
            rows = page.get_by_role("table").get_by_role("row")
            await expect(rows.filter(has_text="desk").get_by_role("cell").last).to_have_text(dollars)
            await expect(rows.filter(has_text="odd").get_by_role("cell").last).to_have_text("price unknown")
            await expect(rows.last.get_by_role("cell").last).to_have_text(f"{dollars} + unknown")
            main = page.get_by_role("main")
            await expect(main).to_contain_text(
                "No price is known for no-such-model-at-all. The node's price table (genai-prices) has no price for them."
            )
            await expect(main).not_to_contain_text("?")
            await screen.go(f"#/why/{seqs['desk']}")
            await expect(main.get_by_text(f"123,456 tokens in, 789 out, {dollars}")).to_be_visible()
            await screen.go(f"#/why/{seqs['odd']}")
            await expect(main.get_by_text("123,456 tokens in, 789 out, price unknown")).to_be_visible()
            await screen.go("#/agents/desk")
            await expect(main.get_by_text(f"1 call, 123,456 tokens in, 789 out, {dollars}")).to_be_visible()
            await window.close()


@pytest.mark.full
async def test_why_shows_the_exact_prompt_where_it_is_kept(tmp_path: Path, open_window: OpenWindow) -> None:
    async with FakeOpenAI([text("Tea."), text("Cake.")]) as server:
        kept, other = streaming("desk", server.base_url), streaming("plain", server.base_url)
        async with team_up(tmp_path, agents=[{**kept, "keep": {"prompt": True}}, other]) as team:
            seqs = {agent_id: await ask(team, agent_id, "Is <b>teapot</b> a word?") for agent_id in ("desk", "plain")}
            window = await open_window(team.origin)
            page = window.page
            screen, main = Screen(page), page.get_by_role("main")
            await log_in(page, await team.link("olga", operator=True))
            await screen.go(f"#/why/{seqs['desk']}")
            summary = main.get_by_text("Exact prompt", exact=True)
            await expect(summary).to_have_count(1)
            prompt = main.get_by_role("group").filter(has=page.get_by_text("Exact prompt", exact=True)).locator("pre")
            await expect(prompt).to_be_hidden()
            await summary.click()
            await expect(prompt).to_be_visible()
            shown = await prompt.inner_text()
            sent = server.requests[0]
            for message in sent["messages"]:
                assert f"[{message['role']}]\n{message['content'].strip()}" in shown
            assert "&lt;b&gt;teapot&lt;/b&gt;" in shown  # the page shows the prompt as the model received it
            for tool in sent["tools"]:
                assert tool["function"]["name"] in shown.rpartition("[tools] ")[2].split(", ")
            await expect(prompt.locator("b")).to_have_count(0)
            await screen.go(f"#/why/{seqs['plain']}")
            await expect(main.get_by_role("heading", name=f"Why #{seqs['plain']}")).to_be_visible()
            await expect(main.get_by_text("tokens in")).to_be_visible()
            await expect(summary).to_have_count(0)
            await window.close()
