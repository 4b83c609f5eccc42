"""The one error of this folder: its message says what happened and what to do next."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, fetched, checked or stored. The message is written for the person at the terminal."""
