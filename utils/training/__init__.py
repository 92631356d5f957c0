"""The training loop: its command line, one step of it, the optimizer, checkpoints."""
