"""Reading traces, and joining what ran with the programs that it comes from."""
