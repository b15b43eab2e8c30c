"""Tables for node life, routing, replicas, deployments, delivery, replay and Merkle trees."""

import hashlib
from dataclasses import replace

import pytest

from potluck.core import (
    deployments,
    ids,
    merkle,
    nodes,
    parameters,
    replicas,
    routing,
)
from potluck.core.delivery import Inbound, Outbound
from potluck.core.deployments import Load, Unload
from potluck.core.ids import BootId, Digest, NodeId, RequestId
from potluck.core.nodes import (
    AnnounceLiveness,
    ConnectionClosed,
    HeartbeatReceived,
    LeftWillingly,
    Node,
    TimePassed,
)
from potluck.core.pricing import Price
from potluck.core.refusals import Refusal
from potluck.core.replay import Window
from potluck.core.replicas import Delta, Gap, Replica

A, B, C = NodeId("node_a"), NodeId("node_b"), NodeId("node_c")
M = Digest("m" * 64)
PRICE = Price(input_micro_per_mtok=1, output_micro_per_mtok=1, fee_basis_points=1_000)
SUSPECT, DEAD, CLOSED = (
    parameters.suspect_after_ms,
    parameters.dead_after_ms,
    parameters.dead_after_closed_ms,
)


def node(liveness: str = "alive", heard: int = 0, closed: int | None = None) -> Node:
    return Node(id=A, liveness=liveness, heard_ms=heard, closed_ms=closed)  # type: ignore[arg-type]


def said(liveness: str) -> tuple[AnnounceLiveness, ...]:
    return (AnnounceLiveness(A, liveness),)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "event", "after", "effects"),
    [
        (node(), HeartbeatReceived(9), node(heard=9), ()),
        (node("suspect"), HeartbeatReceived(9), node(heard=9), said("alive")),
        (node("dead", closed=4), HeartbeatReceived(9), node(heard=9), said("alive")),
        (node(), TimePassed(SUSPECT - 1, False), node(), ()),
        (node(), TimePassed(SUSPECT, False), node("suspect"), said("suspect")),
        (node("suspect"), TimePassed(DEAD - 1, False), node("suspect"), ()),
        (node("suspect"), TimePassed(DEAD, False), node("dead"), said("dead")),
        # Mass silence: suspected, but nobody dies.
        (node(), TimePassed(DEAD, True), node("suspect"), said("suspect")),
        (node("dead"), TimePassed(DEAD * 9, False), node("dead"), ()),
        (node(), ConnectionClosed(5), node("suspect", closed=5), said("suspect")),
        (node("dead"), ConnectionClosed(5), node("dead"), ()),
        (node("suspect", closed=5), TimePassed(5 + CLOSED - 1, False),
         node("suspect", closed=5), ()),
        (node("suspect", closed=5), TimePassed(5 + CLOSED, False),
         node("dead", closed=5), said("dead")),
        # A closed connection is no silence: it is not frozen.
        (node("suspect", closed=5), TimePassed(5 + CLOSED, True),
         node("dead", closed=5), said("dead")),
        (node(), LeftWillingly(5), node("dead", closed=5), said("dead")),
    ],
)  # fmt: skip
def test_the_life_of_a_node(before: Node, event: nodes.Event, after: Node, effects: object) -> None:
    assert nodes.step(before, event) == (after, effects)


@pytest.mark.parametrize(
    ("silent", "speaking", "closed", "expected"),
    [(3, 3, 0, True), (3, 4, 0, False), (2, 0, 0, False), (5, 0, 0, True), (0, 0, 5, False),
     (0, 0, 0, False)],
)  # fmt: skip
def test_mass_silence(silent: int, speaking: int, closed: int, expected: bool) -> None:
    now = SUSPECT
    everyone = (
        [node() for _ in range(silent)]
        + [node(heard=now) for _ in range(speaking)]
        + [node("suspect", closed=1) for _ in range(closed)]
        + [node("dead") for _ in range(50)]
    )
    assert nodes.mass_silence(everyone, now) is expected


def replica(of: NodeId = A, **changed: object) -> Replica:
    usual = Replica(node=of, model="tiny", digest=M, context_tokens=2_048, slots=4, price=PRICE)
    return replace(usual, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("table", "in_flight", "tried", "expected"),
    [
        ([replica(B), replica(A)], {}, (), A),
        ([replica(A), replica(B)], {A: 1}, (), B),
        ([replica(A), replica(B)], {A: 1, B: 1}, (), A),
        # Load is counted for each slot.
        ([replica(A, slots=8), replica(B, slots=2)], {A: 3, B: 1}, (), A),
        ([replica(A), replica(B)], {}, (A,), B),
        ([replica(A)], {}, (A,), Refusal.NO_CAPACITY),
        ([replica(A, ready=False)], {}, (), Refusal.NO_CAPACITY),
        ([replica(A, liveness="suspect"), replica(B)], {B: 9}, (), B),
        ([replica(A, liveness="dead")], {}, (), Refusal.NO_CAPACITY),
        ([replica(A, model="other")], {}, (), Refusal.MODEL_NOT_FOUND),
        ([], {}, (), Refusal.MODEL_NOT_FOUND),
    ],
)
def test_routing(table: list, in_flight: dict, tried: tuple, expected: object) -> None:
    chosen = routing.route(table, "tiny", in_flight, tried=tried)
    assert (chosen.node if isinstance(chosen, Replica) else chosen) == expected


