from stack_serve.llm.adapter_slots import AdapterSlots


def test_what_nobody_uses_gives_way_the_oldest_first():
    slots = AdapterSlots(2)
    assert [slots.hold(7), slots.hold(8), slots.hold(7)] == [(0, True), (1, True), (0, False)]
    assert not slots.can_hold(9) and slots.can_hold(8) and slots.can_hold(None)
    slots.release(7)
    assert not slots.can_hold(9)  # one of its two users is left
    slots.release(8)
    slots.release(7)
    assert slots.hold(8) == (1, False)  # kept, and used again
    slots.release(8)
    assert slots.hold(9) == (0, True)  # in the place of 7, which was used longest ago
    assert slots.hold(7) == (1, True)
    assert not slots.can_hold(8)
