"""GRID.json: who writes which block, which blocks a part of a tensor needs, and hostile tables."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from titanlite.checkpoint.grid import LEAST_BLOCK, Grid, Tables, grid_content
from titanlite.checkpoint.grid_plan import MOST_WRITERS, Box, Described, GridPlan, Written, described, packed_places
from titanlite.checkpoint.manifest import InvalidCheckpointError


def part(shape: tuple[int, ...], counts: tuple[int, ...], place: tuple[int, ...]) -> Box:
    """The part of a tensor at a place of a grid of `counts` blocks, cut as DTensor cuts."""
    offset, sizes = [], []
    for size, count, index in zip(shape, counts, place, strict=True):
        chunk = -(-size // count)
        begin = min(size, chunk * index)
        offset.append(begin)
        sizes.append(min(size, begin + chunk) - begin)
    return shape, tuple(offset), tuple(sizes)


SHAPES = {"model/wide": (12, 7), "model/uneven": (5, 3), "model/row": (9,), "model/none": (0, 4), "model/scalar": ()}


def tensors_of(rank: int, shards: int, rows: int) -> list[tuple[str, str, Box]]:
    """The tensors of a rank of a mesh (replicas, shards, rows): the first dimension is cut by shards, the second one
    by rows."""
    shard, row = rank // rows % shards, rank % rows
    found = []
    for name, shape in SHAPES.items():
        counts, place = (shards, rows)[: len(shape)], (shard, row)[: len(shape)]
        found.append((name, "torch.float32", part(shape, counts, place)))
    return [*found, ("data/streams", "torch.int64", part((4, 3), (1, 1), (0, 0)))]


def written_by(plan: GridPlan, ranks: list[list[tuple[str, str, Box]]]) -> list[list[str]]:
    """The names that each rank writes; puts their places, one byte each."""
    found = []
    for rank, tensors in enumerate(ranks):
        bits = np.unpackbits(np.frombuffer(plan.share_of(rank), dtype=np.uint8), count=len(tensors))
        positions = [position for position, bit in enumerate(bits) if bit]
        if positions:
            rows = [(position, 10 * number, 10) for number, position in enumerate(positions)]
            plan.put(rank, Written(f"__{rank}_0.distcp", packed_places(rows)))
        found.append([tensors[position][0] for position in positions])
    return found


@pytest.mark.parametrize(("replicas", "shards", "rows"), [(1, 1, 1), (2, 3, 2), (3, 4, 1), (1, 13, 2)])
def test_each_element_is_written_once_and_found(replicas: int, shards: int, rows: int) -> None:
    ranks = [tensors_of(rank, shards, rows) for rank in range(replicas * shards * rows)]
    plan = GridPlan([described(tensors) for tensors in ranks])
    names = written_by(plan, ranks)
    boxes: dict[str, list[Box]] = {}
    for tensors, own in zip(ranks, names, strict=True):
        for name, _, box in tensors:
            boxes.setdefault(name, []).extend([box] * (name in own))
    for name, shape in {**SHAPES, "data/streams": (4, 3)}.items():
        assert len(boxes[name]) == len({*boxes[name]}), name
        elements = [
            element
            for _, offset, sizes in boxes[name]
            for element in product(*(range(begin, begin + size) for begin, size in zip(offset, sizes, strict=True)))
        ]
        assert sorted(elements) == sorted(product(*map(range, shape))), name
    grid = Grid(grid_content(plan.tables()))
    assert {name: tuple(tensor["shape"]) for name, tensor in grid.tensors.items()} == {**SHAPES, "data/streams": (4, 3)}
    for name, shape in SHAPES.items():
        for count in (1, 2, 5):
            for place in product(*(range(count) for _ in shape)):
                _, offset, sizes = part(shape, (count,) * len(shape), place)
                require_blocks(grid, name, offset, sizes, boxes[name])


def require_blocks(grid: Grid, name: str, offset: tuple[int, ...], sizes: tuple[int, ...], written: list[Box]) -> None:
    """The blocks of a part are the written boxes that have elements of it."""
    found = {(block.offset, block.sizes) for block in grid.blocks(name, offset, sizes)}
    expected = set()
    for _, begin, extent in written:
        ranges = zip(offset, sizes, begin, extent, strict=True)
        if all(max(a, c) < min(a + b, c + d) for a, b, c, d in ranges):
            expected.add((begin, extent))
    assert found == expected, (name, offset, sizes)


def test_replicas_share_the_work() -> None:
    tensors = [(f"model/{n}", "torch.float32", part((8, 2), (1, 1), (0, 0))) for n in range(96)]
    shares = written_by(GridPlan([described(tensors)] * 4), [tensors] * 4)
    assert [len(each) for each in shares] == [24] * 4
    plan = GridPlan([described(tensors)] * (2 * MOST_WRITERS))
    assert len([each for each in written_by(plan, [tensors] * (2 * MOST_WRITERS)) if each]) == MOST_WRITERS


def test_ranks_of_other_stages_have_other_tensors() -> None:
    """A tied tensor that two stages have is written once."""
    first = [("model/a", "torch.float32", part((4,), (2,), (n,))) for n in range(2)]
    tied = ("model/tied", "torch.float32", part((3,), (1,), (0,)))
    last = ("model/b", "torch.bfloat16", part((6,), (1,), (0,)))
    ranks = [[first[0], tied], [first[1], tied], [last, tied], [last, tied]]
    plan = GridPlan([described(tensors) for tensors in ranks])
    written = sorted(name for each in written_by(plan, ranks) for name in each)
    assert written == ["model/a", "model/a", "model/b", "model/tied"]
    grid = Grid(grid_content(plan.tables()))
    assert [str(grid.dtype(name)) for name in ("model/a", "model/b")] == ["torch.float32", "torch.bfloat16"]


@pytest.mark.parametrize(
    "boxes",
    [
        [((4, 4), (0, 0), (2, 4)), ((4, 4), (2, 0), (1, 4))],
        [((4, 4), (0, 0), (2, 4)), ((4, 4), (1, 0), (3, 4))],
        [((4, 4), (0, 0), (2, 2)), ((4, 4), (2, 2), (2, 2))],
        [((4, 4), (0, 0), (4, 4)), ((5, 4), (0, 0), (4, 4))],
        [((4, 4), (4, 0), (0, 4)), ((4, 4), (4, 0), (0, 4))],
        [((4, 4), (2, 0), (2, 4)), ((4, 4), (2, 0), (2, 4))],
    ],
)
def test_what_is_not_a_grid_is_refused(boxes: list[Box]) -> None:
    with pytest.raises(ValueError, match="are not the blocks of a grid"):
        GridPlan([described([("a", "torch.float32", box)]) for box in boxes])


def test_work_and_metadata_grow_with_distinct_parts_only() -> None:
    """Not with tensors times ranks: the lists of tensors and the tables are shared."""
    sizes = {}
    for shards in (16, 64):
        box = [part((128, 8), (shards, 1), (rank, 0)) for rank in range(shards)]
        ranks = [[(f"model/{n}", "torch.float32", box[rank]) for n in range(200)] for rank in range(shards)]
        sent = [described(tensors) for tensors in ranks]
        plan = GridPlan(sent)
        written_by(plan, ranks)
        tables = plan.tables()
        assert (len({each.tensors for each in sent}), {len(each.boxes) for each in sent}) == (1, {1})
        assert [len(tables[key]) for key in ("cuts", "writers", "places")] == [1, 1, 1]  # type: ignore[literal-required]
        sizes[shards] = len(grid_content(tables))
    assert sizes[64] < sizes[16] + 48 * 64


def tables() -> Tables:
    ranks = [tensors_of(rank, 2, 2) for rank in range(4)]
    plan = GridPlan([described(tensors) for tensors in ranks])
    written_by(plan, ranks)
    return plan.tables()


def _set(key: str, *path: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        inner = content[key]
        for each in path[:-1]:
            inner = inner[each]
        inner[path[-1]] = to

    return change


HOSTILE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a negative size": (_set("tensors", 0, "shape", 0, to=-1), "greater than or equal to 0"),
    "a size of 2^63": (_set("tensors", 0, "shape", 0, to=2**63), "less than"),
    "a float as size": (_set("tensors", 0, "shape", 0, to=1.5), "valid integer"),
    "65 dimensions": (_set("tensors", 0, "shape", to=[1] * 65), "at most 64"),
    "a smaller shape": (_set("tensors", 0, "shape", 0, to=2), "outside of 'model/wide'"),
    "another number of dimensions": (_set("tensors", 0, "shape", to=[12]), "outside of 'model/wide'"),
    "a pickle as dtype": (_set("tensors", 0, "dtype", to="os.system"), "of a dtype"),
    "a name twice": (_set("tensors", 1, "name", to="model/wide"), "twice"),
    "unknown cuts": (_set("tensors", 0, "cuts", to=10**12), "no blocks of 'model/wide'"),
    "unknown writers": (_set("tensors", 0, "writers", to=10**12), "no blocks of 'model/wide'"),
    "writers of another grid": (_set("writers", 0, to=[0]), "lacks writers"),
    "a file with two blocks": (_set("writers", 0, 1, to=0), "two blocks of a tensor in one file"),
    "a writer without a file": (_set("writers", 0, 0, to=99), "but not its file"),
    "cuts that fall": (_set("cuts", 0, 0, to=[0, 6, 3]), "overlap or leave a gap"),
    "cuts without the beginning": (_set("cuts", 0, 0, 0, to=1), "overlap or leave a gap"),
    "no cuts": (_set("cuts", 0, 0, to=[]), "at least 1"),
    "a file elsewhere": (_set("files", 0, "name", to="../../.bashrc"), "outside the checkpoint"),
    "an absolute file": (_set("files", 0, "name", to="/etc/passwd"), "outside the checkpoint"),
    "a file without places": (_set("files", 0, "places", to=7000), "has no places"),
    "a place before the file": (_set("places", 0, 0, 1, to=-5), "greater than or equal to 0"),
    "no tensors": (lambda content: content.pop("tensors"), "Field required"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tables_are_refused(name: str) -> None:
    change, reason = HOSTILE[name]
    content = json.loads(grid_content(tables()))
    change(content)
    with pytest.raises(InvalidCheckpointError, match=reason):
        Grid(json.dumps(content).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\x80\x04.", b"[" * 100_000, b'{"tensors": 1e999}'])
def test_other_content_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match=r"GRID\.json cannot be read"):
        Grid(content)


def test_a_block_without_a_place_is_damage() -> None:
    content = json.loads(grid_content(tables()))
    content["places"] = [[] for _ in content["places"]]
    grid = Grid(json.dumps(content).encode())
    with pytest.raises(InvalidCheckpointError, match=r"has no place of 'model/wide' in '__0_0\.distcp'"):
        [*grid.blocks("model/wide", (0, 0), (1, 1))]


def test_tensors_that_are_larger_than_the_files_are_refused() -> None:
    content = tables()
    grid = Grid(grid_content(content))
    blocks = sum(len(content["writers"][tensor["writers"]]) for tensor in content["tensors"])
    grid.require_bytes(blocks * LEAST_BLOCK)
    with pytest.raises(InvalidCheckpointError, match=f"has {blocks} blocks, too many for files of 10 bytes"):
        grid.require_bytes(10)
    content["tensors"][0]["shape"] = [2**40, 7]
    stated = 4 * (2**40 * 7 + 5 * 3 + 9 + 1) + 8 * 12
    with pytest.raises(InvalidCheckpointError, match=f"has tensors of {stated:,} bytes, but its files have 1,000,000"):
        Grid(grid_content(content)).require_bytes(10**6)
    content["tensors"][0]["shape"] = [2**62, 2**62]
    with pytest.raises(
        InvalidCheckpointError, match=r"has tensors of more than 2\^63 bytes, but its files have 1,000,000"
    ):
        Grid(grid_content(content)).require_bytes(10**6)


def test_a_described_rank_is_small() -> None:
    rows = [
        (f"optimizer/layers.{n}.feed_forward.w1.weight/exp_avg", "torch.float32", part((64, 8), (4, 1), (1, 0)))
        for n in range(3000)
    ]
    sent = described(rows)
    assert isinstance(sent, Described)
    assert len(sent.tensors) < 20 * len(rows)
    assert len(sent.boxes) == 1
