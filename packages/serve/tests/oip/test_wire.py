import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_serve.oip.errors import ProtocolError
from stack_serve.oip.messages import messages
from stack_serve.oip.wire import joined, split

TENSORS = st.lists(st.binary(max_size=300), max_size=4)


@given(st.text(max_size=20), st.lists(st.integers(-1, 2**40), max_size=5), TENSORS)
def test_raw_tensors_are_views_and_the_rest_is_the_message(name: str, shape: list[int], tensors: list[bytes]) -> None:
    whole = messages()["ModelInferRequest"](model_name=name, id="7", raw_input_contents=tensors)
    whole.inputs.add(name=name, datatype="FP32", shape=shape).parameters["a"].double_param = 0.5
    rest, values = split(whole.SerializeToString())
    assert [bytes(value) for value in values] == tensors
    found = messages()["ModelInferRequest"].FromString(rest)
    assert not found.raw_input_contents
    found.raw_input_contents.extend(tensors)
    assert found == whole


@given(st.text(max_size=20), TENSORS)
def test_an_answer_with_its_tensors_behind_it_is_a_message(name: str, tensors: list[bytes]) -> None:
    head = messages()["ModelInferResponse"](model_name=name)
    found = messages()["ModelInferResponse"].FromString(joined(head.SerializeToString(), tensors))
    assert list(found.raw_output_contents) == tensors and found.model_name == name


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_split_or_refused(content: bytes) -> None:
    try:
        rest, values = split(content)
    except ProtocolError:
        return
    assert len(rest) + sum(map(len, values)) <= len(content)


def test_what_is_cut_off_is_refused() -> None:
    whole = messages()["ModelInferRequest"](model_name="digits", raw_input_contents=[bytes(300)]).SerializeToString()
    for size in range(1, len(whole)):
        if size == 8:
            continue  # the model's name alone, which is a message
        with pytest.raises(ProtocolError, match="is cut off"):
            split(whole[:size])
