"""Page objects: each screen of the page as an object with its content and its actions. Page objects find elements by
role and name.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from playwright.async_api import Locator, Page, expect

expect.set_options(timeout=30_000)


class Screen:
    """Parts that every screen has: navigation, the own name, and the state of the connection."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.nav = page.get_by_role("navigation", name="Screens")
        self.heading = page.get_by_role("main").get_by_role("heading", level=1)

    async def go(self, place: str) -> None:
        """Go to a screen by its address, without a reload."""
        await self.page.evaluate("place => { location.hash = place }", place)

    async def open_thread(self, thread_id: str) -> ThreadScreen:
        await self.go(f"#/thread/{quote(thread_id, safe='')}")
        return ThreadScreen(self.page)

    async def open_inbox(self) -> InboxScreen:
        await self.go("#/inbox")
        return InboxScreen(self.page)

    async def open_threads(self) -> ThreadsScreen:
        await self.go("#/threads")
        return ThreadsScreen(self.page)

    async def expect_online(self) -> None:
        await expect(self.page.locator(".myself .dot.online")).to_be_attached()

    async def expect_offline(self) -> None:
        await expect(self.page.get_by_text(re.compile("^(Offline for|Connecting)"))).to_be_visible()


class LoginPage(Screen):
    """Page of a browser that is not logged in."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self.link = page.get_by_label("Login link")
        self.enter = page.get_by_role("button", name="Log in")


async def log_in(page: Page, link: str) -> InboxScreen:
    """Open a login link, as from a terminal, and go to the inbox."""
    await page.goto(link)
    inbox = InboxScreen(page)
    await inbox.expect_online()
    await inbox.open_inbox()
    await expect(inbox.heading).to_have_text("Inbox")
    return inbox


class InboxScreen(Screen):
    """The person's inbox."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self.items = page.get_by_role("list", name="Inbox", exact=True).locator(":scope > li")

    def item(self, text: str) -> InboxItem:
        return InboxItem(self.items.filter(has_text=text))


class InboxItem:
    def __init__(self, place: Locator) -> None:
        self.place = place

    async def approve(self) -> None:
        await self.place.get_by_role("button", name="Approve once").click()

    async def deny(self, reason: str) -> None:
        await self.place.get_by_role("button", name="Deny…").click()
        await self.place.get_by_role("textbox").fill(reason)
        await self.place.get_by_role("button", name="Deny", exact=True).click()


class ThreadsScreen(Screen):
    """The conversations."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        self.rows = page.get_by_role("list", name="Conversations").get_by_role("listitem")

    def row(self, name: str) -> Locator:
        return self.rows.filter(has=self.page.locator(".thread-name", has_text=name))


class ThreadScreen(Screen):
    """One conversation: messages, live activity, and the composer."""

    def __init__(self, page: Page) -> None:
        super().__init__(page)
        main = page.get_by_role("main")
        self.log = main.get_by_role("log")
        self.messages = main.get_by_role("article")
        self.live = main.locator("article.live")
        self.composer = main.get_by_role("textbox", name=re.compile("^(Message|Write|Reply)"))

    def message(self, text: str | re.Pattern[str]) -> Locator:
        return self.messages.filter(has_text=text)

    async def say(self, text: str) -> None:
        await self.composer.fill(text)
        await self.composer.press("Enter")
