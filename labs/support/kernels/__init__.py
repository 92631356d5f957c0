"""Lab 12, kernels: its checks."""
