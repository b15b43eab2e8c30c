"""API keys by the SHA-256 of what was shown; refusals are remembered too.

Rule: life is measured on this machine's monotonic clock from the coordinator's answer on, so no
two wall clocks are compared.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.serving.speech import Speech
from potluck.messages import queries
from potluck.messages.queries import KeyRecord, Query
from potluck.ports.clock import Clock


@dataclass(frozen=True)
class _Known:
    answer: KeyRecord | Refusal
    until_ms: int
    expires_ms: int | None


class Keys:
    def __init__(self, speech: Speech, clock: Clock) -> None:
        self._speech = speech
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Task[KeyRecord | Refusal]] = {}
        self._dropped = 0

    def cached(self, digest: str, now_ms: int) -> KeyRecord | Refusal | None:
        """None: not known, or known too long ago; then `find`."""
        known = self._known.get(digest)
        if known is None or now_ms >= known.until_ms:
            return None
        if known.expires_ms is not None and now_ms >= known.expires_ms:
            return Refusal.EXPIRED_KEY
        return known.answer

    async def find(self, digest: str) -> KeyRecord | Refusal:
        """Asks the coordinator, once for all who wait. `COORDINATOR_UNAVAILABLE` is not kept."""
        task = self._asking.get(digest)
        if task is None:
            if len(self._asking) >= parameters.keys_asking_max:
                return Refusal.OVERLOADED
            task = asyncio.create_task(self._ask(digest))
            self._asking[digest] = task
            task.add_done_callback(lambda _done: self._asking.pop(digest, None))
        return await asyncio.shield(task)

    def left_ms(self, digest: str) -> int | None:
        """How long the key still lives. None: it does not expire, or is not known."""
        known = self._known.get(digest)
        if known is None or known.expires_ms is None:
            return None
        return max(0, known.expires_ms - self._clock.now_ms())

    def drop(self, digest: str) -> None:
        """Revoked, or changed: an answer that is under way is not to be kept either."""
        self._known.pop(digest, None)
        self._dropped += 1

    async def _ask(self, digest: str) -> KeyRecord | Refusal:
        dropped = self._dropped
        question = Query(what="key", args={"hash": digest})
        body = await self._speech.ask_again("query", question, parameters.query_timeout_ms)
        if body is None:
            return Refusal.COORDINATOR_UNAVAILABLE
        answer = _read(body)
        if dropped == self._dropped and answer not in _FLEETING:
            self._keep(digest, answer)
        return answer

    def _keep(self, digest: str, answer: KeyRecord | Refusal) -> None:
        now_ms = self._clock.now_ms()
        expires_ms = None
        if isinstance(answer, KeyRecord) and answer.lives_ms is not None:
            expires_ms = now_ms + answer.lives_ms
        if len(self._known) >= parameters.keys_cached_max:
            del self._known[next(iter(self._known))]
        self._known[digest] = _Known(answer, now_ms + parameters.key_cache_ms, expires_ms)


_LASTING = frozenset({Refusal.INVALID_KEY, Refusal.EXPIRED_KEY, Refusal.REVOKED_KEY})
_FLEETING = frozenset(Refusal) - _LASTING


def _read(body: memoryview) -> KeyRecord | Refusal:
    try:
        answer = queries.answer_decoder.decode(body)
        if not answer.refusal:
            return queries.key_record_decoder.decode(answer.data)
        refusal = Refusal(answer.refusal)
    except (msgspec.DecodeError, ValueError):
        return Refusal.INTERNAL
    missing = (Refusal.KEY_NOT_FOUND, Refusal.NOT_FOUND)
    return Refusal.INVALID_KEY if refusal in missing else refusal
