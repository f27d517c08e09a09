"""Rows of image features, and the positions of tokens around images."""

from types import SimpleNamespace

import pytest

from stack_core.abi.generation import PromptImage
from stack_serve.llm.images import FeatureRows, images_of_rows, step_images
from stack_serve.llm.sequence import Sequence


def image(name, tokens, start=0, grid=None, layout=None):
    return PromptImage(start, tokens, None, name.encode(), layout or ("axes" if grid else "whole"), grid)


def row(images, start, tokens):
    return SimpleNamespace(sequence=SimpleNamespace(images=images), start=start, tokens=tokens)


def test_the_least_recently_used_images_are_replaced():
    rows, (a, b, c) = FeatureRows(6), (image("a", 2), image("b", 3), image("c", 3))
    assert rows.assign([a, b, a]) == [a, b]
    assert rows[a].tolist() == [0, 1] and rows[b].tolist() == [2, 3, 4]
    assert rows.assign([b]) == []
    assert rows.assign([c]) == [c] and len(rows) == 2  # replaces a
    with pytest.raises(KeyError):
        rows[a]
    taken = sorted([*rows[b], *rows[c]])
    assert taken == sorted(set(taken)) and rows.capacity == 6
    rows.clear()
    assert rows.assign([a]) == [a]


def test_images_of_a_step_are_replaced_in_order():
    rows, images = FeatureRows(8), [image(name, 1) for name in "abcdefgh"]
    rows.assign(images)
    rows.assign(images[::-1])
    for count in range(1, 8):
        rows.assign([image(f"new {count}", 1)])
        assert [each.digest in rows._rows_of for each in images] == [True] * (8 - count) + [False] * count


def test_a_step_holds_parts_of_images():
    first, second = image("a", 4, start=2), image("b", 3, start=7)
    rows = FeatureRows(8)
    step = [row([first, second], 3, 6), row([], 0, 2), row([first], 0, 2)]
    found = images_of_rows(step)
    assert found == [first, second]
    rows.assign(found)
    arrays = step_images(step, rows)
    a, b = rows[first].tolist(), rows[second].tolist()
    assert arrays.rows.tolist() == [*a[1:], -1, *b[:2], -1, -1, -1, -1]
    assert arrays.ahead.tolist() == [2, 1, 0, 0, 2, 1, 0, 0, 0, 0]
    assert arrays.positions[:, 0].tolist() == [3, 4, 5, 6, 7, 8, 0, 1, 0, 1]


def test_positions_follow_grids():
    images = (image("a", 6, start=2, grid=(2, 3)), image("b", 4, start=9, grid=(1, 4)))
    whole = [(0, 0, 0), (1, 1, 1), *[(2, 2 + y, 2 + x) for y in range(2) for x in range(3)], (5, 5, 5)]
    whole += [*[(6, 6, 6 + x) for x in range(4)], (10, 10, 10), (11, 11, 11)]
    rows = FeatureRows(10)
    rows.assign(images)
    for start in range(len(whole) - 1):
        found = step_images([row(images, start, len(whole) - start)], rows).positions
        assert found.tolist() == [list(each) for each in whole[start:]]
    fields = {"id": 0, "request_id": "", "index": 0, "tokens": [], "prompt_tokens": 0, "max_total_tokens": 99}
    sequence = Sequence(**fields, priority=0, arrival=0, images=images)
    assert [place - sequence.position_shift(place) for place in (0, 2, 8, 13, 40)] == [0, 2, 5, 10, 37]
    # An image with a grid is causal: chunks may divide it.
    assert sequence.image_boundary(4) == 4
    sequence.images = (image("c", 6, start=2),)
    assert [sequence.image_boundary(end) for end in (2, 4, 8)] == [2, 2, 8]
    assert sequence.position_shift(20) == 0


def test_breaks_between_rows_are_text():
    breaks = {"layout": "rows"}
    images = (image("a", 6, start=1, grid=(3, 2), **breaks), image("b", 2, start=10, grid=(1, 2), **breaks))
    rows = FeatureRows(8)
    rows.assign(images)
    a, b = rows[images[0]].tolist(), rows[images[1]].tolist()
    whole = [-1, *a[:2], -1, *a[2:4], -1, *a[4:], -1, *b, -1]
    for start in range(len(whole)):
        step = [row(images, start, len(whole) - start)]
        found = step_images(step, rows)
        assert found.rows.tolist() == whole[start:]
        assert found.positions[:, 0].tolist() == list(range(start, len(whole)))
        assert len(images_of_rows(step)) == (start < 9) + (start < 12)
    fields = {"id": 0, "request_id": "", "index": 0, "tokens": [], "prompt_tokens": 0, "max_total_tokens": 99}
    sequence = Sequence(**fields, priority=0, arrival=0, images=images)
    assert sequence.position_shift(20) == 0
