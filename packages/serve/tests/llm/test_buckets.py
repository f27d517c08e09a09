import pytest

from stack_serve.llm.buckets import Buckets


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(1, 16), (5, 40), (32, 512), (64, 64)])
def test_every_step_has_a_bucket_that_holds_it_and_is_compiled(max_rows: int, max_tokens: int) -> None:
    buckets = Buckets(max_rows, max_tokens)
    decoding, prompts, samples_of = buckets.decoding, buckets.prompts, buckets.samples
    for rows in range(1, max_rows + 1):
        assert buckets.of_decoding(rows) >= rows and buckets.of_decoding(rows) in decoding
        for tokens in range(rows + 1, max_tokens + 1):
            bucket = buckets.of_prompts(rows, tokens)
            assert bucket[0] >= rows and bucket[1] >= tokens and bucket in prompts
        for samples in range(1, rows + 1):
            sampled = buckets.of_samples(rows, samples)
            assert sampled >= samples and (buckets.of_prompts(rows, rows + 1)[0], sampled) in samples_of


def test_decoding_is_padded_to_less_than_twice_its_rows() -> None:
    assert [Buckets(32, 512).of_decoding(rows) for rows in (1, 2, 3, 9, 32)] == [1, 2, 4, 16, 32]


def test_buckets_are_few() -> None:
    buckets = Buckets(32, 512)
    assert buckets.decoding == [1, 2, 4, 8, 16, 32]
    tokens = [16, 32, 64, 128, 192, 256, 384, 512]
    assert buckets.prompts == [*((1, count) for count in tokens), *((32, count) for count in tokens[1:])]
    assert buckets.samples == [(1, 1), (32, 8), (32, 16), (32, 32)]
