"""Compare layouts by equality: losses, gradient norms and all state after each step, with training.bit_equal."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from titanlite.assembly.data import build_data, build_tokenizer
from titanlite.assembly.job import job_of
from titanlite.assembly.model import build_model, build_trainer
from titanlite.config.schema import JobConfig
from titanlite.parallel.digest import weights_digest
from titanlite.parallel.mesh import AXES, Mesh
from titanlite.parallel.microbatches import rows_together
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import REDISTRIBUTION
from titanlite.runtime.text import aligned
from titanlite.runtime.torch_internals import reset_compiler
from titanlite.tools.parity.compare import combined_hash, measured_layouts
from titanlite.tools.parity.layouts import ONE_PROCESS, Layout, config_of
from titanlite.tools.parity.measure import CPU, connected_mesh, full_tensor, hash_of, mask_and_hash, record_status
from titanlite.trainer import Trainer

Shapes = tuple[int, int, int]
"""Degrees of tp, cp and ep, which change the shapes of matrix products: layouts with equal ones have equal bits."""


@dataclass(frozen=True)
class Bits:
    """What a layout has computed. steps: of each one the loss, the gradient norm and the digest of the weights, as
    texts. tensors: name -> hash of a weight, an average, or a tensor of an optimizer's state after the last step."""

    steps: list[tuple[str, str, str]]
    tensors: dict[str, str]

    def first_difference(self, other: "Bits") -> str:
        """The first step that differs, and the first tensor; "" if nothing does."""
        for number, (own, others) in enumerate(zip(self.steps, other.steps, strict=True), 1):
            for name, before, after in zip(("loss", "grad norm", "weights"), own, others, strict=True):
                if before != after:
                    return f"step {number}: {name} {after} instead of {before}{self._tensors(other)}"
        return self._tensors(other)

    def _tensors(self, other: "Bits") -> str:
        names = [name for name in self.tensors if self.tensors[name] != other.tensors.get(name)]
        return f"; {len(names)} of {len(self.tensors)} tensors differ, the first is {names[0]}" if names else ""


@dataclass(frozen=True)
class BitsResult:
    """The result of one layout. loss: of the last step. state: hash of all tensors after it. first: the layout that it
    is compared with, itself if it is the first with its degrees of tp, cp and ep; "" if it failed. difference: "" if
    there is none; the error of a layout that failed."""

    layout: str
    loss: str
    state: str
    first: str
    difference: str


def exact_config(config: JobConfig) -> JobConfig:
    """The configuration with training.bit_equal, and the same rows in a microbatch with and without a pipeline."""
    rows = rows_together(config.parallelism, config.training.local_batch_size)
    return replace(
        config,
        training=replace(config.training, bit_equal=True, local_batch_size=rows),
        parallelism=replace(config.parallelism, pp_microbatch_size=rows),
    )


def measure_bits(config: JobConfig, layouts: Sequence[Layout], steps: int, folder: str) -> list[Any]:
    """Train each layout on this rank (called by run_ranks); returns its Bits as JSON, of this rank's tensors.

    config: resolved. folder: see record_status.
    """
    REDISTRIBUTION.setLevel(logging.ERROR)  # training does not gather
    found = []
    for layout in layouts:
        with record_status(f"{layout}", folder):
            settings = config_of(config, layout)
            found.append(_train(settings, connected_mesh(settings, layout), steps))
    return found


def _train(config: JobConfig, mesh: Mesh, steps: int) -> dict[str, Any]:
    if config.compile.enable:
        reset_compiler()  # the compiled blocks of all layouts share the recompilation limit
    job = job_of(config, mesh.world.size)
    loader = build_data(job, mesh, build_tokenizer(config))
    try:
        trainer = build_trainer(job, build_model(config, mesh, CPU), mesh, CPU)
        assert trainer.exact is not None
        numbers = []
        for _ in range(steps):
            stats = trainer.train_step(mask_and_hash(loader, config)[0])
            loss = stats.mean_loss.clone()
            dist.all_reduce(loss)  # of exact numbers
            numbers.append((repr(loss.item()), repr(stats.grad_norm.item()), weights_digest(trainer.exact)))
        tensors = {name: hash_of(full_tensor(tensor.detach())) for name, tensor in _state(trainer)}
        return {"steps": numbers, "tensors": tensors}
    finally:
        loader.close()


def _state(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for part in trainer.model_parts:
        yield from part.named_parameters()
    yield from trainer.optimizer.named_state()
    yield from ((f"{name}/average", tensor) for name, tensor in trainer.average.tensors.items())


def compare_bits(config: JobConfig, layouts: Sequence[Layout], steps: int, folder: str) -> list[BitsResult]:
    """Compare each layout with the first one of its degrees of tp, cp and ep. Raises UserError if no two have the same
    degrees, or one process fails."""
    trained = {ONE_PROCESS, *layouts}
    if len({_shapes(layout) for layout in trained}) == len(trained):
        raise UserError(
            "nothing to compare: no two layouts, one process among them, have the same degrees of tp, cp and ep: name "
            "another one with --layouts"
        )
    results: list[BitsResult] = []
    firsts: dict[Shapes, tuple[Layout, Bits]] = {}
    for layout, ranks in measured_layouts(measure_bits, config, layouts, steps, folder):
        if isinstance(ranks, str):
            results.append(BitsResult(str(layout), "", "", "", ranks))
            continue
        bits = Bits(ranks[0]["steps"], {name: value for rank in ranks for name, value in rank["tensors"].items()})
        first, expected = firsts.setdefault(_shapes(layout), (layout, bits))
        difference = expected.first_difference(bits)
        state = combined_hash(bits.tensors)
        results.append(BitsResult(str(layout), bits.steps[-1][0], state, str(first), difference))
    return results


def bits_lines(results: Sequence[BitsResult]) -> list[str]:
    """The table."""
    rows = [["layout", "loss", "state", "verdict"]]
    for each in results:
        verdict = "the first with its tp, cp and ep" if each.first == each.layout else f"equal to {each.first}"
        if each.difference:
            verdict = f"DIFFERS from {each.first}: {each.difference}" if each.first else f"FAILED: {each.difference}"
        rows.append([each.layout, each.loss, each.state, verdict])
    return [*(line.rstrip() for line in aligned(rows, left=len(rows[0]))), *_alone(results)]


def _alone(results: Sequence[BitsResult]) -> Iterator[str]:
    """Name the layouts that nothing was compared with."""
    firsts = Counter(each.first for each in results)
    if alone := [each.layout for each in results if firsts[each.layout] == 1 and each.first == each.layout]:
        yield f"not compared, since no other layout has the same degrees of tp, cp and ep: {', '.join(alone)}"


def _shapes(layout: Layout) -> Shapes:
    degrees = dict(zip(AXES, layout.degrees, strict=True))
    return degrees["tp"], degrees["cp"], layout.ep
