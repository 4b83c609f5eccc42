"""From messages and text to token ids, and from token ids back to text."""
