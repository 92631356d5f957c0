"""Lab 06, tensor parallel: its checks, and what it gives."""
