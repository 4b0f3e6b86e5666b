"""scripts/gpu_check.py: it runs to its end on a CPU, and its checks find planted bugs."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_checks import benchmark, facts, kernels, layouts, plain, profiling, steps, syncs
from gpu_checks.processes import Call, Send, run_calls
from gpu_checks.promises import PROMISES, promise_of
from gpu_checks.rows import Emit, Found, Row, SkippedError, markdown, run_case
from gpu_checks.workload import Setup, one_rank

from tests.distributed.program import REPOSITORY
from titanlite.models import experts, head
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import GatedOptimizer
from titanlite.runtime.plugins import is_registered
from titanlite.trainer import Trainer


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """The small size on a CPU, in a process group of one rank."""
    setup = Setup("cpu", True, str(tmp_path))
    with one_rank(setup):
        yield setup


def failure(case: Callable[[], Found]) -> str:
    """The text of the failed row of a case."""
    row = run_case("check", "case", case)
    assert row.status == "failed", row
    return row.text


ALL_PARTS = [part.name for stage in gpu_check.STAGES for part in stage.parts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts", [pytest.param(["facts", "kernels"], id="some"), pytest.param(ALL_PARTS, id="all", marks=pytest.mark.soak)]
)
def test_what_a_cpu_can_run_passes(
    parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, to share the fork server, whose imports take longer than most checks."""
    chosen = [[part for part in stage.parts if part.name in parts] for stage in gpu_check.STAGES]
    stages = [replace(stage, parts=tuple(some)) for stage, some in zip(gpu_check.STAGES, chosen, strict=True) if some]
    monkeypatch.setattr(gpu_check, "STAGES", stages)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--tiny", "--device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    output = capsys.readouterr().out
    assert ended.value.code is False, output
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    by_check: dict[str, set[str]] = {}
    for row in found["rows"]:
        by_check.setdefault(row["check"][0], set()).add(row["status"])
        if row["status"] == "skipped":
            assert row["text"]
    assert by_check.keys() == {part.check[0] for stage in stages for part in stage.parts}
    assert all("passed" in by_check[check] for check in "234567" if check in by_check)
    text = (tmp_path / "gpu_check.md").read_text()
    summary, *tables = text.split("\n## ")
    assert summary.strip() in output
    assert [table[0] for table in tables] == sorted(by_check)
    assert len(summary.splitlines()) < 50, "a page"
    promises = {promise_of(row["check"], row["name"]).text for row in found["rows"]}
    assert all(summary.count(f"| {promise} |") == 1 for promise in promises)
    if parts == ALL_PARTS:
        of_crashes = {"steps have the gradients of float64"}
        assert {promise.text for promise in PROMISES} - promises == of_crashes
    if parts == ALL_PARTS:
        assert sorted(by_check) == list("12345678")
        assert "| compiled, documents, 2 layers |" in text


def test_a_kernel_without_its_mask(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _mask: object) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=True)

    monkeypatch.setattr(kernels, "attend", attend)
    kernel = kernels.kernels(setup)["attention, causal"]
    assert "result off by" in failure(lambda: kernels.compare(kernel, torch.bfloat16, setup.device))


def test_a_kernel_without_its_options(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda q, k, v, mask, *_options: attend(q, k, v, mask))
    texts = {"window": "off by", "capped": "off by", "sinks": "appears to not have been used"}
    for name, text in texts.items():
        kernel = kernels.kernels(setup)[f"attention, {name}"]
        assert text in failure(partial(kernels.compare, kernel, torch.bfloat16, setup.device))


def test_a_product_in_lower_precision(setup: Setup) -> None:
    """As with TF32: inputs are rounded to fewer digits than float32 has."""
    kernel = kernels.kernels(setup)["product"]
    rounded = kernels.Kernel(lambda x, w: x.bfloat16().float() @ w.T, kernel.expect, kernel.shapes, kernel.roundings)
    assert "off by" in failure(lambda: kernels.compare(rounded, torch.float32, setup.device))


