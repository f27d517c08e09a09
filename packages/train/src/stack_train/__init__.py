"""Trains language models: models, data, optimizers, objectives, checkpoints."""
