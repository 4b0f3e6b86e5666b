"""titanlite ladder: the fit on data of a known law, the runs of a file, what is refused, and the printed prediction."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.unit.tools.sweep.test_training import FakeProcess
from titanlite.config.load import load_config
from titanlite.config.toml import dump_config
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.tools.ladder import fit as fits
from titanlite.tools.ladder import prediction
from titanlite.tools.ladder.__main__ import main
from titanlite.tools.ladder.fit import Law, Point, bootstrap, fit
from titanlite.tools.ladder.prediction import interval_of, lines_of, predict, require_enough
from titanlite.tools.ladder.rungs import Ladder, deepseek, parameters_of, read_ladder
from titanlite.tools.report.__main__ import main as report
from titanlite.tools.sweep import command
from titanlite.tools.sweep.combinations import Run

LAW = Law(1.69, 406.4, 410.7, 0.34, 0.28)
"""Of Hoffmann et al. (2022)."""


def points(noise: float, seed: int = 0) -> list[Point]:
    generator = np.random.default_rng(seed)
    grid = [(n, n * ratio) for n in (4_000_000, 12_000_000, 40_000_000) for ratio in (5, 15, 45)]
    return [Point(n, d, LAW.loss(n, d) * np.exp(noise * generator.standard_normal())) for n, d in grid]


def values(law: Law) -> list[float]:
    return [law.E, law.A, law.B, law.alpha, law.beta]


@pytest.mark.slow
def test_the_constants_of_a_law_are_recovered() -> None:
    np.testing.assert_allclose(values(fit(points(0))), values(LAW), rtol=1e-5)


@pytest.mark.slow
def test_the_fit_is_to_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another unit of the loss, such as bits, changes E, A and B in proportion, and no exponent."""
    monkeypatch.setattr(fits, "STARTS", 1)
    noisy = points(0.001)
    law, other = fit(noisy), fit([Point(each.parameters, each.tokens, 10 * each.loss) for each in noisy])
    expected = [10 * law.E, 10 * law.A, 10 * law.B, law.alpha, law.beta]
    np.testing.assert_allclose(values(other), expected, rtol=1e-4)


@pytest.mark.slow
def test_the_interval_has_the_loss_of_a_noisy_law() -> None:
    noisy = points(0.002, seed=1)
    law = fit(noisy)
    low, high = interval_of([each.loss(400e6, 8e9) for each in bootstrap(noisy, law, count=8)])
    assert low < LAW.loss(400e6, 8e9) < high
    assert high / low < 1.05
    assert abs(law.loss(400e6, 8e9) / LAW.loss(400e6, 8e9) - 1) < 0.02


FILE = """
config = "quickstart"
common.job.dump_folder = "{folder}"
common.model.n_layers = 2
common.validation.steps = 32
common.checkpoint.enable = false
"""
RUNGS = """
[[rungs]]
name = "small"
model.dim = 32
tokens = [8_000, 64_000]
[[rungs]]
name = "middle"
model.dim = 64
tokens = [8_000, 64_000]
[[rungs]]
name = "large"
model.dim = 96
optimizer.lr = 0.5
training.global_batch_size = 4
tokens_per_parameter = [0.5, 1]
"""
TARGET = """
[target]
model.dim = 128
parallelism.tp = 4
tokens = 4_000_000
"""


def ladder(tmp_path: Path, *parts: str, overrides: tuple[str, ...] = ()) -> Ladder:
    return read_ladder(str(write(tmp_path, *parts)), overrides, world_size=1, device_type="cpu")


def write(tmp_path: Path, *parts: str) -> Path:
    path = tmp_path / "ladder.toml"
    path.write_text("".join(parts or (FILE, RUNGS, TARGET)).replace("{folder}", str(tmp_path / "runs")))
    return path


