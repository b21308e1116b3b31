"""Tools of the agent in the kill tests. The tools append a line to a file, and report to the test before and after
it.
"""

from __future__ import annotations

import asyncio
import os
import signal

from roundelay.agents.tools import ToolContext, tool

GATE, BELLS = "ERRAND_GATE", "ERRAND_BELLS"
"""Environment variables with the port of the test and the path of the file."""


async def tell(what: str) -> None:
    """Report the position of this process, and wait for the test's permission to continue."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(os.environ[GATE]))
    writer.write(f"{what}\n".encode())
    await reader.readline()
    writer.close()


@tool(once=True)
async def ring(context: ToolContext) -> str:
    """Ring the bell."""
    await tell("ring before")
    descriptor = os.open(os.environ[BELLS], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{context.reaction} {context.call_id}\n".encode())
    os.close(descriptor)
    await tell("ring after")
    return "It rang."


@tool(idempotent=True)
async def weigh(what: str) -> str:
    """Weigh something."""
    await tell("weigh before")
    await tell("weigh after")
    return f"{what} weighs {len(what)}"


@tool(idempotent=True)
def die() -> str:
    """End this process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "It lives."
