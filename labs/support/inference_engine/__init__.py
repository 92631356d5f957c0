"""Lab 16, an inference engine: its checks, and what it gives."""
