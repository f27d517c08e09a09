"""DeepSeek-V4: attention to a window and to compressed tokens, hyper-connections, and experts chosen by a hash.

Outputs match transformers' `DeepseekV4ForCausalLM`. Training does not change the indexer. Multi-token prediction layers
are not read.

Source: DeepSeek-AI, DeepSeek-V4, 2026.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config, to_mapping
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.hyper_layer import HyperLayer
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.attention import Rope
from stack_train.nn.compressed_attention import CompressedAttention
from stack_train.nn.compressor import Compressor, EntryIndexer
from stack_train.nn.experts import Experts, Router
from stack_train.nn.hyper_connections import HyperConnections
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "DeepseekV4Config"]

Kind = Literal["window", "sparse", "heavy"]


@config
class DeepseekV4Config(ExpertsConfig):
    """Size and numerics of a DeepSeek-V4; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert, and of the expert that is applied to every token.
      rope_theta: base of the rotary frequencies of layers without entries.
      rope_scaling: scaling of rotary positions in layers with entries.
      entry_rope_theta: base of the rotary frequencies of layers with entries.
      rope_dim: number of last features of a head with rotary positions.
      query_rank: width of the query latent.
      output_groups: number of groups of heads in the output projection.
      output_rank: width of a group in the output projection.
      window: size of the attention window in tokens, the query included.
      kinds: kind of each layer: "window" attends to its window only, "sparse" also to the entries that an indexer
        selects, "heavy" also to all entries. Empty: two layers "window", then "sparse" and "heavy" by turns.
      sparse_rate: tokens per entry in layers of kind "sparse".
      heavy_rate: tokens per entry in layers of kind "heavy".
      index_heads: number of heads of the indexer.
      index_dim: width of a head of the indexer.
      index_count: maximum number of entries per query that the indexer selects.
      cached_tokens: maximum length of a cached sequence, for which a cache reserves entries; None uses
        `max_positions`.
      streams: number of residual streams.
      stream_iterations: number of iterations that balance the weights between streams.
      stream_epsilon: term added to the weights and sums of these iterations.
      hash_layers: number of first layers whose experts are chosen by a table of tokens.
      expert_scale: factor of the experts' weights.
      expert_limit: limit of the gate and the product in an expert's hidden activations.
      bias_rate: change of the experts' selection biases per step, which balances their load.
    """

    name: Literal["deepseek_v4"] = "deepseek_v4"
    entry_rope_theta: PositiveFloat = 160_000.0
    rope_dim: PositiveInt = 32
    query_rank: PositiveInt = 256
    output_groups: PositiveInt = 4
    output_rank: PositiveInt = 128
    window: PositiveInt = 128
    kinds: tuple[Kind, ...] = ()
    sparse_rate: PositiveInt = 4
    heavy_rate: PositiveInt = 128
    index_heads: PositiveInt = 16
    index_dim: PositiveInt = 64
    index_count: PositiveInt = 512
    cached_tokens: PositiveInt | None = None
    streams: PositiveInt = 4
    stream_iterations: PositiveInt = 20
    stream_epsilon: PositiveFloat = 1e-6
    hash_layers: NonNegativeInt = 0
    expert_scale: PositiveFloat = 1.5
    expert_limit: PositiveFloat = 10.0
    bias_rate: NonNegativeFloat = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tie_embeddings:
            raise ConfigError("tie_embeddings=True: DeepSeek-V4 has its own head. Leave it out.")
        if self.kinds and len(self.kinds) != self.layers:
            raise ConfigError(f"kinds has {len(self.kinds)} entries; expected one for each of layers={self.layers}.")
        if self.hash_layers > self.layers:
            raise ConfigError(f"hash_layers={self.hash_layers} is more than layers={self.layers}; lower it.")
        for field in ("window", "sparse_rate", "heavy_rate"):
            if getattr(self, field) < 2:
                raise ConfigError(f"{field}={getattr(self, field)}: expected at least 2 tokens.")

    def check_heads(self) -> None:
        """Raises a ConfigError if attention does not support these sizes."""
        if self.kv_heads not in (None, 1):
            raise ConfigError(f"kv_heads={self.kv_heads}: all heads share one key. Remove the setting.")
        if self.head_dim is None and self.embed % self.heads:
            raise ConfigError(
                f"embed={self.embed} is not a multiple of heads={self.heads}; set head_dim or change one."
            )
        if self.rope_dim % 2 or self.rope_dim > min(self.head_size, self.index_dim):
            raise ConfigError(
                f"rope_dim={self.rope_dim}: expected an even number of at most head_dim={self.head_size} and "
                f"index_dim={self.index_dim}, because rotary positions turn pairs of features of both."
            )
        if self.heads % self.output_groups:
            raise ConfigError(
                f"heads={self.heads} is not a multiple of output_groups={self.output_groups}; change one of them."
            )

    @property
    def layer_kinds(self) -> tuple[Kind, ...]:
        """Kind of each layer."""
        if self.kinds:
            return self.kinds
        turns: tuple[Kind, ...] = ("window", "window", *(("sparse", "heavy") * self.layers))
        return turns[: self.layers]

    def layer_attention(self, kind: Kind) -> CompressedAttention:
        """Returns attention of this size."""
        theta, scaling = self.entry_rope_theta, self.rope_scaling
        if kind == "window":
            theta, scaling = self.rope_theta, None
        rope = Rope(theta=theta, scaling=scaling, rotary_dim=self.rope_dim, interleaved=True)
        compressor = indexer = None
        if kind == "heavy":
            compressor = Compressor(rate=self.heavy_rate, dim=self.head_size, rope=rope)
        if kind == "sparse":
            compressor = Compressor(rate=self.sparse_rate, dim=self.head_size, rope=rope, overlaps=True)
            own = Compressor(rate=self.sparse_rate, dim=self.index_dim, rope=rope, overlaps=True)
            indexer = EntryIndexer(heads=self.index_heads, count=self.index_count, compressor=own)
        return CompressedAttention(
            heads=self.heads,
            head_dim=self.head_size,
            query_rank=self.query_rank,
            groups=self.output_groups,
            output_rank=self.output_rank,
            window=self.window,
            rope=rope,
            compressor=compressor,
            indexer=indexer,
            max_tokens=self.cached_tokens or self.max_positions,
            context_keys=self.context_keys,
        )

    def mixture(self, *, hashed: bool) -> Experts:
        """Returns the mixture of experts."""
        choice: Any = {"hashed_tokens": self.vocab_size} if hashed else {"bias_rate": self.bias_rate}
        router = Router(
            experts=self.experts, active=self.active_experts, score="sqrt_softplus", scale=self.expert_scale, **choice
        )
        return Experts(
            router=router, width=self.mlp, limit=self.expert_limit, shared=self.mlp, buffer=self.expert_buffer
        )


def spec(config: DeepseekV4Config) -> DecoderSpec:
    """Returns the architecture."""
    connections = HyperConnections(
        streams=config.streams, iterations=config.stream_iterations, epsilon=config.stream_epsilon
    )
    layers = tuple(
        HyperLayer(
            attention=config.layer_attention(kind),
            feed_forward=config.mixture(hashed=layer < config.hash_layers),
            connections=connections,
        )
        for layer, kind in enumerate(config.layer_kinds)
    )
    return DecoderSpec(
        layers=layers,
        norm=Norm(epsilon=config.norm_epsilon),
        connections=connections,
        cached_tokens=config.cached_tokens,
    )


_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "sliding_attention": "window",
        "compressed_sparse_attention": "sparse",
        "heavily_compressed_attention": "heavy",
    }
)
_OF_RATIO: Final[Mapping[int, Kind]] = MappingProxyType({0: "window", 4: "sparse", 128: "heavy"})
_HASHED, _SCORED = "hash_moe", "moe"


def _read(reader: Reader) -> dict[str, Any]:
    head_dim = reader.get("head_dim", default=512)
    reader.get("num_key_value_heads")  # ignored by the architecture, which has one key per token
    reader.expect("first_k_dense_replace", 0)
    # The code of the experts in published files; their tensors are read by `quantization_config`.
    reader.get("expert_dtype")
    return {
        "kv_heads": None,
        **_read_ropes(reader, head_dim),
        **_read_kinds(reader),
        "hash_layers": _read_hash_layers(reader),
    }


def _read_ropes(reader: Reader, head_dim: int) -> dict[str, Any]:
    """Reads both kinds of rotary positions: `main` and `compress` of transformers 5, or the published flat keys."""
    theta = reader.get("rope_theta", default=10_000.0)
    entry_theta = reader.get("compress_rope_theta", default=160_000.0)
    nested, flat = reader.get("rope_parameters") or {}, reader.get("rope_scaling") or {}
    main: dict[str, Any] = nested.get("main") or {}
    entries = nested.get("compress")
    if not (main and entries):
        main, entries = dict[str, Any](), {**flat, **nested, "rope_theta": entry_theta}
        if entries.get("rope_type", entries.get("type")) == "yarn":
            # As in transformers: by default, YaRN does not scale cosine and sine here.
            entries.setdefault("attention_factor", 1.0)
    if main.get("rope_type", "default") != "default":
        reader.problems.append(f"rope_parameters.main={main!r}, not of rope_type 'default'")
    share = reader.get("partial_rotary_factor") or entries.get("partial_rotary_factor")
    rope_dim = reader.get("qk_rope_head_dim")
    positions = reader.get("max_position_embeddings", default=1_048_576)
    read = read_rope(
        Reader({"rope_parameters": entries, "max_position_embeddings": positions}), handled=("partial_rotary_factor",)
    )
    return {
        "rope_theta": float(main.get("rope_theta", theta)),
        "entry_rope_theta": read["rope_theta"],
        "rope_scaling": read["rope_scaling"],
        "rope_dim": int(head_dim * (share or 64 / 512)) if rope_dim is None else rope_dim,
    }


def _read_kinds(reader: Reader) -> dict[str, Any]:
    """Reads the kind of each layer from `layer_types`, or from `compress_ratios` of published files."""
    layers = reader.get("num_hidden_layers", default=43)
    types, ratios = reader.get("layer_types"), reader.get("compress_ratios")
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    rates |= reader.get("compress_rates") or {}
    sparse, heavy = rates["compressed_sparse_attention"], rates["heavily_compressed_attention"]
    sparse, heavy = reader.get("compress_rate_csa", default=sparse), reader.get("compress_rate_hca", default=heavy)
    if types is not None:
        kinds = [_KINDS.get(each) for each in types]
    elif ratios is not None:
        kinds = [_OF_RATIO.get(each) for each in ratios]
    else:
        kinds = ["heavy", "heavy", *[("heavy", "sparse")[layer % 2] for layer in range(layers)]]
    # The lists of published files go on with multi-token prediction layers.
    kinds = kinds[:layers]
    if len(kinds) < layers or None in kinds:
        name, value = ("layer_types", types) if types is not None else ("compress_ratios", ratios)
        known = ", ".join(map(repr, _KINDS if types is not None else _OF_RATIO))
        reader.problems.append(f"{name}={value!r}, not one of {known} for each of {layers} layers")
    return {"kinds": tuple(kinds), "sparse_rate": sparse, "heavy_rate": heavy}


def _read_hash_layers(reader: Reader) -> int:
    layers, kinds = reader.get("num_hidden_layers", default=43), reader.get("mlp_layer_types")
    count = min(reader.get("num_hash_layers", default=3), layers)
    if kinds is None:
        return count
    kinds = list(kinds[:layers])
    count = kinds.count(_HASHED)
    if kinds != [_HASHED] * count + [_SCORED] * (layers - count):
        reader.problems.append(f"mlp_layer_types={kinds!r}, not {_HASHED!r} layers followed by {_SCORED!r} layers")
    return count


def _write(config: DeepseekV4Config) -> dict[str, Any]:
    kinds, types = config.layer_kinds, {kind: name for name, kind in _KINDS.items()}
    ratios = {"window": 0, "sparse": config.sparse_rate, "heavy": config.heavy_rate}
    scaling = None if config.rope_scaling is None else _written_scaling(config.rope_scaling)
    return {
        "num_key_value_heads": 1,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.entry_rope_theta,
        "rope_scaling": scaling,
        "qk_rope_head_dim": config.rope_dim,
        "layer_types": [types[kind] for kind in kinds],
        "compress_rates": {types["sparse"]: config.sparse_rate, types["heavy"]: config.heavy_rate},
        "compress_ratios": [ratios[kind] for kind in kinds],
        "num_hash_layers": config.hash_layers,
        "mlp_layer_types": [_HASHED] * config.hash_layers + [_SCORED] * (config.layers - config.hash_layers),
    }


def _written_scaling(scaling: ops.RopeScaling) -> dict[str, Any]:
    mapping = {name: value for name, value in to_mapping(scaling).items() if value is not None}
    return {**mapping, "rope_type": scaling.rope_type}


def _matrix(name: str) -> Stored:
    return Stored(name=name, transposed=True)


_COMPRESSOR = {"value": "wkv", "gate": "wgate", "bias": "ape", "norm": "norm.weight"}
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES: Names = {
    "embedding": "embed.weight",
    "norm": "norm.weight",
    "lm_head": _matrix("head.weight"),
    "streams/project/kernel": _matrix("hc_head_fn"),
    "streams/bias": "hc_head_base",
    "streams/scale": "hc_head_scale",
    "attention_streams/project/kernel": _matrix("hc_attn_fn"),
    "attention_streams/bias": "hc_attn_base",
    "attention_streams/scale": "hc_attn_scale",
    "feed_forward_streams/project/kernel": _matrix("hc_ffn_fn"),
    "feed_forward_streams/bias": "hc_ffn_base",
    "feed_forward_streams/scale": "hc_ffn_scale",
    "attention_norm": "attn_norm.weight",
    "attention/query_down": "attn.wq_a",
    "attention/query_norm": "attn.q_norm.weight",
    "attention/query_up": "attn.wq_b",
    "attention/kv": "attn.wkv",
    "attention/kv_norm": "attn.kv_norm.weight",
    "attention/sinks": "attn.attn_sink",
    "attention/output": "attn.wo_b",
    **{f"attention/compressor/{ours}": f"attn.compressor.{name}" for ours, name in _COMPRESSOR.items()},
    **{f"attention/indexer/compressor/{ours}": f"attn.indexer.compressor.{name}" for ours, name in _COMPRESSOR.items()},
    "attention/indexer/query": "attn.indexer.wq_b",
    "attention/indexer/weights": "attn.indexer.weights_proj",
    "feed_forward_norm": "ffn_norm.weight",
    "feed_forward/router": "ffn.gate",
    "feed_forward/selection_bias": "ffn.gate.bias",
    "feed_forward/table": Stored(name="ffn.gate.tid2eid", dtype="int64"),
    **{f"feed_forward/expert_{ours}": f"ffn.experts.{{expert}}.{name}.weight" for ours, name in _EXPERT.items()},
    **{f"feed_forward/shared/{ours}": f"ffn.shared_experts.{name}" for ours, name in _EXPERT.items()},
}


def _names(config: DeepseekV4Config) -> Names:
    down = Stored(name="attn.wo_a.weight", transposed=True, blocks=config.output_groups)
    return {**_NAMES, "attention/output_down": down}


_RENAMED: Final = (
    ("embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("hc_head.hc_", "hc_head_"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".mlp.gate.e_score_correction_bias", ".ffn.gate.bias"),
    (".mlp.gate.", ".ffn.gate."),
    *((f".mlp.shared_experts.{ours}_proj.", f".ffn.shared_experts.{name}.") for ours, name in _EXPERT.items()),
    (".self_attn.", ".attn."),
    (".compressor.indexer.scorer.weights_proj.", ".indexer.weights_proj."),
    (".compressor.indexer.q_b_proj.", ".indexer.wq_b."),
    (".compressor.indexer.", ".indexer.compressor."),
    (".compressor.kv_norm.", ".compressor.norm."),
    (".position_bias", ".ape"),
    (".kv_proj.", ".wkv."),
    (".gate_proj.", ".wgate."),
    (".q_a_proj.", ".wq_a."),
    (".q_b_proj.", ".wq_b."),
    (".q_a_norm.", ".q_norm."),
    (".o_a_proj.", ".wo_a."),
    (".o_b_proj.", ".wo_b."),
    (".attn.norm.", ".attn.kv_norm."),
    (".sinks", ".attn_sink"),
)
"""Names of transformers in memory, and of the files that it saves, with the published names."""


class _Family(DecoderFamily):
    def omit_parts(
        self, mapping: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]:
        """See `OmitsParts`: leaves out the multi-token prediction layers."""
        kept = {name: each for name, each in tensors.items() if not name.startswith("mtp.")}
        count = len(tensors) - len(kept)
        return mapping, kept, (f"mtp ({count} tensors)",) if count else ()

    def published_name(self, tensor: str) -> str:
        """Returns the published name of a tensor; transformers 5.23 saves with a mixture of both kinds of names."""
        tensor = tensor.removeprefix("model.")
        for theirs, published in _RENAMED:
            tensor = tensor.replace(theirs, published)
        return tensor


FAMILY = _Family(
    name="deepseek_v4",
    config_class=DeepseekV4Config,
    config_map=ConfigMap(
        architecture="DeepseekV4ForCausalLM",
        model_type="deepseek_v4",
        settings=(
            Setting("vocab_size", ("vocab_size",), 129_280),
            Setting("embed", ("hidden_size",), 4096),
            Setting("layers", ("num_hidden_layers",), 43),
            Setting("heads", ("num_attention_heads",), 64),
            Setting("head_dim", ("head_dim",), 512, "head_size"),
            Setting("mlp", ("moe_intermediate_size", "intermediate_size"), 2048),
            Setting("max_positions", ("max_position_embeddings",), 1_048_576),
            Setting("query_rank", ("q_lora_rank",), 1024),
            Setting("output_groups", ("o_groups",), 8),
            Setting("output_rank", ("o_lora_rank",), 1024),
            Setting("window", ("sliding_window",), 128),
            Setting("index_heads", ("index_n_heads",), 64),
            Setting("index_dim", ("index_head_dim",), 128),
            Setting("index_count", ("index_topk",), 512),
            Setting("streams", ("hc_mult",), 4),
            Setting("stream_iterations", ("hc_sinkhorn_iters",), 20),
            Setting("stream_epsilon", ("hc_eps",), 1e-6),
            Setting("experts", ("n_routed_experts", "num_local_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 6),
            Setting("expert_scale", ("routed_scaling_factor",), 1.5),
            Setting("expert_limit", ("swiglu_limit",), 10.0),
        ),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "n_shared_experts": 1,
            "scoring_func": "sqrtsoftplus",
            "norm_topk_prob": True,
            "topk_method": "noaux_tc",
            "router_jitter_noise": 0.0,
        },
        # The number of layers that `omit_parts` leaves out.
        silent=("num_nextn_predict_layers",),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=_names,
    layer_prefix="layers.{layer}.",
    sizes=("V4-Flash", "V4-Pro"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
