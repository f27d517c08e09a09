"""Subcommands of `stack` that stack-profile brings."""
