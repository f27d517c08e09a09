"""Observers of a run: terminal, JSON lines, TensorBoard, history, goodput and the report."""
