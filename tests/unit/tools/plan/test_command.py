"""The plan command in its own process: shipped configurations, refusals, verdicts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.program import REPOSITORY, Program, clean_environment, start_command
from titanlite.config.load import load_config
from titanlite.planning.step_time import UNCERTAINTY
from titanlite.runtime.errors import ConfigError, UsageError
from titanlite.tools.plan.__main__ import main
from titanlite.tools.plan.report import FASTER, SLOWER

LARGE = ("--training.local_batch_size", "2", "--activation_checkpoint.mode", "none")
CPU_SECONDS = 30.0
RESIDENT_KIB = 1_000_000_000 // 1024


def start_plan(folder: Path, name: str, *arguments: str) -> Program:
    """Start the command on a shipped configuration, in an otherwise empty folder. Output goes to the file `name`."""
    config = REPOSITORY / f"configs/{name}.toml"
    return start_command(folder, str(config), *arguments, program=("-m", "titanlite.tools.plan"), name=name)


def assert_fits(output: str, ranks: int, parameters: str) -> None:
    assert f"{parameters} parameters" in output
    assert f"= {ranks:,} ranks" in output
    assert "\nFits: " in output


@pytest.mark.slow
def test_shipped_configurations_fit(tmp_path: Path) -> None:
    configurations = [
        ("llama3_8b", 8, 80, "8,030,261,248"),
        ("llama3_8b_one_gpu", 1, 131, "4,540,469,248"),
        ("llama3_70b", 256, 80, "70,553,706,496"),
        ("qwen3_0_6b", 8, 80, "596,049,920"),
        ("qwen3_8b_long_context", 8, 80, "8,190,735,360"),
        ("qwen3_30b_a3b", 16, 80, "30,532,122,624"),
    ]
    programs = [
        start_plan(tmp_path, name, "--world-size", str(ranks), "--device-memory-gib", str(gib))
        for name, ranks, gib, _ in configurations
    ]
    for program, (_, ranks, _, parameters) in zip(programs, configurations, strict=True):
        assert program.wait() == 0, program.output
        assert_fits(program.output, ranks, parameters)
    assert {path.name for path in tmp_path.iterdir()} == {name for name, *_ in configurations}


MEASURE = """
import resource, sys
from titanlite.tools.plan.__main__ import main
main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


@pytest.mark.soak
def test_the_plan_of_the_largest_configuration_takes_little_time_and_memory() -> None:
    """CPU time, which other load on the machine does not change."""
    command = [sys.executable, "-c", MEASURE, REPOSITORY / "configs/llama3_405b.toml", "--world-size", "4096"]
    environment = clean_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert_fits(done.stdout, 4096, "405,853,388,800")
    seconds, resident_kib = map(float, done.stdout.splitlines()[-1].split())
    assert seconds < CPU_SECONDS
    assert resident_kib < RESIDENT_KIB


def test_a_plan_that_does_not_fit_names_the_largest_item_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["llama3_8b", "--world-size", "8", *LARGE])
    output = capsys.readouterr().out
    assert "\nDoes not fit: " in output
    assert "Largest item: activations" in output
    assert 'Try: activation_checkpoint.mode = "full"' in output


def test_the_batch_that_fits_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    fits = ["--training.local_batch_size", "-1", "--training.global_batch_size", "12"]
    main(["quickstart", "--world-size", "2", "--device", "cpu", "--device-memory-gib", "100", *fits])
    assert "each data rank has 1 microbatch of 6 sequences" in capsys.readouterr().out
    main(["quickstart", "--world-size", "2", "--device", "cpu", "--device-memory-gib", "0.1", *fits])
    assert "each data rank has 6 microbatches of 1" in capsys.readouterr().out


def test_refuses_the_same_configurations_as_training_without_reading_files(tmp_path: Path) -> None:
    wrong = ("--world-size", "24", "--parallelism.tp", "3", "--optimizer.lr", "0")
    program = start_plan(tmp_path, "llama3_8b", *wrong)
    assert program.wait() == 2
    assert program.output.startswith("titanlite: the configuration has ")
    for key in ("model.n_heads = 32", "training.seq_len = 8192", "optimizer.lr = 0"):
        assert key in program.output
    for absent in ("tokenizer", "data.sources", "dump_folder", "Traceback"):
        assert absent not in program.output


