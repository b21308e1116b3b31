"""The public import path of the visibility types. `core.visibility` defines which messages an agent may see."""

from .core.visibility import VISIBILITIES, Visibility

__all__ = ["VISIBILITIES", "Visibility"]
