"""Multi-host runs: one agent per host, formations of fresh worker processes, and their supervision."""
