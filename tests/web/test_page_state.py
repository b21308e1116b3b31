"""The page's state: after every frame it is what a refetch gives."""

from __future__ import annotations

from tests.support.node import running_node
from tests.web.page_client import running_page


async def test_smoke() -> None:
    async with running_node() as node:
        await node.person("host")
        bob = await node.agent("bob")
        async with running_page(node.url, "mia", node.owner_token) as page:
            stored = await bob.send("agent:mia", "Hello")
            await page.do("reached", seq=stored["seq"])
            await page.do("open", thread_id="direct:bob~mia")
            await page.do("compare")
            await page.do("send", message={"to": "agent:bob", "content": "Hi", "thread_id": "direct:bob~mia"})
            await page.do("sent")
            await page.do("compare")
            await page.do("drop")
            await page.do("send", message={"to": "agent:bob", "content": "Hi", "thread_id": "direct:bob~mia"})
            await page.do("sent")
            print(await page.do("compare"))
            print(await page.do("counts"))
            await page.do("end")
