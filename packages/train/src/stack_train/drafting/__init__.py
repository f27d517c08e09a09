"""First drafts of model families from Hugging Face checkpoints, and their comparison with transformers."""
