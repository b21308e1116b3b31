"""`DurabilityCheck`: checks in the engine's settings whether acknowledged records are on disks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from roundelay.network.errors import LedgerError

from . import settings
from .shared_log import SharedLog

log = logging.getLogger(__name__)


class DurabilityCheck:
    """Checks how the engine syncs records to disk. With ``is_required``, the node acknowledges messages only if the
    engine's settings show that records are on disks first. ``report`` receives sentences for the operator."""

    def __init__(self, shared: SharedLog, report: Callable[[str], None], *, is_required: bool) -> None:
        self._shared = shared
        self._report = report
        self._is_required = is_required
        self._risk: str | None = None
        """Reason why acknowledged records may not be on disks. None before the first check."""
        self.checked_at = 0.0

    @property
    def level(self) -> str:
        """``full`` if the engine shows that acknowledged records are on disks, else ``replicated``."""
        return "full" if self._risk == "" else "replicated"

    @property
    def is_due(self) -> bool:
        return asyncio.get_running_loop().time() - self.checked_at >= settings.DURABILITY_CHECK_S

    async def run(self) -> None:
        """Check the engine's settings. Raises `LedgerError` if full durability is required and the settings do not show
        it."""
        before, self._risk = self._risk, await self._shared.find_sync_risk()
        self.checked_at = asyncio.get_running_loop().time()
        if self._risk and self._is_required:
            raise LedgerError(
                f"durability full is asked for, and {self._shared.name} does not show it: {self._risk}. Or remove "
                "`durability` from this node's configuration: then it reports `replicated`."
            )
        if before is not None and bool(before) is not bool(self._risk):
            log.warning("durability of the shared log changed", extra={"durability": self.level})
            self._report(f"Acknowledged records are now {self.level}. {self._risk}".strip())
