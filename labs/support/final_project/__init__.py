"""The final project: its brief, its checks, and its page of results."""
