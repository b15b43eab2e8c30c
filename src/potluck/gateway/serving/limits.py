"""How many requests may be in flight, in all and for each key.

Rule: a slot taken is always given back, once.
"""

from potluck.core import parameters
from potluck.core.ids import KeyId
from potluck.core.refusals import Refusal


class Limits:
    def __init__(self) -> None:
        self.in_flight = 0
        self._by_key: dict[KeyId, int] = {}

    def take(self, key: KeyId, count: int) -> Refusal | None:
        """Room for `count` choices. `RATE_LIMITED`: this key's own limit; `OVERLOADED`: ours."""
        used = self._by_key.get(key, 0)
        if used + count > parameters.requests_per_key_in_flight_max:
            return Refusal.RATE_LIMITED
        if self.in_flight + count > parameters.requests_in_flight_max:
            return Refusal.OVERLOADED
        self.in_flight += count
        self._by_key[key] = used + count
        return None

    def give_back(self, key: KeyId) -> None:
        self.in_flight -= 1
        left = self._by_key[key] - 1
        if left:
            self._by_key[key] = left
        else:
            del self._by_key[key]
