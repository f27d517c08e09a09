"""Ranges of numbers of hosts: their form, and the number that is chosen."""

import pytest

from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.runtime.cluster import Cluster
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.host_range import HostRange


@pytest.mark.parametrize(
    ("value", "plain", "numbers"), [(3, 3, (3, 3)), ("3", 3, (3, 3)), ("2..4", "2..4", (2, 4)), ("2..2", 2, (2, 2))]
)
def test_a_number_or_a_range_is_stored_as_yaml_has_it(value, plain, numbers):
    config = parse(ClusterConfig, {"hosts": value})
    assert config.hosts == plain and config.host_range == HostRange(*numbers)
    assert parse(ClusterConfig, to_mapping(config)) == config


@pytest.mark.parametrize("value", ["4..2", "0..3", 0, -1, "2..", "..4", "2...4", "2-4", "many", "", True, 2.0, [2]])
def test_other_forms_are_refused_with_the_form_that_is_expected(value):
    with pytest.raises(ConfigError, match=r"cluster\.hosts is .*; expected .* such as 2\.\.4"):
        parse(ClusterConfig, {"hosts": value})


def test_the_largest_number_that_divides_the_run_is_chosen():
    numbers = HostRange(2, 4)
    assert [numbers.choose(connected) for connected in range(7)] == [None, None, 2, 3, 4, 4, 4]
    assert [numbers.choose(connected, unfit={3}) for connected in range(5)] == [None, None, 2, 2, 4]
    assert numbers.choose(4, unfit={2, 3, 4}) is None


def test_a_range_is_refused_where_the_number_is_fixed_and_its_wait_where_there_is_none():
    with pytest.raises(ConfigError, match=r"hosts is '1\.\.2', but a cluster with meshes has a fixed number"):
        Cluster.connect(ClusterConfig(hosts="1..2"))
    for hosts in (None, 2):
        with pytest.raises(ConfigError, match=r"missing_s is 5\.0, which has no effect without a range of hosts"):
            ClusterConfig(hosts=hosts, missing_s=5.0)
