import pytest

from stack_serve.llm.buckets import Buckets


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 16), (5, 40), (32, 512), (64, 64)])
def test_every_step_has_a_bucket_that_holds_it_and_is_compiled(max_rows: int, max_tokens: int) -> None:
    buckets = Buckets(max_rows, max_tokens)
    # Each property computes all sizes again.
    decoding, samples, prompts, largest_rows = buckets.decoding, buckets.samples, buckets.prompts, buckets.largest_rows
    for rows in range(1, max_rows + 1):
        assert rows <= buckets.of_decoding(rows) <= largest_rows and buckets.of_decoding(rows) in decoding
        assert rows <= buckets.of_samples(rows) <= largest_rows and buckets.of_samples(rows) in samples
    for tokens in range(2, max_tokens + 1):
        assert max(tokens, largest_rows) <= buckets.of_prompts(tokens) <= buckets.largest_tokens
        assert buckets.of_prompts(tokens) in prompts


def test_decoding_is_padded_to_less_than_twice_its_rows_or_to_four() -> None:
    assert [Buckets(32, 512).of_decoding(rows) for rows in (1, 2, 3, 5, 9, 32)] == [1, 4, 4, 8, 16, 32]


def test_decoding_has_the_least_rows_of_the_chip() -> None:
    assert Buckets(32, 512, min_rows=4).decoding == [4, 8, 16, 32]
    assert Buckets(1, 16, min_rows=4).largest_rows == 4


def test_buckets_are_few() -> None:
    buckets = Buckets(32, 512)
    assert buckets.decoding == [1, 4, 8, 16, 32]
    assert buckets.prompts == [32, 64, 128, 192, 256, 384, 512]
    assert buckets.samples == [8, 32]