def test_the_same_report_as_training() -> None:
    settings = [f"--{key}" for key in ("parallelism.pp=3", "training.global_batch_size=7", "model.n_layers=2")]
    with pytest.raises(ConfigError) as refused:
        load_config(settings, world_size=4, device_type="cpu")
    with pytest.raises(ConfigError) as planned:
        load_config(settings, world_size=4, device_type="cpu", checks_files=False)
    assert str(planned.value) == str(refused.value)


def test_only_training_checks_files() -> None:
    settings = ["--data.sources.0.kind=jsonl", "--data.sources.0.path=/nowhere/*.jsonl", "--tokenizer.path=/nowhere"]
    settings += ["--job.dump_folder=/dev/null/outputs"]
    with pytest.raises(ConfigError) as refused:
        load_config(settings, world_size=1, device_type="cpu")
    assert {problem.key for problem in refused.value.problems} == {
        "data.sources.0.path",
        "tokenizer.path",
        "job.dump_folder",
    }
    load_config(settings, world_size=1, device_type="cpu", checks_files=False)
    with pytest.raises(ConfigError, match="only with kind"):
        load_config([*settings, "--data.sources.0.split=train"], world_size=1, device_type="cpu", checks_files=False)


def interval(output: str) -> tuple[float, float, float]:
    """The least, the predicted and the highest tokens per second of a rank."""
    ((rate, least, most),) = re.findall(
        r"Throughput: ([\d,]+) tokens/s per rank.*?Likely: ([\d,]+) to ([\d,]+)", output, re.DOTALL
    )
    return float(least.replace(",", "")), float(rate.replace(",", "")), float(most.replace(",", ""))


def test_a_profile_adds_the_time_by_part_and_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["llama3_8b", "--world-size", "64", "--training.tokens", "4_194_304_000"]
    main([*arguments, "--hardware", "h100", "--price-per-hour", "2.5"])
    output = capsys.readouterr().out
    assert "(90% of a device of 79.6 GiB; " in output
    (seconds,) = re.findall(r"^Predicted step: ([\d.]+) s on H100 SXM 80 GB", output, re.MULTILINE)
    ((rate, every),) = re.findall(r"([\d,]+) tokens/s per rank, ([\d,]+) in all, MFU \d\d\.\d%", output)
    assert int(rate.replace(",", "")) == pytest.approx(4_194_304 / float(seconds) / 64, rel=0.01)
    assert int(every.replace(",", "")) == pytest.approx(4_194_304 / float(seconds), rel=0.01)
    least, middle, most = interval(output)
    assert (least / middle, most / middle) == pytest.approx((1 / (1 + UNCERTAINTY), 1 / (1 - UNCERTAINTY)), rel=1e-3)
    assert "Uncertain" not in output
    shares = [float(share) for share in re.findall(r"(?:[a-z] )(\d+\.\d)%", output.partition("Parts: ")[2])]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    ((hours, cost),) = re.findall(r"1,000 steps .* ([\d.]+) rank-hours, cost ([\d,]+)", output)
    assert float(hours) == pytest.approx(1000 * float(seconds) * 64 / 3600, rel=0.01)
    assert int(cost) == pytest.approx(2.5 * float(hours), abs=1)


def test_what_published_runs_do_not_tell_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["qwen3_30b_a3b", "--world-size", "64", "--training.global_batch_size", "64", "--hardware", "h100"])
    output = capsys.readouterr().out
    assert "Uncertain: few runs with experts" in output
    least, rate, most = interval(output)
    assert (least / rate, most / rate) == pytest.approx((1 / (1 + UNCERTAINTY), FASTER), rel=1e-3)
    main(
        [
            *("qwen3_0_6b", "--world-size", "8", "--training.seq_len", "1024", "--training.global_batch_size", "8"),
            *("--hardware", "h100", "--float8.recipe", "rowwise"),
        ]
    )
    output = capsys.readouterr().out
    assert "Float8: rowwise, products by the matrix unit of GPUs from compute capability 9.0 on" in output
    assert "Uncertain: the profile has no rates of float8; products are predicted at those of bfloat16" in output
    assert "Uncertain: below 4,096 tokens per rank and step" in output
    least, rate, most = interval(output)
    assert (least / rate, most / rate) == pytest.approx((1 / SLOWER, 1 / (1 - UNCERTAINTY)), rel=1e-3)


