"""Who may speak: a handshake of four small frames, without I/O.

::

    client  Hello(protocols, nonce, client)      ─►
            ◄─  Challenge(protocol, nonce, instance)     or  Refused(reason)
            Proof(HMAC as client)                ─►
            ◄─  Welcome(HMAC as server, replica)         or  Refused(reason)

Both prove that they hold the token by an HMAC over the first two frames, so the token never travels, no proof can be
used twice, and no one in between can change the version or who is who. `client` and `instance` name the two ends across
connections: a client that comes back is known, and it knows whether the replica is the one that it had asked (P24).
Confidentiality is not its business: that is the network's.
"""

import hashlib
import hmac
import secrets
from enum import StrEnum

import msgspec

from headrace.platform.errors import EngineError
from headrace.serving.door.messages import PROTOCOL_NEWEST, PROTOCOL_OLDEST, encode

HANDSHAKE_FRAME_BYTES = 4096
"""Largest frame from a peer that has not proved itself."""

_MAGIC = "headrace-door"
_NONCE_BYTES = 32


class RefusalReason(StrEnum):
    """Why a handshake ended without a connection."""

    WRONG_TOKEN = "wrong_token"
    PROTOCOL_MISMATCH = "protocol_mismatch"
    MALFORMED = "malformed"
    TOO_SLOW = "too_slow"


class DoorRefused(EngineError):
    """The handshake failed. `reason` is the same on both sides."""

    def __init__(self, message: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


class Hello(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The client's opening: the protocol versions that it speaks, its nonce, and its own name."""

    magic: str
    oldest: int
    newest: int
    nonce: bytes
    client: str = ""


class Proof(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The client holds the token."""

    mac: bytes


class Challenge(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The protocol version to be spoken, the server's nonce, and the name of this life of the server."""

    protocol: int
    nonce: bytes
    instance: str = ""


class Welcome(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The server holds the token too; its name is `replica`."""

    mac: bytes
    replica: str


class Refused(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """No, and why."""

    reason: RefusalReason
    message: str


_from_client = msgspec.msgpack.Decoder(Hello | Proof)
_from_server = msgspec.msgpack.Decoder(Challenge | Welcome | Refused)


def _mac(token: str, role: str, hello: Hello, challenge: Challenge) -> bytes:
    transcript = msgspec.msgpack.encode((role, hello, challenge))
    return hmac.digest(token.encode(), transcript, hashlib.sha256)


def _malformed(what: object) -> DoorRefused:
    return DoorRefused(f"not the handshake of a token door: {what}", RefusalReason.MALFORMED)


class ServerHandshake:
    """The server's half: feed it frames, send what it answers, until `done`; then `client` is the peer's name."""

    def __init__(
        self,
        token: str,
        replica: str,
        oldest: int = PROTOCOL_OLDEST,
        newest: int = PROTOCOL_NEWEST,
        *,
        instance: str = "",
    ) -> None:
        self._token = token
        self._replica = replica
        self._instance = instance
        self._oldest = oldest
        self._newest = newest
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None
        self.done = False

    def receive(self, body: bytes) -> bytes:
        """The frame that answers `body`. Raises DoorRefused; `refusal` then makes the frame that says so."""
        try:
            message = _from_client.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(error) from error
        if isinstance(message, Hello) and self._hello is None:
            return self._challenged(message)
        if isinstance(message, Proof) and self._hello is not None and self._challenge is not None:
            return self._welcomed(message, self._hello, self._challenge)
        raise _malformed(f"{type(message).__name__} out of turn")

    def _challenged(self, hello: Hello) -> bytes:
        if hello.magic != _MAGIC or len(hello.nonce) != _NONCE_BYTES:
            raise _malformed("wrong opening")
        protocol = min(self._newest, hello.newest)
        if protocol < max(self._oldest, hello.oldest):
            raise DoorRefused(
                f"the server speaks door protocols {self._oldest} to {self._newest}, the client {hello.oldest} to"
                f" {hello.newest}; run the same headrace on both",
                RefusalReason.PROTOCOL_MISMATCH,
            )
        self._hello = hello
        self._challenge = Challenge(protocol, secrets.token_bytes(_NONCE_BYTES), self._instance)
        return encode(self._challenge)

    @property
    def client(self) -> str:
        """The name that the peer gave itself."""
        return self._hello.client if self._hello is not None else ""

    def _welcomed(self, proof: Proof, hello: Hello, challenge: Challenge) -> bytes:
        if not hmac.compare_digest(proof.mac, _mac(self._token, "client", hello, challenge)):
            raise DoorRefused("client and server do not hold the same token", RefusalReason.WRONG_TOKEN)
        self.done = True
        return encode(Welcome(_mac(self._token, "server", hello, challenge), self._replica))


def refusal(error: DoorRefused) -> bytes:
    """The frame that tells the client about `error`."""
    return encode(Refused(error.reason, str(error)))


class ClientHandshake:
    """The client's half: send `opening`, feed it frames, send what it answers, until `replica` is known."""

    def __init__(
        self, token: str, oldest: int = PROTOCOL_OLDEST, newest: int = PROTOCOL_NEWEST, *, client: str = ""
    ) -> None:
        self._token = token
        self._hello = Hello(_MAGIC, oldest, newest, secrets.token_bytes(_NONCE_BYTES), client)
        self._challenge: Challenge | None = None
        self.replica: str | None = None

    @property
    def instance(self) -> str:
        """The name of this life of the server."""
        return self._challenge.instance if self._challenge is not None else ""

    @property
    def opening(self) -> bytes:
        """The first frame."""
        return encode(self._hello)

    def receive(self, body: bytes) -> bytes | None:
        """The frame that answers `body`; None when there is nothing more to say. Raises DoorRefused."""
        try:
            message = _from_server.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _malformed(error) from error
        match message:
            case Refused(reason, text):
                raise DoorRefused(text, reason)
            case Challenge() if self._challenge is None:
                return self._proof(message)
            case Welcome() if self._challenge is not None:
                self._accept(message, self._challenge)
                return None
        raise _malformed(f"{type(message).__name__} out of turn")

    def _proof(self, challenge: Challenge) -> bytes:
        if not self._hello.oldest <= challenge.protocol <= self._hello.newest or len(challenge.nonce) != _NONCE_BYTES:
            raise _malformed("a challenge that was not offered")
        self._challenge = challenge
        return encode(Proof(_mac(self._token, "client", self._hello, challenge)))

    def _accept(self, welcome: Welcome, challenge: Challenge) -> None:
        if not hmac.compare_digest(welcome.mac, _mac(self._token, "server", self._hello, challenge)):
            raise DoorRefused("client and server do not hold the same token", RefusalReason.WRONG_TOKEN)
        self.replica = welcome.replica
