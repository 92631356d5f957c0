"""Lab 08, pipeline parallel: its checks, and what it gives."""
