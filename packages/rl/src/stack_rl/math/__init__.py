"""Losses of post-training as pure functions of arrays: no model, no configuration, no state."""
