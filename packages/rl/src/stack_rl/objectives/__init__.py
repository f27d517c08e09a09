"""Objectives, the losses that a run minimizes; one file per algorithm."""
