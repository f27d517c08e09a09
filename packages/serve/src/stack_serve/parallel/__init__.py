"""Several engines of one model, each in a process of its own."""
