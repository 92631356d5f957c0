"""Lab 09, mixture of experts: its checks, and what it gives."""
