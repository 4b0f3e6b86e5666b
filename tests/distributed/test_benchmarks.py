"""The benchmarks: that each starts, and what step, memory, context, experts and optimizers write, at a tiny
size."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import context, experts, memory, optimizers, products, step
from benchmarks.__main__ import benchmarks, main
from benchmarks.measuring import case, configuration
from tests.pool import run_ranks as run_pooled_ranks
from titanlite.assembly.model import full_parameters
from titanlite.models import linear
from titanlite.planning.estimate import estimate
from titanlite.ranks.launch import run_ranks
from titanlite.runtime.errors import UsageError
from titanlite.runtime.torch_internals import local_part

TINY = ("model.n_layers=2", "model.dim=32", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64")
TINY += ("model.vocab_size=512", "model.max_seq_len=1024")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    main()


def tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The tables of a report. Checks its facts of the machine."""
    found = json.loads(file.read_text())
    assert set(found["machine"]) == {"cpu", "cores", "torch", "python", "date", "command"}
    return dict(found["tables"])


def test_all_benchmarks_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch)
    listed = capsys.readouterr().out
    files = {path.stem for path in Path(step.__file__).parent.glob("[!_]*.py")} - {"measuring"}
    assert set(benchmarks()) == files
    for name, line in benchmarks().items():
        assert f"  {name} " in listed
        assert line.endswith(".")
        assert line in listed


@pytest.mark.parametrize("name", benchmarks())
def test_a_benchmark_lists_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, name, "--help")
    assert "--json" in capsys.readouterr().out


def test_an_unknown_benchmark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"unknown benchmark 'stop': choose one of .*step"):
        run(monkeypatch, "stop")
    with pytest.raises(UsageError, match="--rounds 0: set a positive number"):
        run(monkeypatch, "step", "--rounds", "0")
    with pytest.raises(UsageError, match="accumulation 3 does not divide the 8 sequences"):
        case("dp_shard", 3)


