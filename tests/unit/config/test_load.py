"""Loading a configuration: precedence, values in TOML and on the command line, resolution, and the dump to TOML."""

import dataclasses
import random
import string
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import tomli

from tests.configuration import parse_config
from tests.seeds import seeds
from titanlite.config.check import resolve_config
from titanlite.config.fields import SECTIONS, columns_of, keys_of
from titanlite.config.lengths import LENGTHS, UNSET
from titanlite.config.load import CONFIG_COPY, load_config, most_ranks, parse
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config
from titanlite.config.value_types import Key, alternatives, literal, row_type
from titanlite.data.config import DataConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.optim.lengths import Length


def config_of(tmp_path: Path, toml: str, *argv: str) -> JobConfig:
    """The configuration of a file and a command line, which must have no problem of name or type."""
    file = tmp_path / "config.toml"
    file.write_text(toml, encoding="utf-8")
    config, problems = parse_config(["--job.config_file", str(file), *argv])
    assert problems == []
    return config


def test_empty_command_line_gives_the_defaults() -> None:
    assert parse_config([]) == (JobConfig(), [])


def test_command_line_over_toml_over_default(tmp_path: Path) -> None:
    config = config_of(tmp_path, "[training]\nsteps = 5\nseq_len = 6", "--training.steps", "7")
    assert (config.training.steps, config.training.seq_len) == (7, 6)
    assert config.training.local_batch_size == JobConfig().training.local_batch_size


def test_a_switch_without_a_value_is_true() -> None:
    config, problems = parse_config(["--compile.enable", "--data.shuffle", "false", "--checkpoint.enable"])
    assert not problems
    assert (config.compile.enable, config.data.shuffle, config.checkpoint.enable) == (True, False, True)


def test_value_replaced_by_the_command_line_is_not_checked(tmp_path: Path) -> None:
    assert config_of(tmp_path, 'training.steps = "five"', "--training.steps", "7").training.steps == 7


def test_hyper_parameters_follow_family_and_flavor(tmp_path: Path) -> None:
    toml = '[model]\nflavor = "8B"\ndim = 64\nnorm_eps = 1'
    config = config_of(tmp_path, toml, "--model.dim", "32", "--model.tie_embeddings", "true")
    assert config.model == ModelConfig("llama3", "8B", {"dim": 32, "norm_eps": 1.0, "tie_embeddings": True})
    assert type(config.model.overrides["norm_eps"]) is float


