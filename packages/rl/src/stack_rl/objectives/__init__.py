"""Objectives: what a run minimizes, one file an algorithm."""
