"""Every family against transformers on PyTorch, both in float32: transformers 5, or 4 where that is installed."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from stack_core.abi.plugins import registries
from stack_train.checkpoint import named_leaves
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.sampling import SamplingConfig
from stack_train.huggingface import FORMAT
from stack_train.huggingface.quantization import with_codes
from stack_train.models.family import DecoderFamily
from stack_train.safetensors_files import read_tensors
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,  # whose embedding PyTorch gives no gradient
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
OLMO_YARN = {name: YARN[name] for name in list(YARN)[:3]}
OLMO_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_theta": 500000.0, **OLMO_YARN},
        "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
    }
}
LLAMA_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
IS_4 = transformers.__version__.startswith("4.")
LIMIT = 7.0 if IS_4 else 0.4  # 4 has this one, whatever the config says
if IS_4:  # which scales the positions of layers without a window
    OLMO_ROPE = {"rope_theta": 500000.0, "rope_scaling": OLMO_YARN}
MAMBA_GROUPS = 1 if IS_4 else 2  # 4 normalizes over all groups of Mamba-2, whatever their number
V4_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
# A name may be followed by a variant.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "mlp_only_layers": [0], **EXPERTS}),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 8, "head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"final_logit_softcapping": 5.0},
    ),
    "gemma4": (  # an odd number of layers, of which the last ones share keys, and kinds without a period
        "Gemma4",
        {"num_hidden_layers": 7, "head_dim": 10, "global_head_dim": 16, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "sliding_window": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97, "final_logit_softcapping": 5.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "gemma4 experts": (
        "Gemma4",
        {"head_dim": 10, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12},
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "olmo2": ("Olmo2", {}),
    "gpt_oss": (
        "GptOss",
        {"head_dim": 16, "sliding_window": 6, "num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": LIMIT}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
        | {"rope_theta": 150000.0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
        | {"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_scaling": YARN},
    ),
    "deepseek_v32": (  # queries after the first 5 select keys
        "DeepseekV32",
        {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6}
        | {"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_scaling": YARN}
        | {"index_topk": 5, "index_n_heads": 9, "index_head_dim": 11},
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6}
        | {"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"first_k_dense_replace": 1, "index_topk": 5, "index_n_heads": 9, "index_head_dim": 11},
    ),
    "deepseek_v4": (  # windows, entries of 3 tokens of which queries select 2, and entries of 5 tokens
        "DeepseekV4",
        {"num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 10}
        | {"partial_rotary_factor": 0.6, "q_lora_rank": 20, "o_groups": 3, "o_lora_rank": 7, "sliding_window": 6}
        | {"layer_types": [V4_KINDS[kind] for kind in (0, 1, 2, 1, 2, 1)], "index_topk": 2, "index_n_heads": 9}
        | {"compress_rates": {V4_KINDS[1]: 3, V4_KINDS[2]: 5}, "index_head_dim": 8, "hc_mult": 3}
        | {"mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3}
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "swiglu_limit": 0.7}
        | {"rope_parameters": {name: YARN[name] for name in list(YARN)[:3]}, "compress_rope_theta": 3e3},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {"num_hidden_layers": 8, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, **EXPERTS}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 20},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True}),
    "olmo3": (
        "Olmo3",
        {"sliding_window": 6, "attention_bias": True, **OLMO_ROPE}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 10, "use_bias": True}),
    "glm4": ("Glm4", {"head_dim": 12, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "cwm": (
        "Cwm",
        {"head_dim": 10, "sliding_window": 6, "mlp_bias": True, "num_hidden_layers": 5, "bos_token_id": 1}
        | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3", "factor": 4.0, **LLAMA_FACTORS}}
        | {"layer_types": (["full_attention", "sliding_attention", "sliding_attention"] * 2)[:5]},
    ),
    "exaone4": ("Exaone4", {"sliding_window": 6, "sliding_window_pattern": 3, "num_hidden_layers": 5}),
    "phi3": (
        "Phi3",
        {"sliding_window": 9, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 48}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 3.0]}},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 0.7}
        | {"attention_bias": True, "mlp_bias": True},
    ),
    "seed_oss": ("SeedOss", {"head_dim": 10, "attention_out_bias": True, "mlp_bias": True}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.3}},
    ),
    "qwen3_5": (
        "Qwen3_5",
        {"num_hidden_layers": 8, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"mlp_only_layers": [0], "shared_expert_intermediate_size": 20, **EXPERTS, "norm_topk_prob": False},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4}
        | {"topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
        }
        | {"v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        # 4 does not multiply scores by the square of `mscale_all_dim`.
        | {"rope_scaling": {**YARN, "mscale": 0.7, **({"mscale_all_dim": 0.0} if IS_4 else {})}},
    ),
    "granite_moe": (
        "GraniteMoe",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 0.7}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
    ),
    "bamba": (
        "Bamba",
        {"num_hidden_layers": 5, "attn_layer_indices": [1, 4], "mamba_n_heads": 8, "mamba_n_groups": MAMBA_GROUPS}
        | {"mamba_d_state": 5, "mamba_d_conv": 3, "mamba_chunk_size": 7, "mamba_proj_bias": True, "mlp_bias": True},
    ),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 0.7}
        | {"layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 6, "num_experts_per_tok": 3}
        | {"shared_intermediate_size": 20, "mamba_n_heads": 8, "mamba_n_groups": MAMBA_GROUPS, "mamba_d_state": 5}
        | {"mamba_d_conv": 3, "mamba_chunk_size": 7, "attention_bias": True, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "NemotronH",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "mlp", "linear_attention", "moe"]}
        | {"head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 5}
        | {"conv_kernel": 3, "chunk_size": 7, "use_bias": True, "n_routed_experts": 6, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.5}
        | {"time_step_min": 1e-30},  # to which transformers raises the steps of a prompt, but not of later tokens
    ),
    "minimax": (  # several blocks in 24 tokens, and layers without a period
        "MiniMax",
        {"num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "block_size": 7}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention"] + ["linear_attention"] * 2}
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "full_attn_alpha_factor": 1.7}
        | {"full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 2.3, "linear_attn_beta_factor": 1.2}
        | {"mlp_alpha_factor": 3.1, "mlp_beta_factor": 0.9},
    ),
    "minimax window": (  # with a window, transformers 5.23 generates otherwise if its first layer has no keys
        "MiniMax",
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]}
        | {"num_local_experts": 4, "sliding_window": 9},
    ),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"num_hidden_layers": 8, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, **EXPERTS}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 20},
    ),
    "llama4": (
        "Llama4",
        {"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 6, "floor_scale": 5}
        | {"num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "attention_chunk_size": 7, "attn_scale": 0.3}
        | {"no_rope_layers": [1, 0, 1, 0], "attention_bias": True},
    ),
}

PARTS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Language models of larger ones, which have the shorter name of the config."""


