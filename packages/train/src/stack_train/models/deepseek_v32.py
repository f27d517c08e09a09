"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention to the keys selected by an indexer.

Outputs match transformers' `DeepseekV32ForCausalLM`. Training adds multi-token prediction layers and the loss of the
indexer.

Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (arXiv:2512.02556).
"""

from dataclasses import replace
from typing import Any, Literal

from pydantic import PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec
from stack_train.models.family import DecoderFamily
from stack_train.models.grouped_experts import BALANCED_NAMES, REPEATED, BalancedConfig
from stack_train.models.latent_config import LATENT_NAMES, LATENT_SETTINGS, LatentConfig, read_latent, write_latent
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.nn.attention import Rope
from stack_train.nn.indexer import Indexer, IndexTraining

__all__ = ["FAMILY", "DeepseekV32Config", "SparseConfig", "spec"]


@config
class SparseConfig(LatentConfig, BalancedConfig):
    """Settings of latent attention with an indexer; inherits the fields of `LatentConfig` and `BalancedConfig`.

    Attributes:
      index_heads: number of heads of the indexer.
      index_dim: width of a head of the indexer; its first `rope_dim` features have rotary positions.
      index_count: maximum number of keys per query.
      index_training: "frozen" does not train the indexer, "dense" trains it on attention to all keys, "sparse" on
        attention to the keys that it selects. Both need `objective.index_loss`.
    """

    query_rank: PositiveInt = 256
    index_heads: PositiveInt = 16
    index_dim: PositiveInt = 64
    index_count: PositiveInt = 1024
    index_training: IndexTraining = "frozen"

    @property
    def index_interleaved(self) -> bool:
        """True if the indexer rotates adjacent features as pairs; False pairs features half of `rope_dim` apart."""
        return False

    def check_heads(self) -> None:
        super().check_heads()
        if self.index_dim < self.rope_dim:
            raise ConfigError(
                f"index_dim={self.index_dim} is less than rope_dim={self.rope_dim}: the indexer turns as many features "
                "of its heads as attention. Raise index_dim, or lower rope_dim."
            )

    def indexer(self) -> Indexer:
        """Returns the indexer of every layer."""
        rope = Rope(
            theta=self.rope_theta,
            scaling=self.rope_scaling,
            rotary_dim=self.rope_dim,
            interleaved=self.index_interleaved,
        )
        return Indexer(
            heads=self.index_heads,
            dim=self.index_dim,
            count=self.index_count,
            rope=rope,
            training=self.index_training,
        )


@config
class DeepseekV32Config(SparseConfig):
    """Size and numerics of a DeepSeek-V3.2; inherits the fields of `SparseConfig`.

    Attributes:
      name: selects this family.
    """

    name: Literal["deepseek_v32"] = "deepseek_v32"


def spec(config: SparseConfig) -> DecoderSpec:
    """Returns the architecture, with the same attention in all layers."""
    attention = replace(config.latent_attention(interleaved=True), indexer=config.indexer())
    return config.balanced(attention)


def _read(reader: Reader) -> dict[str, Any]:
    found = read_latent(reader)
    if reader.get("q_lora_rank", default=0) is None:
        reader.problems.append("q_lora_rank=None, and the indexer reads the query latent")
    attention, feed_forward = reader.get("layer_types"), reader.get("mlp_layer_types")
    if set(attention or ()) - {"indexed_attention"}:
        reader.problems.append(f"layer_types={attention!r}, not 'indexed_attention' for every layer")
    if feed_forward is None:
        return found
    # transformers builds its layers from this key, also if first_k_dense_replace differs.
    dense = list(feed_forward).count("dense")
    if list(feed_forward) != ["dense"] * dense + ["sparse"] * (len(feed_forward) - dense):
        reader.problems.append(f"mlp_layer_types={feed_forward!r}, not dense layers followed by sparse ones")
    return {**found, "dense_layers": dense}


FAMILY = DecoderFamily(
    name="deepseek_v32",
    config_class=DeepseekV32Config,
    config_map=ConfigMap(
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        settings=(
            Setting("vocab_size", ("vocab_size",), 129_280),
            Setting("embed", ("hidden_size",), 7168),
            Setting("layers", ("num_hidden_layers",), 61),
            Setting("heads", ("num_attention_heads",), 128),
            Setting("mlp", ("intermediate_size",), 18_432),
            Setting("max_positions", ("max_position_embeddings",), 163_840),
            *LATENT_SETTINGS,
            Setting("index_heads", ("index_n_heads",), 64),
            Setting("index_dim", ("index_head_dim",), 128),
            Setting("index_count", ("index_topk",), 2048),
            Setting("dense_layers", ("first_k_dense_replace",), 3),
            Setting("experts", ("n_routed_experts", "num_local_experts", "num_experts"), 256),
            Setting("active_experts", ("num_experts_per_tok",), 8),
            Setting("expert_mlp", ("moe_intermediate_size",), 2048),
            Setting("shared_experts", ("n_shared_experts",), 1),
            Setting("expert_groups", ("n_group",), 8),
            Setting("kept_groups", ("topk_group",), 4),
            Setting("normalized", ("norm_topk_prob",), True),
            Setting("expert_scale", ("routed_scaling_factor",), 2.5),
            Setting("mtp_layers", ("num_nextn_predict_layers", "num_mtp_layers"), 0),
        ),
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "rope_interleave": True,
        },
        read_others=_read,
        write_others=write_latent,
    ),
    spec=spec,
    names={
        **LATENT_NAMES,
        **BALANCED_NAMES,
        "attention/indexer/query": "self_attn.indexer.wq_b",
        "attention/indexer/key": "self_attn.indexer.wk",
        "attention/indexer/weights": "self_attn.indexer.weights_proj",
        "attention/indexer/key_norm/scale": "self_attn.indexer.k_norm.weight",
        "attention/indexer/key_norm/bias": "self_attn.indexer.k_norm.bias",
    },
    redundant=REPEATED,
    sizes=("671B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
