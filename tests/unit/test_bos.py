"""BOS before documents is a fact of a run: its ways in, and all that read it, judged by transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import tomli
import tomli_w
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from torch.nn.functional import cross_entropy

import titanlite
from tests.unit.hf.making import write_model
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError
from titanlite.tools.convert import __main__ as convert
from titanlite.tools.saved_run import open_run
from titanlite.tools.tokenize import __main__ as tokenize

SEQ_LEN = 16
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_collection")]
BOS, EOS = ("<s>", 0), ("</s>", 1)


def template(single: str, pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=[BOS, EOS])


KINDS: dict[str, Any] = {
    "none": None,
    "bos": template("<s> $A", "<s> $A <s> $B"),
    "eos": template("$A </s>", "$A </s> $B </s>"),
    "both": template("<s> $A </s>", "<s> $A </s> $B </s>"),
    "bytes": processors.ByteLevel(trim_offsets=False),
    "bytes and bos": processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), template("<s> $A", "<s> $A <s> $B")]
    ),
    "roberta": processors.RobertaProcessing(EOS, BOS),
    "bert": processors.BertProcessing(EOS, BOS),
    "all": template("<s> $A", "<s> $A <s> $B"),
}
"""all: with a normalizer, and a space before the first word."""
ODD: dict[str, Any] = {
    "another token first": (template("</s> <s> $A", "$A $B"), [0, 1, "plain"], [1, 0, "plain"]),
    "one token for both": (processors.RobertaProcessing(BOS, BOS), [0, "plain", 0], ["plain", 0]),
    "no text": (template("<s>", "$A $B"), [0], [0]),
}
"""A post-processor, and the tokens of a text with BOS and without; nothing is removed if BOS is not the first one."""
ADDING = ("bos", "both", "bytes and bos", "roberta", "bert", "all")
TEXT = "the model reads the text and the text ends"
PROMPT = "The Model reads"


def write_tokenizer(kind: str, folder: Path) -> Tokenizer:
    words = [*sorted({*TEXT.split(), "a", "b"}), *(f"word{n}" for n in range(131))][: 131 - 3]  # as many as the model
    if kind == "all":
        words = [f"▁{word}" for word in words]
    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2} | {word: 3 + place for place, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, "<unk>"))
    library.add_special_tokens([AddedToken(text, special=True) for text, _ in (BOS, EOS)])
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "all":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        library.decoder = decoders.Metaspace(prepend_scheme="first")
        library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if KINDS[kind] is not None:
        library.post_processor = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": kind in ADDING}))
    return Tokenizer(folder / "tokenizer.json")


def model_folder(kind: str, folder: Path) -> Path:
    write_model(folder, n_layers=1)
    write_tokenizer(kind, folder)
    return folder


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_tokenizer_adds_bos_as_the_run_does(kind: str, adds: bool, tmp_path: Path) -> None:
    """And its other special tokens as before. The run's own copy is unchanged."""
    import transformers

    tokenizer = write_tokenizer(kind, tmp_path / "own")
    assert tokenizer.adds_bos == (kind in ADDING)
    tokenizer.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (tmp_path / "own" / "tokenizer.json").read_bytes()
    tokenizer.save(tmp_path / "exported", adds_bos=adds)
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("own", "exported"))
    ends = [1] if kind in ("eos", "both", "roberta", "bert") else []
    plain = before(TEXT, add_special_tokens=False)["input_ids"]
    assert before(TEXT)["input_ids"] == [0] * (kind in ADDING) + plain + ends
    assert after(TEXT)["input_ids"] == [0] * adds + plain + ends
    without = [each for each in before("a", "b")["input_ids"] if each != 0]
    assert [each for each in after("a", "b")["input_ids"] if each != 0] == without
    assert after("a", "b")["input_ids"][0] == (0 if adds else without[0])
    content = tokenizer.content_with_bos(adds=adds).decode()
    assert tokenizers.Tokenizer.from_str(content).encode(TEXT).ids == [0] * adds + plain + ends
    config = json.loads((tmp_path / "exported" / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] == adds


@pytest.mark.parametrize("name", ODD)
def test_odd_post_processors(name: str, tmp_path: Path) -> None:
    tokenizer = write_tokenizer("none", tmp_path)
    library = tokenizers.Tokenizer.from_file(tokenizer.arguments["file"])
    library.post_processor, *expected = ODD[name]
    library.save(tokenizer.arguments["file"])
    tokenizer = Tokenizer(tokenizer.arguments["file"])
    plain = tokenizer.encode(TEXT)
    for adds, pattern in zip((True, False), expected, strict=True):
        changed = tokenizers.Tokenizer.from_str(tokenizer.content_with_bos(adds=adds).decode())
        ids = [token for each in pattern for token in (plain if each == "plain" else [each])]
        assert changed.encode(TEXT).ids == ids


FEW = ["all", "none", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("bos", "eos", "both"))]


