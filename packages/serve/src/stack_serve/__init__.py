"""Serves models on JAX: a batching generation engine, HTTP and gRPC servers, an export format."""
