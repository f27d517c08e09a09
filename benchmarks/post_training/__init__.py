"""Contenders of `rl_vs_peers`: programs that do what a line on standard input names, and print what it took."""