def imported(kind: str, folder: Path) -> Path:
    """The dump folder of an import."""
    convert.main(["import", str(model_folder(kind, folder / "model")), "--out", str(folder / "run")])
    (folder / "text.txt").write_text(TEXT)
    tables = {"model": tomli.loads((folder / "run" / "config.toml").read_text())["model"]}
    tables["training"] = {"seq_len": SEQ_LEN, "dtype": "float64", "steps": 1, "local_batch_size": 1}
    tables["data"] = {"sources": [{"kind": "text", "path": str(folder / "text.txt")}], "num_workers": 0}
    tables |= {"job": {"dump_folder": str(folder / "new")}, "checkpoint": {"enable": True}}
    (folder / "base.toml").write_text(tomli_w.dumps(tables))
    return folder / "run"


@pytest.mark.parametrize("kind", FEW)
def test_ways_in(kind: str, tmp_path: Path) -> None:
    """A model's documents begin with BOS if its tokenizer says so; those of a new run on this tokenizer do not."""
    adds = kind in ADDING
    run = imported(kind, tmp_path)

    def add_bos(**overrides: Any) -> object:
        changes = {name.replace("__", "."): value for name, value in overrides.items()}
        return titanlite.load_config(tmp_path / "base.toml", changes).data.add_bos

    model = tmp_path / "model"
    checkpoint = {"checkpoint__initial_load_path": run / "checkpoint", "checkpoint__initial_load_model_only": True}
    assert open_run(run).config.data.add_bos is adds
    assert add_bos(checkpoint__initial_load_path=f"hf:{model}") is adds
    assert add_bos(tokenizer__path=model, **checkpoint) is adds
    assert add_bos(tokenizer__path=model) is False
    write_tokenizer("none" if adds else "bos", tmp_path / "another")  # the model, not the tokenizer, was trained
    assert add_bos(checkpoint__initial_load_path=f"hf:{model}", tokenizer__path=tmp_path / "another") is adds
    for given in (True, False):
        assert add_bos(checkpoint__initial_load_path=f"hf:{model}", data__add_bos=given) is given
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"(?s)data.add_bos .*model.tokenizer.json is not a readable tokenizer"):
        add_bos(checkpoint__initial_load_path=f"hf:{model}", tokenizer__path=tmp_path / "another")
    write_tokenizer(kind, model)
    titanlite.run(tmp_path / "base.toml", {"tokenizer.path": model, "data.add_bos": True})
    assert add_bos(tokenizer__path=model) is True  # the resume
    again = {"job__dump_folder": tmp_path / "again", "tokenizer__path": model}
    assert add_bos(checkpoint__initial_load_path=tmp_path / "new" / "checkpoint", **again) is True


@pytest.mark.parametrize(("kind", "flag"), [("none", True), ("bos", False), ("none", False), ("bos", True)])
def test_files_that_disagree_about_bos_are_named(kind: str, flag: bool, tmp_path: Path, capfd: Any) -> None:
    """Such as those of a folder whose class of transformers 4 puts its own post-processor in place of the file's."""
    model = model_folder(kind, tmp_path / "model")
    names = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": flag}))
    convert.main(["import", str(model), "--out", str(tmp_path / "run")])
    output = "".join(capfd.readouterr()).splitlines()
    found = [line for line in output if "BOS: tokenizer_config.json has add_bos_token" in line]
    assert len(found) == (flag != (kind == "bos"))
    assert all(f"write data.add_bos = {str(flag).lower()}" in each for each in found)


@pytest.mark.parametrize("adds", [True, False])
def test_token_files_show_bos(adds: bool, tmp_path: Path) -> None:
    """Those of titanlite in their tokens.json; those of others in the tokens after each end of a document."""
    imported("none", tmp_path)
    of_others = np.array([0, 5, 6, 1, 0, 7, 1, 0, 8] if adds else [5, 0, 6, 1, 7, 1, 0, 8], np.uint16)
    np.save(tmp_path / "others.npy", of_others)
    words = ["--tokenizer.path", str(tmp_path / "model"), f"--data.add_bos={str(adds).lower()}", "--workers", "0"]
    tokenize.main([str(tmp_path / "base.toml"), "--out", str(tmp_path / "tokens"), *words])
    others = {"kind": "tokens", "path": str(tmp_path / "others.npy"), "eos": 1}
    for source, tokenizer in (({"kind": "tokens", "path": str(tmp_path / "tokens")}, ""), (others, tmp_path / "model")):
        changes = {"data.sources": [source], "tokenizer.path": tokenizer}
        assert titanlite.load_config(tmp_path / "base.toml", changes).data.add_bos is adds
    model = {"checkpoint.initial_load_path": f"hf:{model_folder('bos', tmp_path / 'other')}"}
    assert titanlite.load_config(tmp_path / "base.toml", {**changes, **model}).data.add_bos is adds


