"""Subcommands of `stack` that stack-serve brings."""
