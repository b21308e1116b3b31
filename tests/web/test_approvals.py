"""Tests of approvals on the page: the content of a card, the effect of a plain yes, and the decision if approvers are
named.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Locator, expect

from roundelay.agents.models.model import ModelRequest
from roundelay.agents.models.prompt_view import read_prompt
from roundelay.agents.models.scripted import Action, call, say
from roundelay.agents.tools import tool
from tests.web.conftest import OpenWindow
from tests.web.screens import ThreadScreen, log_in
from tests.web.team import WebNode, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = "\n".join(f"line {number} of the letter" for number in range(40))


@tool(needs_approval=True)
def refund(order: int, amount: str, letter: str, to: dict[str, str]) -> str:
    """Pay an order back."""
    return f"order {order} is paid back"


def shop(request: ModelRequest) -> list[Action]:
    view = read_prompt(request)
    if view.tool_results:
        return [say(" ".join(it.content for it in view.tool_results))]
    orders = re.findall(r"order (\d+)", view.incoming_text)
    asked = [call("refund", order=int(it), amount="40.00 EUR", letter=LONG, to={"name": "tom"}) for it in orders]
    return [say("The parcel never came." if orders else f"You wrote: {view.incoming_text}"), *asked]


def agent(agent_id: str, **rule: Any) -> dict[str, Any]:
    named = {"tool": "tests.web.test_approvals:refund", **rule}
    about = {"description": "pays orders back", "instruction": "Pay back.", "tools": [named]}
    return {"id": agent_id, **about, "model": {"script": "tests.web.test_approvals:shop"}}


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def shops(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WebNode]:
    agents = [agent("shop"), agent("vault", approvers=["mona"])]
    async with team_up(tmp_path_factory.mktemp("shops"), agents) as node:
        yield node


async def ask(node: WebNode, open_window: OpenWindow, who: str, text: str, to: str = "shop") -> ThreadScreen:
    """Log a person in, write to an agent, and open the conversation."""
    inbox = await log_in((await open_window(node.origin)).page, await node.link(who))
    async with node.client(who) as client:
        await client.send_text(to, text)
    return await inbox.open_thread(f"direct:{'~'.join(sorted((to, who)))}")


def cards(thread: ThreadScreen) -> Locator:
    return thread.page.get_by_role("region", name="Approval of refund")


async def test_a_card_shows_the_call_in_a_table_why_and_what_always_would_allow(
    shops: WebNode, open_window: OpenWindow
) -> None:
    thread = await ask(shops, open_window, "tina", "my money for order 17")
    card = cards(thread)
    table = card.get_by_role("table", name="Arguments")
    await expect(table.get_by_role("row", name=re.compile("^order 17"))).to_be_visible()
    await expect(table.get_by_role("row", name=re.compile(r"^amount 40\.00 EUR"))).to_be_visible()
    letter = table.get_by_role("row", name=re.compile("^letter"))
    await expect(letter).not_to_contain_text("line 30")
    await letter.get_by_role("button", name=re.compile("^Show all")).click()
    await expect(letter).to_contain_text("line 39 of the letter")
    await expect(card).to_contain_text("Why: The parcel never came.")
    once = card.get_by_role("button", name="Approve once")
    await expect(once).to_be_visible()
    await expect(card.get_by_role("button", name=re.compile("^Always"))).to_have_count(0)
    await card.get_by_text("Don't ask again…").click()
    await expect(card).to_contain_text("in every conversation where you may decide without asking, with any arguments")
    await expect(card.get_by_role("button", name="Always in this conversation")).to_be_visible()
    await once.click()
    await expect(thread.message("tina approved refund(order=17, amount=40.00 EUR")).to_have_count(1)
    await expect(thread.message("order 17 is paid back")).to_be_visible()
    await expect(card).to_contain_text("approved once by tina")
    await expect(thread.page.get_by_text("/approve", exact=False)).to_have_count(0)


@pytest.mark.full
async def test_a_plain_yes_is_offered_as_a_decision_and_no_as_another(shops: WebNode, open_window: OpenWindow) -> None:
    thread = await ask(shops, open_window, "tara", "my money for order 3")
    await expect(cards(thread)).to_be_visible()
    await thread.say("Ok.")
    meant = thread.page.get_by_role("group", name="Approve?")
    await expect(meant).to_contain_text("Approve refund(order=3, amount=40.00 EUR")
    await expect(meant.get_by_role("button", name="Approve")).to_be_focused()
    await thread.page.keyboard.press("Escape")
    await expect(meant).to_have_count(0)
    await expect(thread.composer).to_have_value("Ok.")
    await thread.say("yes")
    await thread.page.keyboard.press("Enter")  # the button has the focus
    await expect(thread.message("order 3 is paid back")).to_be_visible()
    await expect(thread.composer).to_have_value("")
    said = thread.messages.filter(has=thread.page.locator(".markdown").get_by_text("yes", exact=True))
    await expect(said).to_have_count(0)
    await thread.say("yes")  # no card is open, so "yes" is an ordinary message
    await expect(thread.message("You wrote: yes")).to_be_visible()
    await thread.say("my money for order 4")
    await expect(cards(thread).get_by_role("button", name="Approve once")).to_have_count(1)
    await thread.say("no!")
    await thread.page.get_by_role("group", name="Deny?").get_by_role("button", name="Deny").click()
    await expect(thread.message("tara denied refund(order=4")).to_be_visible()
    await expect(thread.message("Not run: tara denied it.")).to_be_visible()


@pytest.mark.full
async def test_a_plain_yes_for_several_calls_asks_which(shops: WebNode, open_window: OpenWindow) -> None:
    thread = await ask(shops, open_window, "theo", "my money for order 5 and order 6")
    await expect(cards(thread).get_by_role("button", name="Approve once")).to_have_count(2)
    await thread.say("yes")
    which = thread.page.get_by_role("group", name="Which call?")
    await expect(which).to_contain_text("Approve which call?")
    await which.get_by_role("button", name=re.compile(r"refund\(order=6")).click()
    await expect(thread.message("theo approved refund(order=6")).to_be_visible()
    await thread.say("no")
    await thread.page.get_by_role("group", name="Deny?").get_by_role("button", name="Send “no” as a message").click()
    said = thread.messages.filter(has=thread.page.locator(".markdown").get_by_text("no", exact=True))
    await expect(said).to_have_count(1)
    await cards(thread).get_by_role("button", name="Approve once").click()
    await expect(thread.message("order 5 is paid back order 6 is paid back")).to_be_visible()


@pytest.mark.full
async def test_who_asked_sees_who_decides_and_the_approver_gets_the_words_and_a_link(
    shops: WebNode, open_window: OpenWindow
) -> None:
    async with shops.client("mona"):
        pass
    thread = await ask(shops, open_window, "tess", "my money for order 8, please", to="vault")
    mine = cards(thread)
    await expect(mine).to_contain_text("Waiting for mona.")
    await expect(mine.get_by_role("button", name="Approve once")).to_have_count(0)
    await thread.say("yes")
    await expect(thread.page.get_by_role("group", name="Approve?")).to_have_count(0)
    mona = await log_in((await open_window(shops.origin)).page, await shops.link("mona"))
    item = mona.item("refund")
    await expect(item.place).to_contain_text("tess wrote: my money for order 8, please")
    await mona.page.set_viewport_size({"width": 360, "height": 740})
    size = await item.place.get_by_role("link", name="vault", exact=True).bounding_box()
    assert size is not None
    assert size["height"] < 30, "the agent's name is broken into letters"
    kind = item.place.get_by_text("Needs approval", exact=True).first
    assert await kind.evaluate("it => it.scrollWidth <= it.clientWidth"), "the kind of the item is cut"
    link = item.place.get_by_role("link", name="Open conversation")
    await expect(link).to_have_attribute("href", re.compile(r"direct%3Atess~vault"))
    await item.approve()
    await expect(item.place).to_have_count(0)
    await expect(thread.message("mona approved refund(order=8")).to_be_visible()
    await expect(thread.message("order 8 is paid back")).to_be_visible()
    await expect(mine).to_contain_text("approved once by mona")
    await mona.go("#/search?q=refund")
    found = mona.page.get_by_role("main").locator(".row .who", has_text="vault").first
    await expect(found).to_be_visible()
    size = await found.bounding_box()
    assert size is not None
    assert size["height"] < 30, "a name in search results is broken into letters"


@pytest.mark.full
async def test_an_operator_decides_in_her_inbox_what_she_does_not_read(shops: WebNode, open_window: OpenWindow) -> None:
    thread = await ask(shops, open_window, "tilo", "my money for order 9")
    await expect(cards(thread)).to_be_visible()
    otto = await log_in((await open_window(shops.origin)).page, await shops.link("otto", operator=True))
    item = otto.item("tilo").place.or_(otto.item("refund").place).first
    await expect(item.get_by_text("Don't ask again…")).to_have_count(0)
    await item.get_by_role("button", name="Approve once").click()
    await expect(thread.message("otto approved refund(order=9")).to_be_visible()
    await expect(thread.message("order 9 is paid back")).to_be_visible()
