"""Contract suites of the ops, one file per op, each with its cases and an oracle in float64."""