@dataclass(frozen=True)
class Family:
    """One model twice; `directory` has the Hugging Face checkpoint, `run` what it was converted to."""

    name: str
    torch_model: Any
    directory: Path
    run: Path
    config: Any
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    (theirs, sizes), name = FAMILIES[request.param], request.param.partition(" ")[0]
    if not hasattr(transformers, f"{theirs}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {theirs}")
    config_class = getattr(transformers, f"{theirs}TextConfig" if theirs in PARTS else f"{theirs}Config")
    torch.manual_seed(0)
    their_config = config_class(**{**SIZES, **sizes}, attn_implementation="eager")  # 4 caps no scores in its others
    torch_model = getattr(transformers, f"{theirs}ForCausalLM")(their_config).eval()
    # Unit vectors and norms of narrow heads magnify rounding: with 0.25, 1e-7 of the embedding moves logits by 2e-4.
    std = 0.1 if name in ("gemma4", "qwen3_next", "qwen3_5", "qwen3_5_moe") else 0.25
    saved = ("correction_bias", "layer_scalar")
    biases = [buffer for name, buffer in torch_model.named_buffers() if name.endswith(saved)]
    with torch.no_grad():  # far from equal logits, so that greedy generation has no ties; no scale or bias at its start
        for parameter in (*torch_model.parameters(), *biases):
            noise = torch.randn_like(parameter)
            parameter.copy_(std * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
        for buffer in (each for name, each in torch_model.named_buffers() if name.endswith("tid2eid")):
            buffer.copy_(torch.rand(len(buffer), their_config.n_routed_experts).argsort()[:, : buffer.shape[1]])
    root = tmp_path_factory.mktemp(request.param)
    torch_model.save_pretrained(root / "hf")
    FORMAT.import_run(root / "hf", root / "run")
    config = run_config(root / "run").model
    assert config.name == name
    model = model_of(config, read_params(root / "run", config)[0])
    return Family(name, torch_model, root / "hf", root / "run", config, model)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 24))


def published_tensors(family: Family) -> dict[str, np.ndarray]:
    """What transformers saved, which has names of its own in files of DeepSeek-V4."""
    tensors = load_file(family.directory / "model.safetensors")
    if family.name != "deepseek_v4":
        return tensors
    return {registries.models[family.name].published_name(name): each for name, each in tensors.items()}


