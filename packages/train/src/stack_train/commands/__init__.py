"""Subcommands of `stack` for training, generation and conversion."""
