"""Subcommands of `stack` that quant brings."""
