"""Commands of `stack rl`."""
