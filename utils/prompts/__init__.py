"""Prompt tuning: virtual tokens for a frozen model, and what they are compared with."""
