"""The wire's bytes, one file a message, with the values of docs/protocol/serving.md.

A difference here breaks every node and gateway in the field. New files are written with
`POTLUCK_GOLDEN=write`; an existing file is never changed by that.
"""

import os
from pathlib import Path

import msgspec
import pytest

from potluck.core.ids import (
    AccountId,
    BootId,
    Digest,
    GatewayId,
    HoldId,
    KeyId,
    NodeId,
    ReceiptId,
    RequestId,
)
from potluck.messages import envelope, membership, money, queries, serving

FOLDER = Path(__file__).parent / "messages"
BOOT = BootId("01JF0000000000000000000001")
HOLD, REQUEST = HoldId("hold_1"), RequestId("req_1")
DIGEST = Digest("ab" * 32)
PRICE = serving.WirePrice(400_000, 2_000_000, 1_000)
GRANT = serving.Grant(HOLD, BOOT, 212, b"0123456789abcdef")
SAMPLING = serving.Sampling(64, 0.5, 0.9, ("END",), 7, 2)
INFER = serving.Infer(
    REQUEST, 1, GRANT, PRICE, DIGEST, b'[{"role":"user","content":"hi"}]', SAMPLING, True, True,
    10_000, 600_000,
)  # fmt: skip
INVENTORY = membership.Inventory(
    "host", "linux", "x86_64", "cpu", 2, 1 << 34, 1 << 36,
    [membership.Accelerator("gpu", "a gpu", 1 << 33)],
)  # fmt: skip
MANIFEST = membership.Manifest(
    "tiny", DIGEST, 3_300_000, "gguf", (membership.Source("wheel", "tiny==1.0/tiny.gguf"),), 2_048,
    362_000_000, "llama.cpp/q8", "Apache-2.0",
)  # fmt: skip
RECEIPT = money.Receipt(
    ReceiptId("rcp_1_1"), REQUEST, 1, HOLD, BOOT, GatewayId("gw_1"), NodeId("node_A"), 212,
    b"0123456789abcdef", True, PRICE, DIGEST, Digest("cd" * 32), "full", 40, 8, 32, 3, 1, 2, 3,
    Digest("01" * 32), Digest("02" * 32), "stop",
)  # fmt: skip
REPLICA = membership.WireReplica(
    NodeId("node_A"), "A", "tiny", DIGEST, 2_048, 4, PRICE, "alive", True
)
BODIES: dict[str, msgspec.Struct] = {
    "serve": serving.Serve(
        [INFER, serving.Ack(REQUEST, 1, 3), serving.Resend(REQUEST, 1, 2),
         serving.Cancel(REQUEST, 1, -1)]
    ),
    "frames": serving.Frames(
        [serving.Accepted(REQUEST, 1, 0), serving.Chunk(REQUEST, 1, 0, (5, 6), b"Once"),
         serving.Chunk(REQUEST, 1, 1, (7,), b" upon", b'{"token":" upon"}'),
         serving.KeepAlive(REQUEST, 1), serving.Done(REQUEST, 1, 3, "stop", 40, 8, 1, 2, 3),
         serving.Failed(REQUEST, 1, "node_busy", "full")]
    ),
    "greet": membership.Greet(b"k" * 32, "0.1.0"),
    "replicas": membership.Replicas("e1", 0, 1, True, [REPLICA], [(NodeId("node_B"), DIGEST)]),
    "regreet": membership.Regreet(),
    "notice": membership.Notice("key", "ab" * 32),
    "hello": membership.Hello(
        b"k" * 32, "A", AccountId("acc_bob"), "0.1.0", "full", "", INVENTORY
    ),
    "welcome": membership.Welcome(),
    "heartbeat": membership.Heartbeat(
        [membership.ReplicaReport(DIGEST, "ready", 4, 1, 2_048)], 1, 12.5, 1 << 33, 1 << 36, 0
    ),
    "bye": membership.Bye("stopped"),
    "rehello": membership.Rehello(),
    "deploy": membership.Deploy(1, [membership.Deployment(MANIFEST, 4)]),
    "hold": money.HoldRequest(HOLD, AccountId("acc_alice"), 1_000_000, 212),
    "hold_reply": money.HoldReply(HOLD, 1_000_000, 600_000, b"g" * 32),
    "renew": money.HoldRenewal(HOLD),
    "release": money.HoldRelease(HOLD),
    "receipt": RECEIPT,
    "receipts": money.ReceiptBatch(b"r" * 32, b"s" * 64, [envelope.encode(RECEIPT)]),
    "receipts_ack": money.ReceiptsAck([ReceiptId("rcp_1_1")], [(ReceiptId("rcp_2_1"), "forged")]),
    "settled": money.Settled(HOLD, [money.Settlement(REQUEST, 1, 35)]),
    "delivery": money.Delivery(REQUEST, 1, 8, 35),
    "countersign": money.Countersignature(
        b"r" * 32, b"s" * 64, [envelope.encode(money.Delivery(REQUEST, 1, 8, 35))]
    ),
    "query": queries.Query("receipt", {"receipt": "rcp_1_1"}, 7),
    "command": queries.Command("cmd_1", "create_key", {"account": "acc_alice"}),
    "answer": queries.Answer("", 7, b'{"id":"rcp_1_1"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BODIES))
def test_bytes_are_as_released(name: str) -> None:
    path = FOLDER / f"{name}.hex"
    body = envelope.encode(BODIES[name])
    if os.environ.get("POTLUCK_GOLDEN") == "write" and not path.exists():
        path.write_text(body.hex() + "\n")
    golden = bytes.fromhex(path.read_text())
    assert body.hex() == golden.hex()
    assert msgspec.msgpack.decode(golden, type=type(BODIES[name])) == BODIES[name]


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.hex")} == {*BODIES, "sealed"}


def test_the_header_is_as_released() -> None:
    path = FOLDER / "sealed.hex"
    payload = envelope.Stamp(BOOT).seal(envelope.encode(BODIES["renew"]))
    if os.environ.get("POTLUCK_GOLDEN") == "write" and not path.exists():
        path.write_text(payload.hex() + "\n")
    assert payload.hex() == path.read_text().strip()
    boot, sequence, body = envelope.split(payload)
    assert (boot, sequence) == (BOOT, 1)
    assert bytes(body) == envelope.encode(BODIES["renew"])


def test_key_record_is_json() -> None:
    record = queries.KeyRecord(KeyId("key_1"), AccountId("acc_alice"), None, None, False)
    text = b'{"id":"key_1","account":"acc_alice","expires_ms":null,"lives_ms":null,"admin":false}'
    assert msgspec.json.encode(record) == text


def test_a_newer_peers_further_fields_are_ignored() -> None:
    longer = msgspec.msgpack.encode([*msgspec.to_builtins(BODIES["renew"]), "new", 7])
    assert money.hold_renewal_decoder.decode(longer) == BODIES["renew"]
