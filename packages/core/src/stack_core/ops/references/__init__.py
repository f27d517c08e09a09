"""What several references share: tiles, a running softmax, pages, scaled positions, quantized operands."""
