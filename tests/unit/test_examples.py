"""Tests that each file of examples/ does what its docstring says."""

import csv
import gzip
import json
import math
import random
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import titanlite
from tests.configuration import parse_config
from tests.unit.models.shaken import perturbed_model
from titanlite.config.load import load_config
from titanlite.data.bpe import EOS
from titanlite.data.config import DataConfig
from titanlite.data.kinds import KINDS, open_source
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.formats import format_of, open_tokens
from titanlite.data.sources.pieces import BadRowError
from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.kv_cache import Reading, remembering
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import PLUGIN_LOGGERS, MetricsConfig
from titanlite.metrics.records import Record
from titanlite.metrics.slow_loggers import BackgroundLogger
from titanlite.models.head import check_terms
from titanlite.models.losses import TERMS
from titanlite.models.registry import FAMILIES
from titanlite.models.watch import STATISTICS, Watched
from titanlite.optim.optimizer import Arguments, GatedOptimizer, OptimizerConfig
from titanlite.optim.registry import OPTIMIZERS
from titanlite.optim.schedule import ScheduleConfig, build_schedule
from titanlite.parallel.mesh import ShardGroups
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.plugins import load_plugins

pytestmark = pytest.mark.usefixtures("registries")

SMALL_RUN = """
[model]
family = "llama3"
flavor = "debug"
vocab_size = 300
dim = 32
n_layers = 1
n_heads = 2
n_kv_heads = 2
[training]
steps = 2
seq_len = 32
local_batch_size = 1
global_batch_size = 2
[validation]
enable = false
"""
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_configuration_of_all_examples_is_valid() -> None:
    config = load_config([str(EXAMPLES / "plugins.toml")], world_size=1, device_type="cpu")
    assert [entry.partition("@")[0] for entry in config.job.plugins] == [
        str(EXAMPLES / f"{name}.py") for name in ("family", "optimizer", "schedule", "loss", "logger")
    ]
    assert (config.model.family, config.optimizer.name, config.lr_schedule.decay) == ("primer", "RAdam", "restarts")
    _, (problem,) = parse_config([str(EXAMPLES / "plugins.toml"), "--model.ffn", "3"])
    assert problem.remedy == "did you mean model.ffn_dim?"


def test_the_family_has_a_squared_relu() -> None:
    load_plugins([str(EXAMPLES / "family.py")])
    family = FAMILIES["primer"]
    model = family.build(family.flavors["debug"])
    feed_forward = model.get_submodule("layers.0.feed_forward")
    with torch.no_grad():
        for parameter in feed_forward.parameters():
            parameter.fill_(0.5)
    x = torch.ones(1, 1, 128)
    assert feed_forward(x).unique().tolist() == [512 * 0.5 * (128 * 0.5) ** 2]
    assert feed_forward(-x).unique().tolist() == [0.0]


def test_the_source_reads_the_cells_of_notebooks(tmp_path: Path) -> None:
    load_plugins([str(EXAMPLES / "source.py")])
    text = "é" * 30
    content = {"cells": [{"source": ["# Title\n", "text"]}, {"source": ""}, {"source": text}]}
    (tmp_path / "good.ipynb").write_text(json.dumps(content))
    (tmp_path / "bad.ipynb").write_text("{}")
    source = open_source(SourceConfig("notebooks", str(tmp_path)))
    bad, good = source.files()
    pieces = list(source.scan(good, 1, 40))  # type: ignore[attr-defined]
    assert [piece.row for piece in pieces] == [1, 3, 3]
    texts = [source.read(good, piece) for piece in pieces]  # type: ignore[attr-defined]
    assert (texts[0], texts[1] + texts[2]) == ("# Title\ntext", text)
    (piece,) = source.scan(bad, 0, 40)  # type: ignore[attr-defined]
    with pytest.raises(BadRowError, match="not a notebook: KeyError"):
        source.read(bad, piece)  # type: ignore[attr-defined]
    assert "notebooks" in KINDS
    assert DataConfig(sources=(source.config,)).sources[0].kind == "notebooks"


