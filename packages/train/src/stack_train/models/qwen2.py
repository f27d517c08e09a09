"""Qwen2 and Qwen2.5: a Llama with query, key and value biases, and optional sliding windows in later layers.

Qwen2.5-1M has dual chunk attention (Qwen Team, Qwen2.5-1M Technical Report, 2025, arXiv:2501.15383), without the sparse
attention of its prompts. transformers ignores both.

Outputs match transformers' `Qwen2ForCausalLM`.

Source: Qwen Team, Qwen2.5 Technical Report, 2024 (arXiv:2412.15115).
"""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.ops.dual_chunk import DualChunk
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Qwen2Config", "WindowedConfig", "read_windows", "write_windows"]


@config
class WindowedConfig(DecoderConfig):
    """Settings of a decoder with optional sliding windows in later layers; inherits the fields of `DecoderConfig`.

    Attributes:
      window: size of the attention window in tokens, the query included; None attends to all tokens in every layer.
      full_layers: number of first layers that attend to all tokens.
    """

    window: PositiveInt | None = None
    full_layers: NonNegativeInt = 0

    def window_of(self, layer: int) -> int | None:
        """Returns the window of a layer, or None if it attends to all tokens."""
        return None if layer < self.full_layers else self.window


@config
class Qwen2Config(WindowedConfig):
    """Size and numerics of a Qwen2; inherits the fields of `WindowedConfig`.

    Attributes:
      name: selects this family.
      dual_chunk: rotary positions of sequences that are longer than the trained ones (Qwen2.5-1M), or None.
    """

    name: Literal["qwen2"] = "qwen2"
    dual_chunk: DualChunk | None = None


def spec(config: Qwen2Config) -> DecoderSpec:
    dual = config.dual_chunk
    # Shorter sequences have ordinary attention, with all of its kernels and caches.
    dual = None if dual is None or config.max_positions <= dual.plain_tokens else dual

    def layer(number: int) -> Layer:
        attention = config.attention(bias=True, window=config.window_of(number), dual_chunk=dual)
        return Layer(attention=attention, feed_forward=Gated(width=config.mlp))

    return DecoderSpec(layers=tuple(map(layer, range(config.layers))), norm=Norm(epsilon=config.norm_epsilon))


def read_windows(reader: Reader) -> dict[str, Any]:
    """Reads the rotary positions and the windows of layers."""
    window, full_layers = reader.get("sliding_window"), reader.get("max_window_layers", default=28)
    window = window if reader.get("use_sliding_window") else None
    layers = reader.get("num_hidden_layers")
    windowed = [window is not None and layer >= full_layers for layer in range(layers or 0)]
    reader.expect_layers(["sliding_attention" if each else "full_attention" for each in windowed])
    return {**read_rope(reader), "window": window, "full_layers": full_layers}


def write_windows(config: WindowedConfig) -> dict[str, Any]:
    """Returns the keys read by `read_windows`."""
    return {
        **write_rope(config),
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        "max_window_layers": config.full_layers,
    }


def _read(reader: Reader) -> dict[str, Any]:
    """Reads windows and dual chunks, whose defaults are vLLM's."""
    found: dict[str, Any] = {**read_windows(reader), "dual_chunk": None}
    given = reader.get("dual_chunk_attention_config")
    if given:
        known = {"chunk": ("chunk_size", 8192), "local": ("local_size", 1024)}
        known["trained"] = ("original_max_position_embeddings", 0)
        values = {name: given.get(key, default) for name, (key, default) in known.items()}
        found["dual_chunk"] = {**values, "trained": values["trained"] or None}
        # Such as `sparse_attention_config`, the vertical and slash lines of MInference.
        others = {key: value for key, value in given.items() if key not in {name for name, _ in known.values()}}
        reader.problems += [f"dual_chunk_attention_config.{key}={value!r}" for key, value in others.items() if value]
    return found


def _write(config: Qwen2Config) -> dict[str, Any]:
    """Returns the keys read by `_read`."""
    dual, windows = config.dual_chunk, write_windows(config)
    if dual is None:
        return windows
    sizes = {"chunk_size": dual.chunk, "local_size": dual.local}
    trained = {} if dual.trained is None else {"original_max_position_embeddings": dual.trained}
    return {**windows, "dual_chunk_attention_config": {**sizes, **trained}}


FAMILY = DecoderFamily(
    name="qwen2",
    config_class=Qwen2Config,
    config_map=ConfigMap(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        settings=(
            Setting("mlp", ("intermediate_size",), 22_016),
            Setting("max_positions", ("max_position_embeddings",), 32_768),
        ),
        fixed={"hidden_act": "silu"},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    sizes=("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    tested=("logits", "greedy", "conversion", "pages", "w8a8 pages", "compiled"),
)
