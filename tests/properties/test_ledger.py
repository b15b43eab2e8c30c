"""Money is neither made nor lost, whatever happens in whatever order, however often it is said."""

import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.adapters.sql import InlineStore
from potluck.coordinator import audit, bootstrap, countersigning, expiry, holds, settlement
from potluck.coordinator.countersigning import Signed
from potluck.coordinator.settlement import Batch, Proven
from potluck.core import grants, ids, ledger, parameters, pricing, receipts
from potluck.core.ids import AccountId, BootId, GatewayId, HoldId, KeyId, NodeId, RequestId
from potluck.core.ledger import Balance
from potluck.core.pricing import Cost, Price
from potluck.core.refusals import Refusal
from potluck.messages import envelope
from potluck.messages.money import Delivery, HoldReply, HoldRequest, Receipt
from potluck.messages.serving import WirePrice
from potluck.ports.store import NodeRow
from potluck.simulator.ids import SeededIds
from tests.cluster.coordinator_under_test import DIGEST, MANIFEST, PRICE

amounts = st.integers(1, 10**12)
balances = st.builds(
    lambda pending, more: Balance(posted_micro=pending + more, pending_micro=pending),
    st.integers(0, 10**12),
    st.integers(0, 10**12),
)
prices = st.builds(
    lambda i, o, f: Price(input_micro_per_mtok=i, output_micro_per_mtok=o, fee_basis_points=f),
    st.integers(0, 10**8),
    st.integers(0, 10**8),
    st.integers(0, 9_999),
)


@given(balances, balances, amounts)
def test_a_posting_conserves_and_never_overdraws(
    payer: Balance, payee: Balance, amount_micro: int
) -> None:
    posted = ledger.post(payer, payee, amount_micro)
    if isinstance(posted, Refusal):
        assert payer.available_micro < amount_micro
        return
    before = payer.posted_micro + payee.posted_micro
    assert sum(one.posted_micro for one in posted) == before
    assert posted[0].available_micro >= 0
    assert [one.pending_micro for one in posted] == [payer.pending_micro, payee.pending_micro]


@given(balances, balances, amounts, st.data())
def test_two_phases_end_where_one_would(
    payer: Balance, payee: Balance, amount_micro: int, data: st.DataObject
) -> None:
    held = ledger.set_aside(payer, amount_micro)
    if isinstance(held, Refusal):
        assert payer.available_micro < amount_micro
        return
    used_micro = data.draw(st.integers(0, amount_micro))
    paid, gained = ledger.post_pending(held, payee, used_micro)
    left = ledger.release(paid, amount_micro - used_micro)
    assert left.pending_micro == payer.pending_micro
    assert left.posted_micro == payer.posted_micro - used_micro
    assert gained.posted_micro == payee.posted_micro + used_micro


@given(balances, balances, amounts, st.data())
def test_what_was_posted_from_a_hold_and_returned_was_never_posted(
    payer: Balance, payee: Balance, amount_micro: int, data: st.DataObject
) -> None:
    held = ledger.set_aside(payer, amount_micro)
    if isinstance(held, Refusal):
        return
    used_micro = data.draw(st.integers(0, amount_micro))
    back_micro = data.draw(st.integers(0, used_micro))
    returned = ledger.return_pending(*ledger.post_pending(held, payee, used_micro), back_micro)
    assert returned == ledger.post_pending(held, payee, used_micro - back_micro)


@given(prices, st.integers(0, 10**6), st.integers(1, 10**6), st.integers(0, 10**7))
def test_a_capped_bill_is_within_its_cap_and_neither_part_grows(
    price: Price, prompt: int, completion: int, max_micro: int
) -> None:
    due = receipts.due_for(price, prompt, completion, bill_prompt=True)
    capped = pricing.capped(due, max_micro, price)
    assert capped.total_micro == min(due.total_micro, max_micro)
    assert 0 <= capped.provider_micro <= due.provider_micro
    assert 0 <= capped.fee_micro <= due.fee_micro
    back = receipts.correction(due, max_micro, price)
    assert due.total_micro - back.total_micro == capped.total_micro


