"""Signatures: Ed25519 (RFC 8032)."""

from typing import Protocol


class Signer(Protocol):
    @property
    def public_key(self) -> bytes:
        """32 bytes."""

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""


class Verifier(Protocol):
    def verify(self, public_key: bytes, signature: bytes, message: bytes) -> bool:
        """False for anything that is not a valid signature, malformed input included."""