def positions_of(tokens):
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def test_logits(family, tokens):
    with torch.no_grad():
        expected = family.torch_model(torch.tensor(tokens)).logits.numpy()
    actual = jax.jit(lambda model, tokens: model.logits(model(tokens, positions_of(tokens)).hidden))(
        family.model, jnp.array(tokens)
    )
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_and_gradients(family, tokens):
    if "gradients" not in registries.models[family.name].tested:
        pytest.skip("a family without a kind of layer of its own")
    family.torch_model.zero_grad()
    expected = family.torch_model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    expected.backward()
    targets = jnp.concatenate([jnp.array(tokens)[:, 1:], jnp.full((len(tokens), 1), -100)], axis=1)

    def loss(model):
        return model.head().cross_entropy(model(jnp.array(tokens), positions_of(tokens)).hidden, targets)

    # The experts of each token in a table are integers.
    actual, gradients = jax.jit(jax.value_and_grad(loss, allow_int=True))(family.model)
    np.testing.assert_allclose(actual, expected.item(), atol=TOLERANCE, rtol=TOLERANCE)
    by_path = named_leaves(nnx.to_pure_dict(nnx.state(gradients)))
    # Parameters outside of PyTorch's graph, such as an indexer's, have None in place of zeros.
    gradients_by_name = {
        name: np.zeros(each.shape, np.float32) if each.grad is None else each.grad.numpy()
        for name, each in family.torch_model.named_parameters()
    }
    published_name = getattr(registries.models[family.name], "published_name", lambda name: name)
    saved_names = {name: _saved_name(name, family.name) for name in gradients_by_name}
    expected_gradients = {published_name(saved_names[name]): each for name, each in gradients_by_name.items()}
    rules = [
        rule.stored_in(expected_gradients, by_path[rule.parameter].shape)
        for rule in registries.models[family.name].weight_rules(family.config)
    ]
    compared = set()
    for rule in rules:
        for name, gradient in rule.tensors(by_path[rule.parameter]).items():
            if name in expected_gradients:
                part = rule.part_of(expected_gradients[name])
                np.testing.assert_allclose(gradient, part, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
                compared.add(name)
    missing = expected_gradients.keys() - compared
    assert not missing, missing


def _saved_name(name: str, family: str) -> str:
    """What a checkpoint calls a parameter of transformers 5, which renames Granite's experts, MiniMax's routers."""
    if family == "minimax":
        name = name.replace("mlp.gate.", "block_sparse_moe.gate.")
    for theirs, saved in (
        ("experts.gate_up_proj", "input_linear.weight"),
        ("experts.down_proj", "output_linear.weight"),
        ("router.weight", "router.layer.weight"),
    ):
        name = name.replace(f"block_sparse_moe.{theirs}", f"block_sparse_moe.{saved}")
    return name


@pytest.mark.filterwarnings("ignore:.* generates up to 48 of its 64 positions")  # longrope of Phi-3
@pytest.mark.parametrize("prompt_tokens", [1, 9])
def test_greedy_generation(family, tokens, prompt_tokens):
    prompt = tokens[0, :prompt_tokens].tolist()
    checkpoint = RUN_FORMAT.open_for_generation(family.run)
    count = 40 - prompt_tokens
    expected = family.torch_model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, prompt_tokens, dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )[0, prompt_tokens:]
    actual = TokenGenerator(checkpoint).stream(prompt, SamplingConfig(max_tokens=count, temperature=0))
    assert list(actual) == expected.tolist()


def test_import_export_import_is_bitwise(family, tmp_path):
    """The export is what transformers saved, tensor by tensor, and transformers reads its config as the original's.

    Tensors that transformers computes from the config, and that nothing here stores, are left out.
    """
    (family.run / "huggingface" / "config.json").unlink(missing_ok=True)  # so that the config is written anew
    FORMAT.export_run(family.run, tmp_path / "back")
    original, written = published_tensors(family), load_file(tmp_path / "back" / "model.safetensors")
    redundant = registries.models[family.name].redundant_tensors(family.config)
    pattern_of = lambda name: re.sub(r"layers\.\d+\.", "layers.{layer}.", name)
    assert written.keys() <= original.keys()
    assert all(redundant.get(pattern_of(name), "") is None for name in original.keys() - written.keys())
    for name, tensor in written.items():
        assert tensor.dtype == original[name].dtype and np.array_equal(tensor, original[name]), name
    # A default of `pad_token_id` may be outside of the small vocabulary.
    options = {"dtype": "auto", "attn_implementation": "eager", "pad_token_id": None}
    loaded = type(family.torch_model).from_pretrained(tmp_path / "back", **options).eval()
    with torch.no_grad():
        inputs = torch.arange(12)[None]
        # The tensors are the same bit by bit; PyTorch rounds otherwise where they lie otherwise in memory.
        torch.testing.assert_close(loaded(inputs).logits, family.torch_model(inputs).logits, rtol=0, atol=1e-5)
    FORMAT.import_run(tmp_path / "back", tmp_path / "again")
    config = run_config(tmp_path / "again").model
    write = registries.models[family.name].config_map.write
    assert write(config) == write(family.config)  # one of them may have left out what the other has resolved
    params = named_leaves(read_params(tmp_path / "again", config)[0])
    for name, leaf in named_leaves(read_params(family.run, family.config)[0]).items():
        np.testing.assert_array_equal(params[name], leaf, err_msg=name)


