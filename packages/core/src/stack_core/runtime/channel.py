"""Frames between a driver and its agents and workers, authenticated by a shared token.

The listening side sends a nonce. Each side, the dialing side first, proves by HMAC-SHA256 over both nonces that it has
the token. From then on every frame carries a MAC over its number, kind and payload. The MAC key is specific to the
connection and direction: frames cannot be added, changed, dropped or replayed. Frames are not encrypted.

    frame = length (4 bytes) | kind (1 byte) | MAC (16 bytes) | payload

Control messages are JSON. The receiver may unpickle a payload of kind BYTES; such a payload is never accepted before
the handshake.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

from stack_core.abi.errors import ClusterError

__all__ = ["ChannelClosed", "Link", "Message", "Peer", "dial"]

Message = dict[str, Any] | bytes

_HEADER = struct.Struct("!IB16s")
_JSON, _BYTES = 0, 1
_PROTOCOL = 1
_MOST_BYTES = 1 << 31
_MOST_GREETING_BYTES = 1024
_NO_MAC = bytes(16)
_READ_BYTES = 1 << 20


class ChannelClosed(ClusterError):
    """The connection ended, or the peer failed authentication or sent an invalid frame."""


class Peer:
    """One end of a channel without the socket: bytes in, messages out.

    Args:
      listening: whether this side accepted the connection.
    """

    def __init__(self, token: bytes, *, listening: bool) -> None:
        self._token = token
        self._listening = listening
        self._nonce = secrets.token_hex(16)
        self._received = bytearray()
        self._outgoing = bytearray()
        self._keys: tuple[bytes, bytes] | None = None  # (sending, receiving)
        self._numbers = [0, 0]
        self._proven = False
        self.ready = False
        if listening:
            self._greet({"stack": _PROTOCOL, "nonce": self._nonce})

    def send(self, message: Message) -> None:
        """Appends a message to the outgoing bytes; only after the handshake."""
        if self._keys is None or not self.ready:
            raise ChannelClosed("Nothing can be sent before the handshake.")
        if isinstance(message, bytes):
            kind, payload = _BYTES, message
        else:
            kind, payload = _JSON, json.dumps(message).encode()
        if len(payload) > _MOST_BYTES:
            raise ClusterError(f"A message has {len(payload):,} bytes; at most {_MOST_BYTES:,} can be sent at once.")
        mac = _mac(self._keys[0], self._numbers[0], kind, payload)
        self._numbers[0] += 1
        self._outgoing += _HEADER.pack(len(payload), kind, mac)
        self._outgoing += payload

    @property
    def outgoing(self) -> bytearray:
        """Bytes to send; the caller deletes them once sent."""
        return self._outgoing

    def receive(self, data: bytes) -> list[Message]:
        """Consumes received bytes and returns the completed messages.

        Raises:
          ChannelClosed: the peer does not have the token, or its bytes are not frames.
        """
        self._received += data
        messages: list[Message] = []
        while len(self._received) >= _HEADER.size:
            length, kind, mac = _HEADER.unpack_from(self._received)
            # A stranger must not make this side buffer gigabytes.
            if kind not in (_JSON, _BYTES) or length > (_MOST_BYTES if self.ready else _MOST_GREETING_BYTES):
                raise ChannelClosed("The other side sent data that is not a frame of this channel.")
            if len(self._received) < _HEADER.size + length:
                break
            # A copy, because Python cannot shrink a bytearray while a view on its bytes exists.
            payload = bytes(memoryview(self._received)[_HEADER.size : _HEADER.size + length])
            del self._received[: _HEADER.size + length]
            if self.ready:
                messages.append(self._opened(kind, mac, payload))
            else:
                self._handshake(kind, payload)
        return messages

    def _opened(self, kind: int, mac: bytes, payload: bytes) -> Message:
        assert self._keys is not None, "ready"
        if not hmac.compare_digest(mac, _mac(self._keys[1], self._numbers[1], kind, payload)):
            raise ChannelClosed("A frame differs from its MAC: it was changed on its way, or is not of the other side.")
        self._numbers[1] += 1
        return payload if kind == _BYTES else _mapping(payload)

    def _handshake(self, kind: int, payload: bytes) -> None:
        if kind != _JSON:
            raise ChannelClosed("The other side sent bytes before it proved that it holds the token.")
        greeting = _mapping(payload)
        if self._listening:
            peer_nonce = _text(greeting, "nonce")
            self._check(greeting, "dialing", self._nonce, peer_nonce)
            self._agree(self._nonce, peer_nonce)
            self._greet({"proof": self._proof("listening", self._nonce, peer_nonce)})
            self.ready = True
        elif not self._proven:
            if greeting.get("stack") != _PROTOCOL:
                raise ChannelClosed(
                    f"The other side speaks protocol {greeting.get('stack')!r} of the runtime, and this one "
                    f"{_PROTOCOL}. Install the same stack-core on all hosts."
                )
            peer_nonce = self._peer_nonce = _text(greeting, "nonce")
            self._greet({"nonce": self._nonce, "proof": self._proof("dialing", peer_nonce, self._nonce)})
            self._proven = True
        else:
            self._check(greeting, "listening", self._peer_nonce, self._nonce)
            self._agree(self._peer_nonce, self._nonce)
            self.ready = True

    def _check(self, greeting: dict[str, Any], role: str, listener: str, dialer: str) -> None:
        if not hmac.compare_digest(_text(greeting, "proof"), self._proof(role, listener, dialer)):
            raise ChannelClosed("The other side does not hold the token of this cluster.")

    def _agree(self, listener: str, dialer: str) -> None:
        to_dialer, to_listener = (
            hmac.digest(self._token, f"{way}|{listener}|{dialer}".encode(), "sha256") for way in ("down", "up")
        )
        self._keys = (to_dialer, to_listener) if self._listening else (to_listener, to_dialer)

    def _proof(self, role: str, listener: str, dialer: str) -> str:
        return hmac.new(self._token, f"{role}|{listener}|{dialer}".encode(), hashlib.sha256).hexdigest()

    def _greet(self, greeting: dict[str, Any]) -> None:
        payload = json.dumps(greeting).encode()
        self._outgoing += _HEADER.pack(len(payload), _JSON, _NO_MAC) + payload


class Link:
    """A socket with its `Peer`; reading and writing never block."""

    def __init__(self, connection: socket.socket, token: bytes, *, listening: bool) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket has no such option
            # Small commands must not wait until earlier packets are acknowledged.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.peer = Peer(token, listening=listening)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def ready(self) -> bool:
        return self.peer.ready

    @property
    def waiting_bytes(self) -> int:
        return len(self.peer.outgoing)

    def read(self) -> list[Message]:
        """Returns the messages that have arrived.

        Raises:
          ChannelClosed: the connection ended, or the peer is not authentic.
        """
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosed(f"The connection broke: {error}") from error
        if not data:
            raise ChannelClosed("The other side closed the connection.")
        messages = self.peer.receive(data)
        self.flush()
        return messages

    def send(self, message: Message) -> None:
        """Sends as much as the socket accepts now; `flush` sends the rest."""
        self.peer.send(message)
        self.flush()

    def flush(self) -> None:
        outgoing = self.peer.outgoing
        while outgoing:
            try:
                del outgoing[: self.socket.send(memoryview(outgoing)[:_READ_BYTES])]
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(f"The connection broke: {error}") from error

    def close(self) -> None:
        self.socket.close()


def dial(address: tuple[str, int], token: bytes, timeout_s: float = 5.0) -> Link:
    """Connects to a listening peer; returns after both sides have proven that they have the token.

    Raises:
      OSError: no process listens at the address.
      ChannelClosed: the listener has another token, or is not a peer.
    """
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        if connection.getsockname() == connection.getpeername():  # TCP may connect a local port to itself
            raise ConnectionRefusedError("nobody listens there")
        link = Link(connection, token, listening=False)
        connection.settimeout(timeout_s)
        while not link.ready:
            link.read()
        connection.setblocking(False)
    except BaseException:  # close the socket after any failure of the handshake
        connection.close()
        raise
    return link


def _mac(key: bytes, number: int, kind: int, payload: bytes) -> bytes:
    digest = hmac.new(key, struct.pack("!QB", number, kind), hashlib.sha256)
    digest.update(payload)
    return digest.digest()[:16]


def _mapping(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ChannelClosed("The other side sent a frame that is not JSON.") from error
    if not isinstance(found, dict):
        raise ChannelClosed(f"The other side sent a {type(found).__name__}; a mapping was expected.")
    return found


def _text(greeting: dict[str, Any], key: str) -> str:
    value = greeting.get(key)
    # `compare_digest` accepts only ASCII text.
    if not isinstance(value, str) or not value.isascii():
        raise ChannelClosed(f"The other side's greeting has no {key!r}.")
    return value
