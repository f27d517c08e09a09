"""Training data: sources, tokenizers, tokenized corpora, packing and pipelines.

`stack_train.data.pipeline.build_pipeline` combines these parts. It is not imported here because it loads Grain.
"""

from stack_train.data.kinds.text import TextData as TextData

__all__ = ["TextData"]
