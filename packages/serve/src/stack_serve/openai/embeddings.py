"""Answers of `POST /v1/embeddings`: pooled hidden states of the served model."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineStopped, GenerationError
from stack_serve.http.slices import Each, Items, Members, json_pieces, maybe_in_thread
from stack_serve.llm.vectors import finished_vectors
from stack_serve.openai.errors import ApiError, as_api_error
from stack_serve.openai.prompts import Prompt
from stack_serve.openai.response import LargeJsonResponse
from stack_serve.openai.schemas import EmbeddingBody, PromptFields
from stack_serve.openai.service import Service

__all__ = ["Embeddings", "IsGone"]

IsGone = Callable[[], Awaitable[bool]]

# A batch is computed before the client is looked for again, and before the next request has its turn.
_BATCH_PROMPTS = 32
_PIECE_NUMBERS = 1024


class Embeddings:
    """Embeddings of one served model, computed batch by batch on a separate thread.

    Args:
      service: served model, whose base weights are used.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._waiting = 0
        # Batches of several requests at once would multiply the memory of the activations.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stack-embed")

    async def create(self, body: EmbeddingBody, request_id: str, is_gone: IsGone) -> LargeJsonResponse:
        """Returns the answer to a request.

        Raises:
          ApiError: a prompt or a field is invalid, or too many prompts wait.
        """
        model = self.check_model(body.model)
        prompts = await self.prompts(body.input, body, "input")
        normalize = self._service.embedding.normalize if body.normalize is None else body.normalize
        vectors = await self.vectors(prompts, is_gone, dimensions=body.dimensions, normalize=normalize)
        tokens = sum(len(prompt.tokens) for prompt in prompts)
        answer = {
            "id": f"embd-{request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": Each(_item(place, vector, body.encoding_format) for place, vector in enumerate(vectors)),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
        return LargeJsonResponse(json_pieces(Members(answer)))

    def check_model(self, name: str | None) -> str:
        """Returns the model name for an answer; raises an ApiError as `Service.check_base_model` does."""
        return self._service.check_base_model(name)

    async def prompts(self, field: Any, body: PromptFields, param: str) -> list[Prompt]:
        """Reads texts, or token ids, of a field with the name `param`."""
        service = self._service
        prompts = await service.prompts.of_field(
            field,
            max_prompts=service.config.max_choices,
            add_special_tokens=body.add_special_tokens,
            param=param,
            keep_tokens=body.truncate_prompt_tokens,
        )
        size = sum(len(prompt.tokens) for prompt in prompts)
        await maybe_in_thread(size, service.prompts.check_lengths, prompts, param)
        return prompts

    async def vectors(
        self, prompts: Sequence[Prompt], is_gone: IsGone, *, dimensions: int | None = None, normalize: bool = True
    ) -> np.ndarray:
        """Computes float32[prompts, dimensions].

        Args:
          is_gone: returns whether the client has left; then the rest is not computed.
          dimensions, normalize: as in `finished_vectors`.

        Raises:
          ApiError: the engine computes no embeddings, too many prompts wait, or the time limit is over.
        """
        engine, config = self._service.backend.engine, self._service.config
        if self._waiting and self._waiting + len(prompts) > config.max_choices:
            message = f"{self._waiting} texts wait for their embeddings; the maximum is {config.max_choices}."
            raise ApiError(429, message, headers={"Retry-After": "1"})
        self._waiting += len(prompts)
        try:
            async with asyncio.timeout(config.timeout_s):
                finish = partial(finished_vectors, dimensions=dimensions, normalize=normalize)
                return await self._computed(engine, prompts, is_gone, finish)
        except TimeoutError:
            message = f"The request did not end within the server's limit of {config.timeout_s} s. Send fewer texts."
            raise ApiError(504, message) from None
        except (GenerationError, EngineStopped) as error:
            raise as_api_error(error, {"prompt": "input"}) from None
        finally:
            self._waiting -= len(prompts)

    async def _computed(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        is_gone: IsGone,
        finish: Callable[[np.ndarray], np.ndarray],
    ) -> np.ndarray:
        loop, pooling = asyncio.get_running_loop(), self._service.config.pooling or self._service.embedding.pooling

        def embed(places: Sequence[int]) -> np.ndarray:
            return finish(engine.embed([prompts[place].tokens for place in places], pooling=pooling))

        # Sorted, because the texts of a batch are padded to the longest.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place].tokens))
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(order), _BATCH_PROMPTS):
            if await is_gone():
                raise ApiError(499, "The client closed the connection.")
            places = order[start : start + _BATCH_PROMPTS]
            vectors = await loop.run_in_executor(self._thread, embed, places)
            found |= dict(zip(places, vectors, strict=True))
        return np.stack([found[place] for place in range(len(prompts))])


def _item(place: int, vector: np.ndarray, encoding: str) -> Members:
    encoded: Any = Items(_pieces(vector))
    if encoding == "base64":
        encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return Members({"object": "embedding", "index": place, "embedding": encoded})


def _pieces(vector: np.ndarray) -> Iterator[np.ndarray]:
    return (vector[start : start + _PIECE_NUMBERS] for start in range(0, len(vector), _PIECE_NUMBERS))
