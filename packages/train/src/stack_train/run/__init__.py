"""A training run: its config, what it is made of, its loop, and its step compiled for hardware that is not there."""
