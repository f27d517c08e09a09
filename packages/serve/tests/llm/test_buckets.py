import pytest

from stack_serve.llm.buckets import Buckets


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 16), (5, 40), (32, 512), (64, 64)])
def test_every_step_has_a_bucket_that_holds_it_and_is_compiled(max_rows: int, max_tokens: int) -> None:
    buckets = Buckets(max_rows, max_tokens)
    for rows in range(1, max_rows + 1):
        for tokens in range(rows, max_tokens + 1):
            bucket = buckets.of(rows, tokens)
            assert bucket[0] >= rows and bucket[1] >= tokens and bucket in buckets.all()


def test_decoding_is_padded_to_less_than_twice_its_rows() -> None:
    buckets = Buckets(32, 512)
    assert [buckets.of(rows, rows) for rows in (1, 2, 3, 9, 32)] == [(1, 1), (2, 2), (4, 4), (16, 16), (32, 32)]


def test_buckets_are_few() -> None:
    assert len(Buckets(32, 512).all()) == 6 + 6 + 4
