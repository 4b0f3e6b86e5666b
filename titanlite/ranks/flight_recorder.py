"""torch's flight recorder: the last collectives of this process, kept in memory."""

import json
import os
from collections.abc import Mapping

VARIABLE = "TORCH_FR_BUFFER_SIZE"
BUFFER_SIZE = 512
"""Collectives that are kept: several steps of a sharded model, about 0.25 MB as JSON."""


def enable_flight_recorder() -> None:
    """Keep the last BUFFER_SIZE collectives, or as many as the environment says. Call before the first collective."""
    os.environ.setdefault(VARIABLE, str(BUFFER_SIZE))


def last_numbers(recorded: Mapping[str, str]) -> dict[str, int]:
    """The number of the last collective that this process has entered, by backend and group.

    recorded: see recorded_collectives. Groups have the same name on all of their ranks, and numbers count from 1 on
    each of them. Without sends and receives, which the recorder does not number alike on both ranks.
    """
    last: dict[str, int] = {}
    for backend, text in recorded.items():
        for entry in json.loads(text).get("entries", ()):
            if not entry["is_p2p"]:
                name, description = entry["process_group"]
                group = f"{backend} {name} {description}"
                last[group] = max(last.get(group, 0), entry["collective_seq_id"])
    return last


def ranks_behind(last: Mapping[int, Mapping[str, int]]) -> list[int]:
    """The ranks that others wait for, and that wait for no other rank. last: last_numbers by rank.

    Ranks enter the collectives of their groups in one order. So a rank that is behind in one group and ahead in none
    has stopped between two collectives.
    """
    behind, ahead = set(), set()
    for group in {group for numbers in last.values() for group in numbers}:
        numbers = {rank: each[group] for rank, each in last.items() if group in each}
        behind |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
        ahead |= {rank for rank, number in numbers.items() if number > min(numbers.values())}
    return sorted(behind - ahead)
