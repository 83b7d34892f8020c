"""How many wrong tokens an address may try; nobody waits for it, and no other address is kept out."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

#: A person mistypes a few; at this pace a word of 16 characters outlives whoever guesses it.
_WRONG: Final = 10
_WITHIN_S: Final = 60.0
_ADDRESSES: Final = 1000  # remembered; the one that was silent for longest is forgotten first


class Guesses:
    """Wrong tokens of the last minute, by address. Safe to share between threads.

    Parameters:
      elapsed: A clock that only goes forward, in seconds.
    """

    def __init__(self, elapsed: Callable[[], float] = time.monotonic) -> None:
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str | None) -> float:
        """How long this address has to wait before its next token is looked at; 0 when it may try now."""
        with self._lock:
            wrong = self._recent(_network(address))
            return 0.0 if len(wrong) < _WRONG else max(0.0, wrong[0] + _WITHIN_S - self._elapsed())

    def was_wrong(self, address: str | None) -> None:
        """Count one. Those that are not looked at are not counted, so that a wait is never longer than a minute."""
        with self._lock:
            network = _network(address)
            self._wrong.setdefault(network, deque(maxlen=_WRONG)).append(self._elapsed())
            self._wrong.move_to_end(network)
            while len(self._wrong) > _ADDRESSES:
                self._wrong.popitem(last=False)

    def _recent(self, network: str) -> deque[float]:
        wrong = self._wrong.get(network, deque())
        while wrong and wrong[0] <= self._elapsed() - _WITHIN_S:
            wrong.popleft()
        return wrong


def _network(address: str | None) -> str:
    """Whoever has one IPv6 address usually has 2^64 of them."""
    try:
        there = ipaddress.ip_address(address or "")
    except ValueError:
        return ""
    return str(ipaddress.ip_network((there, 64), strict=False)) if there.version == 6 else str(there)
