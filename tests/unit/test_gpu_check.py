"""scripts/gpu_check.py: it runs to its end on a CPU, and its checks find planted bugs."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_check
import gpu_packages
import pytest
import torch
from gpu_checks import attention, benchmark, facts, hangs, kernels, layouts, plain, profiling, rates, steps, syncs
from gpu_checks import training as training_checks
from gpu_checks.processes import Call, Outcome, Send, run_calls
from gpu_checks.promises import PROMISES, promise_of
from gpu_checks.report import PAGE, ROWS, Report
from gpu_checks.rows import Emit, Found, Row, SkippedError, WrongError, run_case
from gpu_checks.workload import Setup, fused_kernel, one_rank

from tests.distributed.program import REPOSITORY
from titanlite.checkpoint.state import HostCopy
from titanlite.generation import generate
from titanlite.metrics.meter import Meter
from titanlite.models import attention as models_attention
from titanlite.models import experts, head
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import GatedOptimizer
from titanlite.parallel import recompute
from titanlite.runtime.plugins import is_registered
from titanlite.runtime.torch_internals import compiled_graphs, reset_compiler, strict_compiler
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


ALL_PARTS = [part.name for stage in (*gpu_check.STAGES, gpu_check.LAYOUTS) for part in stage.parts]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / ROWS).read_text().splitlines())
    return [row for row in found if "status" in row]


def number(row: Mapping[str, Any]) -> str:
    """Of the check of a row."""
    return str(row["check"]).partition(" ")[0]


SOME = "facts,kernels,attention 3 of 3,compiled steps of llama3"


@pytest.mark.slow
@pytest.mark.parametrize("only", [pytest.param(SOME, id="some"), pytest.param("", id="all", marks=pytest.mark.soak)])
def test_what_a_cpu_can_run_passes(
    only: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, to share the fork server, whose imports take longer than most checks."""
    arguments = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--only", only]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    output = capsys.readouterr().out
    assert ended.value.code is False, output
    rows = read_rows(tmp_path)
    by_check: dict[str, set[str]] = {}
    for row in rows:
        by_check.setdefault(number(row), set()).add(row["status"])
        assert row["text"]
    stages = gpu_check.chosen(gpu_check.ordered("cpu", 0), only)
    assert by_check.keys() == {part.check.partition(" ")[0] for stage in stages for part in stage.parts}
    assert all("passed" in statuses for check, statuses in by_check.items() if check not in ("8", "11"))
    text = (tmp_path / PAGE).read_text()
    summary, *tables = text.split("\n## ")
    assert summary.strip() in output
    assert [table.partition(" ")[0] for table in tables] == sorted(by_check, key=int)
    assert len(summary.splitlines()) < 60, "a page"
    promises = {promise_of(row["check"], row["name"]).text for row in rows}
    assert all(summary.count(f"| {promise} |") == 1 for promise in promises)
    if not only:
        of_crashes = {"steps have the gradients of float64"}
        assert {promise.text for promise in PROMISES} - promises == of_crashes
        assert sorted(by_check, key=int) == [str(check) for check in range(1, 13)]
        assert "| compiled, documents, 2 layers |" in text


