"""Lab 16, deploy to Triton: its checks, and what it gives."""
