"""Lab 07, context parallel: its checks, and what it gives."""
