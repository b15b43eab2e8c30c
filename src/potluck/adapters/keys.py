"""Ed25519 by the `cryptography` library; private keys on disk readable by their owner alone."""

import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SEED_BYTES = 32


class Ed25519Signer:
    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


class Ed25519Verifier:
    def verify(self, public_key: bytes, signature: bytes, message: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True


def load_or_create(path: Path) -> Ed25519Signer:
    """The key in `path` (32 raw bytes, mode 0600), made on first use. Raises `OSError`."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, os.urandom(SEED_BYTES))
    return Ed25519Signer(path.read_bytes())


def write_private(path: Path, content: bytes) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
    partial = path.with_name(path.name + ".part")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
