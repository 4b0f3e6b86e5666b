"""Files that extend other files: how tables, arrays and lengths merge, and which file an error names."""

from pathlib import Path

import pytest

from tests.configuration import parse_config
from titanlite.config.files import SHIPPED, read_file
from titanlite.config.load import load_config, parse
from titanlite.config.schema import JobConfig
from titanlite.config.toml import dump_config
from titanlite.runtime.errors import ConfigError, Problem


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    """Write files by name; a double underscore is a folder."""
    for name, text in files.items():
        path = Path(name.replace("__", "/") + ".toml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def config_of(*argv: str) -> JobConfig:
    config, problems = parse_config(argv)
    assert problems == []
    return config


def problems_of(*argv: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world_size=1, device_type="cpu", checks_files=False)
    return list(caught.value.problems)


def test_tables_merge_by_key_and_arrays_are_replaced() -> None:
    sources = '[[data.sources]]\nkind = "text"\npath = "a"\n[[data.sources]]\nkind = "text"\npath = "b"\n'
    write(base=f"[training]\nsteps = 5\nseq_len = 6\n[metrics]\ntags = ['a', 'b']\n{sources}")
    child = "extends = 'base.toml'\n[training]\nsteps = 7\n[metrics]\ntags = ['c']\n[[data.sources]]\nsplit = 'train'"
    write(child=child)
    config = config_of("child.toml", "--training.local_batch_size", "3")
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (7, 6, 3)
    assert config.metrics.tags == ("c",)
    assert [(source.kind, source.path, source.split) for source in config.data.sources] == [
        ("python-stdlib", "", "train")
    ]


def test_later_bases_override_earlier_ones_and_are_relative_to_their_file() -> None:
    write(parts__a="training.steps = 1\ntraining.seq_len = 1\nmodel.n_layers = 1", parts__b="training.steps = 2")
    write(parts__both='extends = ["a.toml", "b.toml"]', child='extends = "parts/both.toml"\nmodel.n_layers = 3')
    config = config_of("child.toml")
    assert (config.training.steps, config.training.seq_len, config.model.overrides) == (2, 1, {"n_layers": 3})
    assert parse(["child.toml", "--debug.seed", "1"]).origins == {
        "training.steps": "parts/b.toml",
        "training.seq_len": "parts/a.toml",
        "model.n_layers": "child.toml",
        "debug.seed": "command line",
    }
    assert set(parse(["child.toml"]).origins) == {"training.steps", "training.seq_len", "model.n_layers"}


def test_a_file_may_extend_a_shipped_configuration() -> None:
    write(child='extends = "quickstart"')
    assert config_of("child.toml").training == config_of("quickstart").training
    Path("quickstart").write_text("training.steps = 3")  # as on the command line, a file of this name is meant
    assert config_of("child.toml").training.steps == 3
    assert parse(["quickstart.toml"]).origins == {}
    Path("quickstart").unlink()
    assert parse(["child.toml"]).origins["training.steps"] == str(SHIPPED / "quickstart.toml")


@pytest.mark.parametrize(
    ("base", "child", "argument", "expected"),
    [
        ("steps = 5", "tokens = 100", [], (1000, 100)),
        ("tokens = 100", "steps = 5", [], (5, -1)),
        ("steps = 5", "tokens = -1", [], (5, -1)),
        ("steps = 5", "tokens = 100", ["--training.steps", "6"], (6, -1)),
    ],
)
def test_a_length_overrides_that_of_the_base(
    base: str, child: str, argument: list[str], expected: tuple[int, int]
) -> None:
    write(base=f"[training]\n{base}", child=f'extends = "base.toml"\n[training]\n{child}')
    training = config_of("child.toml", *argument).training
    assert (training.steps, training.tokens) == expected


def test_a_dumped_configuration_extends_nothing() -> None:
    write(base="training.steps = 5", child='extends = "base.toml"')
    text = dump_config(config_of("child.toml"))
    assert "extends" not in text
    assert "\nsteps = 5\n" in text


def test_paths_in_values_are_relative_to_the_current_folder_but_those_of_plugins_to_their_file(folder: Path) -> None:
    write(parts__base='[job]\nplugins = ["plug.py", "a.b"]\n[tokenizer]\npath = "tokenizer"')
    write(child="extends = 'parts/base.toml'")
    content = read_file("child.toml", [])  # parse_config would import the plugins
    assert content is not None
    assert content.tables["tokenizer"]["path"] == "tokenizer"
    assert content.tables["job"]["plugins"] == [str(folder / "parts" / "plug.py"), "a.b"]


def test_errors_name_the_file_of_the_value() -> None:
    write(base='[training]\nsteps = "five"\nseq_len = -1\nlocal_batch_size = 0', child="extends = 'base.toml'")
    problems = problems_of("child.toml", "--training.seq_len", "0", "--training.local_batch_size", "1")
    assert [(problem.key, problem.file) for problem in problems] == [
        ("training.steps", "base.toml"),
        ("training.seq_len", ""),
    ]
    assert str(problems[0]).startswith("training.steps = 'five' in base.toml\n")
    write(base="[[data.sources]]\nkind = 'txt'\n[training]\nlocal_batch_size = 0")
    assert [(problem.key, problem.file) for problem in problems_of("child.toml")] == [
        ("data.sources.0.kind", "base.toml"),
        ("training.local_batch_size", "base.toml"),
    ]


def test_errors_name_the_file_of_an_unknown_section() -> None:
    write(child="extends = 'base.toml'", base="[trainings]\nsteps = 5")
    (problem,) = problems_of("child.toml")
    assert (problem.key, problem.file) == ("trainings", "base.toml")


def test_hyper_parameters_of_a_base_are_refused_if_the_family_of_the_file_lacks_them() -> None:
    write(base='[model]\nflavor = "1B"\ndim = 64\nrope_low_freq_factor = 2.0')
    write(child="extends = 'base.toml'\n[model]\nfamily = 'qwen3'\nflavor = '0.6B'")
    (problem,) = problems_of("child.toml")
    assert (problem.key, problem.file) == ("model.rope_low_freq_factor", "base.toml")
    assert "rope_low_freq_factor is a hyper-parameter of llama3" in problem.rule
    write(child="extends = 'base.toml'\n[model]\nflavor = '8B'")
    config = config_of("child.toml")
    assert (config.model.flavor, config.model.overrides) == ("8B", {"dim": 64, "rope_low_freq_factor": 2.0})


@pytest.mark.parametrize(
    ("files", "value", "rule", "remedy", "file"),
    [
        (
            {"child": 'extends = "bse.toml"', "base": ""},
            "bse.toml",
            "no such file",
            "did you mean base.toml?",
            "child.toml",
        ),
        ({"child": "extends = 'base.toml'", "base": "extends = 'no.toml'"}, "no.toml", "no such file", "", "base.toml"),
        ({"child": "extends = 'base.toml'", "base": "a ="}, "base.toml", "valid TOML", "Invalid value", "child.toml"),
        ({"child": "extends = 'child.toml'"}, "child.toml", "no cycle: child.toml > child.toml", "", "child.toml"),
        (
            {"child": "extends = 'a.toml'", "a": "extends = 'b.toml'", "b": "extends = './a.toml'"},
            "./a.toml",
            "no cycle: child.toml > a.toml > b.toml > a.toml",
            "remove extends",
            "b.toml",
        ),
        ({"child": "extends = 3"}, 3, "the path of a TOML file, or an array", "base.toml", "child.toml"),
        ({"child": "extends = ['']"}, [""], "the path of a TOML file, or an array", "base.toml", "child.toml"),
        ({"child": 'extends = ["a\\u0000b"]'}, ["a\0b"], "the path of a TOML file", "", "child.toml"),
    ],
)
def test_a_base_that_cannot_be_read_is_one_problem(
    files: dict[str, str], value: object, rule: str, remedy: str, file: str
) -> None:
    write(**files)
    (problem,) = problems_of("child.toml")
    assert (problem.key, problem.value, problem.file) == ("extends", value, file)
    assert rule in problem.rule
    assert remedy in problem.remedy


def test_a_long_chain_is_refused_and_a_diamond_is_not() -> None:
    write(**{f"f{n}": f"extends = 'f{n + 1}.toml'" for n in range(20)}, f20="")
    (problem,) = problems_of("f0.toml")
    assert (problem.value, problem.rule.partition(" (")[0]) == ("f16.toml", "at most 16 files in a chain")
    write(top="training.steps = 4", left="extends = 'top.toml'", right="extends = 'top.toml'")
    write(child="extends = ['left.toml', 'right.toml']")
    assert config_of("child.toml").training.steps == 4
    write(**{f"g{n}": f"extends = ['g{n + 1}.toml', 'g{n + 1}.toml']" for n in range(15)}, g15="training.steps = 5")
    assert config_of("g0.toml").training.steps == 5  # each file is read once, not 2^15 times


@pytest.mark.parametrize("argv", [["child.toml"], ["--extends", "base.toml"]])
def test_extends_elsewhere_is_explained(argv: list[str]) -> None:
    write(child="[training]\nextends = 'base.toml'")
    (problem,) = problems_of(*argv)
    assert (problem.rule, problem.remedy.partition(" above ")[0]) == (
        "a key at the top of a TOML file",
        'write extends = "base.toml"',
    )
