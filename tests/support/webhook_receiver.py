"""A webhook receiver as an outsider writes it. The official library verifies every request before the receiver stores
and answers it.

Tests use the class `Receiver`. As a program (PORT FILE SECRET), it appends the requests to a file, and can be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from standardwebhooks import Webhook

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
Take = Callable[[str, dict[str, Any]], int | None]
"""Callback that gets the ID and body of a request, and returns the status to answer. None means that the receiver
sends no answer.
"""
Judge = Callable[[bytes, dict[str, str]], Any]
"""Callback that gets the body and headers of a request, and raises if the signature is invalid."""


class Receiver:
    """Server for POST requests on one port. `got` lists each verified request as (webhook-id, body), whatever the
    answer was.
    """

    def __init__(self, secret: str = SECRET, judge: Judge | None = None, id_header: str = "webhook-id") -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.heads: list[dict[str, str]] = []
        self.answers: Take = lambda *_: 204
        self.port = 0
        self._judge = judge or Webhook(secret).verify
        self._id_header = id_header
        self._came = asyncio.Condition()
        self._writers: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def contents(self) -> list[Any]:
        return [body["data"]["content"] for _, body in self.got if body["type"] == "message"]

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(30), self._came:
            await self._came.wait_for(lambda: len(self.got) >= count)

    @asynccontextmanager
    async def listening(self, port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            serving = [it for it in self._writers.values() if it is not None]
            for writer in [*self._writers]:
                writer.close()
            await asyncio.gather(*serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = asyncio.current_task()
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")[:-2]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers["content-length"]))
                self._judge(body, headers)  # raises for a request with an invalid signature or an old timestamp
                assert first.startswith("POST /hook")
                status = await self._take(headers, json.loads(body))
                if status is None:
                    return
                extra = f"location: {self.url}\r\n" if 300 <= status < 400 else ""
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n{extra}\r\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.pop(writer, None)
            writer.close()

    async def _take(self, headers: dict[str, str], body: dict[str, Any]) -> int | None:
        status = self.answers(headers[self._id_header], body)
        async with self._came:
            self.got.append((headers[self._id_header], body))
            self.heads.append(headers)
            self._came.notify_all()
        return status


async def main(port: int, file: str, secret: str) -> None:
    receiver = Receiver(secret)
    kept = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def keep(webhook_id: str, body: dict[str, Any]) -> int:
        os.write(kept, f"{webhook_id} {body['data']['seq']}\n".encode())
        return 200

    receiver.answers = keep
    async with receiver.listening(port):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
