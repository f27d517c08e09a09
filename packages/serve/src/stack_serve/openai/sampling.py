"""Conversion of a request's fields to `SamplingParams`."""

from collections.abc import Mapping
from typing import Any

import pydantic

from stack_core.abi.generation import MOST_STOP_CHARACTERS, MOST_STOP_TEXTS, Constraint, SamplingParams
from stack_serve.openai.bodies import explain
from stack_serve.openai.errors import bad_request
from stack_serve.openai.schemas import GenerationBody

__all__ = ["PARAMETER_NAMES", "sampling_params"]

PARAMETER_NAMES: Mapping[str, str] = {
    "include_stop": "include_stop_str_in_output",
    "logits_processors": "vllm_xargs",
    "stop_tokens": "stop_token_ids",
}
"""Names of the body's fields by the engine's parameters, if the two differ."""

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "min_tokens",
    "seed",
)


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Builds the sampling parameters of a request.

    Args:
      defaults: fields of `SamplingParams` that the model's makers recommend. Fields in neither the body
        nor `defaults` have OpenAI's defaults.

    Raises:
      ApiError: a value is invalid. The error names its field.
    """
    generated = body.n if body.best_of is None else body.best_of
    if generated < body.n:
        raise bad_request(f"best_of is {generated}, n {body.n}; best_of has to be n at least.", param="best_of")
    if generated > body.n:
        if body.stream:
            raise bad_request("best_of cannot be streamed: the best is known at the end. Raise n.", param="best_of")
        logprobs = logprobs or 0  # for best_of, which ranks continuations by their log-probabilities
    asked: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if body.top_k is not None:
        asked["top_k"] = max(body.top_k, 0)  # vLLM's -1 means no limit, as 0 does here
    if body.include_stop_str_in_output is not None:
        asked["include_stop"] = body.include_stop_str_in_output
    if body.logit_bias:
        asked["logit_bias"] = {_token(key): value for key, value in body.logit_bias.items()}
    asked["stop"] = _stop_texts(body.stop)
    # The model's own stop tokens end its turns, so a request extends the list.
    asked["stop_tokens"] = (*defaults.get("stop_tokens", ()), *body.stop_token_ids)
    asked |= {"n": generated, "max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    asked |= {"constraint": constraint, "logits_processors": body.vllm_xargs}
    try:
        return SamplingParams(**{**defaults, **asked})
    except pydantic.ValidationError as error:
        raise explain(error, PARAMETER_NAMES) from None


def _stop_texts(field: Any) -> tuple[str, ...]:
    """Returns the stop texts of the field `stop`.

    Raises:
      ApiError: `stop` is neither a text nor a list of texts, has too many texts, or a text is too long or empty.
    """
    texts = [field] if isinstance(field, str) else field
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise bad_request("stop is neither a text nor a list of texts.", param="stop")
    if len(texts) > MOST_STOP_TEXTS:
        raise bad_request(f"stop has {len(texts)} texts; the most is {MOST_STOP_TEXTS}.", param="stop")
    for place, text in enumerate(texts):
        where = "stop" if texts is not field else f"stop.{place}"
        if not text:
            raise bad_request(f"{where} is empty: every text would stop there. Leave it out.", param=where)
        if len(text) > MOST_STOP_CHARACTERS:
            raise bad_request(
                f"{where} has {len(text)} characters; the most is {MOST_STOP_CHARACTERS}. Its end may be enough.",
                param=where,
            )
    return tuple(texts)


def _token(key: str) -> int:
    # `isdigit` accepts digits of other scripts, and ten digits may exceed int32.
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise bad_request(f"logit_bias has the key {key[:100]!r}; token ids were expected.", param="logit_bias")
    return int(key)
