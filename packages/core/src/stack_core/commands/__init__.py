"""Subcommands of `stack` that core brings."""
