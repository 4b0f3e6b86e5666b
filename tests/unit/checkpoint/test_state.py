"""The state of a run in a checkpoint: non-finite values, host copies, names, and the state of the streams."""

from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.unit.optim.building import optimizer_of
from titanlite.checkpoint import state
from titanlite.checkpoint.state import HostCopy, RunState, first_not_finite
from titanlite.data.loader import Loader
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.parallel.mesh import Mesh, ParallelismConfig
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.runtime.torch_internals import local_part

INF, NAN = float("inf"), float("nan")
BIG = {torch.float32: 3e38, torch.float64: 1.7e308, torch.bfloat16: 3e38, torch.float16: 65000.0}


@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_single_non_finite_value_is_found(dtype: torch.dtype, value: float, place: int) -> None:
    bad = torch.ones(1000, dtype=dtype)
    bad[place] = value
    others = {f"other/{name}": torch.ones(3, dtype=name) for name in BIG}
    assert first_not_finite(others) is None
    assert first_not_finite({**others, "bad": bad, "good": torch.ones(2)}) == "bad"
    assert first_not_finite({"scalar": bad[place]}) == "scalar"


def test_canceling_infinities_and_several_bad_tensors() -> None:
    assert first_not_finite({"a": torch.tensor([INF, -INF])}) == "a"
    assert first_not_finite({"a": torch.ones(1), "c": torch.tensor([NAN]), "b": torch.tensor([INF])}) == "c"


@pytest.mark.parametrize("dtype", BIG)
def test_huge_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    huge = torch.full((1000,), BIG[dtype], dtype=dtype)
    mixed = huge.clone()
    mixed[::2] *= -1
    assert first_not_finite({"huge": huge, "negative": -huge, "mixed": mixed}) is None
    assert first_not_finite({"huge": huge, "bad": torch.tensor([NAN], dtype=dtype)}) == "bad"


def test_integers_and_empty_tensors_are_finite() -> None:
    integers = {
        "int": torch.full((3,), 2**62),
        "bool": torch.tensor([True]),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 4, dtype=torch.bfloat16),
    }
    assert first_not_finite(integers) is None
    assert first_not_finite({}) is None
    assert first_not_finite({**integers, "x": torch.tensor(NAN)}) == "x"


def test_strides_do_not_matter() -> None:
    base = torch.ones(6, 4)
    base[1, 1] = NAN
    assert first_not_finite({"others": base[::2]}) is None
    assert first_not_finite({"turned": base.T}) == "turned"


