"""`stack generate`: continues a prompt and streams the text to the terminal."""

import dataclasses
import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter

from stack_core.abi.caches import CacheStorage
from stack_core.abi.config import parse
from stack_core.abi.errors import GenerationError
from stack_core.abi.model_formats import open_for_generation
from stack_core.runtime.compile_cache import keep_compiled

__all__ = ["generate"]


def generate(  # noqa: PLR0913, each parameter is an option of the command
    source: str,
    /,
    *,
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = (),
    kv_cache: CacheStorage = "model",
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Generate text: stack generate DIR --prompt "def main("

    Args:
      source: run directory, or a checkpoint of another format; FORMAT:DIR names the format, as in gguf:FILE.
      prompt: the text to continue, or the source of an encoder-decoder such as T5; - reads it from standard input.
      max_tokens: maximum number of generated tokens (128).
      temperature: divisor of the logits (1.0); 0 is greedy decoding.
      top_k: limits sampling to this number of the most likely tokens (all).
      top_p: limits sampling to the most likely tokens with this probability mass (1.0).
      seed: seed of the sampling; the same seed gives the same text (0).
      stop: text that ends the continuation; may be repeated.
      kv_cache: storage format of the KV cache; 8-bit formats take half the memory of bfloat16.
      json: print the result as JSON instead of streaming the text.
    """
    # These import JAX, which is too slow for `stack --help`.
    from stack_train.generation.generate import TextGenerator
    from stack_train.generation.sampling import SamplingConfig

    settings = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop": stop,
    }
    if temperature == 0 and (unused := [name for name in ("top_k", "top_p") if settings[name] is not None]):
        raise GenerationError(
            f"--{unused[0].replace('_', '-')} has no effect with --temperature 0, which takes the most likely token. "
            "Leave out one of them."
        )
    sampling = parse(SamplingConfig, {name: value for name, value in settings.items() if value is not None})
    keep_compiled()
    generator = TextGenerator(open_for_generation(source, sources=True), kv_cache)
    result = generator.generate(_read_prompt(prompt), sampling, write=(lambda piece: None) if json else _write)
    if json:
        print(json_format.dumps(dataclasses.asdict(result)))
        return
    print()
    if result.finish_reason == "max_positions":
        print("The continuation ends here because the model has no positions left.", file=sys.stderr)


def _read_prompt(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise GenerationError(f"The prompt on standard input is not UTF-8: {error}.") from error


def _write(piece: str) -> None:
    """Prints and flushes text; characters outside the terminal's encoding become "?"."""
    encoding = sys.stdout.encoding or "utf-8"
    print(piece.encode(encoding, "replace").decode(encoding), end="", flush=True)