@pytest.mark.soak  # default suite: test_kernels_are_all_products_of_a_step
def test_report_of_step(tmp_path: Path) -> None:
    step.main(("dp_shard",), ("bfloat16",), (1,), rounds=2, steps=1, settings=TINY, json=tmp_path)
    times, shares = tables(tmp_path / "step.json").values()
    (row,), (profile,) = times, shares
    assert row["bare loop"] == "FSDP2"
    assert len(row["trainer / bare"]) == 2
    assert all(share > 0 for share in row["kernels / step"])  # timed apart, so a busy machine may give more than 1
    assert set(step.CAUSES) < set(profile)
    assert all(0 <= profile[cause] < 1 for cause in step.CAUSES)
    assert sum(profile[cause] for cause in step.CAUSES) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("single", marks=pytest.mark.slow),
        *(pytest.param(layout, marks=pytest.mark.soak) for layout in ("pp", "tp")),
    ],
)
def test_kernels_are_all_products_of_a_step(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "single":
        monkeypatch.setattr(linear, "LEAST_PRODUCTS", 1)  # by oneDNN
    ranks, settings = case(layout, 1, TINY)
    found = run_ranks(step.compare, ranks, settings, "", 1, 1, 1)
    planned = estimate(configuration(settings, ranks), ranks, device_type="cpu").ranks
    for rank, result in enumerate(found):
        plan = planned[rank if layout == "pp" else 0]
        assert result["kernel_flops"] == plan.flops + plan.recomputed_flops


@pytest.mark.skipif(not linear.HAS_ONEDNN, reason="torch does not multiply by oneDNN here")
@pytest.mark.slow
def test_report_of_products(tmp_path: Path) -> None:
    least = linear.LEAST_PRODUCTS
    products.main(rounds=2, calls=1, json=tmp_path)
    (rows,) = tables(tmp_path / "products.json").values()
    assert [row["positions, inputs, outputs"] for row in rows[:2]] == ["64, 256, 256", "512, 256, 768"]
    assert all(min(row["weight gradient, oneDNN / torch"]) > 0 for row in rows)
    assert least == linear.LEAST_PRODUCTS


@pytest.mark.soak
def test_report_of_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(("single",), (512,), (64, 1024), (), rounds=1, settings=TINY, json=tmp_path)
    ((short, long),) = tables(tmp_path / "memory.json").values()
    assert set(short) == {"layout", "vocabulary", "sequence", "peak (MiB)", "plan (MiB)", "plan / peak"}
    more, planned = (long["peak (MiB)"][0] - short["peak (MiB)"][0]), long["plan (MiB)"] - short["plan (MiB)"]
    assert 0.5 < more / planned < 2
    assert "| single | 512 | 1,024 | " in capsys.readouterr().out


@pytest.mark.soak
def test_report_of_growth(tmp_path: Path) -> None:
    memory.main((), axes=("ranks",), rounds=2, steps=1, settings=TINY, json=tmp_path)
    (rows,) = tables(tmp_path / "memory.json").values()
    assert [(row["axis"], row["size"]) for row in rows] == [("ranks", 1), ("ranks", 2)]
    for row in rows:
        assert set(row) == {"axis", "size", "tokens/s", "peak (MiB)", "plan (MiB)"}
        assert len(row["tokens/s"]) == len(row["peak (MiB)"]) == 2


@pytest.mark.soak
def test_report_of_context(tmp_path: Path) -> None:
    tiny = ("model.n_layers=1", "model.dim=64", "model.ffn_dim=64", "model.vocab_size=512", "model.max_seq_len=64")
    context.main(64, (32,), rounds=1, steps=1, settings=tiny, json=tmp_path)
    peaks, speeds = tables(tmp_path / "context.json").values()
    assert [row["layout"] for row in peaks] == ["cp 1", "cp 2", "cp 2, gather", "cp 4", "tp 2"]
    assert peaks[0]["cp 1 / this"] == 1.0
    assert [row["relative to dp_shard 2"] for row in speeds[:1]] == [[1.0]]
    assert all(tokens > 0 for row in speeds for tokens in row["tokens/s"])


@pytest.mark.soak
def test_report_of_experts(tmp_path: Path) -> None:
    experts.main(((4, 16, 2),), dim=32, tokens=64, rounds=2, steps=1, json=tmp_path)
    layers, steps = tables(tmp_path / "experts.json").values()
    assert [len(row["CPU (ms)"]) for row in layers] == [2] * 7
    assert layers[0]["time / titanlite"] == layers[-1]["time / dense"] == [1.0, 1.0]
    assert [row["layout"] for row in steps] == ["dp_shard 2, ep 1", "dp_shard 2, ep 2"]
    for row in steps:
        assert set(row) == {"experts", "layout", "step (ms)", "step / ep 1", "CPU of both ranks / ep 1"}
        assert len(row["step (ms)"]) == len(row["CPU of both ranks / ep 1"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("n_experts", [8, 64])
def test_the_compared_layers_compute_the_same(n_experts: int) -> None:
    """All mixtures; 64 experts on 16 positions leave some without positions."""
    layers = experts.build_layers((n_experts, 16, 2), 32, torch.float32, torch.device("cpu"))
    dense, *gpt_oss = (layers.pop(name) for name in ("dense", "titanlite, gpt-oss", "transformers, gpt-oss"))
    x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    for mixtures in (layers.values(), gpt_oss):
        returned = [layer(x) for layer in mixtures]
        results = [out[0] if isinstance(out, tuple) else out for out in returned]
        gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in results]
        for found in (results, gradients):
            assert found[0].norm() > 0
            assert all(torch.allclose(found[0], other, rtol=1e-5, atol=1e-4) for other in found[1:])
    assert dense(x).shape == x.shape


@pytest.mark.soak  # default suite: test_all_bytes_of_an_update_are_counted
def test_report_of_optimizers(tmp_path: Path) -> None:
    optimizers.main(("dp_shard=1", "dp_shard=2"), rounds=2, steps=1, settings=TINY, json=tmp_path)
    updates, savings = tables(tmp_path / "optimizers.json").values()
    assert [row["optimizer"] for row in updates] == 2 * list(optimizers.OPTIMIZERS)
    for row in updates:
        assert len(row["time (ms)"]) == len(row["CPU (ms)"]) == 2
        has_traffic = row["layout"] == "dp_shard=2" and "Muon" in row["optimizer"]
        assert (row["sent (MiB)"] > 0) is (row["received (MiB)"] > 0) is has_traffic
    assert [set(row) for row in savings] == [{"layout", "CPU"}, {"layout", "CPU", "sent", "received"}]


def traffic(layouts: list[str]) -> list[dict[str, Any]]:
    """Bytes of an update of this rank, by layout and optimizer."""
    return [optimizers.measure(optimizers.settings_of(layout, TINY)[1], 1, 1) for layout in layouts]  # type: ignore[arg-type]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_bytes_of_an_update_are_counted(ranks: int) -> None:
    """Muon sends each matrix to its owner and back, or from its owner to all replicas; the reference sends it to all
    other ranks of the shards."""
    layouts = [f"dp_shard={ranks}", f"dp_replicate={ranks}"]
    parameters, _ = full_parameters(configuration(optimizers.settings_of("dp_shard=1", TINY)[1], 1).model)
    shapes = [tensor.shape for name, tensor in parameters.items() if name.startswith("layers.") and tensor.dim() == 2]
    total = 4 * sum(shape.numel() for shape in shapes)
    found = run_pooled_ranks(traffic, ranks, layouts)
    sent, received = (
        {name: [sum(rank[layout][name][key] for rank in found) for layout in (0, 1)] for name in optimizers.OPTIMIZERS}
        for key in ("sent", "received")
    )
    assert sent == received
    assert sent["Muon"] == [2 * total * (ranks - 1) / ranks, total * (ranks - 1)]
    assert sent[optimizers.GATHERED] == [total * (ranks - 1), 0]
    assert all(sent[name] == [0, 0] for name in optimizers.OPTIMIZERS if "Muon" not in name)


def has_equal_weights(layouts: list[str]) -> list[bool]:
    """By layout: whether Muon and the reference without owners have made the same update, bit for bit."""
    found = []
    for layout in layouts:
        trainers = optimizers.build_trainers(optimizers.settings_of(layout, TINY)[1])  # type: ignore[arg-type]
        both = (trainers[name].model_parts[0].parameters() for name in ("Muon", optimizers.GATHERED))
        pairs = [(local_part(one), local_part(other)) for one, other in zip(*both, strict=True)]
        found.append(all(torch.equal(one, other) for one, other in pairs))
    return found


@pytest.mark.soak
def test_the_reference_without_owners_makes_the_same_update() -> None:
    assert run_pooled_ranks(has_equal_weights, 2, ["dp_shard=2", "dp_replicate=2", "tp=2"]) == [[True] * 3] * 2
