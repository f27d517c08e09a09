"""Import and export of Hugging Face checkpoints: `stack convert hf:DIR RUN` and `stack convert RUN hf:DIR`."""

from stack_train.huggingface.format import FORMAT as FORMAT
from stack_train.huggingface.format import HuggingFaceFormat as HuggingFaceFormat

__all__ = ["FORMAT", "HuggingFaceFormat"]
