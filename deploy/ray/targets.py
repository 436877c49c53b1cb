"""Where Prometheus finds the metrics of replicas that come and go."""

import time
from collections.abc import Callable
from typing import Any

# A replica says every `health_check_period_s` (serve.yaml: 5 s) that it is there; four silences in a row mean that it
# is not. Less than the minute after which OfframpDown fires: a replica that was replaced is no alert.
KEEP_SECONDS = 20.0


class Targets:
    """The replicas that were seen lately, as a document of Prometheus's HTTP service discovery."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._seen: dict[tuple[str, str], float] = {}

    async def seen(self, replica: str, address: str) -> None:
        """The replica is there, with its metrics at ``address`` (``host:port``)."""
        self._seen[replica, address] = self._clock()

    async def document(self) -> list[dict[str, Any]]:
        """One group for each replica; the label ``replica`` is the one that Ray's own metrics carry."""
        oldest = self._clock() - self._keep_seconds
        self._seen = {key: seen for key, seen in self._seen.items() if seen >= oldest}
        return [{"targets": [address], "labels": {"replica": replica}} for replica, address in sorted(self._seen)]
