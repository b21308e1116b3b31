"""A report with an attached table: private until it is sent, read in parts, and passed on.

Run it: python examples/files/report.py

It prints:

    sales.csv: 623023 bytes; bob may read it: False
    bob reads ['1,7', '2,14'], and may continue at 20
    bob downloads 623023 bytes, ann 3
    eve sees sales.csv, version 1 of ann
    after a restart, eve downloads 623023 bytes
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from roundelay import InvalidArguments, Network
from roundelay.network.client import NetworkClient
from roundelay.network.client.files import download_file, upload_file


async def may_read(client: NetworkClient, file: str) -> bool:
    try:
        await client.call("files.read", {"file": file})
    except InvalidArguments:
        return False
    return True


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "team.db"
        async with Network.open(database, mods=["channels", "discovery", "files"]) as network:
            ann, bob, eve = [await network.join(name) for name in ("ann", "bob", "eve")]
            table = "\n".join(f"{day},{day * 7}" for day in range(1, 50_001))

            # The content is on the disk when this returns. So far only its owner may read it.
            file = await upload_file(ann, table.encode(), name="sales.csv")
            print(f"{file['name']}: {file['size']} bytes; bob may read it: {await may_read(bob, file['file'])}")

            # The readers of a message may read its files, in this version.
            await ann.send("agent:bob", {"text": "The numbers.", "files": [file]})
            first = await bob.call("files.read", {"file": file["file"], "length": 20})
            print(f"bob reads {first['text'].splitlines()[:2]}, and may continue at {first['next']}")

            # A new version is private again until it is sent.
            await upload_file(ann, b"1,8", name="sales.csv", file=file["file"])
            print(f"bob downloads {len(await download_file(bob, file['file']))} bytes, ann 3")

            # A recipient passes the file on, and the new reader gets the same version.
            await bob.call("files.attach", {"to": "agent:eve", "files": [file["file"]], "text": "From ann."})
            [listed] = (await eve.call("files.list"))["files"]
            print(f"eve sees {listed['name']}, version {listed['version']} of {listed['owner']}")

        # Everything is still there after a restart, and each content is stored once.
        async with Network.open(database, mods=["channels", "discovery", "files"]) as network:
            eve = await network.join("eve")
            print(f"after a restart, eve downloads {len(await download_file(eve, file['file']))} bytes")


asyncio.run(main())
