"""Post-training on JAX: preference and reinforcement-learning objectives, rewards, environments."""
