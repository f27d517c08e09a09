"""Former keys of configs are refused with their new names."""

import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.runtime.config import ClusterConfig
from stack_rl.environments.agent import AgentConfig
from stack_rl.environments.gymnasium import GymnasiumConfig
from stack_rl.environments.openenv import OpenEnvConfig
from stack_rl.environments.tools import ToolsConfig
from stack_rl.rollouts import RolloutData
from stack_train.optim.spikes import SpikeConfig


@pytest.mark.parametrize(
    ("kind", "former", "current"),
    [
        *[
            (kind, "most_turns", "environment.max_turns")
            for kind in (AgentConfig, GymnasiumConfig, OpenEnvConfig, ToolsConfig)
        ],
        (RolloutData, "most_candidates", "data.max_candidates"),
        (ClusterConfig, "most_failures", "cluster.max_failures"),
        (SpikeConfig, "most_in_a_row", "optimizer.skip_spikes.max_consecutive"),
    ],
)
def test_a_former_key_is_refused_with_its_new_name(kind, former, current):
    assert current.rpartition(".")[2] in kind.__dataclass_fields__
    with pytest.raises(ConfigError, match=rf"no key '{former}' any more: it is now {current}\."):
        parse(kind, {former: 3})
