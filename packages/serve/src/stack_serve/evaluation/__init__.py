"""Benchmarks of the Language Model Evaluation Harness on models in this process and on servers."""
