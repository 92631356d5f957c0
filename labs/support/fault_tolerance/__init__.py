"""Lab 13, fault tolerance: its checks, and the ranks and disks that they let fail."""
