"""Initial weights: the same in every region of a tensor, on every mesh, for any number of threads, in every dtype.

Ranks of a mesh are simulated one after another with the fake process group, which needs no peers.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titanlite.models.family import Init
from titanlite.models.init import BLOCK_NUMEL, CUT_STD, INIT_VERSION, fill_region_, init_parameters_

NORMAL = Init("normal", 0.02)


@cache
def _full(name: str, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    fill_region_(out, seed, name, NORMAL, shape, (0,) * len(shape))
    return out


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def test_golden_values_of_this_version() -> None:
    """These change only together with INIT_VERSION: they are the initial weights of every run."""
    assert INIT_VERSION == 1
    assert _digest(_full("layers.0.attention.wq.weight", 16, 8)) == "e5697101a2b20f25"
    assert _digest(_full("tok_embeddings.weight", 1031, 1024)) == "a6ff7373086a5bc1"


def test_a_block_is_drawn_by_one_generator_of_seed_name_and_index() -> None:
    digest = hashlib.sha256(b"3:w:1").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    expected = torch.empty(24, dtype=torch.float64).normal_(generator=generator).clamp(-CUT_STD, CUT_STD) * NORMAL.value
    assert torch.equal(_full("w", BLOCK_NUMEL + 24)[BLOCK_NUMEL:], expected.float())


REGIONS = [
    ((40,), (0,), (40,)),
    ((40,), (13,), (27,)),
    ((40,), (40,), (0,)),
    ((12, 10), (3, 0), (5, 10)),
    ((12, 10), (0, 4), (12, 3)),
    ((12, 10), (7, 9), (5, 1)),
    ((12, 10), (12, 0), (0, 10)),
    ((12, 10), (0, 10), (12, 0)),
    ((4, 6, 5), (1, 2, 0), (2, 3, 5)),
    ((4, 6, 5), (0, 0, 3), (4, 6, 2)),
    ((1500, 1021), (0, 0), (1500, 1021)),
    ((1500, 1021), (1026, 0), (2, 1021)),  # has the border of blocks 0 and 1
    ((1500, 1021), (700, 0), (800, 1021)),
    ((1500, 1021), (0, 1000), (1500, 21)),
    ((1500, 1021), (1000, 500), (400, 521)),
    ((3 * BLOCK_NUMEL + 5,), (BLOCK_NUMEL - 1,), (BLOCK_NUMEL + 2,)),
    ((3 * BLOCK_NUMEL + 5,), (3 * BLOCK_NUMEL + 1,), (4,)),
]


@pytest.mark.parametrize(("shape", "offset", "part"), REGIONS)
def test_a_region_has_the_values_of_the_full_tensor(
    shape: tuple[int, ...], offset: tuple[int, ...], part: tuple[int, ...]
) -> None:
    expected = _full("w", *shape)[tuple(slice(o, o + n) for o, n in zip(offset, part, strict=True))]
    local = torch.full(part, float("nan"))
    fill_region_(local, 3, "w", NORMAL, shape, offset)
    assert torch.equal(local, expected)
    transposed = torch.full(part[::-1], float("nan")).permute(*reversed(range(len(part))))
    fill_region_(transposed, 3, "w", NORMAL, shape, offset)
    assert torch.equal(transposed, expected)


def test_scalar() -> None:
    assert torch.equal(_full("w"), _full("w", 1)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_have_the_same_weights_up_to_the_cast(dtype: torch.dtype) -> None:
    assert torch.equal(_full("w", 100, 7, dtype=dtype), _full("w", 100, 7).to(dtype))


def test_only_the_touched_blocks_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    manual_seed = torch.Generator.manual_seed

    class Counted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            seeds.append(seed)
            return manual_seed(self, seed)

    monkeypatch.setattr(torch, "Generator", Counted)
    local = torch.empty(BLOCK_NUMEL)
    fill_region_(local, 3, "w", NORMAL, (64 * BLOCK_NUMEL,), (7 * BLOCK_NUMEL - 1,))
    assert len(seeds) == 2
    fill_region_(torch.empty(1024, 8), 3, "w", NORMAL, (1024, 4096), (0, 16))
    assert len(seeds) == 2 + 4  # each of the four blocks once, although every row is a separate run


def test_distribution() -> None:
    values = _full("w", 1000, 1000) / NORMAL.value
    assert abs(values.mean().item()) < 0.005
    assert abs(values.std().item() - 0.9936) < 0.005  # a standard normal clamped at 3
    assert values.abs().max().item() == pytest.approx(CUT_STD, rel=1e-6)
    assert 0.001 < (values.abs() >= CUT_STD * (1 - 1e-6)).double().mean().item() < 0.005  # 0.27 % expected


def test_uniform_and_constant() -> None:
    values = torch.empty(100, 1000)
    fill_region_(values, 3, "w", Init("uniform", 0.2), values.shape, (0, 0))
    assert 0.1999 < values.abs().max().item() <= 0.2
    assert values.square().mean().item() == pytest.approx(0.2**2 / 3, rel=0.01)  # the variance of that distribution
    part = torch.empty(2, 1000)
    fill_region_(part, 3, "w", Init("uniform", 0.2), values.shape, (50, 0))
    assert torch.equal(part, values[50:52])
    fill_region_(part, 3, "w", Init("constant", 0.5), values.shape, (50, 0))
    assert part.unique().tolist() == [0.5]


def test_seeds_names_and_blocks_differ() -> None:
    first = _full("w", 2 * BLOCK_NUMEL)
    others = [first[BLOCK_NUMEL:], _full("v", 64), _full("w", 64, seed=4)]
    for other in others:
        assert not (first[:64] == other[:64]).any()


class _Wrapped(nn.Module):
    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


def test_names_are_those_of_the_unwrapped_model() -> None:
    plain = _Wrapped("layer", nn.Linear(4, 4))
    wrapped = _Wrapped("layer", _Wrapped("_orig_mod", _Wrapped("_checkpoint_wrapped_module", nn.Linear(4, 4))))
    names: list[str] = []

    def init(name: str) -> Init:
        names.append(name)
        return Init("ones") if name.endswith("bias") else NORMAL

    for module in (plain, wrapped):
        init_parameters_(module, 3, init)
    assert names == ["layer.weight", "layer.bias"] * 2
    for left, right in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(plain.layer.bias, torch.ones(4))
    assert torch.equal(plain.layer.weight, _full("layer.weight", 4, 4))


def test_a_parameter_without_memory_is_refused() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(AssertionError, match=r"weight has no memory"):
        init_parameters_(module, 0, lambda _: NORMAL)


@pytest.fixture
def restored_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.usefixtures("restored_threads")
def test_values_do_not_depend_on_the_number_of_threads() -> None:
    weights = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        module = nn.Sequential(*(nn.Linear(1021, 300, bias=False) for _ in range(6)))
        init_parameters_(module, 3, lambda _: NORMAL)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="the CPU has only one instruction set")
def test_values_do_not_depend_on_the_instruction_set() -> None:
    code = f"from {Path(__file__).stem} import _digest, _full; print(_digest(_full('w', 1000, 100)))"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": os.pathsep.join(sys.path)}
    plain = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True
    )
    assert plain.stdout.strip() == _digest(_full("w", 1000, 100)), plain.stderr


@contextmanager
def _rank(rank: int, degrees: tuple[int, ...]) -> Iterator[DeviceMesh]:
    world_size = torch.Size(degrees).numel()
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        # DTensor's caches compare meshes by shape and names, so the names must differ by rank.
        names = (f"dp_{rank}", f"tp_{rank}")[: len(degrees)]
        yield init_device_mesh("cpu", degrees, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


CASES: list[tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = [
    ((4,), (Replicate(),), (6, 5)),
    ((4,), (Shard(0),), (8, 5)),
    ((4,), (Shard(0),), (6, 5)),  # uneven: the shard of the last rank is empty
    ((4,), (Shard(0),), (3,)),
    ((3,), (Shard(1),), (4, 7)),
    ((2, 2), (Shard(0), Shard(0)), (9, 4)),
    ((2, 2), (Shard(0), Shard(1)), (7, 5)),
    ((2, 2), (Replicate(), Shard(1)), (7, 6)),
    ((2, 3), (Shard(1), Shard(0)), (1100, 1000)),
]


@pytest.mark.parametrize(("degrees", "placements", "shape"), CASES, ids=str)
def test_any_placement(degrees: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]) -> None:
    reference = nn.ParameterDict({"w": nn.Parameter(torch.empty(shape))})
    init_parameters_(reference, 3, lambda _: NORMAL)
    for rank in range(torch.Size(degrees).numel()):
        with _rank(rank, degrees) as mesh:
            expected = distribute_tensor(reference["w"].detach(), mesh, placements, src_data_rank=None)
            empty = torch.full_like(expected, float("nan"))
            module = nn.ParameterDict({"w": nn.Parameter(empty)})
            init_parameters_(module, 3, lambda _: NORMAL)
            assert torch.equal(module["w"].detach().to_local(), expected.to_local()), f"rank {rank}"


class _Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(12, hidden, bias=False)
        self.down = nn.Linear(hidden, 10, bias=False)


@pytest.mark.parametrize("hidden", [16, 20])
def test_fully_shard_over_tensor_parallelism(hidden: int) -> None:
    """Both axes shard `up` along dim 0 (a strided shard); hidden = 20 is cut into 2, then unevenly into 4."""
    reference = _Pair(hidden)
    init_parameters_(reference, 3, lambda _: NORMAL)
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    seen = {name: torch.zeros_like(parameter) for name, parameter in expected.items()}
    for rank in range(8):
        with _rank(rank, (4, 2)) as mesh:
            with torch.device("meta"):
                model = _Pair(hidden)
            parallelize_module(model, mesh[f"tp_{rank}"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh[f"dp_{rank}"])
            model.to_empty(device="cpu")
            init_parameters_(model, 3, lambda _: NORMAL)
            tp_rank, dp_rank = rank % 2, rank // 2
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                dim = 0 if name == "up.weight" else 1
                part = expected[name].chunk(2, dim)[tp_rank].chunk(4, 0)
                rows = part[dp_rank] if dp_rank < len(part) else part[0][:0]
                assert torch.equal(parameter.detach().to_local(), rows), f"rank {rank}, {name}"
                covered = seen[name].chunk(2, dim)[tp_rank].chunk(4, 0)
                if dp_rank < len(covered):
                    covered[dp_rank].add_(1)
    for name, count in seen.items():
        assert torch.equal(count, torch.ones_like(count)), name
