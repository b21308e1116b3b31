"""The public import path of the visibility types. `core.visibility` defines the rules for what an agent may see."""

from .core.visibility import VISIBILITIES, Visibility

__all__ = ["VISIBILITIES", "Visibility"]
