"""Patterns cover whole segments of a path."""

import jax
import pytest

from stack_core.runtime.tree_paths import path_matches, path_name


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("query", True),
        ("attention/query", True),
        ("blocks/.*/kernel", True),
        (".*", True),
        ("quer", False),
        ("kernel/query", False),
        ("query|bias", True),
    ],
)
def test_a_pattern_covers_whole_segments(pattern, matches):
    assert path_matches(pattern, "blocks/attention/query/kernel") == matches


def test_a_path_is_named_by_its_keys():
    (path, _), *_ = jax.tree.leaves_with_path({"layers": [{"kernel": 1}]})
    assert path_name(path) == path_name(("layers", 0, "kernel")) == "layers/0/kernel"