@pytest.mark.parametrize("adds", [True, False])
def test_a_run_on_token_files_without_a_tokenizer_has_bos_as_its_model(adds: bool, tmp_path: Path) -> None:
    """And as these files, if they show it."""
    imported("bos" if adds else "none", tmp_path)
    np.save(tmp_path / "with.npy", np.array([0, 5, 6, 1, 0, 7, 1, 0, 8], np.uint16))
    np.save(tmp_path / "without.npy", np.array([5, 0, 6, 1, 7, 1, 0, 8], np.uint16))

    def add_bos(name: str, eos: int) -> object:
        source = {"kind": "tokens", "path": str(tmp_path / name), "eos": eos}
        changes = {"data.sources": [source], "checkpoint.initial_load_path": f"hf:{tmp_path / 'model'}"}
        return titanlite.load_config(tmp_path / "base.toml", changes | {"data.document_mask": False}).data.add_bos

    assert add_bos("with.npy", -1) is adds
    assert add_bos("with.npy", 1) is True
    assert add_bos("without.npy", 1) is False


@pytest.mark.parametrize("case", ["data", "sources", "weights"])
def test_what_disagrees_about_bos_is_named(case: str, tmp_path: Path, capfd: Any) -> None:
    run = imported("bos", tmp_path)
    write_tokenizer("none", tmp_path / "plain")
    np.save(tmp_path / "with.npy", np.array([0, 5, 6, 1, 0, 7, 1] * 9, np.uint16))
    np.save(tmp_path / "without.npy", np.array([5, 6, 1, 7, 1, 8] * 9, np.uint16))
    files = [{"kind": "tokens", "path": str(tmp_path / name), "eos": 1} for name in ("with.npy", "without.npy")]
    weights = {"checkpoint.initial_load_path": run / "checkpoint", "checkpoint.initial_load_model_only": True}
    changes, expected = {
        "data": ({"data.sources": files[1:], "data.add_bos": True}, "data.add_bos = true should be false"),
        "sources": ({"data.sources": files}, "with.npy have it, those in .*without.npy have none, prompts"),
        "weights": (weights | {"data.add_bos": False}, "data.add_bos = false should be true"),
    }[case]
    titanlite.run(tmp_path / "base.toml", {"tokenizer.path": tmp_path / "plain"} | changes)
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "BOS: " in line]
    assert len(lines) == 1
    assert re.search(expected, lines[0])


@pytest.mark.parametrize("kind", FEW)
def test_readers(kind: str, tmp_path: Path) -> None:
    """The loss of a text is that of transformers, which adds BOS by its tokenizer; so are the prompts, samples, and the
    texts of the exported folder; also in a run from this model."""
    import transformers

    run = imported(kind, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    prompt = [each for each in tokenizer(PROMPT)["input_ids"] if each != 1]
    ids = [each for each in tokenizer(TEXT)["input_ids"] if each != 1] + [1]
    assert (prompt[0] == 0) == (kind in ADDING)

    tokens = torch.tensor([ids])
    with torch.no_grad():
        loss = cross_entropy(theirs(tokens).logits[0, :-1], tokens[0, 1:])
        following = int(theirs(torch.tensor([prompt])).logits[0, -1].argmax())
    word = tokenizer.decode([following]).strip()
    begun = {"checkpoint.initial_load_path": f"hf:{tmp_path / 'model'}", "optimizer.lr": 1e-30}
    begun |= {"samples.prompts": [PROMPT], "samples.max_new_tokens": 1}
    titanlite.run(tmp_path / "base.toml", begun)
    (sample,) = map(json.loads, (tmp_path / "new" / "samples.jsonl").read_text().splitlines())
    assert sample["text"].strip() == word
    for number, one in enumerate((run, tmp_path / "new")):
        found = titanlite.evaluate_run(one, tmp_path / "text.txt", overrides={"training.seq_len": SEQ_LEN})
        assert found.loss == pytest.approx(float(loss), rel=1e-8)  # transformers computes RoPE in float32
        written = titanlite.generate_text(one, PROMPT, max_new_tokens=1, temperature=0, dtype="float64")
        assert [each.strip() for each in written] == [word]
        titanlite.export_run(one, tmp_path / f"exported{number}")
        exported = transformers.AutoTokenizer.from_pretrained(tmp_path / f"exported{number}")
        assert exported(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