def test_a_kernel_without_its_mask(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setattr(attention, "attend", attend)
    case = partial(attention.exact_and_fused, setup, attention.Form(), torch.bfloat16)
    assert "result off by" in failure(case)


def test_a_kernel_without_its_options(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend
    monkeypatch.setattr(attention, "attend", lambda q, k, v, mask, *_options: attend(q, k, v, mask))
    texts = {"window": "off by", "capped": "off by", "sinks": "appears to not have been used"}
    for name, text in texts.items():
        case = partial(attention.exact_and_fused, setup, attention.forms()[name], torch.bfloat16)
        assert text in failure(case)


class OnDevice(Setup):
    """The checks take the CPU for a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def on_device(tmp_path: Path) -> Setup:
    return OnDevice("cuda", True, str(tmp_path))


def test_attention_that_is_not_compiled_once_or_keeps_all_scores(
    on_device: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, no form of attention is FlexAttention."""
    monkeypatch.setattr(attention, "peak_bytes", lambda _run: 1)
    monkeypatch.setattr(models_attention, "mask_form", lambda *_: "scores")
    of = {name: partial(attention.exact_and_fused, on_device, form, torch.bfloat16) for name, form in FORMS.items()}
    assert "0 graphs, not 2, and 0 more" in failure(of["documents"])
    assert run_case("9 attention", "causal", of["causal"]).status == "passed"
    monkeypatch.setattr(attention, "peak_bytes", lambda _run: 2**22)
    assert "not fused: 4 MiB, and all scores take 3" in failure(of["causal"])
    with pytest.raises(WrongError, match="and 1 more for other documents"):
        attention.require_once(2, 1, 2)


FORMS = attention.forms()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["documents", "sinks, window"])
def test_graphs_of_flex_attention(name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a GPU is expected to compile, and none for other documents; traced on a CPU, forward only."""
    traced = cache(partial(torch.compile, dynamic=False, backend="eager"))
    for compiled in ("_compiled", "_compiled_as_operation"):
        monkeypatch.setattr(models_attention, compiled, traced)
    monkeypatch.setattr(models_attention, "mask_form", lambda *_: "blocks")
    monkeypatch.setattr(models_attention, "attention_dtype", lambda _device, dtype: dtype)
    models_attention._kept_causal_blocks.cache_clear()
    reset_compiler()
    before, found = compiled_graphs(), []
    try:
        with strict_compiler(), torch.no_grad():
            for shift in (0, 1):
                made = attention.kernel(setup, FORMS[name], shift=shift)
                inputs = [torch.randn(shape) for shape in made.shapes]
                expected = made.expect(*(x.double() for x in inputs))
                assert torch.allclose(made.run(*inputs).double(), expected, atol=1e-5)
                found.append([now - then for now, then in zip(compiled_graphs(), before, strict=True)])
    finally:
        models_attention._kept_causal_blocks.cache_clear()
        reset_compiler()
    assert found == [[FORMS[name].graphs, 0]] * 2


def test_kernels_of_all_models(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(attention.shapes_of(name) for name in FAMILIES if not is_registered(FAMILIES, name))
    monkeypatch.setattr(models_attention, "mask_form", lambda *_: "blocks")
    assert attention.kernels_of(setup, "gpt_oss", False).text == "FlexAttention"
    assert {"FlexAttention", "flash_attention_for_cpu"} <= {
        *attention.kernels_of(setup, "gemma3", False).text.split(", ")
    }
    monkeypatch.setattr(models_attention, "attend_to_scores", plain_attention)
    text = failure(partial(attention.kernels_of, setup, "qwen3_next", True))
    assert text.startswith("16 and 2 heads, 256 and 256 wide, window 0, cap 0: not a fused kernel, but aten.bmm")
    monkeypatch.setattr(facts, "attend", plain_attention)
    assert "not a fused kernel" in failure(partial(facts.attention, setup, documents=False))
    monkeypatch.setattr(facts, "attend", lambda q, *_: q + 1)
    assert failure(partial(facts.attention, setup, documents=False)) == "no fused operation"
    assert fused_kernel(lambda: None, also=["FlexAttention"]) == "FlexAttention"


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, **_options: object) -> torch.Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return (q @ k.mT).softmax(-1) @ v


@pytest.mark.slow
def test_a_wait_in_what_follows_a_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Meter.update

    def reads(self: Meter, step: int, stats: Any, **options: Any) -> None:
        assert stats.mean_loss.item() > 0
        update(self, step, stats, **options)

    monkeypatch.setattr(Meter, "update", reads)
    assert "_local_scalar_dense" in failure(partial(training_checks.no_wait, setup, "llama3", ()))


def test_a_rank_that_is_not_wrapped(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_checks, "wrapped_modules", lambda _part: iter(()))
    assert failure(partial(training_checks.wrapped_rank, setup)) == "the model is not wrapped: nothing is tested"


class LateCopy(HostCopy):
    """Copies as late as a device may: when it must, before `hold`'s caller goes on."""

    waiting: Callable[[], None] | None = None

    def begin(self, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = self._places(local)

        def copied() -> None:
            for name, tensor in local.items():
                places[name].copy_(tensor)

        LateCopy.waiting = copied
        return places

    def hold(self) -> None:
        if LateCopy.waiting is not None:
            LateCopy.waiting()
            LateCopy.waiting = None

    def wait(self) -> None:
        LateCopy.hold(self)


def test_a_copy_of_a_save_that_has_the_next_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, step_if = LateCopy(pinned=False), GatedOptimizer.step_if

    def late(self: GatedOptimizer, ok: torch.Tensor) -> None:
        LateCopy.hold(copy)
        step_if(self, ok)

    class HeldLate(LateCopy):
        def hold(self) -> None:
            """Not before bit_equal has ended the step."""

    monkeypatch.setattr(training_checks, "HostCopy", HeldLate)
    monkeypatch.setattr(GatedOptimizer, "step_if", late)
    assert "copies have the next step, such as exact/" in failure(partial(training_checks.copies, setup))


def test_bit_equal_without_deterministic_kernels(on_device: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training_checks, "configure", lambda *_: SimpleNamespace(debug=SimpleNamespace(deterministic=False))
    )
    assert "does not set debug.deterministic" in failure(partial(training_checks.bits_twice, on_device, False))


def test_samples_that_differ_with_deterministic_algorithms(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1) if not torch.are_deterministic_algorithms_enabled() else x.flip(-1).cumsum(-1)

    monkeypatch.setattr(generate, "cumulative_sum", sums)
    with attention.deterministic_algorithms(True):
        assert "of 64 tokens differ from those of the host" in failure(partial(training_checks.samples, setup))


@pytest.mark.parametrize(
    ("found", "is_static", "text"),
    [
        ({"gap s": 5.1, "launches s": 4.9, "is static": False}, False, "launches hold Python's lock (bound 1 s)"),
        ({"gap s": 0.1, "launches s": 0.3, "is static": False}, False, "they did not wait, so nothing is tested"),
        ({"gap s": 0.1, "launches s": 4.9, "is static": True}, False, "has no effect"),
    ],
)
def test_threads_that_stop_beside_a_gpu_that_hangs(found: dict[str, Any], is_static: bool, text: str) -> None:
    assert text in failure(partial(hangs.judge_thread, found, is_static))


def test_launches_that_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process sends, with a device that is never busy."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(hangs, "occupied", lambda _seconds: None)
    found: list[dict[str, Any]] = []
    hangs.launch_beside(found.append, Setup("cpu", True, str(tmp_path)))
    assert "so nothing is tested" in failure(lambda: hangs.judge_thread(found[0], found[0]["is static"]))


def test_threads_that_run_beside_a_gpu_that_hangs() -> None:
    found = {"gap s": 0.1, "launches s": 4.9, "is static": False}
    assert not hangs.judge_thread(found, False).measured
    known = {"gap s": 4.9, "launches s": 4.9, "is static": True}
    assert hangs.judge_thread(known, True).measured


SEEN = {"numbers": True, "timeout s": hangs.TIMEOUT_S, "answer s": 0.01}
ABORTED = "the process ended with code -6"
TOLD = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2)"


@pytest.mark.parametrize(
    ("sent", "failed", "output", "files", "text"),
    [
        ([], ABORTED, "no driver", [], "the process failed before: the process ended with code -6; no driver"),
        ([SEEN | {"numbers": False}], ABORTED, TOLD, ["nccl-rank-0"], "the flight recorder has"),
        ([SEEN | {"timeout s": None}], ABORTED, TOLD, ["nccl-rank-0"], "the flight recorder has"),
        ([SEEN | {"answer s": 9.0}], ABORTED, TOLD, ["nccl-rank-0"], "the flight recorder answers after 9.0 s"),
        ([SEEN, {"value": 1.0}], None, "", [], "NCCL's timeout of 5 s did not end it"),
        ([SEEN], ABORTED, "Fatal Python error: Aborted", ["nccl-rank-0"], "without a word about the timeout"),
        ([SEEN], ABORTED, TOLD, ["output"], "no file nccl-rank-* but output"),
    ],
)
def test_a_timeout_of_nccl_that_is_not_as_promised(
    sent: list[Any], failed: str | None, output: str, files: list[str], text: str
) -> None:
    assert text in failure(lambda: hangs.judge_end(Outcome(sent, failed), 9.0, output, files))


def test_a_timeout_of_nccl() -> None:
    found = hangs.judge_end(Outcome([SEEN], ABORTED), 9.0, f"start\n{TOLD}\n", ["nccl-rank-0", "output"])
    assert found.text == f"{ABORTED} after 9 s with its start: {TOLD}"


def test_a_save_that_waits_for_the_device() -> None:
    until = [0.0]

    def busy(seconds: float) -> Callable[[], bool]:
        until[0] = time.perf_counter() + seconds / 20
        return lambda: time.perf_counter() < until[0]

    assert "beside an idle GPU" in rates.judge_save(lambda _name: None, busy, 2**30).text
    waiting = failure(lambda: rates.judge_save(lambda _: time.sleep(max(0.0, until[0] - time.perf_counter())), busy, 1))
    assert waiting.endswith("the save waited for the GPU")

    def fails(name: str) -> None:
        if name == "busy":
            raise OSError("no space")

    assert failure(lambda: rates.judge_save(fails, busy, 1)) == "OSError: no space"


def test_products_of_experts_that_are_computed_again(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tuple(each for each in recompute.SAVED_OPS if each is not torch.ops.aten._grouped_mm.default)
    monkeypatch.setattr(recompute, "SAVED_OPS", kept)
    assert failure(lambda: rates.expert_products(setup)) == "12 grouped products, not 9"


def test_chunks_that_are_slow() -> None:
    found = {"auto": 10.6, "2092": 10.5, "2048": 10.0}
    text = failure(lambda: rates.judge_chunks(found, is_bound=True))
    assert text.endswith("chunks of 2048 tokens are faster than automatic ones (bound 1.05 times)")
    assert rates.judge_chunks(found | {"auto": 10.4}, is_bound=True).values["auto ms"] == 10.4


def test_a_plan_that_is_wrong() -> None:
    assert layouts.require_planned(100, 107).endswith("(+7.0%; bounds -3% and +15%)")
    for planned in (96, 116):
        with pytest.raises(WrongError):
            layouts.require_planned(100, planned)


def test_a_slow_step_and_an_idle_device(tmp_path: Path) -> None:
    setup = Setup("cpu", False, str(tmp_path))
    loops: Any = {
        "hand-written loop": SimpleNamespace(step=lambda _mark: None),
        "compiled": SimpleNamespace(step=lambda _mark: time.sleep(0.001)),
    }
    assert "the goal of 0.97 is not reached" in failure(lambda: benchmark.alternate(setup, loops))
    work = [("gemm", (0.0, 4.0)), ("gemm", (5.0, 9.0))]
    assert failure(lambda: profiling.busy(setup, work)) == "11.1% of 3 steps in a row (bound 10%)"
    assert profiling.busy(setup, [*work, ("copy", (4.5, 5.0))]).values["share"] == pytest.approx(0.5 / 9)


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
    alone = layouts.run_ranks(setup, layouts.rank_bits, [*layouts.UNIT], ranks=1)
    plain = [*layouts.BITS["dp_shard 2"], "training.bit_equal=false"]
    assert "weights differ, such as" in failure(lambda: layouts.same_bits(setup, plain, alone))


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
    crashed, failed, succeeded = run_calls(calls, "cpu", 300.0, at_once=2)
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
    stage = gpu_check.Stage(300.0, (gpu_check.Part("1 facts", "facts", crashing_part),))
    late = gpu_check.Stage(60.0, (gpu_check.Part("10 training", "training", crashing_part),))
    setup = Setup("cpu", True, str(tmp_path))
    report = Report(tmp_path, {"device": "cpu"})
    gpu_check.run_stage(late, setup, time.monotonic() + 1, report)
    gpu_check.run_stage(stage, setup, time.monotonic() + 300, report)
    assert {(row["name"], row["status"]) for row in read_rows(tmp_path)} == {
        ("first", "passed"),
        ("facts", "failed"),
        ("training", "skipped"),
    }, "before the page is written"
    assert report.has_failed
    report.add_facts(seconds=1.0)
    assert report.write().startswith("# GPU check\n\ndevice cpu, seconds 1.0\n")
    text = (tmp_path / PAGE).read_text()
    assert "\n1 failed, 1 passed, 1 skipped.\n" in text
    assert text.index("## 1 facts") < text.index("## 10 training")
    look = "Look at `titanlite/runtime/peak_flops.py`."
    assert f"**failed: 1 facts: facts**: stopped after 1 rows: the process ended with code 3. {look}" in text
    assert re.search(r"Seconds of each part, with its start: facts \d", text)


def test_two_ranks_need_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process for them; the layouts come first if there are several GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    report = Report(tmp_path, {})
    gpu_check.run_stage(gpu_check.LAYOUTS, Setup("cuda", True, str(tmp_path)), time.monotonic() + 60, report)
    (row,) = read_rows(tmp_path)
    assert (row["name"], row["status"], row["text"]) == ("two ranks", "skipped", "needs a GPU for each of its ranks")
    first = [[stage.parts[0].name for stage in gpu_check.ordered("cuda", gpus)][:4] for gpus in (1, 2)]
    assert first == [
        ["facts", "side by side", "profile", "simulated ranks"],
        ["two ranks", "facts", "side by side", "profile"],
    ]
    assert gpu_check.ordered("cuda", 1)[-1] == gpu_check.LAYOUTS


def test_only_some_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def names(only: str) -> list[str]:
        return [part.name for stage in gpu_check.chosen(gpu_check.STAGES, only) for part in stage.parts]

    assert names("7,8")[:2] == ["side by side", "profile"]
    assert names("8, hangs,compiled documents") == ["profile", "hangs", "compiled documents"]
    assert names("attention") == [f"attention {share} of 3" for share in (1, 2, 3)]
    assert names("") == [name for name in ALL_PARTS if name != "two ranks"]
    assert all("," not in name for name in ALL_PARTS)
    assert len(ALL_PARTS) == len({*ALL_PARTS})
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device=cpu", "--tiny", "--out=unused", "--only=7,speed"])
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main()
    assert "--only: no part 'speed'; the parts are 1 facts: facts; 2 kernels:" in capsys.readouterr().err


def test_threads_of_a_gpu_machine(tmp_path: Path) -> None:
    found = gpu_check.environment(Setup("cuda", False, str(tmp_path)))
    assert (found["OMP_NUM_THREADS"], found["TORCHINDUCTOR_COMPILE_THREADS"]) == ("2", "4")
    assert "OMP_NUM_THREADS" not in gpu_check.environment(Setup("cpu", True, str(tmp_path)))


def test_packages_to_carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"tyro": "1.0", "typeguard": "4.6", "tomli": "2.5", "torch": "2.11", "triton": "3.6", "numpy": "2.4"}
    needs = {"tyro": ["typeguard>=4", 'rich; extra == "x"'], "torch": ["triton", "numpy"]}
    monkeypatch.setattr(gpu_packages.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(gpu_packages.metadata, "requires", needs.get)
    needed = gpu_packages.needed(["torch", "tyro", "tomli"], "3.12", frozenset({"torch", "numpy"}))
    assert needed == {"tomli": "2.5", "typeguard": "4.6", "tyro": "1.0"}
    command = gpu_packages.pip_command(needed, "3.12", tmp_path)
    assert {"--python-version=3.12", f"--target={tmp_path}", "tyro==1.0", "--no-deps"} <= {*command}
    assert not [part for part in command if "://" in part]
    assert gpu_packages.name_of("typing_extensions>=4") == "typing-extensions"
    image = (REPOSITORY / "scripts" / "gpu_image.txt").read_text()
    assert "pydantic" not in image
    assert "torch" in gpu_packages.direct()


def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_packages, "direct", lambda: ["torch", "no-such-package"])
    monkeypatch.setattr(gpu_packages, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    folder = tmp_path / f"gpu_packages-{gpu_packages.own_python()}"
    with pytest.raises(SystemExit, match=rf"lacks no-such-package: .* copy {folder.name} to {tmp_path}$"):
        gpu_packages.use()
    (folder / "no_such_package-1.0.dist-info").mkdir(parents=True)
    (folder / "no_such_package-1.0.dist-info" / "METADATA").write_text("Name: no-such-package\nVersion: 1.0\n")
    gpu_packages.use()
    assert sys.path[0] == str(folder)
    assert os.environ["PYTHONPATH"] == f"{folder}{os.pathsep}before"


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
