"""Lab 17, deploy to Triton: its checks, and what it gives."""
