"""Search the fastest layout of a configuration: mesh axes, microbatches, schedule, recomputation, synchronization.

Any of them may be chosen, since none changes the numbers of a run. All factorizations of the axes are searched, with
tensor parallelism inside a node. What the checks of the configuration refuse, or what does not fit the memory, is left
out. Layouts are visited by a lower bound of their time, until no other one can be among the fastest.

The time of a pipeline with many microbatches is that of a few, and of the steady state for the others: time, memory and
traffic are linear in the number of microbatches as soon as all stages work.
"""

import gc
import heapq
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any, get_args

from titanlite.config.check import check_layout, one_rank, resolve_config
from titanlite.config.fields import keys_that_affect, value_of
from titanlite.config.schema import JobConfig
from titanlite.data.deal import most_sequences
from titanlite.parallel.data import resolve_gradient_sync
from titanlite.parallel.mesh import AXES, LAYOUT, ContextParallel, GradientSync, resolve_degrees
from titanlite.parallel.microbatches import Microbatches
from titanlite.parallel.pipeline import SCHEDULES, local_stages, stage_owners
from titanlite.planning.estimate import Estimate, estimate, estimate_memory, plan_step
from titanlite.planning.hardware.machine import Profile
from titanlite.planning.stages import plan_stages
from titanlite.planning.step_time import StepTime, predict, times
from titanlite.runtime.memory import GIB, USABLE

