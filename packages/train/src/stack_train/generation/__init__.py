"""Generation with trained models: checkpoints opened for it, the static engine, and `stack generate`."""