def search_output(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[str]]:
    """The paragraphs of the output of --search by their first lines."""
    main([*arguments, "--hardware", "h100", "--search"])
    paragraphs = [paragraph.splitlines() for paragraph in capsys.readouterr().out.split("\n\n")]
    return {lines[0].partition(",")[0]: lines[1:] for lines in paragraphs}


@pytest.mark.slow
def test_the_options_of_a_search_give_its_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each line: time, memory, cost."""
    run = ["qwen3_0_6b", "--world-size", "8", "--training.global_batch_size", "32", "--training.steps", "1000"]
    price = ["--price-per-hour", "2.5"]
    found = search_output(capsys, *run, *price)
    table, options = found["Fastest first; tokens/s of one rank"], found["Options"]
    (reasons,) = (lines for name, lines in found.items() if name.startswith("Why"))
    assert len(table) - 1 == len(options) == len(reasons) == 8
    rates = []
    for row, pasted, reason in zip(table[1:], options, reasons, strict=True):
        cells = row.split()
        main([*run, *price, "--hardware", "h100", *pasted.split()[1:]])
        output = capsys.readouterr().out
        assert f"Throughput: {cells[9]} tokens/s per rank" in output
        assert f"MFU {cells[10]}" in output
        (needed,) = re.findall(r"Fits: ([\d.]+) GiB", output)
        assert needed == cells[11]
        assert reason.rpartition("; ")[2].removeprefix("1: ") in output  # days, hours and cost
        rates.append(int(cells[9].replace(",", "")))
    assert rates == sorted(rates, reverse=True)


@pytest.mark.slow
def test_a_search_needs_no_valid_layout_and_keeps_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The degrees of the shipped configuration do not divide 12 ranks."""
    run = ["llama3_70b", "--world-size", "12", "--device-memory-gib", "1000", "--training.global_batch_size", "96"]
    with pytest.raises(ConfigError, match="12"):
        main(run)
    found = search_output(capsys, *run, "--parallelism.tp", "2")
    rows = [row.split() for row in found["Fastest first; tokens/s of one rank"][1:]]
    assert {row[5] for row in rows} == {"2"}
    assert not any("tp" in line for line in found["Options"])


@pytest.mark.slow
def test_a_search_without_a_fitting_layout_says_what_needs_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    found = search_output(capsys, "llama3_70b", "--world-size", "8", "--training.global_batch_size", "8")
    (meshes,) = (lines for name, lines in found.items() if name.startswith("No layout fits into the usable 71.6 GiB"))
    assert any(re.fullmatch(r"  dp_shard 8: \d+\.\d GiB", line) for line in meshes)
    found = search_output(capsys, "llama3_8b", "--world-size", "8", "--parallelism.tp", "3")
    assert "No layout passes the checks of the configuration: give fewer keys" in found


@pytest.mark.slow
def test_the_plan_of_a_chosen_layout_needs_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["llama3_8b", "--world-size", "8", "--parallelism.layout", "auto", "--training.global_batch_size", "64"]
    with pytest.raises(UsageError, match='"auto" depends on the machine: add --hardware'):
        main(run)
    main([*run, "--hardware", "h100"])
    assert "1: --parallelism.layout given --parallelism." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--price-per-hour", "2"), "only with --hardware"),
        (("--search",), "only with --hardware"),
        (("--search", "--hardware", "h100", "--training.global_batch_size", "-1"), "given with layout"),
        (("--hardware", "h100", "--price-per-hour", "-2"), "--price-per-hour"),
        (("--hardware", "h101"), "'h101' does not exist: give a TOML file, or one of a100"),
        (("--hardware", "h100", "--device", "cpu"), "the profile h100 is of cuda"),
    ],
)
def test_refused_options_of_the_prediction(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        main(["llama3_8b", "--world-size", "8", *arguments])
    assert message in str(raised.value)
