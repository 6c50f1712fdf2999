"""Keys of a group over the network, made from the secret that its hosts share, and the check of who connects.

ZeroMQ's CURVE (https://rfc.zeromq.org/spec/26/) encrypts and authenticates with a pair of keys on each side. Both pairs come from the secret,
so whoever has the secret has all four, and nobody else can connect, listen or take the leader's place.
"""

import hashlib
import hmac
import threading
from dataclasses import dataclass

import zmq
from zmq.utils import z85

MIN_SECRET_BYTES = 16
_ZAP = "inproc://zeromq.zap.01"
# scrypt (RFC 7914) makes guessing slow for whoever has recorded a connection. 16 MiB, about 50 ms.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 2**14, 8, 1


@dataclass(frozen=True, slots=True)
class KeyPair:
    """public, secret: as ZeroMQ writes keys, 40 characters of Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Of the leader, and of all who connect to it."""

    leader: KeyPair
    others: KeyPair


def group_keys(secret: bytes) -> GroupKeys:
    """The keys of a group whose processes share `secret`, at least MIN_SECRET_BYTES."""
    assert len(secret) >= MIN_SECRET_BYTES, len(secret)
    derived = hashlib.scrypt(
        secret, salt=b"headrace ranks 1", n=_SCRYPT_N, r=_SCRYPT_R, p=_SCRYPT_P, maxmem=64 << 20, dklen=64
    )
    return GroupKeys(_pair(derived[:32]), _pair(derived[32:]))


def _pair(raw: bytes) -> KeyPair:
    secret: bytes = z85.encode(raw)
    return KeyPair(zmq.curve_public(secret), secret)


def admit_only(context: "zmq.Context[zmq.Socket[bytes]]", public: bytes) -> None:
    """Let only the holder of this key connect to the sockets of a context, until the context ends (https://rfc.zeromq.org/spec/27/).

    Without it, CURVE lets in whoever knows the leader's public key.
    """
    handler = context.socket(zmq.REP)
    handler.bind(_ZAP)
    thread = threading.Thread(target=_answer, args=(handler, z85.decode(public)), name="rank keys", daemon=True)
    thread.start()


def _answer(handler: "zmq.Socket[bytes]", public: bytes) -> None:
    try:
        while True:
            version, request, _, _, _, mechanism, *credentials = handler.recv_multipart()
            is_known = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), public)
            status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
            handler.send_multipart([version, request, *status, b"", b""])
    except zmq.ContextTerminated:
        handler.close(linger=0)
