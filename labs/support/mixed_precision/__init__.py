"""Lab 03, mixed precision: its checks."""
