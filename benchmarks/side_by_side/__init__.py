"""Runs the contenders of one case, in a process of its own, and prints what it sees as lines of JSON.

    python -m side_by_side OP NUMBER --rounds 15 --limit-s 60 --memory-bytes 8e9 [--memory-of CONTENDER]

Each line names a contender and says one thing of it: a problem, how far off it is, what it chose, the seconds of a call
in one round, or its peak memory.
"""