Settings = Mapping[str, Any]
"""Values by full key."""
RECOMPUTE: tuple[Settings, ...] = (
    {"activation_checkpoint.mode": "none"},
    {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_policy": "op"},
    {"activation_checkpoint.mode": "full"},
)
"""From the fastest to the one with the least memory."""
RESHARD = ("never", "default", "always")
"""Values of parallelism.fsdp_reshard_after_forward, from the fastest to the one with the least memory."""
SEARCHED = keys_that_affect("search")
"""Full keys whose values a search may choose, unless they are given."""
PP_SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Without GPipe and LoopedBFS, which idle as long as 1F1B and Interleaved1F1B, with more memory."""
SYNC: tuple[GradientSync, ...] = ("last", "hybrid", "every")
"""From the fastest to the one with the least memory."""
SLACK = 0.9
"""Share of the time of the largest microbatches that no smaller ones improve on. They would be the fastest if rates
never fell with the size."""
TIE = 0.03
"""Layouts whose times differ by less count as equal: about half of the published runs differ by more from theirs."""
FILLED = (3, 4)
"""Microbatches per pipeline rank of the two schedules from which longer ones are extrapolated. All stages work, and
have gradients when most microbatches are in flight."""


@dataclass(frozen=True)
class Choice:
    """A layout with its predicted time.

    settings: by full key, of what was searched. sizes: of the mesh axes by name. microbatches: of a step, of `rows`
    rows each. memory_bytes: of the rank that needs the most. sent_bytes: of the rank that sends the most, per step.
    """

    settings: Settings
    config: JobConfig
    sizes: Mapping[str, int]
    microbatches: int
    rows: int
    memory_bytes: int
    sent_bytes: int
    time: StepTime

    @property
    def axes(self) -> tuple[int, ...]:
        """The degrees in the order of LAYOUT."""
        return _axes(self.settings)

    @property
    def mesh(self) -> str:
        """The degrees larger than 1, for people."""
        return _mesh_name(self.settings)


@dataclass(frozen=True)
class TooLarge:
    """A mesh that does not fit. memory_bytes: lower bound of what a rank needs."""

    mesh: str
    memory_bytes: float


@dataclass(frozen=True)
class Found:
    """fastest: of each mesh that fits, the fastest first. too_large: meshes that do not fit, those that would be the
    fastest first. meshes: how many the checks allow."""

    fastest: tuple[Choice, ...]
    too_large: tuple[TooLarge, ...]
    meshes: int

    @property
    def best(self) -> Choice:
        """The choice with the fewest axes among the fastest, and those that are equal to it."""
        fastest = self.fastest[0].time.total
        equal = [choice for choice in self.fastest if choice.time.total <= (1 + TIE) * fastest]
        return min(equal, key=lambda choice: (len([size for size in choice.axes if size > 1]), choice.time.total))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Without Python's collector of reference cycles, which plans have none of: 18 % of the time of a search."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def search(
    config: JobConfig,
    world_size: int,
    profile: Profile,
    *,
    memory_gib: float,
    kept: Collection[str] = (),
    count: int = 8,
) -> Found:
    """The `count` fastest meshes for world_size ranks. Deterministic.

    config: read and valid for some layout, with a global batch size. memory_gib: of a rank. kept: full keys whose
    values stay those of `config`.
    """
    visit = _Visit(config, world_size, profile, memory_gib, frozenset(kept))
    numbers = itertools.count()  # equal bounds keep the order of the meshes
    # (has a pipeline, lower bound of the time, number, settings, first mode)
    queue: list[tuple[bool, float, int, Settings, int | None]] = []
    too_large: list[tuple[float, int, TooLarge]] = []
    meshes = set()
    for mesh in visit.meshes():
        counts = visit.row_counts(mesh)
        if (bound := visit.least_time({**mesh, **counts[-1], **visit.recompute()[0]})) is None:
            continue  # the checks refuse it
        meshes.add(_axes(mesh))
        first, least = visit.first_mode({**mesh, **counts[0]})
        if first is None:
            too_large.append((bound, next(numbers), TooLarge(_mesh_name(mesh), least)))
        else:
            if first > 0:
                bound = visit.least_time({**mesh, **counts[-1], **visit.recompute()[first]}) or bound
            queue.append((mesh["parallelism.pp"] > 1, SLACK * bound, next(numbers), mesh, None))
    heapq.heapify(queue)
    best: dict[tuple[int, ...], Choice] = {}
    limit = inf
    while queue:
        has_pipeline, bound, _, settings, first = heapq.heappop(queue)
        if bound >= limit:
            continue
        if first is None:
            first = 0
            for rows in visit.row_counts(settings):  # larger microbatches need more memory
                first, _ = visit.first_mode({**settings, **rows}, first)
                if first is None:
                    break
                if schedules := visit.schedules({**settings, **rows, **visit.recompute()[first]}):
                    entry = has_pipeline, schedules[0][0], next(numbers), {**settings, **rows}, first
                    heapq.heappush(queue, entry)
            continue
        known = best.get(_axes(settings))
        found = visit.best_of(settings, first, min(limit, known.time.total if known else inf))
        if found is not None:
            best[found.axes] = found
            totals = sorted(each.time.total for each in best.values())
            limit = totals[count - 1] if len(totals) >= count else inf
    fastest = sorted(best.values(), key=lambda choice: (choice.time.total, choice.axes))[:count]
    rejected: dict[str, TooLarge] = {}
    for _, _, each in sorted(too_large):
        rejected.setdefault(each.mesh, each)  # of the ways to exchange positions, the fastest
    return Found(tuple(fastest), tuple(rejected.values())[:count], len(meshes))


class _Visit:
    """Predictions of one configuration with other settings."""

    def __init__(
        self, config: JobConfig, world_size: int, profile: Profile, memory_gib: float, kept: frozenset[str]
    ) -> None:
        self.world_size, self.profile = world_size, profile
        self.kept = frozenset(key for key in kept & SEARCHED if value_of(config, key) != -1)
        self.usable = USABLE * memory_gib * GIB
        self.model = config.hyper_parameters
        resolved = resolve_config(one_rank(config), world_size=1, device_type=profile.device)
        self.config = replace(resolved, parallelism=config.parallelism)
        self.configs: dict[frozenset[tuple[str, Any]], JobConfig | None] = {}
        self.divisions: dict[tuple[Any, ...], tuple[Sequence[int], int]] = {}
        self.bounds: dict[tuple[tuple[str, Any], ...], Sequence[tuple[float, Settings]]] = {}

    def options(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values to search for a key."""
        return [value_of(self.config, key)] if key in self.kept else values

    def meshes(self) -> Iterator[Settings]:
        """All factorizations of the ranks over the axes, with the ways to exchange positions and to place experts."""
        degrees = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
        node = min(self.profile.ranks_per_node, self.world_size)
        n_blocks, n_experts = self.model.n_layers, self.model.n_experts
        choices = {
            "pp": [size for size in degrees if size <= n_blocks],
            "dp_replicate": degrees,
            "cp": [size for size in degrees if self.config.training.seq_len % size == 0],
            "tp": [size for size in degrees if node % size == 0],
        }
        (shards,) = self.options("parallelism.dp_shard", [-1])
        for sizes in product(*(self.options(f"parallelism.{axis}", values) for axis, values in choices.items())):
            chosen = dict(zip(choices, sizes, strict=True))
            rest, left = divmod(self.world_size, prod(sizes))
            if left or shards not in (-1, rest) or rest * chosen["dp_replicate"] > self.config.data.num_streams:
                continue
            pool = rest * chosen["cp"]
            fits = [size for size in degrees if n_experts % size == 0 and pool % size == 0]
            ways = get_args(ContextParallel) if chosen["cp"] > 1 else [self.config.parallelism.context_parallel]
            for ep in self.options("parallelism.ep", fits if n_experts > 1 else [1]):
                for way in self.options("parallelism.context_parallel", ways):
                    layout = {"layout": "given", **chosen, "dp_shard": rest, "context_parallel": way, "ep": ep}
                    yield {f"parallelism.{name}": value for name, value in layout.items()}

    def row_counts(self, mesh: Settings) -> Sequence[Settings]:
        """Sizes of microbatches: powers of two, and all rows of a rank."""
        training, degree = self.config.training, mesh["parallelism.dp_replicate"] * mesh["parallelism.dp_shard"]
        sequences = most_sequences(training.global_batch_size, self.config.data.num_streams, degree)
        sizes = [*(2**power for power in range(sequences.bit_length()) if 2**power < sequences), sequences]
        key = "training.local_batch_size" if mesh["parallelism.pp"] == 1 else "parallelism.pp_microbatch_size"
        all_rows = {"training.local_batch_size": sequences} if mesh["parallelism.pp"] > 1 else {}
        if "training.local_batch_size" in self.kept:
            all_rows = {}
        return [{**all_rows, key: size} for size in self.options(key, sizes)]

    def recompute(self) -> Sequence[Settings]:
        return [{}] if "activation_checkpoint.mode" in self.kept else RECOMPUTE

    def reshard(self) -> Sequence[Settings]:
        return self._each("parallelism.fsdp_reshard_after_forward", RESHARD)

    def sync(self) -> Sequence[Settings]:
        return self._each("parallelism.gradient_sync", SYNC)

    def _each(self, key: str, values: Sequence[Any]) -> Sequence[Settings]:
        return [{key: value} for value in self.options(key, values)]

    def best_of(self, settings: Settings, first: int, limit: float) -> Choice | None:
        """The fastest choice with this mesh and these microbatches that fits and takes less than `limit`. first: of the
        ways to recompute, without those that need too much memory."""
        best: Choice | None = None
        for floor, tried, known in self.candidates(settings, first, limit):
            if floor >= limit:
                break
            choice = known
            if choice is None and self._least_memory(tried) <= self.usable:
                choice = self.predict(tried)
            if choice is not None and choice.memory_bytes <= self.usable and choice.time.total < limit:
                best, limit = choice, choice.time.total
        return best

    def candidates(self, settings: Settings, first: int, limit: float) -> list[tuple[float, Settings, Choice | None]]:
        """(lower bound of the time, settings, choice if it is known) for each way to recompute, to synchronize and to
        free parameters, and each schedule, by the bound: without a pipeline, and with 1F1B, by the prediction; with
        other schedules, that of 1F1B without idle time."""
        found: list[tuple[float, Settings, Choice | None]] = []
        least = self._schedule()
        for mode in self.recompute()[first:]:
            schedules = self.schedules({**settings, **mode})
            for sync, reshard in product(self._distinct_syncs(settings), self._distinct_reshards(settings)):
                tried = {**settings, **mode, **sync, **reshard}
                if not schedules or schedules[0][0] >= limit or self._least_memory({**tried, **least}) > self.usable:
                    continue
                if (known := self.predict({**tried, **least})) is None:
                    continue
                for floor, schedule in schedules:
                    is_known = {**least, **schedule} == least
                    bound = known.time.total if is_known else max(floor, known.time.least)
                    found.append((bound, {**tried, **schedule}, known if is_known else None))
        return sorted(found, key=lambda entry: entry[0])

    def schedules(self, settings: Settings) -> Sequence[tuple[float, Settings]]:
        """(lower bound of the time, settings) of the schedules to search with this mesh, these microbatches and this
        recomputation, by the bound; empty if the checks refuse them."""
        if settings["parallelism.pp"] > 1:
            # the bounds of pipelines do not depend on the division of the data-parallel ranks
            degree = settings["parallelism.dp_replicate"] * settings["parallelism.dp_shard"]
            settings = {**settings, "parallelism.dp_replicate": 1, "parallelism.dp_shard": degree}
        key = tuple(settings.items())
        if key not in self.bounds:
            self.bounds[key] = self._schedules(settings)
        return self.bounds[key]

    def _schedules(self, settings: Settings) -> Sequence[tuple[float, Settings]]:
        pp = settings["parallelism.pp"]
        if pp == 1:
            choice = self.predict({**settings, **self.sync()[0], **self.reshard()[0]})
            return [] if choice is None else [(choice.time.total, {})]
        if (time := self._mean_time(settings)) is None:
            return []
        of_head = time.parts["loss"]
        of_blocks = time.total - of_head - time.parts["input"]
        found = []
        for name in self.options("parallelism.pp_schedule", PP_SCHEDULES):
            schedule = {"parallelism.pp_schedule": name}
            config = self._checked({**settings, **schedule})
            if config is None:
                continue
            microbatches = self._step(config).per_batch
            # idle time relative to the work, with equal stages (tests/unit/planning/test_pipeline_order.py), else more
            shape = SCHEDULES[name]
            idle = (pp - 1) / microbatches / (6 if shape.splits_backward else shape.stages_per_rank)
            blocks, last = self._division(config)
            n_blocks = self.model.n_layers
            busy = (of_blocks * count / n_blocks + of_head * (rank == last) for rank, count in enumerate(blocks))
            found.append((max(time.total * (1 + idle), pp * max(busy)), schedule))
        return sorted(found, key=lambda entry: entry[0])

    def _division(self, config: JobConfig) -> tuple[Sequence[int], int]:
        """(blocks of each pipeline rank, the rank of the last stage)."""
        key = config.parallelism.pp, config.parallelism.pp_schedule, config.activation_checkpoint
        if key not in self.divisions:
            owners, blocks = stage_owners(config.parallelism), [0] * config.parallelism.pp
            stages = plan_stages(config, self._sizes(config))
            for stage, owner in zip(stages, owners, strict=True):
                blocks[owner] += len(stage.blocks)
            self.divisions[key] = blocks, owners[-1]
        return self.divisions[key]

    def least_time(self, settings: Settings) -> float | None:
        """A lower bound of the time with this mesh, these microbatches and this recomputation; None if the checks
        refuse them."""
        if self._checked({**settings, **self._schedule()}) is None:
            return None
        return min((bound for bound, _ in self.schedules(settings)), default=None)

    def _mean_time(self, settings: Settings) -> StepTime | None:
        """The mean over the ranks of a pipeline, which share the work of a rank without one; without what data-parallel
        ranks exchange and share. None if the checks refuse the settings."""
        settings = {**settings, **self.sync()[0], **self.reshard()[0], **self._schedule()}
        pp = settings["parallelism.pp"]
        if (config := self._checked(settings)) is None:
            return None
        rows = self._step(config).size
        alone = with_settings(config, {"parallelism.pp": 1, "training.local_batch_size": rows})
        time = predict(alone, self._plan(alone, self.world_size // pp), self.profile)
        parts = times({**time.parts, "data parallel": 0.0, "update": 0.0}, 1 / pp)
        return StepTime(parts, sum(parts.values()))

    def first_mode(self, settings: Settings, first: int = 0) -> tuple[int | None, float]:
        """(the first way to recompute that may fit with this mesh and these microbatches, or None; least bytes of a
        rank). first: without those before it."""
        settings = {**settings, **self._schedule(), **self.sync()[-1], **self.reshard()[-1]}
        least, ways = inf, self.recompute()
        for index in range(first, len(ways)):
            least = self._least_memory({**settings, **ways[index]})
            if least <= self.usable:
                return index, least
        return None, least

    def _schedule(self) -> Settings:
        """The schedule that needs the least memory."""
        return {} if "parallelism.pp_schedule" in self.kept else {"parallelism.pp_schedule": "1F1B"}

    def _least_memory(self, settings: Settings) -> float:
        """Bytes of the first and the last rank of a pipeline, and of the first one with the most blocks, of which one
        needs the most as a rule, without the gradients of other microbatches; infinite if the checks refuse the
        settings."""
        config = self._checked(settings)
        if config is None:
            return inf
        section = config.parallelism
        sizes = self._sizes(config)
        shorter = self._with_microbatches(config, plan_step(config, sizes), FILLED[0])
        longer = config.training.global_batch_size / shorter.training.global_batch_size
        stages = plan_stages(config, sizes)
        blocks, _ = self._division(config)
        found = [
            estimate_memory(
                *(shorter, sizes, rank, [stages[index] for index in local_stages(section, rank)]),
                device_type=self.profile.device,
            )
            for rank in {0, blocks.index(max(blocks)), section.pp - 1}
        ]
        return max(memory.least + memory.pipeline * (longer - 1) for memory in found)

    def _distinct_syncs(self, settings: Settings) -> Sequence[Settings]:
        """Of the ways to synchronize, one for each that differs on this mesh."""
        sizes = {axis: settings[f"parallelism.{axis}"] for axis in AXES}
        found: dict[Any, Settings] = {}
        for sync in self.sync():
            policy = sync["parallelism.gradient_sync"]
            limited = settings["parallelism.pp"] > 1 and "training.local_batch_size" in self.kept
            apart = limited and policy == "every"
            found.setdefault((resolve_gradient_sync(policy, sizes), apart), sync)
        return list(found.values())

    def _distinct_reshards(self, settings: Settings) -> Sequence[Settings]:
        """Of the ways to free parameters, one for each that differs on this mesh: with a pipeline, default is never."""
        ways = self.reshard()
        shards = settings["parallelism.dp_shard"] * settings["parallelism.cp"]
        return ways[:1] if shards == 1 else [ways[0], *ways[2:]] if settings["parallelism.pp"] > 1 else ways

    def predict(self, settings: Settings) -> Choice | None:
        """The choice with these settings; None if the checks refuse them."""
        config = self._checked(settings)
        if config is None:
            return None
        step = self._step(config)
        shorter = [self._with_microbatches(config, step, filled) for filled in FILLED]
        if config in shorter:
            return self._exactly(settings, config)
        few, more = (self._exactly(settings, each) for each in shorter)
        return _extrapolated(few, more, step.per_batch, config)

    def _checked(self, settings: Settings) -> JobConfig | None:
        key = frozenset(settings.items())
        if key not in self.configs:
            config = with_settings(self.config, settings)
            self.configs[key] = None if check_layout(config, self.world_size) else config
        return self.configs[key]

    def _sizes(self, config: JobConfig) -> Mapping[str, int]:
        """The degrees of the mesh axes."""
        return resolve_degrees(config.parallelism, self.world_size)

    def _step(self, config: JobConfig) -> Microbatches:
        return plan_step(config, self._sizes(config))

    def _with_microbatches(self, config: JobConfig, step: Microbatches, filled: int) -> JobConfig:
        """The configuration with a smaller batch, if there are more than filled microbatches per rank of a pipeline.
        step: of `config`."""
        section, size = config.parallelism, config.training.global_batch_size
        count = filled * section.pp
        if section.pp == 1 or step.batches > 1 or step.per_batch <= max(FILLED) * section.pp:
            return config
        return with_settings(config, {"training.global_batch_size": size * count // step.per_batch})

    def _plan(self, config: JobConfig, world_size: int) -> Estimate:
        return estimate(config, world_size, device_type=self.profile.device)

    def _exactly(self, settings: Settings, config: JobConfig) -> Choice:
        plan = self._plan(config, self.world_size)
        return Choice(
            *(settings, config, plan.axes, plan.microbatches, plan.rows, plan.largest.memory.total),
            max(sum(part.sent_bytes for part in rank.traffic) for rank in plan.ranks),
            predict(config, plan, self.profile),
        )


def _axes(mesh: Settings) -> tuple[int, ...]:
    return tuple(mesh[f"parallelism.{axis}"] for axis in LAYOUT)


def _mesh_name(mesh: Settings) -> str:
    """The degrees larger than 1, for people."""
    degrees = dict(zip(LAYOUT, _axes(mesh), strict=True))
    return " x ".join(f"{axis} {size}" for axis, size in degrees.items() if size > 1) or "one rank"


def _extrapolated(few: Choice, more: Choice, microbatches: int, config: JobConfig) -> Choice:
    """The choice with more microbatches, with the other settings of `config`."""
    steps = (microbatches - few.microbatches) / (more.microbatches - few.microbatches)

    def line(first: float, second: float) -> float:
        return first + steps * (second - first)

    parts = {part: line(seconds, more.time.parts[part]) for part, seconds in few.time.parts.items()}
    return replace(
        few,
        config=config,
        microbatches=microbatches,
        memory_bytes=round(line(few.memory_bytes, more.memory_bytes)),
        sent_bytes=round(line(few.sent_bytes, more.sent_bytes)),
        time=StepTime(parts, line(few.time.least, more.time.least)),
    )


def with_settings(config: JobConfig, settings: Settings) -> JobConfig:
    """The configuration with other values of some keys."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})
