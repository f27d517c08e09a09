"""Definitions of the ops, one per file: the public function with its equation, and the reference implementation."""
