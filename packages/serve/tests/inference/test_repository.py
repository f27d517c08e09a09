from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stack_serve.inference.repository import (
    Key,
    Steps,
    Version,
    changed,
    failed,
    latest,
    loading,
    steps,
    tried_again,
    without_lost,
)

NOTHING = Steps((), ())


def key(version: int) -> Key:
    return Key("m", version)


def found(*versions: int, mark: str = "x") -> dict[Key, str]:
    return {key(version): mark for version in versions}


def live(*versions: int) -> dict[Key, Version]:
    return {key(version): Version("x", "READY", live=True) for version in versions}


def todo(files: Mapping[Key, str], versions: Mapping[Key, Version], *, newest: int = 1, unwanted: Any = ()) -> Steps:
    return steps(files, versions, unwanted=frozenset(unwanted), newest=newest)


def test_a_new_version_is_loaded_before_the_old_one_goes() -> None:
    assert todo(found(1, 2), live(1)) == Steps((key(2),), ())
    assert todo(found(1, 2), {**live(1), key(2): loading(None, "x")}) == NOTHING
    assert todo(found(1, 2), live(1, 2)) == Steps((), (key(1),))


def test_one_that_fails_leaves_the_old_one_and_is_tried_again_when_it_changes() -> None:
    versions = {**live(1), key(2): failed(loading(None, "x"), "damaged")}
    assert todo(found(1, 2), versions) == NOTHING
    assert todo({**found(1), **found(2, mark="y")}, versions) == Steps((key(2),), ())


def test_damaging_the_files_of_what_is_served_does_not_end_it() -> None:
    versions = {key(1): failed(loading(live(1)[key(1)], "y"), "damaged")}
    assert todo(found(1, mark="y"), versions) == NOTHING
    assert latest(versions, "m") == 1


def test_what_failed_is_tried_again_on_request_and_what_is_live_stays() -> None:
    versions = {key(1): failed(loading(live(1)[key(1)], "y"), "damaged")}
    again = tried_again(versions, "m")
    assert todo(found(1, mark="y"), again) == Steps((key(1),), ()) and again[key(1)].live
    assert tried_again(versions, "other") == versions


def test_as_many_versions_as_are_wanted_are_live() -> None:
    assert todo(found(1, 2, 3), {}, newest=2) == Steps((key(2), key(3)), ())
    assert todo(found(1, 2, 3), {}, newest=0) == Steps((key(1), key(2), key(3)), ())


def test_what_is_removed_or_unwanted_ends() -> None:
    assert todo({}, live(1)) == Steps((), (key(1),))
    assert todo(found(1), live(1), unwanted=["m"]) == Steps((), (key(1),))
    assert without_lost({**live(1), key(2): failed(loading(None, "x"), "damaged")}, found(1)) == live(1)


@given(st.lists(st.tuples(st.sets(st.integers(1, 4)), st.sets(st.integers(1, 4))), max_size=8), st.integers(0, 3))
def test_it_settles_and_serves_the_newest_that_loads(states: list[tuple[set[int], set[int]]], newest: int) -> None:
    versions: Mapping[Key, Version] = {}
    for number, (present, broken) in enumerate(states):
        files = {key(version): f"{version in broken}{number if version in broken else ''}" for version in present}
        versions = without_lost(versions, files)
        for _ in range(50):
            wanted = todo(files, versions, newest=newest)
            if wanted == NOTHING:
                break
            for each in wanted.unload:
                versions = changed(versions, each, None)
            for each in wanted.load:
                begun = loading(versions.get(each), files[each])
                ok = each.version not in broken
                versions = changed(
                    versions, each, Version(files[each], "READY", live=True) if ok else failed(begun, "no")
                )
        else:
            raise AssertionError("it does not settle")
        good = sorted(present - broken)
        assert {each.version for each, version in versions.items() if version.live} >= set(good[-newest:])
