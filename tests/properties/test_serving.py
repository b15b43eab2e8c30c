"""Laws of the rules that serving stands on, over arbitrary inputs and orders."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from potluck.core import delivery, grants, merkle, parameters, pricing, receipts, replicas
from potluck.core.grants import Purse
from potluck.core.ids import BootId, Digest, HoldId, NodeId
from potluck.core.pricing import Price
from potluck.core.refusals import Refusal
from potluck.core.replay import Window
from potluck.core.replicas import Delta, Gap, Replica, Table

prices = st.builds(
    Price,
    input_micro_per_mtok=st.integers(0, 10**9),
    output_micro_per_mtok=st.integers(0, 10**9),
    fee_basis_points=st.integers(0, 9_999),
)
tokens = st.integers(0, 10**6)


@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(0, 10**5), st.integers(0, 100),
                                                 st.integers(0, 120))))  # fmt: skip
def test_a_purse_never_loses_or_makes_money(
    amount_micro: int, steps: list[tuple[int, int, int]]
) -> None:
    purse = grants.opened(HoldId("hold"), amount_micro)
    for max_micro, used_percent, settled_percent in steps:
        drawn = grants.draw(purse, max_micro)
        if drawn is Refusal.INSUFFICIENT_FUNDS:
            assert purse.free_micro < max_micro
            continue
        assert isinstance(drawn, Purse)
        used_micro = max_micro * used_percent // 100
        closed = grants.close(drawn, max_micro=max_micro, used_micro=used_micro)
        purse = grants.settled(
            closed, expected_micro=used_micro, settled_micro=used_micro * settled_percent // 100
        )
        assert purse.idle
    assert purse.free_micro + purse.settled_micro == amount_micro


@given(prices, st.integers(0, 10**6), tokens, st.data())
def test_what_it_costs_is_never_above_what_was_granted(
    price: Price, prompt_bytes: int, completion_max: int, data: st.DataObject
) -> None:
    max_micro = pricing.cost_max_micro(
        price, prompt_bytes=prompt_bytes, completion_tokens_max=completion_max
    )
    prompt = data.draw(st.integers(0, prompt_bytes + parameters.template_tokens_margin))
    completion = data.draw(st.integers(0, completion_max))
    due = receipts.due_for(price, prompt, completion, bill_prompt=True)
    assert due.total_micro <= max_micro
    assert pricing.capped(due, max_micro, price) == due


@given(prices, tokens, tokens, st.integers(0, 10**9))
def test_capping_lowers_both_parts_and_keeps_below(
    price: Price, prompt: int, completion: int, max_micro: int
) -> None:
    due = pricing.cost(price, prompt_tokens=prompt, completion_tokens=completion)
    capped = pricing.capped(due, max_micro, price)
    assert 0 <= capped.fee_micro <= due.fee_micro
    assert 0 <= capped.provider_micro <= due.provider_micro
    assert capped.total_micro <= max(max_micro, 0) or capped == due


@given(st.lists(st.integers(0, 30)))
def test_chunks_arrive_in_order_and_once_whatever_comes(arrivals: list[int]) -> None:
    inbound = delivery.Inbound()
    taken = [seq for seq in arrivals if inbound.take(seq)]
    assert taken == list(range(len(taken)))
    assert inbound.next_seq == len(taken)


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 40)), max_size=80))
def test_a_sender_keeps_exactly_what_is_not_acknowledged(steps: list[tuple[bool, int]]) -> None:
    outbound: delivery.Outbound[int] = delivery.Outbound()
    sent, acknowledged = 0, -1
    for push, seq in steps:
        if push:
            assert outbound.push(sent, size_bytes=10, tokens=2) == sent
            sent += 1
        else:
            assert outbound.acknowledge(seq) == (seq < sent)
            acknowledged = max(acknowledged, seq) if seq < sent else acknowledged
        assert outbound.again(0) == list(range(acknowledged + 1, sent))
        assert outbound.pending_bytes == 10 * (sent - acknowledged - 1)
        assert outbound.acknowledged_tokens == 2 * (acknowledged + 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3_000)), max_size=200))
def test_a_window_admits_each_message_once_and_nothing_of_an_earlier_boot(
    messages: list[tuple[int, int]],
) -> None:
    window, seen, newest = Window(), set(), -1
    for boot, sequence in messages:
        admitted = window.admit(BootId(f"{boot:026d}"), sequence)
        if admitted:
            assert (boot, sequence) not in seen
            assert boot >= newest
        elif boot == newest and (boot, sequence) not in seen:
            assert window.highest - sequence >= parameters.replay_window
        newest = max(newest, boot)
        seen.add((boot, sequence))


tables = st.dictionaries(
    st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), st.integers(1, 4), max_size=6
)


def _replicas(spec: dict[tuple[str, str], int]) -> dict[tuple[NodeId, Digest], Replica]:
    made = [
        Replica(
            node=NodeId(node), model="m", digest=Digest(digest), context_tokens=8, slots=slots,
            price=Price(input_micro_per_mtok=1, output_micro_per_mtok=1, fee_basis_points=0),
        )
        for (node, digest), slots in spec.items()
    ]  # fmt: skip
    return {replica.key: replica for replica in made}


@given(st.lists(tables, min_size=1, max_size=6), st.data())
def test_following_deltas_ends_where_the_whole_does(
    versions: list[dict[tuple[str, str], int]], data: st.DataObject
) -> None:
    states = [_replicas(spec) for spec in versions]
    table = Table("e", 0, states[0])
    for offset, (before, after) in enumerate(zip(states, states[1:], strict=False), 1):
        changed, removed = replicas.difference(before, after)
        delta = Delta(
            epoch="e", follows=offset - 1, offset=offset, changed=changed, removed=removed
        )
        lost = data.draw(st.booleans())
        result = table if lost else replicas.apply(table, delta)
        if isinstance(result, Gap):
            result = replicas.whole("e", offset, tuple(after.values()))
        table = result
        assert replicas.apply(table, delta) == table or table.offset < offset
        if table.offset == offset:
            assert table.replicas == after
    stranger = Delta(epoch="other", follows=table.offset, offset=table.offset + 1)
    assert isinstance(replicas.apply(table, stranger), Gap)


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=40), st.data())
def test_each_leaf_proves_itself_and_nothing_else_does(
    leaves: list[bytes], data: st.DataObject
) -> None:
    top = merkle.root(leaves)
    paths = merkle.paths(leaves)
    index = data.draw(st.integers(0, len(leaves) - 1))
    size = len(leaves)
    assert merkle.included(leaves[index], index, size, paths[index], top)
    forged = leaves[index] + b"x"
    assert not merkle.included(forged, index, size, paths[index], top)
    assert not merkle.included(leaves[index], index, size, paths[index], hashlib.sha256().digest())
    other = data.draw(st.integers(0, size - 1))
    if leaves[other] != leaves[index]:
        assert not merkle.included(leaves[index], other, size, paths[other], top)
