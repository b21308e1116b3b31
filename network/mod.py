"""The public import path of the plugin interface, for authors of mods. `core.mod` defines the interface."""

from .core.mod import (
    AfterContext,
    Change,
    Incoming,
    Mod,
    Operation,
    Undelivered,
    Upkeep,
    add_mod_folder,
    load_mods,
    operation,
)
from .core.screens import Action, Detail, DetailList, Fact, Input, ModScreen
from .operations.reading import Reading

__all__ = [
    "Action",
    "AfterContext",
    "Change",
    "Detail",
    "DetailList",
    "Fact",
    "Incoming",
    "Input",
    "Mod",
    "ModScreen",
    "Operation",
    "Reading",
    "Undelivered",
    "Upkeep",
    "add_mod_folder",
    "load_mods",
    "operation",
]
