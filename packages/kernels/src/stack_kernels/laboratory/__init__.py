"""Compiles implementations for chips that are not attached, and reports their resource usage."""
