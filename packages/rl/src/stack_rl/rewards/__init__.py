"""Rewards: what scores a completion."""
