"""Inference servers side by side: the model that all of them serve, one module or program a server, the client."""