def test_copies_are_complete_and_reuse_one_arena() -> None:
    copy = HostCopy(pinned=False)
    source = {
        "a": torch.arange(6.0).reshape(2, 3),
        "turned": torch.arange(6).reshape(2, 3).T,
        "b": torch.tensor(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    first = copy.begin(source)
    assert list(first) == list(source)
    for name, tensor in source.items():
        assert torch.equal(first[name], tensor)
        assert first[name].dtype == tensor.dtype
        assert tensor.numel() == 0 or first[name].data_ptr() != tensor.data_ptr()
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    kept = first["a"].clone()
    source["a"].add_(1)
    assert torch.equal(first["a"], kept)  # as of begin()
    assert len({tensor.untyped_storage().data_ptr() for tensor in first.values()}) == 1
    second = copy.begin(source)
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert torch.equal(second["a"], kept + 1)
    copy.hold()  # nothing to wait for
    copy.wait()


def test_copies_of_a_gpu_run_beside_training_until_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, with stand-ins for CUDA's streams: the copies begin after what training has launched, the
    update waits for them on the GPU, and the thread that writes waits for them on the host."""
    cuda = MagicMock()
    monkeypatch.setattr(state, "pin_in_place", cuda.pin_memory)
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    source, copy = {"a": torch.ones(3), "b": torch.arange(5)}, HostCopy(pinned=True)
    for _ in range(2):
        copies = copy.begin(source)
        copy.hold()
        copy.wait()
    assert all(torch.equal(copies[name], tensor) for name, tensor in source.items())
    arena = copies["a"].untyped_storage()
    cuda.pin_memory.assert_called_once_with(arena.data_ptr(), arena.nbytes())
    side, training = cuda.Stream.return_value, cuda.current_stream.return_value
    copied = side.record_event.return_value
    step = [
        *(call.Stream().wait_stream(training), call.stream(side), call.stream().__enter__()),
        *(call.Stream().record_event(), call.stream().__exit__(None, None, None)),
        *(call.current_stream().wait_event(copied), call.Stream().record_event().synchronize()),
    ]
    calls = [entry for entry in cuda.mock_calls if entry not in (call.current_stream(), call.Stream())]
    assert calls[1:] == step * 2  # after pin_memory


def test_memory_that_cannot_be_page_locked_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "pin_in_place", Mock(side_effect=RuntimeError("Pinning memory failed")))
    with pytest.raises(UserError, match=r"async_mode: cannot page-lock 0\.0 GiB.*Pinning memory failed.*\"async\""):
        HostCopy(pinned=True).begin({"a": torch.ones(3)})


def test_local_part_shares_memory(group: dist.ProcessGroup) -> None:
    del group
    mesh = init_device_mesh("cpu", (1,))
    sharded = distribute_tensor(torch.zeros(4, requires_grad=True), mesh, [Shard(0)])
    plain = torch.zeros(4, requires_grad=True)
    for tensor in (sharded, plain):
        part = local_part(tensor)
        assert not part.requires_grad
        part.fill_(7.0)
        values = tensor.full_tensor() if tensor is sharded else tensor  # type: ignore[attr-defined]
        assert values.tolist() == [7.0] * 4


class FourStreams:
    """A fake loader of 4 streams, of which this rank has `stream_ids`."""

    num_streams = 4
    source_names = ("text",)

    def __init__(self, stream_ids: list[int]) -> None:
        self.stream_ids = stream_ids
        self.loaded: Tensor | None = None

    def state(self) -> Tensor:
        return torch.tensor([[0, 10 * s, 5, 2, 0] for s in self.stream_ids], dtype=torch.int64)

    def load_state(self, state: Tensor, step: int) -> None:
        del step
        self.loaded = state

    describe = Loader.describe


@pytest.fixture
def mesh(group: dist.ProcessGroup) -> Mesh:
    del group
    return Mesh(ParallelismConfig(), World(0, 0, 1, "cpu"))


def state_of(mesh: Mesh, loader: Any, name: str = "AdamW") -> tuple[nn.ModuleDict, RunState]:
    model = nn.ModuleDict({"wq": nn.Linear(4, 4, bias=False), "norm": nn.RMSNorm(4)})
    model["tied"] = nn.Linear(4, 4, bias=False)
    model["tied"].weight = model["wq"].weight
    optimizer = optimizer_of(model, OptimizerConfig(name=name))
    return model, RunState([model], optimizer, loader, mesh)


def test_names_follow_parameters_and_tied_weights_appear_once(mesh: Mesh) -> None:
    model, state = state_of(mesh, FourStreams([0]))
    assert list(state.model()) == ["model/wq.weight", "model/norm.weight"]
    both = state.model_and_optimizer()
    assert set(both) == {
        *("model/wq.weight", "model/norm.weight"),
        *(f"optimizer/{p}/{s}" for p in ("wq.weight", "norm.weight") for s in ("step", "exp_avg", "exp_avg_sq")),
    }
    both["model/wq.weight"].fill_(3.0)
    assert model["wq"].weight.tolist() == [[3.0] * 4] * 4
    both["optimizer/wq.weight/exp_avg"].fill_(5.0)
    assert state.model_and_optimizer()["optimizer/wq.weight/exp_avg"].tolist() == [[5.0] * 4] * 4


def test_sgd_has_no_optimizer_state(mesh: Mesh) -> None:
    _, state = state_of(mesh, FourStreams([0]), "SGD")
    assert list(state.model_and_optimizer()) == list(state.model())


def test_streams_gathers_states_by_stream_id(mesh: Mesh, group: dist.ProcessGroup) -> None:
    loader = FourStreams([2, 0])
    _, state = state_of(mesh, loader)
    rows = [[0, 0, 5, 2, 0], [0] * 5, [0, 20, 5, 2, 0], [0] * 5]
    assert state.streams(group).tolist() == rows
    assert state.streams(group).dtype == torch.int64
    assert state.empty_streams().tolist() == [[0] * 5] * 4


@pytest.mark.parametrize(
    ("epochs", "text"), [([1, 1, 1, 1], "sequence 1,200 (epoch 1)"), ([1, 2, 3, 1], "sequence 1,200 (epochs 1 to 3)")]
)
def test_load_streams_describes_the_position(mesh: Mesh, epochs: list[int], text: str) -> None:
    loader = FourStreams([0])
    _, state = state_of(mesh, loader)
    rows = torch.tensor([[epoch, 3, 0, 300, 0, 0] for epoch in epochs])
    assert state.load_streams(rows, 0) == text
    assert loader.loaded is rows


def test_num_bytes(mesh: Mesh, group: dist.ProcessGroup) -> None:
    _, state = state_of(mesh, FourStreams([0]))
    assert state.num_bytes(group) == 3 * 4 * (16 + 4) + 2 * 4
