"""Environments for policies, one file each."""
