"""Subcommands of `stack` that core provides."""
