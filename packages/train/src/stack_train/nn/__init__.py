"""Layers of decoders as values: what each is, what it keeps of a token, and the module that it builds."""
