"""`reward: run:DIRECTORY`, or `{name: model, source: DIRECTORY}`: a reward model trained by a run."""

import asyncio
from pathlib import Path
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stack_core.abi.config import LocalAddress, config
from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.model_formats import open_auxiliary, open_for_generation
from stack_rl.contracts import Completion, Reward
from stack_rl.placing import ShardedCheckpoint

__all__ = ["ModelReward", "ModelRewardConfig"]

_ROWS: Final = 64
_SMALLEST_BUCKET: Final = 16  # shortest padded length in tokens


@config
class ModelRewardConfig:
    """A reward model and its mesh; see `ModelReward`.

    Attributes:
      source: directory of the run, or of another reward model.
      name: selects this reward.
      mesh: mesh over the machine's last devices; None uses the first device.
    """

    source: LocalAddress
    name: Literal["model"] = "model"
    mesh: MeshConfig | None = None

    def check(self) -> None:
        """Raises a ConfigError if the directory does not exist."""
        if not Path(self.source).is_dir():
            raise ConfigError(
                f"Reward model {self.source!r} is not a directory. Give the directory of a run whose objective is "
                "reward_model."
            )

    def build(self) -> Reward:
        return ModelReward(self.source, self.mesh)


class ModelReward:
    """Scores answers by the head of a reward model, evaluated at the last token before the end token.

    The objective `reward_model` trains the head at the same token. The model reads the token ids sampled by the policy,
    so both must have the same tokenizer. Answers that finish in the same turn are scored together in batches of 64
    rows, padded to a power of two of tokens; each padded length compiles one program.

    Args:
      address: directory of the run, or of another reward model.
      mesh: mesh over the machine's last devices; None uses the first device.

    Raises:
      ShardingError: the mesh has more devices than the machine.
      ConversionError: the run did not train a reward model.
      StackError: the checkpoint cannot be read.
    """

    def __init__(self, address: str, mesh: MeshConfig | None = None) -> None:
        self.address = address
        opened = open_for_generation(address)
        placed: Any = None if mesh is None else ShardedCheckpoint(opened, mesh, "The reward model's mesh")
        self._model = placed or opened
        self._params = self._model.load_params()
        embed, _ = jax.eval_shape(lambda params: self._model.model(params).head().weight, self._params).shape
        shapes = {"kernel": (embed,), "bias": ()}
        head = open_auxiliary(
            address, "reward", {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        )
        self._head = head if placed is None else jax.device_put(head, placed.whole)
        self._scores = jax.jit(self._scored)
        self._waiting: list[tuple[tuple[int, ...], asyncio.Future[float]]] = []

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Raises a DataError if the policy's tokenizer differs from the reward model's."""
        own = self._model.tokenizer
        if tokenizer is None or own is None or not _same_tokens(own, tokenizer):
            raise DataError(
                f"Reward model {self.address} has a different tokenizer than the policy. Train it from the model that "
                "the policy starts from."
            )

    async def __call__(self, completion: Completion) -> float:
        if completion.images:
            raise DataError(
                f"The prompt has images, and the reward model {self.address} reads text only. Choose another reward."
            )
        answer = completion.tokens[:-1] if completion.is_finished else completion.tokens
        found = asyncio.get_running_loop().create_future()
        self._waiting.append(((*completion.prompt_tokens, *answer), found))
        # The first answer schedules the scoring; the rest of the turn arrives before the event loop runs the callback.
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._score_waiting)
        return await found

    def _score_waiting(self) -> None:
        waiting = self._waiting
        self._waiting = []
        try:
            scores = [score for first in range(0, len(waiting), _ROWS) for score in self._of(waiting[first:][:_ROWS])]
        except Exception as error:  # passed on to all waiting callers
            for _, found in waiting:
                found.set_exception(error)
            return
        for (_, found), score in zip(waiting, scores, strict=True):
            found.set_result(score)

    def _of(self, rows: list[tuple[tuple[int, ...], Any]]) -> list[float]:
        longest = max(len(tokens) for tokens, _ in rows)
        seq = min(max(_SMALLEST_BUCKET, 1 << (longest - 1).bit_length()), self._model.max_positions)
        if longest > seq:
            raise DataError(
                f"An answer and its prompt have {longest} tokens, but reward model {self.address} reads {seq}. Lower "
                "data.seq_tokens."
            )
        tokens, lengths = np.zeros((_ROWS, seq), np.int32), np.ones(_ROWS, np.int32)
        for row, (each, _) in enumerate(rows):
            tokens[row, : len(each)], lengths[row] = each, len(each)
        return np.asarray(self._scores(self._params, self._head, tokens, lengths))[: len(rows)].tolist()

    def _scored(
        self, params: Any, head: Any, tokens: Int[Array, "rows seq"], lengths: Int[Array, " rows"]
    ) -> Float[Array, " rows"]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        segment_ids = (positions < lengths[:, None]).astype(jnp.int32)
        hidden = self._model.model(params)(tokens, positions, segment_ids).hidden
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return last.astype(jnp.float32) @ head["kernel"] + head["bias"]


def _same_tokens(left: Tokenizer, right: Tokenizer) -> bool:
    return left.vocab_size == right.vocab_size and all(
        left.token_bytes(token) == right.token_bytes(token) for token in range(left.vocab_size)
    )
