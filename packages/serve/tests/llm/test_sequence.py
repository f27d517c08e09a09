from stack_serve.llm.sequence import Sequence


def sequence(**fields):
    given = {"id": 0, "request_id": "a", "index": 0, "tokens": [1, 2], "prompt_tokens": 2, "max_total_tokens": 4}
    return Sequence(**given, priority=0, arrival=0, **fields)


def test_tokens_that_the_host_has_not_seen_count():
    assert sequence().total_tokens == 2
    assert sequence(in_flight=2).total_tokens == 4


def test_a_sequence_is_itself_alone():
    assert sequence() != sequence()
    assert len({sequence(), sequence()}) == 2


def test_sequences_share_no_lists():
    first, second = sequence(), sequence()
    first.pages.append(1)
    first.digests.append(b"")
    assert (second.pages, second.digests) == ([], [])
