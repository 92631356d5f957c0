"""Counts and measurements: traffic, memory, time, this machine."""
