"""Lengths in tokens and percentages: resolved to steps, one key each, overridden by the command line."""

from pathlib import Path

import pytest

from tests.configuration import parse_config
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config
from titanlite.optim.lengths import steps_of
from titanlite.runtime.errors import ConfigError

BATCH = "[training]\nseq_len = 10\nlocal_batch_size = 2\n"
"""20 tokens per step on one process."""


def loaded(tmp_path: Path, toml: str, *argv: str, world_size: int = 1) -> JobConfig:
    file = tmp_path / "config.toml"
    file.write_text(toml)
    return load_config([str(file), *argv], world_size=world_size, device_type="cpu")


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (20, 1), (21, 2), (4000, 200), (10**13, 5 * 10**11)])
def test_tokens_are_rounded_up_to_steps(tokens: int, steps: int, tmp_path: Path) -> None:
    config = loaded(tmp_path, f"{BATCH}tokens = {tokens}")
    assert (config.training.steps, config.training.tokens) == (steps, -1)
    assert f"\nsteps = {steps}\ntokens = -1\n" in dump_config(config)


def test_the_batch_of_all_ranks_counts(tmp_path: Path) -> None:
    assert loaded(tmp_path, f"{BATCH}tokens = 4000", world_size=2).training.steps == 100


@pytest.mark.parametrize(
    ("text", "warmup", "decay"),
    [
        ("99 tokens", 5, 5),
        ("1_00 tokens", 5, 5),
        ("101 tokens", 6, 6),
        ("1 tokens", 1, 1),
        ("10 %", 20, 20),
        ("10%", 20, 20),
        ("0.75 %", 2, 2),
        ("0.1 %", 0, 1),
        ("100 %", 200, 200),
    ],
)
def test_warm_up_and_decay_in_tokens_and_percent(text: str, warmup: int, decay: int, tmp_path: Path) -> None:
    """Of 200 steps: tokens are rounded up, percentages to the nearest step, but a decay has one at least."""
    toml = f"{BATCH}tokens = 4000\n[lr_schedule]\nwarmup_steps = {text!r}\n"
    muon = f"[optimizer]\nname = 'Muon'\nmomentum = 0.9\nmomentum_start = 0.5\nmomentum_steps = {text!r}\n"
    config = loaded(tmp_path, f"{toml}decay_steps = {text!r}\n{muon}")
    found = config.lr_schedule
    assert config.optimizer.momentum_steps == decay
    assert (found.warmup_steps, found.decay_steps, found.final_decay_steps) == (warmup, decay, -1)
    found = loaded(tmp_path, toml, "--lr_schedule.final_decay_steps", text).lr_schedule
    assert (found.warmup_steps, found.decay_steps, found.final_decay_steps) == (warmup, -1, decay)


def test_lengths_in_tokens_count_the_steps_of_their_stages(tmp_path: Path) -> None:
    """Steps of 20 tokens, 80 from step 6 on, and 40 from step 9 on: after 100 and after 340 tokens."""
    sizes = f"{BATCH}tokens = 1000\n"
    sizes += "[[training.stages]]\nfrom_tokens = 100\nglobal_batch_size = 4\nseq_len = 20\n"
    sizes += "[[training.stages]]\nfrom_tokens = 301\nseq_len = 10\n[lr_schedule]\nwarmup_steps = '101 tokens'\n"
    config = loaded(tmp_path, f"{sizes}decay_steps = '200 tokens'")
    assert [row.from_step for row in config.training.stages] == [6, 9]
    assert (config.training.steps, config.lr_schedule.warmup_steps, config.lr_schedule.decay_steps) == (25, 6, 3)
    for tokens, steps in ((40, 1), (41, 2), (680, 17), (681, 18), (760, 18), (10**6, 25)):
        found = loaded(tmp_path, f"{sizes}final_decay_steps = '{tokens} tokens'").lr_schedule
        assert found.final_decay_steps == steps, tokens
    again = loaded(tmp_path, dump_config(config))
    assert again == config
    assert (config.data.num_streams, config.data.max_piece_bytes) == (4, 64 * 20)


