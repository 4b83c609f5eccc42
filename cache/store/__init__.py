"""Where answers are kept: in memory by key and by vector, and on disk."""
