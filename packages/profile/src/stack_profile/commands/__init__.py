"""Subcommands of `stack profile`."""