def test_a_percentage_is_rounded_as_its_ratio() -> None:
    for steps in (1, 7, 200, 1999, 123_457):
        assert [steps_of(f"{n / 10:g} %", int, steps) for n in range(1001)] == [
            round(n / 1000 * steps) for n in range(1001)
        ]


def test_a_warm_up_may_have_no_tokens(tmp_path: Path) -> None:
    assert loaded(tmp_path, f"{BATCH}[lr_schedule]\nwarmup_steps = '0 tokens'").lr_schedule.warmup_steps == 0


def test_the_written_configuration_gives_the_same_steps(tmp_path: Path) -> None:
    config = loaded(tmp_path, f"{BATCH}tokens = 4001\n[lr_schedule]\nwarmup_steps = '50 %'\ndecay_steps = '30 tokens'")
    again = loaded(tmp_path, dump_config(config))
    assert dump_config(again) == dump_config(config)
    assert (again.training.steps, again.lr_schedule.warmup_steps, again.lr_schedule.decay_steps) == (201, 100, 2)


@pytest.mark.parametrize(
    ("in_file", "argument", "steps"),
    [
        ("steps = 7", ["--training.tokens", "4000"], 200),
        ("tokens = 4000", ["--training.steps", "7"], 7),
        ("tokens = 4000", ["--training.tokens=-1"], 1000),
        ("steps = 7", ["--training.tokens=-1"], 7),
    ],
)
def test_the_command_line_overrides_a_length_by_another_key(
    in_file: str, argument: list[str], steps: int, tmp_path: Path
) -> None:
    assert loaded(tmp_path, f"{BATCH}{in_file}", *argument).training.steps == steps


def test_each_length_is_overridden_on_its_own(tmp_path: Path) -> None:
    schedule = "[lr_schedule]\nwarmup_steps = 30\ndecay_ratio = 0.5"
    found = loaded(tmp_path, f"{BATCH}{schedule}", "--lr_schedule.decay_steps", "40 tokens").lr_schedule
    assert (found.warmup_steps, found.decay_steps, found.decay_ratio) == (30, 2, -1.0)
    found = loaded(tmp_path, f"{BATCH}{schedule}", "--lr_schedule.final_decay_steps", "20").lr_schedule
    assert (found.final_decay_steps, found.decay_ratio) == (20, -1.0)


SEVERAL = [
    ("[training]\nsteps = 5\ntokens = 6", [], "training.tokens"),
    ("", ["--training.steps", "5", "--training.tokens", "6"], "training.tokens"),
    ("[lr_schedule]\ndecay_steps = '5 tokens'\ndecay_ratio = 0.5", [], "lr_schedule.decay_ratio"),
    ("[lr_schedule]\ndecay_steps = 5\nfinal_decay_steps = 5", [], "lr_schedule.final_decay_steps"),
    ("[lr_schedule]\ndecay_ratio = 0.5\nfinal_decay_steps = '5 %'", [], "lr_schedule.final_decay_steps"),
]


@pytest.mark.parametrize(("toml", "argv", "key"), SEVERAL)
def test_a_length_with_several_values_is_one_problem(toml: str, argv: list[str], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, toml, *argv)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert problem.rule.startswith("only one of ")
    assert problem.remedy.startswith("leave out all of ")


def test_values_out_of_range_are_reported_with_their_own_key(tmp_path: Path) -> None:
    for key, value in (("training.tokens", "0"), ("lr_schedule.decay_ratio", "1e308"), ("training.seq_len", "0")):
        tokens = [] if key == "training.tokens" else ["--training.tokens", "100"]
        with pytest.raises(ConfigError) as caught:
            loaded(tmp_path, "", f"--{key}", value, *tokens)
        assert [problem.key for problem in caught.value.problems] == [key]


def test_unresolved_lengths_are_read_as_given() -> None:
    config, problems = parse_config(["--training.tokens", "100"])
    assert problems == []
    assert (config.training.steps, config.training.tokens) == (JobConfig().training.steps, 100)
