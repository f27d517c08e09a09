"""Subcommands of `stack` in stack-quant."""
