"""What may be noted, and what a skipped step leaves out. Means on meshes: tests/distributed/test_watch.py."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titanlite.models.watch import Watched, watch
from titanlite.runtime.errors import UserError


class Noting(nn.Module):
    """Notes its input as a name."""

    def forward(self, values: Tensor, name: str, labels: Tensor) -> None:
        del labels
        watch(name, values)


MODEL = Noting()
LABELS = torch.zeros(2, 6, dtype=torch.int64)


def sums_of(watched: Watched) -> dict[str, tuple[float, float, bool]]:
    return {name: (sum(values), sum(per), root) for name, (values, per, root) in watched.take().items()}


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("x", (2, 4, 6), r"there is one per position: \(2, 6\)"),
        ("x", (2, 5), "one per position"),
        ("x", (), "values.expand"),
        ("x y", (2, 6), 'watch\\("x y"\\): a name has letters'),
        ("/x", (2, 6), "a name has"),
    ],
)
def test_other_shapes_and_names_are_refused(name: str, shape: tuple[int, ...], rule: str) -> None:
    watched = Watched([MODEL], None, (0, 1))
    with watched.noting(), pytest.raises(UserError, match=rule):
        MODEL(torch.ones(shape), name, labels=LABELS)


def test_a_number_is_no_tensor_of_values() -> None:
    with pytest.raises(UserError, match=r'watch\("x"\): takes a tensor of values, not float'):
        watch("x", 3.0)  # type: ignore[arg-type]


def test_values_are_real_and_indexes_not_negative() -> None:
    for values, index in ((torch.ones(2, 6), -1), (torch.ones(2, 6, dtype=torch.complex64), None)):
        with pytest.raises(UserError, match="real values, and an index of at least 0"):
            watch("x", values, index=index)


def test_of_a_tensor_in_shards_a_number_counts_if_it_is_of_all_shards(group: dist.ProcessGroup) -> None:
    """Its norm is the part of a rank: the mean over the ranks would be another number on each mesh."""
    watched = Watched([], None, (0, 1))
    mesh = DeviceMesh.from_group(group, "cpu")
    with watched.noting():
        for name, placement in (("all", Replicate()), ("part", Partial())):
            number = DTensor.from_local(torch.tensor(3.0), mesh, [placement])
            if name == "all":
                watch(name, number)
                continue
            with pytest.raises(UserError, match=r'watch\("part"\): takes values of elements, not the sum or norm'):
                watch(name, number)
    watched.end_step(torch.tensor(True))
    assert sums_of(watched) == {"all": (3.0, 1.0, False)}


def test_a_skipped_step_counts_nothing_and_other_code_notes_nothing() -> None:
    watched = Watched([MODEL], None, (0, 1))
    MODEL(torch.ones(2, 6), "x", labels=LABELS)
    for value, ok in ((2.0, True), (torch.nan, False), (4.0, True)):
        with watched.noting():
            MODEL(torch.full((2, 6), value), "x", labels=LABELS)
        watched.end_step(torch.tensor(ok))
    assert sums_of(watched) == {"x": (12 * 6.0, 24.0, False)}
    assert sums_of(watched) == {}
