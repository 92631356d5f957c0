"""Lab 14, prompt tuning: its checks, and what it gives."""
