import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stack_serve.llm.pages import PagePool, extend_digests


def digests(tokens, *, pages, page_tokens=2):
    found = []
    extend_digests(found, tokens, page_tokens=page_tokens, pages=pages)
    return found


def kept(pool, *contents):
    """Takes, registers and releases a page for each digest, as one sequence."""
    pages = [pool.take() for _ in contents]
    for page, digest in zip(pages, contents, strict=True):
        pool.register(page, digest)
    pool.release(pages)
    return pages


def test_pages_are_taken_until_there_are_none():
    pool = PagePool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.available == 0


def test_a_page_that_was_not_registered_is_not_found_after_it_was_given_back():
    pool = PagePool(2)
    pool.release([pool.take()])
    assert pool.available == 2
    assert pool.find([b"a"]) == []


def test_a_registered_page_is_found_while_it_is_held_and_after():
    pool = PagePool(2)
    page = pool.take()
    pool.register(page, b"a")
    assert pool.find([b"a"]) == [page]
    pool.release([page])
    assert (pool.find([b"a"]), pool.available) == ([page], 2)


def test_what_is_found_ends_with_the_first_digest_that_is_missing():
    pool = PagePool(4)
    first, _, third = kept(pool, b"a", b"b", b"c")
    assert pool.find([b"a", b"x", b"c"]) == [first]
    assert pool.find([b"x", b"a"]) == []
    assert pool.find([b"c", b"a"]) == [third, first]


def test_a_shared_page_is_free_when_the_last_gave_it_back():
    pool = PagePool(1)
    page = pool.take()
    pool.register(page, b"a")
    pool.share([page])
    pool.release([page])
    assert (pool.references(page), pool.available) == (1, 0)
    pool.release([page])
    assert (pool.references(page), pool.available) == (0, 1)


def test_sharing_a_kept_page_makes_one_less_available():
    pool = PagePool(3)
    pages = kept(pool, b"a", b"b")
    assert pool.count_unreferenced(pages) == 2
    pool.share(pages[:1])
    assert (pool.available, pool.count_unreferenced(pages)) == (2, 1)


def test_free_pages_go_before_kept_ones():
    pool = PagePool(2)
    (page,) = kept(pool, b"a")
    assert pool.take() != page
    assert pool.find([b"a"]) == [page]


def test_the_page_released_longest_ago_goes_first():
    pool = PagePool(3)
    kept(pool, b"a")
    pages = [pool.take(), pool.take()]
    pool.register(pages[0], b"b")
    pool.register(pages[1], b"c")
    pool.release(pages[:1])
    pool.release(pages[1:])
    for gone, left in [(b"a", [b"b", b"c"]), (b"b", [b"c"])]:
        pool.take()
        assert pool.find([gone]) == []
        assert len(pool.find(left)) == len(left)


def test_use_makes_a_kept_page_young_again():
    pool = PagePool(2)
    (old,) = kept(pool, b"a")
    kept_later = pool.take()
    pool.register(kept_later, b"b")
    pool.release([kept_later])
    pool.share([old])
    pool.release([old])
    assert pool.take() == kept_later


def test_the_end_of_a_sequence_goes_before_its_beginning():
    pool = PagePool(3)
    kept(pool, b"a", b"b", b"c")
    pool.take()
    assert len(pool.find([b"a", b"b", b"c"])) == 2
    pool.take()
    assert len(pool.find([b"a", b"b", b"c"])) == 1


def test_of_two_pages_with_the_same_contents_the_first_is_found_and_the_second_freed():
    pool = PagePool(2)
    first, second = pool.take(), pool.take()
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.release([second])
    assert pool.take() == second


def test_a_page_given_to_another_is_no_longer_found_by_its_old_contents():
    pool = PagePool(1)
    kept(pool, b"a")
    page = pool.take()
    pool.register(page, b"b")
    assert pool.find([b"a"]) == []
    pool.release([page])
    assert pool.find([b"b"]) == [page]


def test_forgetting_frees_what_is_kept_and_leaves_what_is_held():
    pool = PagePool(3)
    kept(pool, b"a", b"b")
    (held,) = pool.find([b"a"])
    pool.share([held])
    pool.forget()
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([], [])
    assert (pool.references(held), pool.available) == (1, 2)
    pool.release([held])
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]


def test_a_digest_stands_for_its_tokens_and_all_before_them():
    one = digests([1, 2, 3, 4, 5], pages=2)
    assert one == digests([1, 2, 3, 4, 9], pages=2)
    assert one[0] == digests([1, 2, 7, 8], pages=2)[0]
    assert one[1] != digests([1, 2, 7, 8], pages=2)[1]
    assert one[1] != digests([9, 2, 3, 4], pages=2)[1]
    assert digests([1, 2, 1, 2], pages=2)[0] != digests([1, 2, 1, 2], pages=2)[1]


def test_digests_are_extended_and_not_computed_again():
    found = digests([1, 2, 3, 4], pages=1)
    extend_digests(found, [7, 7, 3, 4], page_tokens=2, pages=2)
    assert found == digests([1, 2, 3, 4], pages=2)
    extend_digests(found, [], page_tokens=2, pages=1)
    assert len(found) == 2


@pytest.mark.parametrize("token", [0, 2**31 - 1])
def test_any_token_id_has_a_digest(token):
    assert len(digests([token, token], pages=1)[0]) == 32


class Holders(RuleBasedStateMachine):
    """Holders of pages against a record of who holds what."""

    pages = 5

    def __init__(self):
        super().__init__()
        self.pool = PagePool(self.pages)
        self.held = []  # a list of pages a holder
        self.contents = {}  # what each page was last registered with

    @rule(count=st.integers(1, 3))
    def take(self, count):
        if count <= self.pool.available:
            taken = [self.pool.take() for _ in range(count)]
            assert not set(taken) & {page for pages in self.held for page in pages}
            for page in taken:
                self.contents.pop(page, None)
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), contents=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, data, contents):
        page = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        if page not in self.contents and contents not in self.contents.values():
            self.contents[page] = contents
        if self.contents.get(page, contents) == contents:
            self.pool.register(page, contents)

    @rule(contents=st.lists(st.sampled_from([b"a", b"b", b"c"]), unique=True, max_size=3))
    def share(self, contents):
        found = self.pool.find(contents)
        assert [self.contents.get(page) for page in found] == contents[: len(found)]
        if found:
            self.pool.share(found)
            self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def forget(self):
        self.pool.forget()
        self.contents.clear()

    @invariant()
    def references_are_exact(self):
        pages = [page for pages in self.held for page in pages]
        assert [self.pool.references(page) for page in range(self.pages)] == [pages.count(n) for n in range(self.pages)]
        assert self.pool.available == self.pages - len(set(pages))

    @invariant()
    def what_is_registered_is_found(self):
        for page, contents in self.contents.items():
            assert self.pool.find([contents]) == [page]


TestHolders = Holders.TestCase
