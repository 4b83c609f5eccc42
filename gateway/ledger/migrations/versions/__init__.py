"""One file per step, in order; a published step never changes."""
