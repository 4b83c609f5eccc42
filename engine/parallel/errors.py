"""What goes wrong with a model in several processes."""

from __future__ import annotations


class LayoutError(Exception):
    """A model cannot be divided as asked. The message says why, and what can be done."""


class PeersLost(Exception):
    """A step that takes several ranks failed on this one. The others may be anywhere in it: none of them can go on."""
