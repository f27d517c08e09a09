import pytest

from stack_train.nn.groups import Group, groups_of


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("LLLL", [("L", 4)]),
        ("LLLLLG" * 4 + "LL", [("LLLLLG", 4), ("L", 2)]),  # Gemma 3
        ("DDD" + "M" * 58, [("D", 3), ("M", 58)]),  # DeepSeek-V3
        ("dddf" * 12, [("dddf", 12)]),  # Qwen3-Next
        ("A" + "BC" * 3 + "D", [("A", 1), ("BC", 3), ("D", 1)]),
        ("ABAB" + "AB", [("AB", 3)]),
        ("LLGLLGL", [("LLG", 2), ("L", 1)]),
        ("", []),
    ],
)
def test_what_repeats_is_found(layers, expected):
    groups = groups_of(tuple(layers))
    assert [("".join(group.period), group.repeats) for group in groups] == expected


def test_places_name_the_layers_that_are_stacked():
    groups = groups_of(tuple("A" + "BC" * 3))
    assert [group.start for group in groups] == [0, 1]
    assert list(groups[1].layers(0)) == [1, 3, 5] and list(groups[1].layers(1)) == [2, 4, 6]
    places = sorted(layer for group in groups for place in range(len(group.period)) for layer in group.layers(place))
    assert places == list(range(7))
    assert Group(0, ("A",), 2) == groups_of(("A", "A"))[0]
