"""Low-rank adapters (LoRA, rsLoRA, DoRA) for parameters that are selected by rules on their paths."""
