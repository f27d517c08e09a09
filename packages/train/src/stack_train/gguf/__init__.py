"""GGUF files, which llama.cpp runs."""

from stack_train.gguf.format import FORMAT

__all__ = ["FORMAT"]
