"""Text to tokens to batches, shared out over ranks."""
