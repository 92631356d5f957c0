"""Lab 05, sharded data parallel (ZeRO): its checks, and what it gives."""