def test_runs_of_a_ladder(tmp_path: Path) -> None:
    found = ladder(tmp_path, overrides=("--optimizer.beta1=0.8",))
    assert [rung.run.name for rung in found.rungs][:3] == ["small_D-8000", "small_D-64000", "middle_D-8000"]
    sizes = {rung.name: rung.parameters for rung in found.rungs}
    for rung in [*found.rungs, found.target]:
        model, config = rung.run.config.hyper_parameters, rung.run.config
        attention = 2 * model.dim * model.head_dim * (model.n_heads + model.n_kv_heads)
        block = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
        assert rung.parameters == 2 * block, "without the embedding, the last norm and the output layer"
        assert rung.tokens == config.training.steps * config.training.global_batch_size * 256
        # the same sequences of validation in the same streams, whatever the batch is
        assert config.validation.steps * config.training.global_batch_size == 32 * 8
        assert (config.data.num_streams, config.optimizer.beta1) == (8, 0.8)
    large = found.rungs[-1]
    assert (large.run.config.optimizer.lr, large.run.config.training.global_batch_size) == (0.5, 4)
    assert large.tokens - sizes["large"] in range(4 * 256)
    again = [load_config(rung.run.arguments, world_size=1, device_type="cpu") for rung in found.rungs]
    assert again == [rung.run.config for rung in found.rungs]  # as `titanlite train`
    assert "--parallelism.tp=4" in found.target.run.arguments
    require_enough(found.rungs)


def test_rule_of_deepseek(tmp_path: Path) -> None:
    assert deepseek(1e20) == pytest.approx((9.86e-4, 1.017e6), rel=1e-3)
    found = ladder(tmp_path, 'rule = "deepseek"', FILE, RUNGS, TARGET)
    small, large = found.rungs[0].run.config, found.rungs[-1].run.config
    lr, batch = deepseek(6 * found.rungs[0].parameters * 8_000)
    assert small.optimizer.lr == pytest.approx(lr, rel=1e-2)
    assert 0.7 < small.training.global_batch_size * 256 / batch < 1.42
    assert (large.optimizer.lr, large.training.global_batch_size) == (0.5, 4), "the rung's own keys win"


