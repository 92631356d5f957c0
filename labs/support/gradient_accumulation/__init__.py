"""Lab 02, gradient accumulation: its checks, and what it gives."""
