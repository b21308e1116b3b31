"""`DurabilityCheck`: checks whether the settings of the shared log's engine (NATS JetStream or PostgreSQL) guarantee
that acknowledged records are on disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roundelay.network.errors import LedgerError

from . import settings
from .shared_log import SharedLog

log = logging.getLogger(__name__)


class DurabilityCheck:
    """Checks whether the log's engine stores records on disk before it acknowledges them. With ``is_required``, the
    check fails if the engine's settings do not guarantee this. ``report`` receives messages for the operator."""

    def __init__(self, shared: SharedLog, report: Callable[[str], None], *, is_required: bool) -> None:
        self._shared = shared
        self._report = report
        self._is_required = is_required
        self._risk: str | None = None
        """Reason why acknowledged records may not be on disk. An empty string means that there is no risk, and None
        that no check has run yet."""
        self.checked_at = 0.0

    @property
    def level(self) -> str:
        """Durability level of acknowledged records: ``full`` if the engine's settings show that they are on disk,
        otherwise ``replicated``."""
        return "full" if self._risk == "" else "replicated"

    @property
    def is_due(self) -> bool:
        return asyncio.get_running_loop().time() - self.checked_at >= settings.DURABILITY_CHECK_S

    async def run(self) -> None:
        """Check the engine's settings. Raises `LedgerError` if full durability is required but the settings do not
        guarantee it."""
        before, self._risk = self._risk, await self._shared.find_sync_risk()
        self.checked_at = asyncio.get_running_loop().time()
        if self._risk and self._is_required:
            raise LedgerError(
                f"durability full is configured, but {self._shared.name} does not provide it: {self._risk}. Or "
                "remove `durability` from this node's configuration. The node then reports `replicated`."
            )
        if before is not None and bool(before) is not bool(self._risk):
            log.warning("durability of the shared log changed", extra={"durability": self.level})
            self._report(f"Acknowledged records are now {self.level}. {self._risk}".strip())
