"""Import and export of PEFT adapters: `stack convert peft:DIR RUN --base BASE` and `stack convert RUN peft:DIR`."""

from stack_train.peft.format import FORMAT as FORMAT
from stack_train.peft.format import PeftFormat as PeftFormat

__all__ = ["FORMAT", "PeftFormat"]
