"""Serving of models on JAX: a batching generation engine, HTTP and gRPC servers, and an export format.

Generate in batches, chat, or embed with a run or a checkpoint::

    from stack_serve import LLM, SamplingParams

    with LLM("runs/small", max_sequences=4) as llm:  # or "hf:DIR"
        for output in llm.generate(["one", "two"], SamplingParams(max_tokens=4, temperature=0.0)):
            print(output.prompt, output.text)
        for piece in llm.stream("three", SamplingParams(max_tokens=4)):
            print(piece.text, end="", flush=True)
        print(llm.embed(["one", "two"]).shape)
"""

from typing import TYPE_CHECKING

from stack_core.exports import lazy_exports

if TYPE_CHECKING:
    from stack_core.abi.generation import SamplingParams as SamplingParams
    from stack_serve.llm.language_model import LLM as LLM
    from stack_serve.llm.language_model import Completion as Completion
    from stack_serve.llm.language_model import Output as Output
    from stack_serve.llm.language_model import Piece as Piece

    __version__: str
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "stack_core.abi.generation": ["SamplingParams"],
            "stack_serve.llm.language_model": ["LLM", "Completion", "Output", "Piece"],
        },
    )
