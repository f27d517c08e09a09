"""Shared parts of the references: tiles, running softmax, pages, position scaling, quantized operands."""
