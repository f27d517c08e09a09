"""Frames and the handshake, byte by byte, without sockets; then over one."""

import json
import random
import socket
import threading

import pytest

from stack_core.abi.errors import ClusterError
from stack_core.runtime.channel import ChannelClosed, Link, Peer, dial

TOKEN = b"t" * 32


def deliver(source, destination, size=1 << 20):
    """Moves what one peer has to say to the other, in pieces."""
    messages = []
    while source.outgoing:
        piece = bytes(source.outgoing[:size])
        del source.outgoing[:size]
        messages += destination.receive(piece)
    return messages


def shaken(listener_token=TOKEN, dialer_token=TOKEN, size=1 << 20):
    listener, dialer = Peer(listener_token, listening=True), Peer(dialer_token, listening=False)
    for source, destination in ((listener, dialer), (dialer, listener), (listener, dialer)):
        assert deliver(source, destination, size) == []
    return listener, dialer


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_messages_arrive_as_they_were_sent_in_any_pieces(size):
    listener, dialer = shaken(size=size)
    assert listener.ready and dialer.ready
    said = [{"fork": 1}, b"\x00\xff" * 500, {"text": "ß"}]
    for message in said:
        dialer.send(message)
        listener.send(message)
    assert deliver(dialer, listener, size) == said == deliver(listener, dialer, size)


def test_who_holds_another_token_is_let_in_by_neither_side():
    with pytest.raises(ChannelClosed, match="does not hold the token"):
        shaken(dialer_token=b"u" * 32)
    listener, dialer = Peer(TOKEN, listening=True), Peer(TOKEN, listening=False)
    deliver(listener, dialer)
    impostor = Peer(b"u" * 32, listening=True)
    impostor._nonce = listener._nonce
    impostor._greet({"proof": "0" * 64})
    del impostor.outgoing[: -(21 + len(json.dumps({"proof": "0" * 64})))]
    with pytest.raises(ChannelClosed, match="does not hold the token"):
        deliver(impostor, dialer)


def test_what_one_side_said_cannot_be_sent_back_to_it_as_proof():
    listener, dialer = Peer(TOKEN, listening=True), Peer(TOKEN, listening=False)
    deliver(listener, dialer)
    with pytest.raises(ChannelClosed):
        dialer.receive(bytes(dialer.outgoing))


@pytest.mark.parametrize("change", ["flip", "repeat", "drop", "kind"])
def test_a_frame_that_was_changed_repeated_or_left_out_ends_the_channel(change):
    listener, dialer = shaken()
    dialer.send({"number": 1})
    first = bytes(dialer.outgoing)
    dialer.outgoing.clear()
    dialer.send({"number": 2})
    second = bytes(dialer.outgoing)
    wire = {
        "flip": first[:-2] + bytes([first[-2] ^ 1]) + first[-1:],
        "repeat": first + first,
        "drop": second,
        "kind": first[:4] + b"\x01" + first[5:],
    }[change]
    with pytest.raises(ChannelClosed, match="differs from its MAC"):
        listener.receive(wire)


def test_bytes_are_refused_before_the_handshake():
    listener = Peer(TOKEN, listening=True)
    with pytest.raises(ChannelClosed, match="before it proved"):
        listener.receive(b"\x00\x00\x00\x04\x01" + bytes(16) + b"\x80\x05N.")
    with pytest.raises(ClusterError):
        listener.send({"too": "early"})


def test_a_thousand_fuzzed_greetings_end_in_nothing_but_a_closed_channel():
    generator = random.Random(0)
    listener, dialer = Peer(TOKEN, listening=True), Peer(TOKEN, listening=False)
    greetings = bytes(listener.outgoing)
    deliver(listener, dialer)
    honest = bytes(dialer.outgoing)
    for _ in range(1000):
        wire = bytearray(generator.choice((honest, greetings, generator.randbytes(60))))
        for _ in range(generator.randint(1, 5)):
            wire[generator.randrange(len(wire))] = generator.randrange(256)
        peer = Peer(TOKEN, listening=True)
        try:
            assert peer.receive(bytes(wire)) == []
        except ChannelClosed:
            continue
        assert not peer.ready, "a changed greeting was taken for a proof"


def test_a_thousand_fuzzed_frames_after_the_handshake_end_in_nothing_but_a_closed_channel():
    generator = random.Random(1)
    closed = 0
    for _ in range(1000):
        listener, dialer = shaken()
        for message in ({"step": 1}, generator.randbytes(40)):
            dialer.send(message)
        honest = bytes(dialer.outgoing)
        wire = bytearray(honest)
        for _ in range(generator.randint(1, 3)):
            place = generator.randrange(len(wire))
            change = generator.choice(("replace", "cut", "insert", "repeat"))
            if change == "replace":
                wire[place] = generator.randrange(256)
            elif change == "cut":
                del wire[place : place + generator.randint(1, 8)]
            else:
                wire[place:place] = wire[:place] if change == "repeat" else generator.randbytes(8)
        try:
            messages = listener.receive(bytes(wire))
        except ChannelClosed:
            closed += 1
            continue
        # Nothing is heard but what was said: a length that has grown waits for more, an end may be missing.
        assert messages == [{"step": 1}, honest[-40:]][: len(messages)]
    assert closed > 500


def test_over_a_socket_it_is_the_same_and_an_end_is_heard():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = []

        def serve():
            link = Link(server.accept()[0], TOKEN, listening=True)
            link.socket.setblocking(True)
            link.flush()
            while not found:
                found.extend(link.read())
            link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        link = dial(server.getsockname(), TOKEN)
        link.send({"hello": 1})
        thread.join(10)
        assert found == [{"hello": 1}]
        link.socket.setblocking(True)
        with pytest.raises(ChannelClosed, match="closed the connection"):
            link.read()
        link.close()
