"""One file an op: the calls of its contract suite, and its oracle in float64."""