def test_fused_experts_are_read_as_those_of_each_expert(family, tmp_path):
    tensors = published_tensors(family)
    rules = [rule for rule in registries.models[family.name].weight_rules(family.config) if rule.fused is not None]
    if not rules:
        pytest.skip("a family without experts")
    fused: dict[str, dict[int, np.ndarray]] = {}
    for rule in rules:
        experts = family.config.experts
        names = list(rule.tensor_shapes((len(rule.layers), experts, 1, 1)))
        for row, name in enumerate(rule.fused.tensor_shapes((len(rule.layers), experts, 1, 1))):
            of_layer = [tensors.pop(each) for each in names[row * experts : (row + 1) * experts]]
            fused.setdefault(name, {})[rule.fused.part[0]] = np.stack(of_layer)
    joined = {name: np.concatenate([parts[i] for i in sorted(parts)], axis=-2) for name, parts in fused.items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((family.directory / "config.json").read_bytes())
    save_file(tensors | joined, tmp_path / "hf" / "model.safetensors")
    FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    params = named_leaves(read_params(tmp_path / "run", family.config)[0])
    for name, leaf in named_leaves(read_params(family.run, family.config)[0]).items():
        np.testing.assert_array_equal(params[name], leaf, err_msg=name)


def test_every_family_is_here():
    decoders = {name for name in registries.models.names() if isinstance(registries.models[name], DecoderFamily)}
    # Others are in test_images.py, test_gemma4_images.py, test_grid_images.py and test_pixtral.py.
    elsewhere = {"gemma3_vision", "gemma4_vision", "mistral3", "pixtral", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}
    assert {name.partition(" ")[0] for name in FAMILIES} == decoders - elsewhere
    for name in decoders:
        assert {"logits", "greedy", "conversion"} <= set(registries.models[name].tested)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm4_moe", "qwen3_next", "qwen3_5"], indirect=True)
def test_a_state_that_predicts_the_token_after_the_next(family, tokens, tmp_path):
    """transformers has the layer alone, and no model that is saved with it."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpLayer"):
        pytest.skip("needs transformers 5.20 or later, which has layers that predict later tokens")
    base, inputs = family.torch_model.model, torch.tensor(tokens)
    torch.manual_seed(1)
    layer = layers.MtpLayer(base.config, type(base.layers[-1]), type(base.norm), 3).eval()
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.1 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
        embedded = base.embed_tokens(torch.roll(inputs, -1, dims=1))
        states = base(inputs).last_hidden_state
        angles = base.rotary_emb(embedded, positions)
        # The layer makes no mask: with None, attention that is written out sees later tokens, too.
        causal = torch.full((1, 1, tokens.shape[1], tokens.shape[1]), -torch.inf).triu(1)
        expected = layer(embedded, states, angles, causal, positions, None).numpy()
    (tmp_path / "hf").mkdir()
    config = json.loads((family.directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    own = {_further_name(family.name, name): value.numpy() for name, value in layer.state_dict().items()}
    save_file(load_file(family.directory / "model.safetensors") | own, tmp_path / "hf" / "model.safetensors")
    FORMAT.import_run(tmp_path / "hf", tmp_path / "run")
    read = run_config(tmp_path / "run").model
    assert (read.mtp_layers, family.config.mtp_layers) == (1, 0)
    model = model_of(read, read_params(tmp_path / "run", read)[0])
    (actual,) = jax.jit(lambda model: model(jnp.array(tokens), positions_of(tokens)).further)(model)
    np.testing.assert_allclose(actual[:, :-1], expected[:, :-1], atol=TOLERANCE, rtol=TOLERANCE)


def _further_name(family: str, name: str) -> str:
    """What published checkpoints call a tensor of transformers' layer."""
    if family in ("deepseek_v3", "deepseek_v32", "glm4_moe"):
        return "model.layers.4." + name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    module = name.split(".", maxsplit=1)[0]
    return f"mtp.{own[module]}.weight" if module in own else "mtp.layers.0." + name.removeprefix("mtp_block.")


def test_microscaled_experts_are_those_of_transformers(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = random.integers(100, 140, (2, 6, 3)).astype(np.uint8)
    save_file({"up_blocks": blocks, "up_scales": scales}, tmp_path / "model.safetensors")
    _, coding = with_codes({"quantization_config": {"quant_method": "mxfp4"}}, read_tensors(tmp_path))
    expected = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    np.testing.assert_array_equal(coding.tensors["up"].read().astype(np.float32), expected.float().numpy())
