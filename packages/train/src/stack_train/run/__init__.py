"""Training runs: config, trainer, training loop, and ahead-of-time compilation of the step for other hardware."""