def test_family_without_the_default_flavor_requires_a_flavor(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = FAMILIES["llama3"]
    flavors = {"small": llama.flavors["debug"]}
    monkeypatch.setitem(FAMILIES, "tiny", dataclasses.replace(llama, name="tiny", flavors=flavors))
    problems = parse_config(["--model.family", "tiny"])[1]
    assert [(problem.key, problem.rule) for problem in problems] == [("model.flavor", 'one of "small"')]
    assert parse_config(["--model.family", "tiny", "--model.flavor", "small"])[1] == []


TWO_SOURCES = """
[[data.sources]]
kind = "text"
path = "a"
[[data.sources]]
kind = "jsonl"
path = "b"
"""


@pytest.mark.parametrize(
    ("toml", "argv", "sources"),
    [
        (TWO_SOURCES, "--data.sources.1.path c --data.sources.1.field d", [("text", "a", ""), ("jsonl", "c", "d")]),
        (
            TWO_SOURCES,
            "--data.sources.2.path c --data.sources.3.kind text",
            [("text", "a", ""), ("jsonl", "b", ""), ("python-stdlib", "c", ""), ("text", "", "")],
        ),
        ("", "--data.sources.0.field d", [("python-stdlib", "", "d")]),
    ],
)
def test_source_keys_change_the_table_of_their_number_or_add_it(
    toml: str, argv: str, sources: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, toml, *argv.split())
    assert [(source.kind, source.path, source.field) for source in config.data.sources] == sources


VALUES = [
    *("5", "-1", "5.0", "1e-3", "true", "false", "nan", "-inf", "0x10", "1_000", "[]", '["a"]', "[1]", "{}"),
    "07:30:00",
]
KEYS = ["training.steps", "optimizer.lr", "data.shuffle", "optimizer.weight_decay_skip", "model.dim", "model.norm_eps"]


@pytest.mark.parametrize("key", KEYS)
def test_toml_and_command_line_read_alike(key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for value in VALUES:
        file.write_text(f"{key} = {value}")
        from_file, file_problems = parse_config(["--job.config_file", str(file)])
        from_words, word_problems = parse_config([f"--{key}", value])
        assert [str(problem) for problem in word_problems] == [str(problem) for problem in file_problems], value
        assert dump_config(from_words) == dump_config(from_file), value


@pytest.mark.parametrize("text", ["5", "true", "", " x ", '"quoted"', "a#b", "[1]", "caf\u00e9 \U0001f642", "-", "a=b"])
def test_string_key_takes_the_text_verbatim(text: str, tmp_path: Path) -> None:
    assert parse_config([f"--job.description={text}"])[0].job.description == text
    assert config_of(tmp_path, f"job.description = {literal(text)}").job.description == text


@pytest.mark.parametrize("text", ["1, other = 2", "1}\nother = {value = 2", "1 # five", "1}\n[training]\nx = {a = 1"])
def test_text_with_more_than_a_value_is_refused(text: str) -> None:
    config, problems = parse_config([f"--training.steps={text}", "--training.seq_len", "64"])
    assert [(problem.key, problem.value) for problem in problems] == [("training.steps", text)]
    assert config.training.seq_len == 64


def test_resolved_values_for_the_cpu() -> None:
    argv = ["--training.local_batch_size", "3", "--training.dtype", "float64", "--training.seq_len", "100"]
    config = load_config(argv, world_size=4, device_type="cpu")
    assert config.training.global_batch_size == 12
    assert config.data.num_streams == 12
    assert config.data.max_piece_bytes == 6400
    assert config.training.mixed_precision_param == config.training.mixed_precision_reduce == "float64"
    assert config.parallelism.dp_shard == -1


def test_resolved_values_for_cuda() -> None:
    config = load_config([], world_size=1, device_type="cuda")
    assert config.training.mixed_precision_param == "bfloat16"
    assert config.training.mixed_precision_reduce == "float32"
    assert not config.debug.deterministic
    equal = ["--training.bit_equal", "true", "--training.local_batch_size", "1"]
    assert load_config(equal, world_size=1, device_type="cuda").debug.deterministic
    assert not load_config(equal, world_size=1, device_type="cpu").debug.deterministic


@pytest.mark.parametrize(
    ("device_type", "kinds", "workers"),
    [("cuda", ("text",), 1), ("cuda", ("tokens", "jsonl"), 1), ("cuda", ("tokens",), 0), ("cpu", ("text",), 0)],
)
def test_workers_by_device_and_sources(device_type: str, kinds: tuple[str, ...], workers: int) -> None:
    config = JobConfig(data=DataConfig(sources=tuple(SourceConfig(kind=kind) for kind in kinds)))
    resolved = resolve_config(config, world_size=1, device_type=device_type)
    assert resolved.data.num_workers == workers
    given = dataclasses.replace(config, data=dataclasses.replace(config.data, num_workers=3))
    assert resolve_config(given, world_size=1, device_type=device_type).data.num_workers == 3


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", (), "bfloat16"),
        ("cuda", ("--training.dtype=float64",), "float64"),
        ("cuda", ("--training.mixed_precision_param=float32",), "float32"),
        ("cpu", (), "float32"),
        ("cpu", ("--training.mixed_precision_param=bfloat16",), "bfloat16"),
        ("cuda", ("--optimizer.newton_schulz_dtype=float32",), "float32"),
        ("cuda", ("--optimizer.name=AdamW",), "auto"),
    ],
)
def test_muon_orthogonalizes_in_the_dtype_of_the_computation(
    device: str, settings: tuple[str, ...], expected: str
) -> None:
    values = dict(setting.split("=") for setting in ("--optimizer.name=Muon", "--model.flavor=debug", *settings))
    arguments = [f"{key}={value}" for key, value in values.items()]
    config = load_config(arguments, world_size=1, device_type=device, checks_files=False)
    assert config.optimizer.newton_schulz_dtype == expected


def test_given_values_are_not_overridden() -> None:
    argv = ["--training.global_batch_size", "64", "--data.num_streams", "32", "--data.max_piece_bytes", "1000"]
    precision = ["--training.mixed_precision_param", "float32", "--training.mixed_precision_reduce", "float32"]
    config = load_config([*argv, *precision], world_size=2, device_type="cuda")
    assert (config.training.global_batch_size, config.data.num_streams, config.data.max_piece_bytes) == (64, 32, 1000)
    assert config.training.mixed_precision_param == config.training.mixed_precision_reduce == "float32"


PLAIN = string.printable.translate(str.maketrans("", "", "~$"))
"""Without what paths may not contain."""
STRINGS = [
    *("", "plain", 'quo"te', "back\\slash", "new\nline\r\n\ttab", "\x01\x1f\x7f\x80", "\u2028", "\U0001f642", "#'"),
    "\\u0041",
]
FLOATS = [0.0, -0.0, 1.0, 1e-300, 5e-324, 1.7976931348623157e308, 1e16, 1e22, 0.1, 1 / 3, -2.5e-7]
INTS = [0, -1, 2**63 - 1, -(2**63), 1000]


