"""One signature for many receipts: a Merkle tree as in RFC 9162, section 2.1.

Leaves and nodes are hashed under different prefixes, so that neither can pass for the other.
"""

import hashlib
from collections.abc import Sequence

EMPTY_ROOT = hashlib.sha256(b"").digest()


def leaf_hash(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + leaf).digest()


def _node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def root(leaves: Sequence[bytes]) -> bytes:
    """SHA-256 root over the leaves in their order."""
    return _root([leaf_hash(leaf) for leaf in leaves])


def paths(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """For each leaf its audit path, from the leaf upwards."""
    return _paths([leaf_hash(leaf) for leaf in leaves])[1] if leaves else []


def proofs(leaves: Sequence[bytes]) -> tuple[bytes, list[list[bytes]]]:
    """`root` and `paths` in one go."""
    return _paths([leaf_hash(leaf) for leaf in leaves]) if leaves else (EMPTY_ROOT, [])


def included(leaf: bytes, index: int, size: int, path: Sequence[bytes], top: bytes) -> bool:
    """Whether `leaf` is number `index` of `size` under the root `top` (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    position, last = index, size - 1
    digest = leaf_hash(leaf)
    for sibling in path:
        if last == 0:
            return False
        if position % 2 == 1 or position == last:
            digest = _node_hash(sibling, digest)
            while position % 2 == 0 and position != 0:
                position, last = position >> 1, last >> 1
        else:
            digest = _node_hash(digest, sibling)
        position, last = position >> 1, last >> 1
    return last == 0 and digest == top


def _root(hashes: Sequence[bytes]) -> bytes:
    if not hashes:
        return EMPTY_ROOT
    if len(hashes) == 1:
        return hashes[0]
    split = _split(len(hashes))
    return _node_hash(_root(hashes[:split]), _root(hashes[split:]))


def _paths(hashes: Sequence[bytes]) -> tuple[bytes, list[list[bytes]]]:
    if len(hashes) == 1:
        return hashes[0], [[]]
    split = _split(len(hashes))
    left, left_paths = _paths(hashes[:split])
    right, right_paths = _paths(hashes[split:])
    lengthened = [[*path, right] for path in left_paths]
    lengthened += [[*path, left] for path in right_paths]
    return _node_hash(left, right), lengthened


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1