def test_the_replica_table_follows_by_offset() -> None:
    table = replicas.whole("e1", 5, (replica(A),))
    next_one = Delta(epoch="e1", follows=5, offset=6, changed=(replica(B),), removed=((A, M),))
    after = replicas.apply(table, next_one)
    assert isinstance(after, replicas.Table)
    assert list(after.replicas.values()) == [replica(B)]
    assert replicas.apply(after, next_one) is after
    assert replicas.apply(table, replace(next_one, follows=6, offset=7)) == Gap()
    assert replicas.apply(table, replace(next_one, epoch="e2")) == Gap()
    quiet = Delta(epoch="e1", follows=5, offset=5)
    assert replicas.apply(table, quiet) is table


def test_the_difference_of_two_tables() -> None:
    before = {one.key: one for one in (replica(A), replica(B))}
    after = {one.key: one for one in (replica(B, ready=False), replica(C))}
    assert replicas.difference(before, after) == (
        (replica(B, ready=False), replica(C)),
        ((A, M),),
    )
    assert replicas.difference(before, before) == ((), ())


X, Y = Digest("x"), Digest("y")


@pytest.mark.parametrize(
    ("wanted", "actual", "effects"),
    [
        ([], {}, ()),
        ([X], {}, (Load(X),)),
        ([X], {X: "ready"}, ()),
        ([X], {X: "fetching"}, ()),
        ([X], {X: "failed"}, ()),
        ([], {X: "ready"}, (Unload(X),)),
        ([], {X: "stopping"}, ()),
        ([Y], {X: "loading"}, (Unload(X), Load(Y))),
    ],
)
def test_reconciling(wanted: list, actual: dict, effects: object) -> None:
    assert deployments.reconcile(wanted, actual) == effects


def test_chunks_are_taken_in_order_and_once() -> None:
    inbound = Inbound()
    assert [inbound.take(seq) for seq in (0, 1, 1, 0, 3, 2, 3)] == [
        True, True, False, False, None, True, True,
    ]  # fmt: skip


def test_a_window_keeps_what_is_not_acknowledged() -> None:
    outbound: Outbound[str] = Outbound()
    half = parameters.window_bytes // 2
    assert outbound.push("a", size_bytes=half, tokens=2) == 0
    assert not outbound.full
    assert outbound.push("b", size_bytes=half, tokens=3) == 1
    assert outbound.full
    assert outbound.again(0) == ["a", "b"]
    assert outbound.acknowledge(0)
    assert (outbound.full, outbound.acknowledged_tokens) == (False, 2)
    assert outbound.again(0) == ["b"]
    assert outbound.acknowledge(-1)
    assert outbound.acknowledged_seq == 0
    assert not outbound.acknowledge(2)
    assert outbound.acknowledge(1)
    assert (outbound.acknowledged_tokens, outbound.pending_bytes) == (5, 0)


B1, B2 = BootId("01A"), BootId("01B")


@pytest.mark.parametrize(
    ("messages", "admitted"),
    [
        ([(B1, 1), (B1, 2), (B1, 2), (B1, 1)], [True, True, False, False]),
        ([(B1, 5), (B1, 3), (B1, 3), (B1, 4)], [True, True, False, True]),
        ([(B1, 5), (B2, 1), (B1, 6), (B2, 1)], [True, True, False, False]),
        ([(B1, 0), (B1, -1)], [False, False]),
        ([(B1, 2_000), (B1, 2_000 - parameters.replay_window), (B1, 977)], [True, False, True]),
        ([(B1, 1), (B1, 10**9), (B1, 10**9 - 1), (B1, 1)], [True, True, True, False]),
    ],
)
def test_replay(messages: list, admitted: list) -> None:
    window = Window()
    assert [window.admit(boot, sequence) for boot, sequence in messages] == admitted


def test_merkle_roots_are_those_of_rfc_9162() -> None:
    """Test vectors of the certificate-transparency reference implementation."""
    leaves = [
        bytes.fromhex(text)
        for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657",
                     "606162636465666768696a6b6c6d6e6f")
    ]  # fmt: skip
    assert merkle.root([]).hex() == hashlib.sha256(b"").hexdigest()
    assert (
        merkle.root(leaves[:1]).hex()
        == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"
    )
    assert (
        merkle.root(leaves).hex()
        == "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    )


@pytest.mark.parametrize("size", range(1, 18))
def test_every_leaf_is_proved_and_no_other(size: int) -> None:
    leaves = [b"leaf %d" % index for index in range(size)]
    top = merkle.root(leaves)
    for index, path in enumerate(merkle.paths(leaves)):
        assert merkle.included(leaves[index], index, size, path, top)
        assert not merkle.included(b"other", index, size, path, top)
        assert not merkle.included(leaves[index], index, size, [*path, top], top)
        assert not merkle.included(leaves[index], size, size, path, top)
        if path:
            assert not merkle.included(leaves[index], index, size, path[:-1], top)


def test_names_follow_from_keys() -> None:
    name = ids.node_id(b"k" * 32)
    assert name.startswith("node_")
    assert len(name) == 5 + 52
    assert name == name.lower()
    assert ids.gateway_id(b"k" * 32).removeprefix("gw_") == name.removeprefix("node_")
    assert ids.receipt_id(RequestId("req_01X"), 2) == "rcp_01X_2"
