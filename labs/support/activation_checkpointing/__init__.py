"""Lab 04, activation checkpointing: its checks, and what it gives."""
