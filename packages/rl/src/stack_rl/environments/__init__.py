"""Environments: what a policy acts in, one file each."""
