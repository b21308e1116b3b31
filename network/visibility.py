"""The public path of the names of what an agent may see; the rules are `core.visibility`."""

from .core.visibility import VISIBILITIES, Visibility

__all__ = ["VISIBILITIES", "Visibility"]
