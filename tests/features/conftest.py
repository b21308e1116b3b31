"""Fixtures that the feature tests share: a network in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from roundelay.app import Network


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    async with Network.open() as opened:
        yield opened
