"""Drafts of three held-out families against transformers, and the first part in which a wrong draft differs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stack_train.drafting import new_family
from stack_train.drafting.new_family import draft_family

from .test_families import FAMILIES, SIZES

pytestmark = pytest.mark.parity

ODD = {"hidden_size": 42, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 3}


def saved(name: str, directory: Path) -> str:
    theirs, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{theirs}Config")(**{**SIZES, **ODD, **sizes})
    model = getattr(transformers, f"{theirs}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    model.save_pretrained(directory)
    return f"hf:{directory}"


@pytest.mark.parametrize("name", ["olmo2", "granite", "smollm3", "qwen3", "arcee", "cwm"])
def test_a_draft_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    lines = draft_family(name, saved(name, tmp_path / "hf"), tmp_path / "draft.py")
    layers = FAMILIES[name][1].get("num_hidden_layers", SIZES["num_hidden_layers"])
    assert any(line.startswith(f"equal to transformers in all {3 * layers + 4} parts") for line in lines), lines


def test_the_first_part_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = draft_family("gemma2", saved("gemma2", tmp_path / "gemma2"), tmp_path / "gemma2.py")
    assert lines[-1].startswith("differs from transformers first in embedding, by ")
    lines = draft_family("exaone4", saved("exaone4", tmp_path / "exaone4"), tmp_path / "exaone4.py")
    assert any(line.startswith("differs from transformers first in layers.2.self_attn, by ") for line in lines), lines
    address, written = saved("granite", tmp_path / "granite"), new_family.family_source
    for right, wrong, part in (
        ("scale=config.attention_scale", "scale=0.5", "layers.0.self_attn"),
        ("Gated(width=config.mlp", 'Gated(activation="gelu", width=config.mlp', "layers.0.mlp"),
        ("residual_scale=config.residual_scale", "residual_scale=0.5", "layers.0, its norms and residual sums"),
        ("logit_scale=1 / config.logit_divisor", "logit_scale=2.0", "lm_head"),
    ):

        def changed(*arguments: Any, right: str = right, wrong: str = wrong) -> str:
            source = written(*arguments)
            assert right in source
            return source.replace(right, wrong)

        monkeypatch.setattr(new_family, "family_source", changed)
        out = tmp_path / f"{part.replace(' ', '_')}.py"
        assert draft_family("granite", address, out)[-1].startswith(f"differs from transformers first in {part}, by ")