def test_experts_that_a_token_does_not_use_do_not_count() -> None:
    def count(**overrides: int) -> int:
        words = [
            "--model.family=qwen3_moe",
            "--model.flavor=debug",
            *(f"--model.{k}={v}" for k, v in overrides.items()),
        ]
        return parameters_of(load_config(words, world_size=1, device_type="cpu"))

    routers = count(n_experts=8, n_active_experts=2) - count(n_experts=4, n_active_experts=2)
    assert 0 < routers < 0.01 * count(n_experts=4, n_active_experts=2)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((FILE, RUNGS), r"a table \[target\]"),
        ((FILE, TARGET), r"tables \[\[rungs\]\]"),
        ((FILE, RUNGS, TARGET, "token = 3\n"), r"target\.token = '3'\n.*one of a run with its section"),
        ((FILE, RUNGS, TARGET, "tokens_per_parameter = 3\n"), "one of tokens and tokens_per_parameter"),
        ((FILE, RUNGS.replace("8_000", "0"), TARGET), r"rungs\.0\.tokens = \[0, 64000\]\n.*a positive number"),
        ((FILE, RUNGS.replace('"middle"', '"small"'), TARGET), r"rungs\.1\.name = 'small'"),
        ((FILE, RUNGS.replace("optimizer.lr", "data.seed"), TARGET), r"rungs\.2\.data\.seed.*\n.*may differ"),
        ((FILE, RUNGS.replace("optimizer.lr", "optimizer.lrr"), TARGET), "did you mean optimizer.lr"),
        ((FILE, RUNGS.replace("batch_size = 4", "batch_size = 48"), TARGET), "256 sequences of a validation"),
        (("common.validation.enable = false\n", FILE, RUNGS, TARGET), "fitted to validation losses"),
        (("common.training.tokens = 9\n", FILE, RUNGS, TARGET), "each rung says its tokens"),
        ((FILE, RUNGS.replace("8_000,", "64_000.2,", 1), TARGET), r"rung small.*\n.*numbers of tokens, rounded"),
        (("rule = 'deepseek'\n", FILE, "common.optimizer.lr = 1e-3", RUNGS, TARGET), r"optimizer\.lr.*\n.*left out"),
        (("rule = 'fixed", FILE, RUNGS, TARGET), r"argument LADDER = '.*ladder\.toml'\n.*valid TOML"),
        (("rule = 'best'\n", FILE, RUNGS, TARGET), "one of fixed, deepseek"),
        (("seq_len = 3\n", FILE, RUNGS, TARGET), "common.training.seq_len = 256"),
        (("rle = 'fixed'\n", FILE, RUNGS, TARGET), "did you mean rule"),
        ((FILE.replace("quickstart", "\\u0000"), RUNGS, TARGET), "the path of a TOML file"),
        ((FILE, RUNGS, TARGET.replace("dim = 128", "dim = 1_099_511_627_776")), "a model that can be built: "),
        ((FILE, RUNGS.replace("8_000,", f"{','.join(map(str, range(1, 1000)))},", 1), TARGET), "at most 1000 runs"),
    ],
)
def test_refused_ladders(parts: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        ladder(tmp_path, *parts)


def test_too_few_runs_are_refused_before_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'4 runs of 2 sizes and 2 numbers of tokens'\n.*more runs than the 5"):
        main([str(write(tmp_path, FILE, RUNGS[: RUNGS.rindex("[[")], TARGET))])
    assert not (tmp_path / "runs").exists()


def log_loss(run: Run, tokens: int, loss: object) -> None:
    run.folder.mkdir(parents=True)
    (run.folder / "config.toml").write_text(dump_config(run.config))
    step = run.config.training.steps
    rows = [{"step": step, "loss": 2.0, "tokens_seen": tokens}, {"step": step, "validation/loss": loss}]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_the_prediction_is_printed_stored_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, runs = write(tmp_path), tmp_path / "runs"
    found = ladder(tmp_path)
    law = Law(1.5, 20.0, 60.0, 0.3, 0.35)
    rungs = {rung.run.name: rung for rung in found.rungs}

    def started(run: Run, **_: int) -> FakeProcess:
        rung = rungs[run.name]
        log_loss(run, rung.tokens, law.loss(rung.parameters, rung.tokens))
        return FakeProcess(0)

    monkeypatch.setattr(fits, "STARTS", 1)
    monkeypatch.setattr(prediction, "bootstrap", lambda given, law: bootstrap(given, law, count=2))
    main([str(path), "--results"])
    assert "No prediction yet: 6 runs of 6 without a last validation" in capsys.readouterr().out
    monkeypatch.setattr(command, "start_run", started)
    main([str(path)])
    printed = capsys.readouterr().out
    expected = law.loss(found.target.parameters, found.target.tokens)
    words = re.search(r"predicted loss ([0-9.]+), interval ([0-9.]+) to", printed)
    assert words
    assert float(words[1]) == pytest.approx(expected, abs=2e-4)
    share = sum(rung.flops for rung in found.rungs) / found.target.flops
    assert f"{share:.1%} of them" in printed
    assert re.search(f"train it: .*titanlite train \\S*quickstart.toml .*--job.dump_folder={runs}/target", printed)
    stored = json.loads((runs / "ladder.json").read_text())
    assert stored["law"]["alpha"] == pytest.approx(0.3, rel=1e-3)
    log_loss(found.target.run, found.target.tokens, 1.01 * expected)
    main([str(path), "--results"])
    printed = capsys.readouterr().out
    assert re.search(r"measured loss [0-9.]+: outside the interval, .* differs by -0\.99%", printed)
    assert "train it" not in printed
    report([str(runs), "--over", "tokens", "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure") == 2
    assert "trained tokens D" in page
    assert "Warning" not in printed
    short = predict(found, [Law(0.0, 20.0, 60.0, 0.3, 0.35).loss(rung.parameters, rung.tokens) for rung in found.rungs])
    assert "Warning: E is near 0" in "\n".join(lines_of(found, short))
    first = found.rungs[0]
    shutil.rmtree(first.run.folder)
    log_loss(first.run, first.tokens, "NaN")
    with pytest.raises(UserError, match="small_D-8000: the validation loss after the last step is nan"):
        main([str(path), "--results"])
