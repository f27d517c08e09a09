"""Rewards, which score completions."""