def test_rows_of_the_wrong_expert(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = kernels.grouped_feed_forward
    monkeypatch.setattr(
        kernels,
        "grouped_feed_forward",
        lambda rows, counts, *weights, **options: grouped(rows, counts.roll(1), *weights, **options),
    )
    kernel = kernels.kernels(setup)["experts"]
    assert "result off by" in failure(lambda: kernels.compare(kernel, torch.bfloat16, setup.device))
    assert "the gradient of w1 is not 0" in failure(lambda: kernels.unused_experts(setup))


def test_an_optimizer_that_forgets_to_skip(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    step_if = GatedOptimizer.step_if
    monkeypatch.setattr(GatedOptimizer, "step_if", lambda self, ok: step_if(self, torch.ones_like(ok)))
    settings = steps.settings(setup, "llama3", "float32")
    assert "the skipped step changed" in failure(lambda: steps.skipped_step(setup, settings))


def test_a_microbatch_that_is_left_out(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = Trainer.train_step
    monkeypatch.setattr(Trainer, "train_step", lambda self, batches: train_step(self, batches[:1]))
    assert "off by" in failure(lambda: steps.compare(setup, "llama3", "bfloat16", False, []))


def test_repeats_that_differ(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step, calls = steps.take_step, []

    def noisy(trainer: Trainer, batches: Any) -> Any:
        calls.append(1)
        stats = take_step(trainer, batches)
        if len(calls) == 6:
            with torch.no_grad():
                next(trainer.model_parts[0].parameters()).mul_(1 + 2**-20)
        return stats

    monkeypatch.setattr(steps, "take_step", noisy)
    settings = steps.settings(setup, "llama3", "float32")
    assert "different tensors: ['tok_embeddings.weight']" in failure(lambda: steps.repeats(setup, settings, False))


def test_a_host_read_in_a_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    count = Trainer.count_valid_tokens

    def reads(self: Trainer, batches: Any) -> torch.Tensor:
        found = count(self, batches)
        assert found.item() >= 0
        return found

    monkeypatch.setattr(Trainer, "count_valid_tokens", reads)
    assert "_local_scalar_dense" in failure(lambda: syncs.no_host_read(setup, [], False))


@pytest.mark.slow
def test_sums_of_gradients_that_depend_on_the_mesh(tmp_path: Path) -> None:
    """Those of two ranks without the key."""
    setup = Setup("cpu", True, str(tmp_path))
    alone = layouts.run_ranks(setup, layouts.rank_bits, "gloo", [*layouts.UNIT], ranks=1)
    plain = [*layouts.BITS["dp_shard 2"], "training.bit_equal=false"]
    assert "weights differ, such as" in failure(lambda: layouts.same_bits(setup, "gloo", plain, alone))


def test_answers_that_are_not_masked(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the reference only: prompts that count change the gradients by more than bfloat16 does."""
    reference = steps.reference

    def without_mask(config: Any, batch: Any) -> Any:
        labels = torch.where(batch.labels < 0, batch.tokens.roll(-1, 1), batch.labels)
        return reference(config, batch._replace(labels=labels))

    monkeypatch.setattr(steps, "reference", without_mask)
    assert "off by" in failure(lambda: steps.compare(setup, "llama3", "bfloat16", True, answers=True))


def test_an_expert_that_is_chosen_by_no_position(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = experts.feed_forward
    rolled = lambda rows, counts, *weights, **options: choose(rows, counts.roll(1), *weights, **options)  # noqa: E731
    monkeypatch.setattr(experts, "feed_forward", rolled)
    assert "off by" in failure(lambda: steps.compare(setup, "olmoe", "float64", True))


def test_every_family_has_a_step_and_every_promise_a_file() -> None:
    assert {*steps.FAMILIES, *steps.OTHERS} == {name for name in FAMILIES if not is_registered(FAMILIES, name)}
    assert [promise.file for promise in PROMISES if not (REPOSITORY / promise.file).is_file()] == []


def test_a_product_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_AtOnce", head._Recomputed)
    setup = Setup("cpu", True, str(tmp_path))
    assert "FLOPs, not" in failure(lambda: layouts.simulated_products(setup))


def test_a_hand_written_loop_that_computes_something_else(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "rotate", lambda x, _cos, _sin: x)
    assert "gradient of" in failure(lambda: benchmark.same_numbers(setup))


def test_a_slow_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "matmul_flops", lambda _setup: 1e14)
    monkeypatch.setattr(facts, "device_peak_flops", lambda _device, _dtype: 989.5e12)
    assert "10% of the published peak" in failure(lambda: facts.product(Setup("cpu", False, str(tmp_path))))


def crash(_send: Send) -> None:
    os._exit(3)


def hang(_send: Send) -> None:
    time.sleep(600)


def fail(_send: Send) -> None:
    raise ValueError("broken")


def succeed(send: Send) -> None:
    send(os.environ["OWN"])


@pytest.mark.slow
def test_crashes_and_hangs_are_results() -> None:
    calls = [Call(crash), Call(fail), Call(succeed, environment={"OWN": "1"})]
    crashed, failed, succeeded = run_calls(calls, "cpu", 60.0, at_once=2)
    (hung,) = run_calls([Call(hang)], "cpu", 1.0)
    assert crashed.failure == "the process ended with code 3"
    assert hung.failure == "did not end within 1 s"
    assert failed.failure is not None
    assert failed.failure.endswith("ValueError: broken\n")
    assert (succeeded.failure, succeeded.sent) == (None, ["1"])


def crashing_part(emit: Emit, _setup: Setup) -> None:
    emit(Row("1 facts", "first", "passed", "fine"))
    os._exit(3)


def test_a_crash_of_a_part_is_a_failed_row(tmp_path: Path) -> None:
    stage = gpu_check.Stage(60.0, (gpu_check.Part("1 facts", "facts", crashing_part),))
    late = gpu_check.Stage(60.0, (gpu_check.Part("2 kernels", "kernels", crashing_part),))
    setup = Setup("cpu", True, str(tmp_path))
    rows, _ = gpu_check.run_stage(stage, setup, time.monotonic() + 60)
    rows += gpu_check.run_stage(late, setup, time.monotonic() + 1)[0]
    assert [(row.name, row.status) for row in rows] == [
        ("first", "passed"),
        ("facts", "failed"),
        ("kernels", "skipped"),
    ]
    text = markdown(rows, {"device": "cpu"})
    assert "\n1 failed, 1 passed, 1 skipped.\n" in text
    look = "Look at `titanlite/runtime/peak_flops.py`."
    assert f"**failed: 1 facts: facts**: stopped after 1 rows: the process ended with code 3. {look}" in text


def test_a_case_without_what_it_needs_is_skipped() -> None:
    def needs() -> Found:
        raise SkippedError("needs CUDA")

    assert run_case("check", "case", needs) == Row("check", "case", "skipped", "needs CUDA")


def test_idle_share_counts_overlapping_work_once() -> None:
    assert profiling.idle_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 10.0)]) == pytest.approx(0.3)


def test_device_work_of_a_trace() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("kernel", "gemm", 5.0, 2.0),
        event("gpu_user_annotation", "step", 0.0, 100.0),
        event("gpu_memcpy", "copy", 1.0, 1.0),
        {"ph": "f", "cat": "ac2g", "name": "flow", "ts": 5.0},
    ]
    assert profiling.device_work(events, profiling.KINDS["cuda"]) == [("copy", (1.0, 2.0)), ("gemm", (5.0, 7.0))]
    nested = [event("cpu_op", "linear", 0.0, 5.0), event("cpu_op", "mm", 1.0, 2.0), event("cpu_op", "add", 5.0, 1.0)]
    names = [name for name, _ in profiling.device_work(nested, profiling.KINDS["cpu"])]
    assert names == ["linear", "add"]


def test_the_fit_extends_both_sizes(tmp_path: Path) -> None:
    sizes = [
        benchmark.Measured(layers, 1.0 + 0.5 * layers, (0.0, 0.0, 0.0), 0.0, 0, 10.0 * layers, 100)
        for layers in (6, 12)
    ]
    found = benchmark.fit(Setup("cpu", False, str(tmp_path)), sizes)
    assert found.values["tokens/s"] == pytest.approx(100 / 17.0)
    assert found.values["TFLOP/s"] == pytest.approx(320 / 17.0 / 1e12)
    assert found.values["MFU"] == "unknown peak"


def test_a_cpu_takes_the_small_size_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--out", "unused"])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert "--device cpu needs --tiny" in capsys.readouterr().err