def any_value(kind: Key, choose: random.Random) -> Any:
    """A random value of a kind; the rows of tables are made of such values, too."""
    if row := row_type(kind.type):
        return tuple(row(**any_values(columns_of(row), choose)) for _ in range(choose.randrange(4)))
    if kind.type == Length:
        return any_value(kind._replace(type=int), choose)
    if (found := alternatives(kind.type))[1]:
        return choose.choice([any_value(kind._replace(type=found[0]), choose), *found[1]])
    if get_origin(kind.type) is Literal:
        return choose.choice(get_args(kind.type))
    if get_origin(kind.type) is tuple:
        item = Key(get_args(kind.type)[0], None)
        return tuple(any_value(item, choose) for _ in range(choose.randrange(4)))
    if get_origin(kind.type) is dict:
        item = kind._replace(type=get_args(kind.type)[1], default=1.0)
        return {name: any_value(item, choose) for name in choose.sample(STRINGS, choose.randrange(4))}
    noise = "".join(choose.choices(PLAIN + "\u00e4\u4e2d", k=5))
    values: list[Any] = {bool: [True, False], int: INTS, float: FLOATS, str: [*STRINGS, noise]}[kind.type]
    inside = [value for value in values if kind.range is None or (kind.range.has(value) and str(value) != "-0.0")]
    return choose.choice(inside or [kind.default])


def any_values(kinds: dict[str, Key], choose: random.Random) -> dict[str, Any]:
    return {name: any_value(kind, choose) for name, kind in kinds.items()}


def any_config(choose: random.Random) -> JobConfig:
    sections = {}
    for name, section_type in SECTIONS.items():
        if section_type is ModelConfig:
            family = choose.choice(list(FAMILIES))
            family_only = Key(Literal[family], None)
            values = any_values(keys_of(name, family) | {"family": family_only}, choose)
            names = ("family", "flavor")
            overrides = {key: value for key, value in values.items() if key not in names and choose.random() < 0.5}
            sections[name] = ModelConfig(values["family"], values["flavor"], overrides)
        else:
            values = any_values(columns_of(section_type), choose)
            others = {key for keys in LENGTHS for key in keys[1:]}
            values |= {
                key: float(UNSET) if isinstance(values[key], float) else UNSET
                for key in values
                if f"{name}.{key}" in others
            }
            values |= {"plugins": ()} if name == "job" else {}  # they are imported
            sections[name] = section_type(**values)
    return JobConfig(**sections)


@seeds(10, 1000)
def test_dumped_config_reads_back_equal(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        config = any_config(random.Random(seed))
        again = config_of(tmp_path, dump_config(config))
        assert repr(again) == repr(config), seed  # repr distinguishes 0.0 from -0.0 and 1 from 1.0


def test_empty_keys_of_sources_are_left_out_of_the_dump() -> None:
    assert tomli.loads(dump_config(JobConfig()))["data"]["sources"] == [{"kind": "python-stdlib"}]


def test_every_key_has_a_type_that_can_be_read() -> None:
    """Each default, written as TOML, reads back unchanged: every field has a supported type."""
    for family in FAMILIES:
        for flavor in FAMILIES[family].flavors:
            values = dataclasses.asdict(FAMILIES[family].flavors[flavor])
            argv = [f"--model.{name}={literal(value)}" for name, value in values.items()]
            config, problems = parse_config([f"--model.family={family}", f"--model.flavor={flavor}", *argv])
            assert problems == []
            assert config.model == ModelConfig(family, flavor, values)


@pytest.mark.parametrize(
    ("argv", "launched", "used"),
    [
        ("--parallelism.tp 2", 3, 2),
        ("--parallelism.tp 2 --parallelism.pp 2 --training.global_batch_size 16", 11, 8),
        ("--training.global_batch_size 8 --data.num_streams 3", 5, 3),
        ("--parallelism.dp_shard 2", 3, 2),
        ("--parallelism.tp 4 --training.global_batch_size 16", 3, 3),  # none: load_config says why
        ("--training.steps 0", 3, 3),
    ],
)
def test_the_most_ranks_that_fit(argv: str, launched: int, used: int, tmp_path: Path) -> None:
    arguments = ["--job.dump_folder", str(tmp_path), "--model.n_layers", "8", *argv.split()]
    assert most_ranks(parse(arguments), launched, device_type="cpu") == used


def test_a_start_that_is_lost_before_its_first_save_keeps_its_batch(tmp_path: Path) -> None:
    """With checkpoints, also on fewer ranks; without them, each start is a new run."""
    argv = ["--job.dump_folder", str(tmp_path), "--training.local_batch_size", "2"]
    saving = [*argv, "--checkpoint.enable", "true"]
    first = load_config(saving, world_size=4, device_type="cpu")
    assert (first.training.global_batch_size, first.data.num_streams) == (8, 8)
    (tmp_path / CONFIG_COPY).write_text(dump_config(first), encoding="utf-8")
    again = load_config(saving, world_size=3, device_type="cpu")
    assert (again.training.global_batch_size, again.data.num_streams) == (8, 8)
    given = load_config([*saving, "--training.global_batch_size", "6"], world_size=3, device_type="cpu")
    assert (given.training.global_batch_size, given.data.num_streams) == (6, 8)
    new = load_config(argv, world_size=3, device_type="cpu")
    assert (new.training.global_batch_size, new.data.num_streams) == (6, 6)
