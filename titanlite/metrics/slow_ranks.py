"""Slow ranks: the comparison of the ranks' compute times, and a warning about ranks that hold up the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from titanlite.runtime.logging import log

SLOW = 1.3
"""Ratio to the median above which a rank is slow."""
SLOW_STEPS = 20
"""Steps for which a rank must stay slow before it is named."""


@dataclass(frozen=True)
class Place:
    """Host of a rank, and its pipeline rank. Pipeline ranks hold different layers, so only equal ones are compared."""

    host: str
    pp_rank: int


@dataclass(frozen=True)
class Slowest:
    """The rank with the highest ratio of its compute time to the median of its peers."""

    rank: int
    host: str
    ratio: float


class SlowRanks:
    """Compares the compute times of ranks at log lines, and warns once about each rank that stays slow.

    places: by rank. logs: whether this rank logs the warnings.
    """

    def __init__(self, places: Sequence[Place], *, logs: bool) -> None:
        self._places = places
        self._logs = logs
        self._slow_steps = [0] * len(places)
        self._warned: set[int] = set()

    def compare(self, num_steps: int, compute_s: Sequence[float]) -> Slowest | None:
        """The slowest rank of the last `num_steps` steps; None if no rank has a peer. Logs the warnings.

        compute_s: median of a rank's compute time per step, by rank.
        """
        ratios = self._ratios(compute_s)
        for rank, place in enumerate(self._places):
            ratio = ratios.get(rank, 0.0)
            self._slow_steps[rank] = self._slow_steps[rank] + num_steps if ratio > SLOW else 0
            if self._slow_steps[rank] >= SLOW_STEPS and rank not in self._warned:
                self._warned.add(rank)
                if self._logs:
                    log.warning(
                        "rank %d on %s has been slow for %d steps: it computes and waits for data %.2f times as long "
                        "as the median of its pipeline stage, %.3g s per step; the other ranks wait for it",
                        *(rank, place.host, self._slow_steps[rank], ratio, compute_s[rank]),
                    )
        if not ratios:
            return None
        slowest = max(ratios, key=lambda rank: ratios[rank])
        return Slowest(slowest, self._places[slowest].host, ratios[slowest])

    def _ratios(self, compute_s: Sequence[float]) -> Mapping[int, float]:
        """Ratio to the median of the peers, by rank. Of two ranks, the faster one is the median."""
        stages: dict[int, list[int]] = {}
        for rank, place in enumerate(self._places):
            stages.setdefault(place.pp_rank, []).append(rank)
        medians = {stage: median_low(compute_s[rank] for rank in ranks) for stage, ranks in stages.items()}
        return {
            rank: compute_s[rank] / medians[stage]
            for stage, ranks in stages.items()
            if len(ranks) > 1 and medians[stage] > 0
            for rank in ranks
        }
