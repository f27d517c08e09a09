"""Drafts of a model's own multi-token prediction layer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from stack_core.abi.formats import GenerativeCheckpoint
from stack_serve.llm.adapters import Weights
from stack_serve.llm.compiled_programs import Key
from stack_serve.llm.config import EngineConfig, PageLayout
from stack_serve.llm.mtp_step import HiddenStep, MtpStep, cached_states
from stack_serve.llm.programs import Programs
from stack_serve.llm.proposer import Proposer
from stack_serve.llm.scheduler_state import Row
from stack_serve.llm.step import SlotState
from stack_serve.llm.unstacking import layer_by_layer

__all__ = ["MtpDrafter", "MtpPrograms", "programs_class"]


class MtpDrafter(Proposer):
    """Drafts tokens with the served model's multi-token prediction layer.

    Each step stores the hidden states of its tokens in pages. The layer reads them, so its keys can be computed later,
    and a step without drafts costs no more than the storage. Drafts of several tokens continue from hidden states of
    the layer. Keys computed from these are replaced once the tokens are accepted, and the model's hidden states known.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437), section 2.2.

    Args:
      served: programs of the served model.
      checkpoint: served model.
      config: settings of the engine.
    """

    def __init__(self, served: "MtpPrograms", checkpoint: GenerativeCheckpoint, config: EngineConfig) -> None:
        assert config.speculation is not None
        self._programs = served
        layers = sum(state.repeats for state in jax.tree.leaves(checkpoint.states))
        super().__init__(
            served,
            served,
            config,
            cost=1 / layers,
            max_positions=checkpoint.max_positions,
            usual_tokens=config.speculation.tokens,
        )

    def _fill(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> None:
        # No hidden state precedes the first token.
        later = [(slot, max(start, 1), tokens - (start == 0), *rest) for slot, start, tokens, *rest in rows]
        places = [place for place, (_, _, tokens, *_) in enumerate(later) if tokens]
        if places:
            self._programs.fill_mtp([later[place] for place in places], tables[places])

    def _draft(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> np.ndarray:
        return self._programs.draft_mtp(rows, tables)

    def _count_steps(self, row: Row) -> int:
        return row.tokens - 1

    def _count_keys(self, steps: int) -> int:
        # Only the first step has a hidden state of the model.
        return min(steps, 1)


class MtpPrograms(Programs):
    """Programs of a model with a multi-token prediction layer: each step stores hidden states, and the layer drafts."""

    _step_class = HiddenStep

    def fill_mtp(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> None:
        """Launches the computation of the layer's keys of known tokens, which follow known hidden states.

        Args:
          rows, tables: as in `step`.
        """
        size = self._compiled.ready_size(
            "fill_mtp", self._buckets.of_prompts(sum(row[2] for row in rows)), self._buckets.prompts
        )
        packed = self._packed(rows, tables, self._buckets.largest_rows)
        program = self._compiled["fill_mtp", size]
        pools = program(self._base_weights, self._layers.mtp, self.slots.tokens, packed)
        self._layers = replace(self._layers, mtp=pools)

    def draft_mtp(self, rows: Sequence[tuple[int, ...]], tables: np.ndarray) -> np.ndarray:
        """Drafts the next tokens of each row, as many as it has tokens, and writes them to its slot.

        Args:
          rows, tables: as in `step`.

        Returns:
          int32[steps, rows].
        """
        bucket = self._compiled.ready_size("draft_mtp", self._buckets.of_decoding(len(rows)), self._buckets.decoding)
        packed, program = self._packed(rows, tables, bucket), self._compiled["draft_mtp", bucket]
        known, settings = self.slots.tokens, self.slots.settings
        pools, known, tokens = program(self._base_weights, self._layers.mtp, known, settings, packed)
        self._layers, self.slots = replace(self._layers, mtp=pools), SlotState(known, settings)
        return np.asarray(tokens)

    @property
    def _base_weights(self) -> Weights:
        """The weights without adapters, which the layer does not have."""
        return replace(self._weights, pool=None)

    @property
    def _exchanged_pools(self) -> Any:
        # The keys of the layer stay: a prefill engine computes none, and the receiver may already have computed them.
        return replace(self._layers, mtp=replace(self._layers.mtp, layer=None))

    def _replace_exchanged(self, pools: Any) -> None:
        self._layers = replace(pools, mtp=replace(pools.mtp, layer=self._layers.mtp.layer))

    def _find_states(self) -> Any:
        return cached_states(self._checkpoint, self._config)

    def _lay_out(self, pages: int, layout: PageLayout) -> None:
        super()._lay_out(pages, layout)
        self._mtp_step = MtpStep(self._checkpoint, self._config, pages, layout)

    def _keys(self) -> list[Key]:
        fills: list[Key] = [("fill_mtp", size) for size in self._buckets.prompts]
        return [*super()._keys(), *fills, *(("draft_mtp", size) for size in self._buckets.decoding)]

    def _lowered_fill_mtp(self, tokens: int) -> Any:
        def fill(weights: Weights, pools: Any, known: Any, packed: Any) -> Any:
            step = layer_by_layer(partial(self._mtp_step.prefill, tokens=tokens, padded_tokens=tokens))
            return step(weights, pools, known, packed)[0]

        packed = jax.ShapeDtypeStruct((self._buckets.largest_rows, self._row_fields), np.int32)
        jitted = jax.jit(fill, donate_argnums=1)
        return jitted.lower(self._base_weights, self._layers.mtp, self.slots.tokens, packed)

    def _lowered_draft_mtp(self, rows: int) -> Any:
        assert self._config.speculation is not None
        sizes = {"repeats": self._config.speculation.tokens, "padded_rows": rows}

        def draft(weights: Weights, pools: Any, known: Any, settings: Any, packed: Any) -> Any:
            pools, _, known, sampled = self._mtp_step.decode(weights, pools, known, settings, packed, **sizes)
            return pools, known, sampled.tokens

        slots, packed = self.slots, jax.ShapeDtypeStruct((rows, self._row_fields), np.int32)
        jitted = jax.jit(draft, donate_argnums=(1, 2))
        return jitted.lower(self._base_weights, self._layers.mtp, slots.tokens, slots.settings, packed)


def programs_class(config: EngineConfig) -> type[Programs]:
    """Returns the class of an engine's programs, which depends on the method of speculation."""
    return MtpPrograms if config.speculation is not None and config.speculation.method == "mtp" else Programs
