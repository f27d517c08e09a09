"""Contenders of `rl_vs_tunix`: programs that do what a line on standard input names, and print what it took."""
