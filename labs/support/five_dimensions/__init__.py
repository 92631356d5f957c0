"""Lab 10, five dimensions: its checks, and what it gives."""
