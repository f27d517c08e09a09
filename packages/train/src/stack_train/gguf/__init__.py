"""Import and export of GGUF files, the model format of llama.cpp."""

from stack_train.gguf.format import FORMAT

__all__ = ["FORMAT"]
