"""titanlite train with --print-config, --check and --dry-run: what is printed, and for how many processes."""

import os
import tomllib
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from titanlite.config.load import load_config, parse
from titanlite.runtime.errors import ConfigError, UsageError
from titanlite.tools.plan.preview import preview
from titanlite.torchrun import __main__ as torchrun

CONFIG = """
extends = "quickstart"
[training]
seq_len = 16
[parallelism]
pp_schedule = "GPipe"
[model]
n_layers = 2
vocab_size = 300
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    Path("my.toml").write_text(CONFIG)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *argv: str, world_size: int = 1) -> str:
    with pytest.raises(SystemExit) as caught:
        preview(parse(["my.toml", *argv]), [world_size], 1)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_without_such_an_option_nothing_happens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preview(parse(["my.toml", "--strict"]), [1], 1)
    assert capsys.readouterr().out == ""
    assert os.listdir(folder) == ["my.toml"]


def test_check_prints_a_line_and_settings_without_effect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = printed(capsys, "--check").splitlines()
    assert first == (
        "my.toml is valid for 1 process: llama3 debug on cpu, layout one rank, 300 steps of 8 sequences of 16 tokens"
    )
    assert second == 'Without effect: parallelism.pp_schedule = "GPipe" has an effect only with parallelism.pp above 1'
    pipeline = ["--parallelism.pp=2", "--parallelism.gradient_sync=every"]
    (line,) = printed(capsys, "--check", *pipeline, "--world-size", "4").splitlines()
    assert line.startswith("my.toml is valid for 4 processes: llama3 debug on cpu, layout pp 2, dp_shard 2, ")
    cuda = printed(capsys, "--check", "--device=cuda", "--checkpoint.async_mode", "async_with_pinned_mem")
    assert "valid for 1 process: llama3 debug on cuda" in cuda
    assert os.listdir(folder) == ["my.toml"]


@pytest.mark.usefixtures("folder")
def test_check_refuses_what_training_refuses() -> None:
    for argv, key in (
        (["--parallelism.pp", "3"], "parallelism.pp"),
        (["--tokenizer.path", "nowhere"], "tokenizer.path"),
        (["--strict"], "parallelism.pp_schedule"),
    ):
        with pytest.raises(ConfigError) as caught:
            preview(parse(["my.toml", "--check", *argv]), [1], 1)
        assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.usefixtures("folder")
def test_print_config_is_valid_input(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--print-config", "--optimizer.lr=1e-3", world_size=2)
    assert "\nseq_len = 16  # my.toml\n" in text
    assert "\nlr = 0.001  # command line\n" in text
    assert "\nnum_streams = 8  # -1: training.global_batch_size\n" in text
    Path("my.toml").write_text(text)
    again = printed(capsys, "--print-config", world_size=2)
    assert tomllib.loads(again) == tomllib.loads(text)
    assert "\nlr = 0.001  # my.toml\n" in again


@pytest.mark.usefixtures("folder")
def test_print_config_leaves_keys_out_that_a_search_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--print-config", "--parallelism.layout", "auto", "--parallelism.tp", "1", world_size=4)
    assert "\n# pp = 1  # default\n" in text
    assert "\ntp = 1  # command line\n" in text


@pytest.mark.slow
def test_dry_run_shows_plan_and_first_sequences(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--dry-run", "--training.local_batch_size=-1", "--training.global_batch_size=9")
    assert "Mesh: pp 1 x dp_replicate 1 x dp_shard 1 x cp 1 x tp 1 = 1 ranks\n" in text
    assert "\nFits: " in text
    assert "\nThe first step has 9 sequences; shown: 8\n" in text
    assert text.count("════ sequence ") == 8
    assert "\nAll of them: titanlite inspect my.toml --sequences 9\n" in text
    assert 'Without effect: parallelism.pp_schedule = "GPipe"' in text
    with pytest.raises(UsageError, match=r"add --parallelism\.hardware"):
        preview(parse(["my.toml", "--dry-run", "--parallelism.layout", "auto"]), [1], 1)
    layout = ["--parallelism.layout", "auto", "--parallelism.hardware", "h100"]
    assert "x dp_shard 2 x" in printed(capsys, "--dry-run", *layout, "--parallelism.dp_shard", "2", "--world-size", "2")
    assert {*os.listdir(folder)} <= {"my.toml", "cache"}


def test_options_that_make_no_sense_are_refused() -> None:
    for argv, keys in (
        (["--world-size", "4"], ["--world-size"]),
        (["--device", "cpu"], ["--device"]),
        (["--check", "--world-size", "0"], ["--world-size"]),
        (["--check", "--world-size", 5000 * "1"], ["--world-size"]),
        (["--check", "--world-size"], ["--world-size"]),
        (["--check", "--device", "tpu"], ["--device"]),
        (["--check=true"], ["--check"]),
        (["--check", "--dry-run"], ["--dry-run"]),
        (["--check", "--check"], ["--check"]),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(["quickstart", *argv], world_size=1, device_type="cpu")
        assert [problem.key for problem in caught.value.problems] == keys


@pytest.mark.parametrize(("rank", "lines"), [("0", 2), ("1", 0)])
@pytest.mark.usefixtures("folder")
def test_only_the_first_rank_prints(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert len(printed(capsys, "--check", world_size=2).splitlines()) == lines


@pytest.mark.usefixtures("folder")
def test_the_launcher_answers_for_all_its_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a start of ranks; an elastic launch, for the fewest and the most."""
    ranks = ["--nproc-per-node=2", "-m", "titanlite.train", "my.toml", "--check", "--parallelism.pp=2"]
    ranks += ["--parallelism.gradient_sync=every"]
    with pytest.raises(SystemExit) as caught:
        torchrun.check(parse_args(["--nnodes=2", *ranks]))
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("my.toml is valid for 4 processes: ")
    with pytest.raises(SystemExit):
        torchrun.check(parse_args(["--nnodes=1:2", "--rdzv-backend=c10d", *ranks]))
    found = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert found == ["my.toml is valid for 2 processes", "my.toml is valid for 4 processes"]
    with pytest.raises(ConfigError, match=r"parallelism\.tp = 3"):
        torchrun.check(parse_args(["--nnodes=2", *ranks, "--parallelism.tp=3"]))
