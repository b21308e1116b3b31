"""The public path of the plugin seam, for authors of mods; the seam itself is `core.mod`."""

from .core.mod import AfterContext, Change, Incoming, Mod, Operation, load_mods, look_for_mods_in, operation
from .operations.reading import Reading

__all__ = [
    "AfterContext",
    "Change",
    "Incoming",
    "Mod",
    "Operation",
    "Reading",
    "load_mods",
    "look_for_mods_in",
    "operation",
]
