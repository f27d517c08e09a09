"""Layers with windows that a `config.json` names by kind or by period."""

import pytest

from stack_core.abi.errors import ConversionError
from stack_core.abi.plugins import registries
from stack_train.huggingface.source import read_config

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(name, **mapping):
    return read_config(registries.models[name], {"num_hidden_layers": 5, **mapping})


@pytest.mark.parametrize(
    ("name", "kinds", "period"),
    [
        ("exaone4", [LOCAL, GLOBAL, LOCAL, GLOBAL, LOCAL], 2),
        ("exaone4", [LOCAL] * 5, 6),
        ("exaone4", None, 4),
        ("cwm", [GLOBAL, LOCAL, LOCAL, GLOBAL, LOCAL], 3),
        ("cwm", [GLOBAL, LOCAL, LOCAL, LOCAL, LOCAL], 5),
        ("cwm", [GLOBAL] * 5, 1),
        ("cwm", None, 4),
    ],
)
def test_the_period_comes_from_the_kinds_and_goes_back(name, kinds, period):
    config, family = read(name, **({"layer_types": kinds} if kinds else {})), registries.models[name]
    assert config.period == period
    written = family.config_map.write(config)
    assert kinds in (None, written["layer_types"])
    again = read_config(family, written)
    assert again.period == period and family.spec(again) == family.spec(config)


@pytest.mark.parametrize(("name", "kinds"), [("exaone4", [LOCAL, GLOBAL, GLOBAL]), ("cwm", [LOCAL, GLOBAL, LOCAL])])
def test_kinds_without_a_period_are_refused(name, kinds):
    with pytest.raises(ConversionError, match=r"layer_types=\['sliding_attention', 'full_attention', "):
        read(name, num_hidden_layers=3, layer_types=kinds)


def test_exaone_without_a_window_has_rotary_positions_in_all_layers():
    config = read("exaone4", sliding_window=None)
    assert all(layer.attention.rope is not None for layer in registries.models["exaone4"].spec(config).layers)
    assert registries.models["exaone4"].config_map.write(config)["layer_types"] == [GLOBAL] * 5
    with pytest.raises(ConversionError, match="sliding_window_pattern='LLLG' without layer_types, not a positive int"):
        read("exaone4", sliding_window_pattern="LLLG")


def test_cwm_scales_frequencies_unless_its_config_says_otherwise():
    family = registries.models["cwm"]
    scaling = read("cwm").rope_scaling
    assert (scaling.factor, scaling.original_max_position_embeddings) == (16.0, 8192)
    plain = read("cwm", rope_scaling={"rope_type": "default"})
    assert plain.rope_scaling is None
    assert read_config(family, family.config_map.write(plain)) == plain
