"""The public path of the plugin seam, for authors of mods; the seam itself is `core.mod`."""

from .core.mod import AfterContext, Change, Incoming, Mod, Operation, add_mod_folder, load_mods, operation
from .operations.reading import Reading

__all__ = [
    "AfterContext",
    "Change",
    "Incoming",
    "Mod",
    "Operation",
    "Reading",
    "add_mod_folder",
    "load_mods",
    "operation",
]
