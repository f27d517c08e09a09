"""An engine that answers by a rule, and a policy without weights, for tests of what stands around them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stack_core.abi.engines import Engine
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, TokenLogprob

__all__ = ["END", "Letters", "Policy", "ScriptedEngine"]

END = 0


class ScriptedEngine(Engine):
    """An `Engine` that continues a prompt by `answer(prompt)`, up to a stop token or the limit; all logprobs are -1.

    Attributes:
      requests: all that were submitted.
    """

    def __init__(self, answer: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
        self.requests: list[GenerationRequest] = []
        self._answer = answer
        self._version = 0

    def start(self) -> None: ...

    def close(self, *, drain_s: float = 0.0) -> None: ...

    def submit(self, request: GenerationRequest, receive: Any = None) -> None:
        self.requests.append(request)

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        (request,) = (each for each in self.requests if each.request_id == request_id)
        whole = self._answer(request.prompt)
        stops = [place for place, token in enumerate(whole) if token in request.sampling.stop_tokens]
        whole = whole[: min(stops, default=len(whole)) + 1]
        tokens = whole[: request.sampling.max_tokens]
        for place, token in enumerate(tokens):
            yield GenerationUpdate(
                request_id=request_id,
                tokens=(token,),
                logprobs=(TokenLogprob(token, -1.0, 1),),
                weights_versions=(self._version,),
                finish_reason=None if place < len(tokens) - 1 else "stop" if tokens == whole else "length",
            )

    def abort(self, request_id: str) -> None: ...

    def update_weights(
        self, params: Any, *, version: int | None = None, kv: str = "keep", donate: bool = False
    ) -> None:
        self._version = version or 0

    def stats(self) -> Any:
        raise NotImplementedError


class Letters:
    """A tokenizer whose tokens are the numbers of characters; 0 ends a text, 1 begins it."""

    vocab_size, eos_id, bos_id = 128, END, 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    def encode_batch(self, texts: Sequence[str]) -> list[Any]:
        return [np.asarray(self.encode(text)) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(index) for index in ids if index > 1)

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def save(self, directory: Path) -> None: ...


@dataclass
class Policy:
    """A `GenerativeCheckpoint` of which nothing is computed."""

    tokenizer: Any = field(default_factory=Letters)
    end_tokens: frozenset[int] = frozenset({END})
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "scripted"
    parameters: Any = ()
    states: Any = ()
    vocab_size: int = 128
    max_positions: int = 64

    def load_params(self, shardings: Any = None) -> Any: ...

    def model(self, params: Any) -> Any: ...

    def shardings(self, mesh: Any) -> Any: ...
