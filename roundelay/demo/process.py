"""One agent of the demo as a process of its own: started, read, killed on purpose and started again, stopped.

Stands between `run`, which decides, and `team`, which runs in the process. It knows nothing of what the agents say.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from roundelay.demo.team import Report
from roundelay.network.errors import RoundelayError

STOP_TIMEOUT_S = 3.0
MAX_REPORT_BYTES = 4 * 1024 * 1024


class DemoFailed(RoundelayError):
    """The demo could not come to its end; the sentence says who is missing."""

    code = "demo"


class MemberProcess:
    """One agent's process: started by `keep`, read, and started again when it was killed on purpose."""

    def __init__(
        self, agent_id: str, arguments: Sequence[str], folder: Path, take: Callable[[MemberProcess, Report], None]
    ) -> None:
        self.agent_id = agent_id
        self.times_killed = 0
        # -P: nothing in the current folder can stand in for a module
        self._command = [sys.executable, "-P", "-m", "roundelay.demo.team", agent_id, *arguments]
        self._log = folder / f"{agent_id}.log"
        self._home = folder / "home"
        self._take = take
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False
        self._is_stopping = False

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    async def keep(self) -> None:
        """Run the process until `stop`. Raises `DemoFailed` when it ends by itself."""
        while not self._is_stopping:
            process = self._process = await self._start()
            assert process.stdout is not None
            async for line in process.stdout:
                if line.endswith(b"\n"):  # else it was killed in the middle of it
                    self._take(self, json.loads(line))
            code = await process.wait()
            if not self._is_killed and not self._is_stopping:
                raise DemoFailed(
                    f"{self.agent_id} could not go on (exit code {code}): {self.read_last_words() or 'it said nothing.'}"
                )
            self._is_killed = False

    def kill(self) -> None:
        """End the process as a crash would (SIGKILL); `keep` starts it again."""
        if self._process is not None and self._process.returncode is None:
            self._is_killed = True
            self.times_killed += 1
            self._process.kill()

    async def stop(self) -> None:
        """End the process: its input ends, and after a while it is killed."""
        self._is_stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def read_last_words(self) -> str:
        """Give the last line that it wrote to its standard error, or nothing."""
        if not self._log.exists():
            return ""
        return "".join(self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:])

    async def _start(self) -> asyncio.subprocess.Process:
        # Its own token, wherever the user keeps theirs; no session of the terminal's, whose Ctrl-C is for the demo alone.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("ROUNDELAY_TOKEN", "ROUNDELAY_URL")
        }
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment | {"ROUNDELAY_HOME": str(self._home)},
                start_new_session=True,
                limit=MAX_REPORT_BYTES,
            )
