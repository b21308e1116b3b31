"""The operation that lists the screens of a hub's mods. The web page and the terminal UI display these screens."""

from __future__ import annotations

from typing import Any

import msgspec

from .reading import Reading


async def screens(reading: Reading) -> dict[str, Any]:
    """List the screens that this hub's mods describe, in the order of the node's `mods`. A client draws them with the
    operations that they name."""
    return {
        "screens": [
            {**msgspec.to_builtins(screen), "mod": mod.id} for mod in reading.hub.mods for screen in mod.screens
        ]
    }
