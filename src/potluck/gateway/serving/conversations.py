"""All requests under way, and what the wire, the clock and the client do to them.

Ends are remembered for a while, so that a node that repeats itself hears the same closing word.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable

from potluck.core import grants, parameters, pricing, receipts, routing
from potluck.core.ids import NodeId, RequestId
from potluck.core.pricing import Cost, Price
from potluck.core.refusals import Refusal
from potluck.core.replicas import Replica
from potluck.gateway.serving.countersign import Countersigner
from potluck.gateway.serving.limits import Limits
from potluck.gateway.serving.links import Links
from potluck.gateway.serving.purses import Held
from potluck.gateway.serving.requests import Completion, Failure, Life, Piece, State, Usage
from potluck.gateway.serving.speech import Speech
from potluck.gateway.serving.table import ReplicaTable
from potluck.messages.serving import (
    Accepted,
    Ack,
    Cancel,
    Chunk,
    Done,
    Failed,
    Grant,
    Infer,
    KeepAlive,
    Resend,
    ToGateway,
    wire_price,
)
from potluck.ports.clock import Clock

_log = logging.getLogger(__name__)
_THE_ASKERS = frozenset(
    {Refusal.CONTEXT_LENGTH_EXCEEDED, Refusal.INVALID_REQUEST, Refusal.UNSUPPORTED_PARAMETER}
)
"""Refusals that another node would give too."""


class Conversations:
    def __init__(
        self,
        *,
        speech: Speech,
        clock: Clock,
        table: ReplicaTable,
        limits: Limits,
        countersigner: Countersigner,
    ) -> None:
        self._speech = speech
        self._clock = clock
        self._table = table
        self._limits = limits
        self._countersigner = countersigner
        self._links = Links(speech, self._wake)
        self._lives: dict[RequestId, Life] = {}
        self._closed: OrderedDict[tuple[RequestId, int], tuple[NodeId, Ack | Cancel]] = (
            OrderedDict()
        )
        self._dirty: list[Completion] = []
        self.in_flight: dict[NodeId, int] = {}
        """Attempts by node; a node without any is not in it."""

    def flush(self) -> None:
        """What was said leaves now."""
        self._links.flush()

    def __len__(self) -> int:
        return len(self._lives)

    def is_live(self, request: RequestId, attempt: int) -> bool:
        life = self._lives.get(request)
        return life is not None and life.attempt == attempt

    def completions(self) -> list[Completion]:
        return list(
            {id(life.completion): life.completion for life in self._lives.values()}.values()
        )

    # Beginning

    def begin(
        self,
        completion: Completion,
        replica: Replica,
        draws: Iterable[tuple[RequestId, Held, int]],
        now_ms: int,
    ) -> None:
        """One life for each (request, hold, max_micro); money and slots are already taken."""
        for index, (request, held, max_micro) in enumerate(draws):
            bill_prompt = index == 0
            order = self._order(request, 1, replica, held, max_micro, bill_prompt, completion)
            life = Life(
                request=request, index=index, completion=completion, held=held,
                max_micro=max_micro, bill_prompt=bill_prompt, replica=replica, order=order,
                sent_ms=now_ms, born_ms=now_ms, heard_ms=now_ms, acked_ms=now_ms,
                progress_ms=now_ms,
            )  # fmt: skip
            self._lives[request] = life
            completion.lives.append(life)
            completion.open += 1
            self._count(replica.node, 1)
            self._links.say(replica.node, order)

    def _order(
        self, request: RequestId, attempt: int, replica: Replica, held: Held, max_micro: int,
        bill_prompt: bool, completion: Completion,
    ) -> Infer:  # fmt: skip
        price = replica.price
        ask = completion.ask
        seal = grants.seal(
            held.key, request=request, attempt=attempt, node=replica.node, hold=held.purse.hold,
            boot=self._speech.boot, max_micro=max_micro, bill_prompt=bill_prompt, price=price,
        )  # fmt: skip
        return Infer(
            request=request,
            attempt=attempt,
            grant=Grant(
                hold=held.purse.hold, boot=self._speech.boot, max_micro=max_micro, seal=seal
            ),
            price=wire_price(price),
            model=replica.digest,
            messages=ask.messages,
            sampling=ask.sampling,
            stream=ask.stream,
            bill_prompt=bill_prompt,
            first_token_ms=parameters.first_token_timeout_ms,
            total_ms=parameters.request_timeout_ms,
        )

    # What nodes say

    def receive(self, sender: NodeId, items: Iterable[ToGateway]) -> None:
        now_ms = self._clock.now_ms()
        for item in items:
            life = self._lives.get(item.request)
            if life is None or item.attempt != life.attempt or sender != life.replica.node:
                self._stray(sender, item)
                continue
            life.heard_ms = now_ms
            match item:
                case Chunk():
                    self._chunk(life, item, now_ms)
                case Done():
                    self._done(life, item, now_ms)
                case Accepted() | KeepAlive():
                    if life.state is State.SENT:
                        life.state = State.ACCEPTED
                case Failed():
                    self._failed(life, item, now_ms)

    def _stray(self, sender: NodeId, item: ToGateway) -> None:
        """Of an attempt that has ended: the closing word is said again."""
        closed = self._closed.get((item.request, item.attempt))
        if closed is not None and closed[0] == sender:
            self._links.say(sender, closed[1])

    def _chunk(self, life: Life, chunk: Chunk, now_ms: int) -> None:
        taken = life.take(chunk)
        if taken is None:
            self._resend(life, now_ms)
        elif not taken:
            return
        elif life.tokens > life.order.sampling.max_tokens:
            self._fail(life, Refusal.STREAM_BROKEN, "the node sent more tokens than were asked for")
        elif not life.order.stream:
            self._keep(life, now_ms)
        elif life.pending_bytes > parameters.stream_pending_bytes_max:
            self._fail(life, Refusal.STREAM_BROKEN, "the node sent more than its window")
        else:
            self._mark(life, now_ms)

    def _keep(self, life: Life, now_ms: int) -> None:
        """A part of an answer that is shown as a whole. What is acknowledged may be billed, so only
        what the node must hear to go on is acknowledged before the end."""
        if life.pending_bytes > parameters.body_bytes_max:
            self._fail(life, Refusal.STREAM_BROKEN, "the answer is too large")
            return
        if life.pending_bytes - life.acked_bytes >= parameters.window_bytes // 2:
            life.acked_bytes = life.pending_bytes
            life.acked_seq = life.inbound.next_seq - 1
            self._say_acknowledged(life, now_ms)
        if life.done is not None and life.complete:
            self._done(life, life.done, now_ms)

    def _mark(self, life: Life, now_ms: int) -> None:
        if not life.dirty:
            life.dirty = True
            life.progress_ms = now_ms
            self._dirty.append(life.completion)
            self._links.schedule()

    def _resend(self, life: Life, now_ms: int) -> None:
        if life.gap_ms < 0 or now_ms - life.gap_ms >= parameters.acknowledge_every_ms:
            life.gap_ms = now_ms
            word = Resend(
                request=life.request, attempt=life.attempt, from_seq=life.inbound.next_seq
            )
            self._links.say(life.replica.node, word)

    def _done(self, life: Life, done: Done, now_ms: int) -> None:
        if life.done is None:
            life.done = done
        if not life.complete:
            self._resend(life, now_ms)
            return
        life.state = State.FINISHING
        if life.order.stream or life.completion.complete:
            self._mark(life, now_ms)

    def _failed(self, life: Life, failed: Failed, now_ms: int) -> None:
        try:
            refusal = Refusal(failed.code)
        except ValueError:
            refusal = Refusal.INTERNAL
        if life.shown or refusal in _THE_ASKERS:
            self._fail(life, refusal, failed.message)
        else:
            self._try_elsewhere(life, refusal, failed.message, now_ms)

    # Handing on

    def _wake(self) -> None:
        """Once a loop turn: everybody with new output is told, then acknowledgements leave."""
        while self._dirty:
            dirty, self._dirty = self._dirty, []
            for completion in dirty:
                try:
                    completion.listener.wake()
                except Exception:
                    # One answer that cannot be written must not silence all others.
                    _log.exception("an answer could not be handed on")
                    self._break(completion)

    def _break(self, completion: Completion) -> None:
        try:
            self.give_up(completion, Refusal.INTERNAL, "the answer could not be written")
            completion.listener.broken()
        except Exception:
            _log.exception("a broken answer could not be ended")

    def drain(self, completion: Completion) -> list[Piece]:
        now_ms = self._clock.now_ms()
        pieces: list[Piece] = []
        if not completion.ask.stream and not completion.complete:
            return pieces
        for life in completion.lives:
            if life.state is State.CLOSED or not (life.pending or life.done):
                life.dirty = False
                continue
            life.dirty = False
            piece = life.hand_on()
            life.progress_ms = now_ms
            if piece is not None:
                pieces.append(piece)
            if life.complete:
                self._finish(life)
            elif life.handed_seq - life.acked_seq >= parameters.acknowledge_every_chunks:
                self._acknowledge(life, now_ms)
        if pieces:
            completion.quiet_ms = now_ms
        return pieces

    def _acknowledge(self, life: Life, now_ms: int) -> None:
        if life.order.stream:
            life.acked_seq = life.handed_seq
            life.acked_tokens = life.handed_tokens
        self._say_acknowledged(life, now_ms)

    def _say_acknowledged(self, life: Life, now_ms: int) -> None:
        life.acked_ms = now_ms
        word = Ack(request=life.request, attempt=life.attempt, seq=life.acked_seq)
        self._links.say_soon(life.replica.node, word)

    # Ending

    def _finish(self, life: Life) -> None:
        done = life.done
        assert done is not None
        tokens = life.handed_tokens  # Whatever the node claims to have made.
        prompt_tokens = max(0, min(done.prompt_tokens, _prompt_tokens_max(life)))
        cost = _cost(life, prompt_tokens, tokens)
        life.usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens,
            cost_micro=cost.total_micro,
        )
        life.acked_seq, life.acked_tokens = done.last_seq, life.handed_tokens
        word = Ack(request=life.request, attempt=life.attempt, seq=done.last_seq)
        self._close(life, word, cost.total_micro)

    def _close(self, life: Life, word: Ack | Cancel, used_micro: int) -> None:
        """The attempt and the request end: money is counted, the slot is free."""
        self._close_attempt(life, word, used_micro)
        attempt = (life.request, life.attempt)
        life.held.close(attempt, max_micro=life.max_micro, used_micro=used_micro)
        life.state = State.CLOSED
        life.pending.clear()
        del self._lives[life.request]
        life.completion.open -= 1
        self._limits.give_back(life.completion.key.id)

    def _close_attempt(self, life: Life, word: Ack | Cancel, used_micro: int) -> None:
        node = life.replica.node
        if len(self._closed) >= parameters.finished_attempts_kept:
            self._closed.popitem(last=False)
        self._closed[life.request, life.attempt] = (node, word)
        if type(word) is Cancel:
            self._links.say(node, word)  # An engine works until it hears this.
        else:
            self._links.say_soon(node, word)
        self._count(node, -1)
        self._countersigner.delivered(life.request, life.attempt, life.acked_tokens, used_micro)

    def _abort(self, life: Life) -> None:
        """Pays what was handed on; the prompt's size is not known, so its bound is set aside."""
        life.acked_seq, life.acked_tokens = life.handed_seq, life.handed_tokens
        cost = _cost(life, _prompt_tokens_max(life), life.acked_tokens)
        word = Cancel(request=life.request, attempt=life.attempt, acked_seq=life.acked_seq)
        self._close(life, word, cost.total_micro)

    def give_up(self, completion: Completion, refusal: Refusal, message: str) -> None:
        if completion.failure is None and completion.open:
            completion.failure = Failure(refusal, message)
        for life in completion.lives:
            if life.state is not State.CLOSED:
                self._abort(life)

    def _fail(self, life: Life, refusal: Refusal, message: str) -> None:
        """One choice failed: the whole answer did."""
        self.give_up(life.completion, refusal, message)
        self._dirty.append(life.completion)
        self._links.schedule()

    def _try_elsewhere(self, life: Life, refusal: Refusal, message: str, now_ms: int) -> None:
        """Attempt n + 1 on another node; nothing of this one was shown."""
        life.tried.append(life.replica.node)
        target = routing.route(
            self._table.serving(life.completion.ask.model),
            life.completion.ask.model,
            self.in_flight,
            tried=life.tried,
        )
        if isinstance(target, Refusal) or life.attempt >= parameters.attempts_max:
            self._fail(life, refusal, message)
            return
        if target.digest != life.replica.digest or target.price != life.replica.price:
            self._fail(life, refusal, message)  # Another price needs another grant: ask again.
            return
        word = Cancel(request=life.request, attempt=life.attempt, acked_seq=-1)
        self._close_attempt(life, word, 0)
        self._restart(life, target, now_ms)

    def _restart(self, life: Life, target: Replica, now_ms: int) -> None:
        order = self._order(
            life.request, life.attempt + 1, target, life.held, life.max_micro, life.bill_prompt,
            life.completion,
        )  # fmt: skip
        life.start_over(order, target, now_ms)
        self._count(target.node, 1)
        self._links.say(target.node, order)

    def _count(self, node: NodeId, change: int) -> None:
        count = self.in_flight.get(node, 0) + change
        if count:
            self.in_flight[node] = count
        else:
            del self.in_flight[node]

    # What time does

    def tick(self, now_ms: int) -> None:
        """Every `acknowledge_every_ms`: one look at each request instead of a timer for each."""
        for life in list(self._lives.values()):
            if life.state is not State.CLOSED:
                self._look(life, now_ms)

    def forgive(self, late_ms: int) -> None:
        """We were not looking for so long: nobody's silence counts for it."""
        for life in self._lives.values():
            life.heard_ms += late_ms
            life.sent_ms += late_ms
            life.progress_ms += late_ms

    def _look(self, life: Life, now_ms: int) -> None:
        silent_ms = now_ms - life.heard_ms
        if life.state is State.SENT:
            self._look_unaccepted(life, now_ms)
        elif now_ms - life.born_ms >= parameters.request_timeout_ms:
            self._fail(life, Refusal.TIMED_OUT, "the whole request took too long")
        elif life.state < State.FINISHING and silent_ms >= parameters.silence_timeout_ms:
            self._silent(life, now_ms)
        elif life.dirty and now_ms - life.progress_ms >= parameters.slow_client_timeout_ms:
            self._fail(life, Refusal.CLIENT_TOO_SLOW, "nothing was read for too long")
        else:
            if life.gap_ms >= 0:
                self._resend(life, now_ms)
            if (life.handed_seq > life.acked_seq and life.order.stream) or (
                now_ms - life.acked_ms >= parameters.keepalive_ms
            ):
                self._acknowledge(life, now_ms)
            self._look_quiet(life.completion, now_ms)

    def _look_unaccepted(self, life: Life, now_ms: int) -> None:
        waited_ms = now_ms - life.sent_ms
        if waited_ms >= parameters.accept_timeout_ms:
            self._try_elsewhere(life, Refusal.NODE_LOST, "no node accepted in time", now_ms)
        elif waited_ms >= parameters.infer_repeat_ms and not life.repeated:
            life.repeated = True
            self._links.say(life.replica.node, life.order)

    def _silent(self, life: Life, now_ms: int) -> None:
        if life.shown:
            self._fail(life, Refusal.NODE_LOST, "the node fell silent in the middle of its answer")
        else:
            self._try_elsewhere(life, Refusal.NODE_LOST, "the node fell silent", now_ms)

    def _look_quiet(self, completion: Completion, now_ms: int) -> None:
        if now_ms - completion.quiet_ms >= parameters.sse_comment_ms:
            completion.quiet_ms = now_ms
            completion.listener.quiet()


def _prompt_tokens_max(life: Life) -> int:
    return len(life.order.messages) + parameters.template_tokens_margin


def _cost(life: Life, prompt_tokens: int, completion_tokens: int) -> Cost:
    price: Price = life.replica.price
    due = receipts.due_for(price, prompt_tokens, completion_tokens, bill_prompt=life.bill_prompt)
    return pricing.capped(due, life.max_micro, price)
