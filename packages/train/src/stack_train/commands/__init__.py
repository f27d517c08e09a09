"""Subcommands of `stack` that train brings."""
