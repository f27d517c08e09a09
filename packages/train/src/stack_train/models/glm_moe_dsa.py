"""GLM-5: the layers of DeepSeek-V3.2 in other sizes, and an indexer with interleaved rotary positions.

Outputs match transformers' `GlmMoeDsaForCausalLM`. Training adds multi-token prediction layers and the loss of the
indexer.
"""

from dataclasses import replace
from typing import Any, Literal

from pydantic import PositiveFloat

from stack_core.abi.config import config
from stack_train.models import deepseek_v32
from stack_train.models.deepseek_v32 import SparseConfig
from stack_train.models.reader import Reader, Setting

__all__ = ["FAMILY", "GlmMoeDsaConfig"]


@config
class GlmMoeDsaConfig(SparseConfig):
    """Size and numerics of a GLM-5; inherits the fields of `SparseConfig`.

    Attributes:
      name: selects this family.
    """

    name: Literal["glm_moe_dsa"] = "glm_moe_dsa"
    norm_epsilon: PositiveFloat = 1e-5

    @property
    def index_interleaved(self) -> bool:
        return True


_BASE = deepseek_v32.FAMILY.config_map


def _read(reader: Reader) -> dict[str, Any]:
    kinds, pattern = reader.get("indexer_types") or (), reader.get("index_topk_pattern") or ()
    if set(kinds) - {"full"} or set(pattern) - {"F", "full"}:
        reader.problems.append(
            "layers that share the selection of an earlier layer (indexer_types, index_topk_pattern)"
        )
    # The two keys are ignored next to a list of layers.
    frequency = reader.get("index_topk_freq", default=1)
    reader.get("index_skip_topk_offset")
    if not kinds and not pattern and frequency not in (None, 0, 1):
        reader.problems.append(
            f"index_topk_freq={frequency}, not 1: layers that share the selection of an earlier layer"
        )
    return {**_BASE.read_others(reader), "nope_dim": reader.get("qk_nope_head_dim", default=192)}


FAMILY = replace(
    deepseek_v32.FAMILY,
    name="glm_moe_dsa",
    config_class=GlmMoeDsaConfig,
    config_map=replace(
        _BASE,
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        settings=(
            *_BASE.settings,
            Setting("vocab_size", ("vocab_size",), 154_880),
            Setting("embed", ("hidden_size",), 6144),
            Setting("layers", ("num_hidden_layers",), 78),
            Setting("heads", ("num_attention_heads",), 64),
            Setting("mlp", ("intermediate_size",), 12_288),
            Setting("max_positions", ("max_position_embeddings",), 202_752),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("query_rank", ("q_lora_rank",), 2048),
            Setting("value_dim", ("v_head_dim",), 256),
            Setting("expert_groups", ("n_group",), 1),
            Setting("kept_groups", ("topk_group",), 1),
            Setting("index_heads", ("index_n_heads",), 32),
        ),
        fixed={**_BASE.fixed, "indexer_rope_interleave": True},
        read_others=_read,
    ),
    sizes=("744B-A40B",),
)
