"""The engines that serve_vs_peers measures side by side: a worker process each, and the model that they all have."""
