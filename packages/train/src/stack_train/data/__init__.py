"""From documents to batches: sources, tokenizer, tokenized corpus, packing, pipeline.

`stack_train.data.pipeline.build_pipeline` puts them together; it is not imported here because it loads Grain.
"""

from stack_train.data.kinds.text import TextData as TextData

__all__ = ["TextData"]
