"""Adapters of low rank: LoRA, rsLoRA and DoRA, on the products of parameters that rules select by their paths."""
