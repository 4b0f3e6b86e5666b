"""The printed configuration: every value with its origin, and valid input again."""

import tomllib
from pathlib import Path

import pytest

from tests.configuration import parse_config
from titanlite.config.check import resolve_config
from titanlite.config.fields import SECTIONS, keys_of
from titanlite.config.load import keep_earlier, load_config, parse
from titanlite.config.toml import print_config
from titanlite.models.registry import FAMILIES


def printed(*argv: str, world_size: int = 1, device_type: str = "cpu", chosen_later: tuple[str, ...] = ()) -> str:
    given, problems = parse_config(argv)
    assert problems == []
    kept = keep_earlier(given)
    config = resolve_config(kept, world_size=world_size, device_type=device_type)
    return print_config(given, kept, config, parse(argv).origins, chosen_later)


def comments(text: str) -> dict[str, str]:
    """Full key -> its comment, of the keys outside of arrays of tables."""
    found, section = {}, ""
    for line in text.splitlines():
        section = line.strip("[]") if line.startswith("[") else section
        key, _, rest = line.partition(" = ")
        if rest and not line.startswith("#"):
            found[f"{section}.{key}"] = rest.rpartition("  # ")[2]
    return found


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(
        "[training]\ntokens = 4001\nseq_len = 10\nlocal_batch_size = 2\n[lr_schedule]\nwarmup_steps = '50 %'\n"
        '[[data.sources]]\nkind = "text"\npath = "a # b"\n'
    )
    Path("my.toml").write_text(
        'extends = "base.toml"\n[model]\nflavor = "1B"\ndim = 64\n[metrics]\ntags = ["a#b", "\\u200b"]'
    )
    return "my.toml"


def test_every_value_has_its_origin(child: str) -> None:
    found = comments(printed(child, "--optimizer.lr", "1e-3", "--data.sources.0.name", "x", world_size=2))
    expected = {
        "training.steps": "resolved from training.tokens (base.toml)",
        "training.tokens": "4001 (base.toml), resolved to training.steps",
        "training.seq_len": "base.toml",
        "training.global_batch_size": "-1: local_batch_size x data ranks",
        "training.mixed_precision_param": "auto: float32",
        "training.max_norm": "default",
        "lr_schedule.warmup_steps": "50 % (base.toml)",
        "lr_schedule.decay_steps": "default",
        "data.num_streams": "-1: training.global_batch_size",
        "model.family": "default",
        "model.flavor": "my.toml",
        "model.dim": "my.toml",
        "model.n_layers": "flavor 1B",
        "optimizer.lr": "command line",
        "data.sources.path": "base.toml",
        "data.sources.name": "command line",
        "data.sources.field": "default",
    }
    assert {key: found[key] for key in expected} == expected
    keys = {f"{section}.{key}" for section in SECTIONS for key in keys_of(section, "llama3")}
    assert keys - found.keys() == {"data.sources"}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("argv", [["my.toml"], ["quickstart"], ["qwen3_30b_a3b", "--data.sources.1.kind", "tokens"]])
def test_the_printed_configuration_gives_the_same(argv: list[str], device_type: str, child: str) -> None:
    assert child
    text = printed(*argv, device_type=device_type)
    assert tomllib.loads(text)
    Path("printed.toml").write_text(text)
    config, problems = parse_config(["printed.toml"])
    assert problems == []
    again = printed("printed.toml", device_type=device_type)
    assert tomllib.loads(again) == tomllib.loads(text)
    assert config.model.family in FAMILIES


def test_values_that_the_run_has_from_its_first_start_say_it(child: str) -> None:
    Path("outputs").mkdir()
    Path("outputs/config.toml").write_text("training.global_batch_size = 4\ndata.num_streams = 4")
    found = comments(printed(child, "--checkpoint.enable"))
    assert found["training.global_batch_size"] == found["data.num_streams"] == "kept from the run in outputs"


def test_keys_that_the_start_chooses_are_comments(child: str) -> None:
    argv = [child, "--parallelism.layout", "auto", "--parallelism.tp", "2", "--training.global_batch_size", "8"]
    text = printed(*argv, chosen_later=("parallelism.pp", "parallelism.tp"))
    assert "\n# pp = 1  # default\n" in text
    assert "\ntp = 2  # command line\n" in text


def test_names_of_files_cannot_break_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a\nb.toml").write_text("training.steps = 5")
    text = printed("a\nb.toml")
    assert "\nsteps = 5  # a?b.toml\n" in text


def test_files_of_the_same_name_are_named_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("parts").mkdir()
    Path("parts/my.toml").write_text("training.steps = 5")
    Path("my.toml").write_text("extends = 'parts/my.toml'\ntraining.seq_len = 8")
    found = comments(printed("my.toml"))
    assert (found["training.steps"], found["training.seq_len"]) == ("parts/my.toml", "my.toml")
    assert load_config(["my.toml"], world_size=1, device_type="cpu").training.steps == 5
