import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_train.generation.sampling import SamplingConfig


def test_an_engine_hears_every_setting_but_where_to_stop():
    params = SamplingConfig(temperature=0.5, top_k=3, top_p=0.25, seed=9, max_tokens=7, stop=("x",)).params
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.stop) == (0.5, 3, 0.25, 9, ())


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"seed": -1},
        {"stop": [""]},
    ],
)
def test_settings_out_of_range_are_named(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        parse(SamplingConfig, setting)