def test_the_optimizer_is_radam_and_can_skip() -> None:
    load_plugins([str(EXAMPLES / "optimizer.py")])
    ours, theirs = (nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    options = {"lr_factor": 1.0, "weight_decay": 0.1, "betas": (0.8, 0.9), "momentum": 0.0}
    groups = [{"params": [("weights", ours)], **options}]
    section = OptimizerConfig(lr=0.01)
    gated = GatedOptimizer(
        [OPTIMIZERS["RAdam"].build(Arguments(groups, section, torch.device("cpu"), ShardGroups(), 0))]
    )
    reference = torch.optim.RAdam([theirs], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True)
    gated.set_lr(0.01)
    for step in range(3):
        ours.grad = theirs.grad = torch.full((2, 3), step - 1.5)
        gated.step_if(torch.tensor(False))
        gated.step_if(torch.tensor(True))
        reference.step()
        torch.testing.assert_close(ours, theirs)


def test_terms_are_beside_the_cross_entropy() -> None:
    arguments = ["--job.plugins", f'["{EXAMPLES / "max_z.py"}"]', "--loss.terms", '["max_z"]', "--loss.z_loss", "0.1"]
    config, problems = parse_config(arguments)
    assert problems == []
    logits = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z_loss, max_z = config.loss.chosen.term_values(logits, torch.zeros(3, dtype=torch.int64))
    assert torch.allclose(z_loss, 0.1 * logits.exp().sum(1).log() ** 2)
    assert torch.allclose(max_z, 2e-4 * logits.amax(1) ** 2)
    assert config.loss.is_cross_entropy  # perplexity and bits per byte
    assert not replace(config.loss, terms=()).chosen.needs_logits  # sharded logits, and the compiled loss
    with pytest.raises(ConfigError, match="each term once"):
        load_config([*arguments[:3], '["max_z", "max_z"]'], world_size=1, device_type="cpu", checks_files=False)
    _, (problem,) = parse_config([*arguments[:3], '["maxz"]'])
    assert 'did you mean "max_z"?' in problem.remedy
    with patch.dict(TERMS, {"z_loss": TERMS["max_z"]}):
        (problem,) = check_terms(replace(config.loss, terms=("z_loss",)))
    assert (problem.key, problem.rule) == ("loss.z_loss", "0 with another term of the name z_loss")


def test_logits_are_capped_with_and_without_labels() -> None:
    load_plugins([str(EXAMPLES / "capped.py")])
    family = FAMILIES["capped"]
    output = family.build(family.flavors["debug"]).output
    with torch.no_grad():
        output.weight.fill_(100.0)
        assert output(torch.ones(1, 1, 256)).unique().tolist() == [15.0]


def test_blocks_compute_attention_and_feed_forward_side_by_side() -> None:
    load_plugins([str(EXAMPLES / "parallel_blocks.py")])
    family = FAMILIES["parallel_blocks"]
    model = family.build(replace(family.flavors["debug"], dim=16, n_heads=2, n_kv_heads=2, n_layers=1, ffn_dim=8))
    model.init_buffers(torch.device("cpu"))
    block, rope = model.layers["0"], model.rope(None)
    x = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    expected = x + block.attention(block.attention_norm(x), rope, None) + block.feed_forward(block.ffn_norm(x))
    assert torch.equal(block(x, rope, None), expected)


def test_a_short_convolution_generates_with_a_cache_what_it_computes_without() -> None:
    load_plugins([str(EXAMPLES / "short_convolution.py")])
    family = FAMILIES["short_convolution"]
    config = replace(family.flavors["debug"], dim=32, n_heads=4, n_kv_heads=2, n_layers=3, ffn_dim=16, vocab_size=50)
    model = perturbed_model(family, config)
    tokens = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    with remembering(model, [0, 3], capacity=12) as reading:
        assert isinstance(reading, Reading)
        parts = [reading.read(tokens[:, :5]), *(reading.read(tokens[:, index : index + 1]) for index in range(5, 9))]
        assert reading.rewind(7, capacity=12) == 0  # the inputs before column 7 are no longer kept
    read = torch.cat(parts, dim=1)
    with torch.inference_mode():
        torch.testing.assert_close(read[0], model(tokens[:1])[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(read[1, 3:], model(tokens[1:, 3:])[0], rtol=1e-12, atol=1e-12)


def test_the_schedule_restarts_four_times() -> None:
    load_plugins([str(EXAMPLES / "schedule.py")])
    section = ScheduleConfig(warmup_steps=0, decay="restarts", min_lr_factor=0.0)
    lr = build_schedule(section, 2.0, 400)
    rates = np.array([lr(step) for step in range(401)])
    assert rates[[0, 100, 200, 300]].tolist() == [2.0] * 4
    assert math.isclose(rates[50], 1.0)
    assert rates[[99, 199, 299, 399]].max() < 0.001
    assert rates[400] == 0.0


def test_a_layer_notes_the_entropy_of_its_attention_and_an_update_its_size() -> None:
    load_plugins([str(EXAMPLES / "watched.py"), str(EXAMPLES / "updates.py")])
    family = FAMILIES["watched"]
    model = family.build(replace(family.flavors["debug"], dim=16, n_heads=2, n_kv_heads=1, n_layers=4, ffn_dim=8))
    model.init_buffers(torch.device("cpu"))
    watched = Watched([model], None, (0, 1))
    weights = nn.Parameter(torch.full((4,), 2.0))
    with torch.no_grad(), watched.noting():
        for parameter in model.parameters():
            parameter.zero_()  # a query sees all earlier positions alike
        labels = torch.tensor([[0, 0, -100, 0]])
        model(torch.zeros(1, 4, dtype=torch.int64), labels=labels, num_valid=torch.tensor([3]))
    with watched.noting():
        weights.grad = torch.full((4,), 3.0)
        with torch.no_grad(), STATISTICS["updates"]({"w": weights}):
            weights -= 0.5
    watched.end_step(torch.tensor(True))
    found = {name: (sum(values), sum(per), root) for name, (values, per, root) in watched.take().items()}
    assert found["entropy/3"] == pytest.approx((math.log(2) + math.log(4), 3.0, False))
    assert (found["norm/w"], found["update/w"]) == ((4 * 9.0 * 4, 4.0, True), (4 * 0.25, 4 * 4.0, True))


def test_the_logger_appends_rows(tmp_path: Path) -> None:
    load_plugins([str(EXAMPLES / "logger.py")])
    record = Record(3, 2.5, 1.0, 0.1, *[0] * 8)
    for _ in range(2):  # the second one is a resumed run
        logger = BackgroundLogger(PLUGIN_LOGGERS["csv"](MetricsConfig(), tmp_path, AboutRun({}, {}, "")))
        logger.write(record)
        logger.close()
    rows = list(csv.reader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert rows == [["step", "loss", "lr"], ["3", "2.5", "0.1"], ["3", "2.5", "0.1"]]


def tokenize_with_datatrove(texts: list[str], tokenizer: str, out: Path) -> None:
    """Write token files of Megatron and of datatrove, with its own steps."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    for step in (
        MegatronDocumentTokenizer(str(out), None, tokenizer, eos_token=EOS),
        DocumentTokenizer(str(out), tokenizer, eos_token=EOS, shuffle_documents=False),
    ):
        step.run(Document(text, str(number)) for number, text in enumerate(texts))


@pytest.mark.slow
def test_a_corpus_is_cleaned_tokenized_and_trained_on(tmp_path: Path, tokenizer_folder: Path) -> None:
    pytest.importorskip("datatrove")
    rng = random.Random(0)
    good = [" ".join("".join(rng.choices("abcdefgh", k=4)) for _ in range(60)) for _ in range(30)]
    rows = [*good, *(f"{text} at last" for text in good[:10]), *["too short"] * 5, "again " * 50, *good[10:20]]
    (tmp_path / "raw").mkdir()
    for part in range(2):
        rows_of_part = [json.dumps({"text": text}) for text in rows[part::2]]
        (tmp_path / "raw" / f"{part}.jsonl").write_text("\n".join(rows_of_part))
    runpy.run_path(str(EXAMPLES / "clean.py"))["clean"](str(tmp_path / "raw"), str(tmp_path), 1)
    with gzip.open(tmp_path / "clean" / "00000.jsonl.gz") as lines:
        cleaned = [json.loads(line)["text"] for line in lines]
    assert sorted(text.removesuffix(" at last") for text in cleaned) == sorted(good)

    config = tmp_path / "config.toml"
    sources = '[[data.sources]]\nkind = "{}"\npath = "{}"\n'
    config.write_text(f'[tokenizer]\npath = "{tokenizer_folder}"\n{sources.format("jsonl", tmp_path / "clean")}')
    command = [sys.executable, "-m", "titanlite", "tokenize", config, "--out", tmp_path / "tokens", "--workers", "1"]
    subprocess.run(command, check=True)
    ids, documents = np.load(tmp_path / "tokens/tokens-00000.npy"), np.load(tmp_path / "tokens/tokens-00000.documents")
    tokenizer = Tokenizer(tokenizer_folder / "tokenizer.json")
    assert [tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, documents[1:])] == cleaned

    tokenize_with_datatrove(cleaned, str(tokenizer_folder / "tokenizer.json"), tmp_path / "others")
    for file in (tmp_path / "others").iterdir():
        if file.suffix in (".bin", ".ds"):
            others = open_tokens(file, "")
            np.testing.assert_array_equal(others.read(0, len(others)), ids)
            positions = format_of(file).positions(file)
            np.testing.assert_array_equal(positions.read(0, positions.num_documents), documents)

    config.write_text(SMALL_RUN + sources.format("tokens", tmp_path / "tokens"))
    run = titanlite.run(config, {"job.dump_folder": tmp_path / "out", "data.document_mask": True})
    assert (run.ended, run.step) == ("finished", 2)