@given(prices, st.integers(0, 10**6), st.integers(0, 10**5))
def test_no_bill_exceeds_what_was_reserved_for_it(
    price: Price, prompt_bytes: int, completion: int
) -> None:
    bound_micro = pricing.cost_max_micro(
        price, prompt_bytes=prompt_bytes, completion_tokens_max=completion
    )
    prompt = prompt_bytes + parameters.template_tokens_margin
    due = receipts.due_for(price, prompt, completion, bill_prompt=True)
    assert due.total_micro <= bound_micro


GATEWAY, NODES = GatewayId("gw_1"), (NodeId("node_a"), NodeId("node_b"))
OWNER, PROVIDER = AccountId("acc_owner"), AccountId("acc_provider")
WIRE = WirePrice(400_000, 2_000_000, 1_000)


class Books(RuleBasedStateMachine):
    """Holds, grants, receipts and countersignatures in any order, through the real SQL."""

    def __init__(self) -> None:
        super().__init__()
        self.store = InlineStore()
        self.now_ms = 1_000
        self.boot = BootId("B1")
        self.held: list[HoldReply] = []
        self.said: list[tuple[NodeId, Receipt]] = []
        self.asked: list[HoldRequest] = []
        self.count = 0

    @initialize(credit_micro=st.integers(1, 3_000_000))
    def founded(self, credit_micro: int) -> None:
        founding = bootstrap.Founding(
            owner=OWNER, provider=PROVIDER, key=KeyId("key_1"), key_hash="0" * 64,
            manifest=MANIFEST, slots=1, price=PRICE, starting_credit_micro=credit_micro,
        )  # fmt: skip
        ids_ = SeededIds(random.Random(1))
        for _ in range(2):
            self.store.run(lambda tx: bootstrap.ensure(tx, founding, self.now_ms, ids_))
        # One node works for the one who pays, one for another.
        for node, account in zip(NODES, (PROVIDER, OWNER), strict=True):
            row = NodeRow(
                id=node, name=node, account=account, public_key=b"k", version="1", tier="full",
                tier_reason="", inventory=b"", report=b"", liveness="alive", heard_ms=1,
                closed_ms=None, joined_ms=1,
            )  # fmt: skip
            self.store.run(lambda tx, row=row: tx.nodes.put(row))  # type: ignore[misc]

    @rule(want_micro=st.integers(1, 1_000_000), need_micro=st.integers(0, 1_000))
    def open(self, want_micro: int, need_micro: int) -> None:
        self.count += 1
        request = HoldRequest(
            hold=HoldId(f"hold_{self.count}"), account=OWNER, want_micro=want_micro,
            need_micro=min(need_micro, want_micro),
        )  # fmt: skip
        self.asked.append(request)
        reply = self._ask(request)
        if not reply.refusal:
            assert request.need_micro <= reply.amount_micro <= want_micro
            self.held.append(reply)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def open_again(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.asked))
        before = self._balance()
        reply = self._ask(request)
        known = [one for one in self.held if one.hold == request.hold]
        if known:
            assert self._balance() == before
            assert reply.refusal or reply.amount_micro == known[0].amount_micro
        elif not reply.refusal:
            self.held.append(reply)

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(), node=st.sampled_from(NODES), attempt=st.integers(1, 3),
        prompt=st.integers(0, 5_000), completion=st.integers(0, 200),
        max_micro=st.integers(0, 2_000), request=st.integers(1, 5),
    )  # fmt: skip
    def work(
        self, data: st.DataObject, node: NodeId, attempt: int, prompt: int, completion: int,
        max_micro: int, request: int,
    ) -> None:  # fmt: skip
        held = data.draw(st.sampled_from(self.held))
        # A request's grant is the same for all its attempts.
        max_micro = max_micro if request > 3 and attempt == 1 else request * 100
        receipt = self._receipt(
            held, node, f"req_{request}", attempt, prompt, completion, max_micro
        )
        self.said.append((node, receipt))
        self._settle(node, receipt)

    @precondition(lambda self: self.said)
    @rule(data=st.data(), changed=st.booleans())
    def say_again(self, data: st.DataObject, changed: bool) -> None:
        node, receipt = data.draw(st.sampled_from(self.said))
        before = self._balance()
        known = self.store.run(lambda tx: tx.receipts.get(receipt.receipt))
        if changed:
            receipt.queue_ms += 1
        self._settle(node, receipt)
        if changed:
            receipt.queue_ms -= 1
        if known is not None:
            assert self._balance() == before

    @precondition(lambda self: self.said)
    @rule(data=st.data(), total_micro=st.integers(0, 500), tokens=st.integers(0, 200))
    def countersign(self, data: st.DataObject, total_micro: int, tokens: int) -> None:
        _, receipt = data.draw(st.sampled_from(self.said))
        delivery = Delivery(receipt.request, receipt.attempt, tokens, total_micro)
        signed = Signed(
            gateway=GATEWAY, public_key=b"k", root=b"r", signature=b"s",
            deliveries=((delivery, b"b", b"p"),),
        )  # fmt: skip
        self.store.run(lambda tx: countersigning.attach(tx, signed, "home", "co", self.now_ms))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.store.run(lambda tx: holds.release(tx, held.hold, GATEWAY, self.boot, self.now_ms))

    @rule(passed_ms=st.integers(0, 2_000_000))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        self.store.run(lambda tx: expiry.expire(tx, self.now_ms))

    @invariant()
    def books_are_right(self) -> None:
        assert self.store.run(audit.check) == []

    def teardown(self) -> None:
        self.store.connection.close()

    def _ask(self, request: HoldRequest) -> HoldReply:
        return self.store.run(
            lambda tx: holds.open(tx, request, GATEWAY, self.boot, b"k" * 32, self.now_ms)
        )

    def _balance(self) -> list[Any]:
        return list(self.store.run(lambda tx: tx.balances.list()))

    def _settle(self, node: NodeId, receipt: Receipt) -> None:
        proven = Proven(receipt=receipt, body=envelope.encode(receipt), path=b"")
        batch = Batch(node=node, public_key=b"k", root=b"r", signature=b"s", receipts=(proven,))
        self.store.run(lambda tx: settlement.settle(tx, batch, self.now_ms))

    def _receipt(
        self, held: HoldReply, node: NodeId, request: str, attempt: int, prompt: int,
        completion: int, max_micro: int,
    ) -> Receipt:  # fmt: skip
        due = receipts.due_for(PRICE, prompt, completion, bill_prompt=True)
        cost: Cost = pricing.capped(due, max_micro, PRICE)
        seal = grants.seal(
            held.grant_key, request=RequestId(request), attempt=attempt, node=node,
            hold=held.hold, boot=self.boot, max_micro=max_micro, bill_prompt=True, price=PRICE,
        )  # fmt: skip
        return Receipt(
            receipt=ids.receipt_id(RequestId(request), attempt), request=RequestId(request),
            attempt=attempt, hold=held.hold, boot=self.boot, gateway=GATEWAY, node=node,
            max_micro=max_micro, seal=seal, bill_prompt=True, price=WIRE, model=DIGEST,
            engine=DIGEST, tier="full", prompt_tokens=prompt, completion_tokens=completion,
            provider_micro=cost.provider_micro, fee_micro=cost.fee_micro, queue_ms=0,
            prefill_ms=0, decode_ms=0, input_digest=DIGEST, output_digest=DIGEST, outcome="stop",
        )  # fmt: skip


TestBooks = Books.TestCase
TestBooks.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
