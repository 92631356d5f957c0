"""Lab 01, data parallel: its checks, and what it gives."""
