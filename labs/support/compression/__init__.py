"""Lab 15, compression: its checks, and what it gives."""
