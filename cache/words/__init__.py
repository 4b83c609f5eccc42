"""Texts as the cache compares them: forms of writing and asking, and the guards that keep apart what lies close."""
