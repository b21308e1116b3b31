"""Test of files that the node stores: upload from the composer, display and download."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.web.conftest import OpenWindow
from tests.web.screens import log_in
from tests.web.team import ECHO, team_up

pytestmark = pytest.mark.asyncio(loop_scope="session")

PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==")
PICTURE = PIXEL + bytes(300_000)  # larger than a frame
TEXT = b"<b>first line</b>\n" * 8_000


async def test_large_files_are_uploaded_shown_and_saved(
    tmp_path: Path, open_window: OpenWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDELAY_MODS", "channels,discovery,files")
    async with team_up(tmp_path, [ECHO]) as team, team.client("bob") as bob:
        window = await open_window(team.origin)
        inbox = await log_in(window.page, await team.link("ann"))
        thread = await inbox.open_thread("direct:ann~bob")
        picture = {"name": "picture.png", "mimeType": "image/png", "buffer": PICTURE}
        text = {"name": "log.txt", "mimeType": "text/plain", "buffer": TEXT}
        await window.page.set_input_files("input[type=file]", files=[picture, text])  # type: ignore[arg-type]
        await expect(window.page.get_by_role("button", name="Remove log.txt")).to_be_visible()
        await thread.say("Look at these")
        async with bob.receive() as message:
            content = message.content
        assert [it["size"] for it in (*content["images"], *content["files"])] == [len(PICTURE), len(TEXT)]
        image = window.page.get_by_role("img", name="picture.png")
        await expect(image).to_be_visible()
        assert await image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1
        await window.page.get_by_text("Text of the file").click()
        await expect(window.page.get_by_text("<b>first line</b>").first).to_be_visible()  # as text, not as markup
        async with window.page.expect_download() as download:
            await window.page.get_by_role("button", name="Save").first.click()
        saved = await (await download.value).path()
        assert saved.read_bytes() == PICTURE
        await window.close()
