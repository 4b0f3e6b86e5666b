"""titanlite convert: export and import, compared with transformers."""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import titanlite
from tests.distributed.program import REPOSITORY, TEXT
from tests.unit.hf.making import tiny, write_model
from titanlite.checkpoint.manifest import MANIFEST_FILE, read_manifest, write_manifest
from titanlite.data.bpe import train_bpe
from titanlite.data.chat.encoder import ChatEncoder, EncodedChat
from titanlite.data.chat.messages import Conversation
from titanlite.data.tokenizer import Tokenizer
from titanlite.models.attention import attend
from titanlite.models.family import HuggingFace
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import setup_logging
from titanlite.runtime.plugins import add_entry
from titanlite.tools import digest
from titanlite.tools.convert import __main__ as command
from titanlite.tools.convert import export_run, verify
from titanlite.tools.convert.__main__ import main, size_in_bytes
from titanlite.tools.saved_run import open_run

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
VOCAB_SIZE = 400
TOKENS = torch.arange(60).view(2, 30) * 6 % VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with fewer tokens than the tiny models' 400, and a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter([TEXT] * 4), 280, folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def loaded(folder: Path, **options: Any) -> Any:
    import transformers  # takes over a second, so not at collection time in every test worker

    if "experts" in (folder / "config.json").read_text():
        options["experts_implementation"] = "eager"  # the default does not compute in float64
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)


@torch.no_grad()
def transformers_logits(folder: Path, **options: Any) -> Tensor:
    logits: Tensor = loaded(folder, **options).eval()(TOKENS).logits
    return logits


def source(folder: Path, tokenizer: Path | None, family: str = "llama3", *dtype: torch.dtype, **options: Any) -> Path:
    write_model(folder, family, *dtype, **{"vocab_size": VOCAB_SIZE} | options)
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    return folder


LIKE_LLAMA3 = ("qwen2", "qwen3", "smollm3")
"""Families that tie embeddings by the code of llama3."""


def suite_of(family: str, *, tied: bool) -> tuple[pytest.MarkDecorator, ...]:
    if tied and family in LIKE_LLAMA3:
        return (pytest.mark.soak,)
    return () if family in ("llama3", "deepseek_v3") and not tied else (pytest.mark.slow,)


ROUND_TRIPS = [
    pytest.param(name, tied, marks=suite_of(name, tied=tied))
    for name, family in FAMILIES.items()
    for tied in sorted({False, *(flavor.tie_embeddings for flavor in family.flavors.values())})
]


@pytest.mark.parametrize(("family", "tied"), ROUND_TRIPS)
def test_export_import_export_gives_the_same_bytes_and_transformers_loads_them(
    tmp_path: Path, tokenizer_files: Path, capsys: pytest.CaptureFixture[str], family: str, tied: bool
) -> None:
    original = source(tmp_path / "original", tokenizer_files, family, shards=3, tie_embeddings=tied)
    main(["import", str(original), "--out", str(tmp_path / "run")])
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "one"), "--shard-size", "20KB"])
    main(["import", f"hf:{tmp_path / 'one'}", "--out", str(tmp_path / "again")])
    step = tmp_path / "again" / "checkpoint" / "step-0"
    main(["export", str(step), "--out", str(tmp_path / "two"), "--shard-size", "20KB"])
    printed = capsys.readouterr().out
    assert printed.count("Verified: logits of the folder (by transformers") == 2
    assert "warning" not in printed
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3

    found, expected = tensors_of(tmp_path / "one"), tensors_of(original)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert torch.equal(transformers_logits(tmp_path / "one"), transformers_logits(original))
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one", local_files_only=True)
    assert tokenizer.decode(tokenizer(TEXT, add_special_tokens=False)["input_ids"]) == TEXT
    assert (tokenizer.eos_token, tokenizer.model_max_length, tokenizer.chat_template) == (
        *("<|endoftext|>", 77),
        TEMPLATE,
    )
    own = open_run(tmp_path / "run").tokenizer()
    assert own is not None
    assert own.eos_id == loaded(tmp_path / "one").generation_config.eos_token_id == 0


@pytest.mark.parametrize(
    ("family", "prefix", "own"),
    [
        ("deepseek_v3", "model.layers.2.", "enorm hnorm eh_proj embed_tokens shared_head.norm shared_head.head"),
        ("qwen3_5", "mtp.", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm layers.0.self_attn.q_proj"),
        ("qwen3_next", "mtp.", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm layers.0.mlp.experts.0.up_proj"),
    ],
)
def test_a_layer_that_predicts_further_tokens_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, prefix: str, own: str
) -> None:
    """transformers drops it, so the comparison of logits does not see it."""
    original = source(tmp_path / "original", None, family, torch.bfloat16, n_further_tokens=1)
    main(["import", str(original), "--out", str(tmp_path / "run")])
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "one"), "--shard-size", "20KB"])
    output = capsys.readouterr()
    assert "Verified: logits of the folder (by transformers" in output.out
    assert f"{prefix}{own.split()[0]}" not in output.out + output.err, "a report of transformers"
    found, expected = tensors_of(tmp_path / "one"), tensors_of(original)
    assert {f"{prefix}{name}.weight" for name in own.split()} <= found.keys()
    assert found.keys() == expected.keys()
    assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_saved_by_transformers_is_the_same_model(tmp_path: Path, family: str) -> None:
    """With transformers' own fields and file names, and with rotary scaling if the family supports it."""
    described, config = FAMILIES[family].hugging_face, tiny(FAMILIES[family], vocab_size=VOCAB_SIZE)
    scaled = {"rope_scaling_factor": 4.0, "rope_original_seq_len": 16}
    config = replace(config, **{name: value for name, value in scaled.items() if hasattr(config, name)})
    fields = {"model_type": described.model_type} | described.config_json(config)
    (tmp_path / "fields").mkdir()
    (tmp_path / "fields" / "config.json").write_text(json.dumps(fields))
    import transformers

    options = {"experts_implementation": "eager"} if config.n_experts > 1 else {}
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "fields")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float64, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "original", max_shard_size="30KB")
    main(["import", str(tmp_path / "original"), "--out", str(tmp_path / "run")])
    run = open_run(tmp_path / "run")
    assert run.hyper_parameters == config
    with torch.no_grad():
        own = run.model(torch.device("cpu"), torch.float64)(TOKENS)
        assert torch.allclose(own, model(TOKENS).logits, rtol=0, atol=1e-5 * float(own.abs().max()))


@pytest.mark.parametrize(
    ("family", "theirs", "ours"),
    [("gpt_oss", 0.9, 0.001), ("gpt_oss", 0.0, 0.0), ("olmoe", 0.02, 0.01 / 16), ("deepseek_v3", 0.001, 0.001)],
)
def test_the_balance_loss_of_a_flavor_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, theirs: float, ours: float
) -> None:
    """router_aux_loss_coef is of another loss, aux_loss_alpha of DeepSeek-V3 of the same."""
    write_model(tmp_path / "original", family, balance_loss=theirs)
    main(["import", str(tmp_path / "original"), "--out", str(tmp_path / "run")])
    assert open_run(tmp_path / "run").hyper_parameters.balance_loss == ours
    said = f"model.balance_loss = {ours}, that of the flavor debug: router_aux_loss_coef = {theirs} in config.json"
    assert (said in capsys.readouterr().out) == (ours != theirs)


def test_an_export_has_the_balance_loss_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "original", "olmoe", balance_loss=0.0)
    main(["import", str(tmp_path / "original"), "--out", str(tmp_path / "first")])
    step_0 = tmp_path / "first" / "checkpoint" / "step-0"
    manifest = read_manifest(step_0)
    facts = {**manifest.facts, "model": manifest.facts["model"] | {"balance_loss": 0.02}}
    (step_0 / MANIFEST_FILE).unlink()
    write_manifest(step_0, replace(manifest, facts=facts))
    main(["export", str(tmp_path / "first"), "--out", str(tmp_path / "exported"), "--no-verify"])
    main(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "second")])
    output = capsys.readouterr().out
    assert open_run(tmp_path / "second").hyper_parameters.balance_loss == 0.02
    assert "unknown fields" not in output
    assert "of another loss" not in output
    fields = json.loads((tmp_path / "exported" / "config.json").read_text()) | {"router_aux_loss_coef": 0.5}
    (tmp_path / "exported" / "config.json").write_text(json.dumps(fields))
    main(["import", str(tmp_path / "exported"), "--out", str(tmp_path / "third")])
    assert open_run(tmp_path / "third").hyper_parameters.balance_loss == 0.01 / 16
    assert "router_aux_loss_coef = 0.5 in config.json is the coefficient of another loss" in capsys.readouterr().out


DEFAULTS = b"""{ "bos_token_id": null, "eos_token_id": [7, 0], "pad_token_id": 9, "do_sample": true,
  "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 33,
  "of another program": [1.50] }
"""


def generation_settings(folder: Path) -> dict[str, Any]:
    import transformers

    settings: dict[str, Any] = transformers.GenerationConfig.from_pretrained(folder).to_dict()
    return settings


@pytest.mark.slow
def test_generation_defaults_survive_import_training_resume_and_export(tmp_path: Path, tokenizer_files: Path) -> None:
    original = source(tmp_path / "original", tokenizer_files, dtype=torch.float32)
    (original / "generation_config.json").write_bytes(DEFAULTS)
    main(["import", str(original), "--out", str(tmp_path / "imported")])
    step_0 = tmp_path / "imported" / "checkpoint" / "step-0"
    shutil.copytree(step_0, tmp_path / "copy" / "step-0")
    (tmp_path / "text.txt").write_text(TEXT * 50)
    settings = {
        "data.sources": [{"kind": "text", "path": tmp_path / "text.txt"}],
        "training.seq_len": 16,
        "training.global_batch_size": 2,
        "checkpoint.enable": True,
    }

    def train(out: str, steps: int, path: str) -> Path:
        changes = {"job.dump_folder": tmp_path / out, "training.steps": steps, "checkpoint.initial_load_path": path}
        return titanlite.run(tmp_path / "imported" / "config.toml", settings | changes).folder

    from_folder = train("from folder", 1, f"hf:{original}")
    shutil.rmtree(original)
    assert train("from folder", 2, f"hf:{original}") == from_folder
    from_run = train("from run", 1, str(from_folder / "checkpoint"))
    for number, run in enumerate((tmp_path / "copy" / "step-0", from_folder, from_run)):
        out = tmp_path / f"out-{number}"
        export(run, out, "--no-verify")
        assert (out / "generation_config.json").read_bytes() == DEFAULTS
    assert open_run(from_folder).manifest.step == 2
    found = generation_settings(out)
    assert (found["eos_token_id"], found["pad_token_id"], found["max_new_tokens"]) == ([7, 0], 9, 33)
    assert (found["temperature"], found["top_k"], found["repetition_penalty"]) == (0.6, 20, 1.05)
    (step_0 / "generation_config.json").write_bytes(DEFAULTS.replace(b"0.6", b"0.9"))
    with pytest.raises(UserError, match=r"generation_config\.json .* has changed since it was written"):
        open_run(step_0)


@pytest.mark.slow
def test_a_chosen_chat_template_is_exported_and_gives_the_same_tokens_in_transformers(tmp_path: Path) -> None:
    """After fine-tuning on conversations; the model also learns to end a turn. Only tokenizer_config.json has the
    tokens of the template, and does not call the last one special."""
    (tmp_path / "tokenizer").mkdir()
    size = train_bpe(iter([TEXT] * 4), 290, tmp_path / "tokenizer")
    added = {size: {"content": "<|im_start|>", "special": True}, size + 1: {"content": "<|im_end|>", "special": False}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    original = source(tmp_path / "original", tmp_path / "tokenizer", dtype=torch.float32)
    main(["import", str(original), "--out", str(tmp_path / "imported")])
    messages = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "it says é"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    template = REPOSITORY / "examples" / "chatml.jinja"
    settings = {
        "data.sources": [{"kind": "chat", "path": tmp_path / "chat.jsonl"}],
        "tokenizer.chat_template": template,
        "training.seq_len": 64,
        "training.global_batch_size": 1,
        "training.steps": 1,
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": f"hf:{original}",
        "job.dump_folder": tmp_path / "run",
    }
    titanlite.run(tmp_path / "imported" / "config.toml", settings)
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--no-verify"])
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    own = Tokenizer(original / "tokenizer.json", chat_template=str(template))
    (encoded,) = ChatEncoder(own).encode([Conversation(messages)], "assistant")
    assert isinstance(encoded, EncodedChat)
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert encoded.trained.astype(int).tolist() == expected["assistant_masks"]
    ends = generation_settings(tmp_path / "out")["eos_token_id"]
    assert {theirs.decode([token]) for token in ends} == {"<|im_end|>", "<|endoftext|>"}


def test_the_eos_of_the_run_is_added_to_the_generation_defaults(
    tmp_path: Path, tokenizer_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the token that the run has learned to write after a document."""
    original = source(tmp_path / "original", tokenizer_files)
    (original / "generation_config.json").write_bytes(DEFAULTS.replace(b"[7, 0]", b"[7, 5]"))
    main(["import", str(original), "--out", str(tmp_path / "run")])
    export(tmp_path / "run", tmp_path / "out", "--no-verify")
    expected = generation_settings(original) | {"eos_token_id": [0, 7, 5]}
    assert generation_settings(tmp_path / "out") == expected
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [0, 7, 5]
    assert "eos_token_id is [0, 7, 5], with the tokens that end the texts of the run" in capsys.readouterr().out


def test_ids_of_a_config_json_without_generation_defaults(tmp_path: Path) -> None:
    """transformers takes them from there."""
    for eos, kept in (([7, 5], (7, 5)), (7, (7,)), (None, ())):
        folder = source(tmp_path / f"{len(kept)}", None)
        fields = json.loads((folder / "config.json").read_text()) | {"eos_token_id": eos, "pad_token_id": 9}
        (folder / "config.json").write_text(json.dumps(fields))
        main(["import", str(folder), "--out", str(folder / "run")])
        assert open_run(folder / "run").generation_defaults().eos_ids == kept
    for text, problem in (("[]", "is not a JSON object"), ("{", "is not JSON")):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(UserError, match=rf"generation_config\.json {problem}"):
            main(["import", str(folder), "--out", str(tmp_path / "none")])


def export(run: Path, out: Path, *arguments: str) -> None:
    main(["export", str(run), "--out", str(out), *arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported run in float32, without a tokenizer."""
    folder = tmp_path_factory.mktemp("imported")
    main(["import", str(source(folder / "original", None, dtype=torch.float32)), "--out", str(folder / "run")])
    return folder / "run"


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    export(run, tmp_path / "out", "--dtype", dtype, "--verify")
    wanted, before = getattr(torch, dtype), tensors_of(run.parent / "original")
    found = tensors_of(tmp_path / "out")
    assert all(torch.equal(tensor, before[name].to(wanted)) for name, tensor in found.items())
    assert loaded(tmp_path / "out").dtype == wanted
    printed = capsys.readouterr().out
    assert f"converted from float32 to {dtype}" in printed
    assert f"tokens in {'float64' if dtype == 'float64' else 'float32'}\n" in printed
    main(["import", str(tmp_path / "out"), "--out", str(tmp_path / "back")])
    imported = "float32" if dtype == "float16" else dtype  # runs do not support float16
    assert open_run(tmp_path / "back").dtype == getattr(torch, imported)
    if dtype == "float16":
        assert "converted from float16 to float32" in capsys.readouterr().out


def test_a_run_in_float8_is_exported_in_its_own_dtype(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(0)
    saved = open_run(run)
    trained = replace(saved.manifest, config=saved.manifest.config | {"float8": {"recipe": "mxfp8"}})
    options = command.ExportOptions(str(run), tmp_path / "out", no_verify=True)
    command.write_export(replace(saved, manifest=trained), options, 1 << 30)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {torch.float32}
    assert "Not in float8: one rounding would not give" in capsys.readouterr().out
    export(run, tmp_path / "other", "--no-verify")
    assert "Not in float8" not in capsys.readouterr().out


def test_values_out_of_a_dtypes_range_are_refused(tmp_path: Path) -> None:
    original = source(tmp_path / "original", None)
    tensors = load_file(original / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, original / "model.safetensors")
    main(["import", str(original), "--out", str(tmp_path / "run")])
    with pytest.raises(UserError, match=r"--dtype float16 cannot represent all values of norm\.weight"):
        export(tmp_path / "run", tmp_path / "out", "--dtype", "float16")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, original / "model.safetensors")
    with pytest.raises(UserError, match=r"norm.weight has values that are not finite"):
        main(["import", str(original), "--out", str(tmp_path / "other")])
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["original", "run"]


def test_shards_keep_to_their_size_and_the_index_names_each_tensor(run: Path, tmp_path: Path) -> None:
    limit = 10_000
    export(run, tmp_path / "out", "--shard-size", "10KB", "--no-verify")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    expected = {f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))}
    assert {file.name for file in files} == expected == set(index["weight_map"].values())
    total = 0
    for file in files:
        found = load_file(file)
        assert {name for name, shard in index["weight_map"].items() if shard == file.name} == found.keys()
        num_bytes = sum(tensor.nbytes for tensor in found.values())
        assert num_bytes <= limit or len(found) == 1
        total += num_bytes
    assert index["metadata"]["total_size"] == total
    assert sum(1 for file in files if len(load_file(file)) > 1) > 2
    export(run, tmp_path / "single", "--no-verify")
    assert [file.name for file in (tmp_path / "single").glob("*.safetensors*")] == ["model.safetensors"]


def test_sizes(run: Path, tmp_path: Path) -> None:
    sizes = {"5GB": 5 * 10**9, "1.5 GiB": 3 * 2**29, "500mb": 5 * 10**8, "7": 7, "3KB": 3000}
    assert {text: size_in_bytes(text) for text in sizes} == sizes
    for text in ("", "0", "GB", "-5GB", "5 apples", "0.1", "9" * 400):
        with pytest.raises(UserError, match=r"--shard-size = .*\n +rule: +a size in bytes"):
            export(run, tmp_path / "out", f"--shard-size={text}")


Names = Mapping[str, str]


def swapped(one: str, other: str) -> Callable[[Names], Names]:
    def swap(names: Names) -> Names:
        return {name: names[name.replace(one, "?").replace(other, one).replace("?", other)] for name in names}

    return swap


def planted(monkeypatch: pytest.MonkeyPatch, name: str = "llama3", **changes: Callable[[Any], Any]) -> None:
    """Change the results of the functions that export a family."""
    family = FAMILIES[name]
    described: HuggingFace = family.hugging_face

    def wrapped(key: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda config: change(getattr(described, key)(config))

    wrong = {key: wrapped(key, change) for key, change in changes.items()}
    monkeypatch.setitem(FAMILIES, name, replace(family, hugging_face=replace(described, **wrong)))


def interleaved(tensor: Tensor) -> Tensor:
    """The tensor with the rows of each head of 8 reordered to interleaved rotary pairs."""
    return tensor.view(-1, 2, 4, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def written_with(change: Callable[[str, Tensor], Tensor]) -> Callable[[Path, Mapping[str, Tensor]], None]:
    original = export_run.write_tensors
    return lambda file, tensors: original(file, {name: change(name, tensor) for name, tensor in tensors.items()})


def unused_row_changed(tensor: Tensor) -> Tensor:
    """Change the row of a token whose logits are not compared."""
    used = torch.randint(VOCAB_SIZE, (verify.ROWS, verify.SEQ_LEN), generator=torch.Generator().manual_seed(0))
    row = next(row for row in range(VOCAB_SIZE) if row not in used)
    return tensor.index_fill(0, torch.tensor([row]), 0.0)


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "keys and values": lambda patch: planted(patch, names=swapped("wk", "wv")),
    "gate and up": lambda patch: planted(patch, names=swapped("w1", "w3")),
    "norms": lambda patch: planted(patch, names=swapped("attention_norm", "ffn_norm")),
    "embedding and output": lambda patch: planted(patch, names=swapped("tok_embeddings", "output")),
    "theta": lambda patch: planted(patch, config_json=lambda fields: fields | {"rope_theta": 10_000.0}),
    "epsilon": lambda patch: planted(patch, config_json=lambda fields: fields | {"rms_norm_eps": 1e-2}),
    "rotary layout": lambda patch: patch.setattr(
        export_run,
        "write_tensors",
        written_with(lambda name, t: interleaved(t) if "q_proj" in name or "k_proj" in name else t),
    ),
    "one value": lambda patch: patch.setattr(
        export_run, "write_tensors", written_with(lambda name, t: unused_row_changed(t) if "embed" in name else t)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(name, marks=() if name in ("keys and values", "epsilon", "rotary layout") else pytest.mark.soak)
        for name in MISTAKES
    ],
)
def test_a_folder_with_different_results_is_deleted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    MISTAKES[mistake](monkeypatch)
    is_own = mistake == "epsilon"
    monkeypatch.setattr(verify, "is_registered", lambda registry, name: is_own and name in registry)
    with pytest.raises(UserError, match="; the exported folder was deleted") as error:
        export(run, tmp_path / "out")
    assert (
        "The registered family 'llama3' computes something else than LlamaForCausalLM" in str(error.value)
    ) == is_own
    by_logits = mistake not in ("rotary layout", "one value")
    assert ("(bound 1e-04)" if by_logits else "values of ") in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_folder_with_norms_that_have_the_1_of_gemma_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["import", str(source(tmp_path / "original", None, "gemma2")), "--out", str(tmp_path / "run")])
    changed = written_with(lambda name, tensor: tensor + 1 if "norm" in name else tensor)
    monkeypatch.setattr(export_run, "write_tensors", changed)
    with pytest.raises(UserError, match="the exported folder was deleted"):
        export(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(("most", "compared"), [(80 + 64, True), (70, False)])
def test_a_window_is_compared_with_more_tokens_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], most: int, compared: bool
) -> None:
    """A window of one position more is another model, but only beyond the window."""
    original = source(tmp_path / "original", None, "mistral", dtype=torch.float32, sliding_window=80, max_seq_len=256)
    main(["import", str(original), "--out", str(tmp_path / "run")])
    monkeypatch.setattr(verify, "MOST_OF_WINDOW", most)
    export(tmp_path / "run", tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"on 1 x {most} tokens" in printed
    assert ("; a window of 80 positions is longer, and was not compared" in printed) != compared
    planted(monkeypatch, "mistral", config_json=lambda fields: fields | {"sliding_window": 81})
    with pytest.raises(UserError, match="the exported folder was deleted") if compared else nullcontext():
        export(tmp_path / "run", tmp_path / "other")


def test_without_transformers_titanlite_verifies_the_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "_has_transformers", lambda: False)
    export(run, tmp_path / "out", "--dtype", "bfloat16")
    printed = capsys.readouterr().out
    assert "by titanlite (transformers is not installed)) and" in printed
    assert "differ by at most 0, 0 of the largest logit (bound 0e+00)" in printed
    MISTAKES["one value"](monkeypatch)
    with pytest.raises(UserError, match="the exported folder was deleted"):
        export(run, tmp_path / "other")


def test_a_folder_that_transformers_cannot_load_is_deleted(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(monkeypatch, config_json=lambda fields: fields | {"pad_token_id": 10**9})
    with pytest.raises(UserError, match=r"transformers [\d.]+ cannot load the exported folder, "):
        export(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == []


def with_window(config: Any) -> Any:
    """Llama 3 whose positions see the 70 last ones."""
    model = FAMILIES["llama3"].build(config)
    for layer in model.layers.values():
        layer.attention.attend = attend_to_window
    return model


def attend_to_window(queries: Tensor, keys: Tensor, values: Tensor, mask: None) -> Tensor:
    del mask
    seen = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril().triu(-69)
    return attend(queries, keys, values, torch.zeros(seen.shape).masked_fill(~seen, -torch.inf))


@pytest.mark.usefixtures("registries")
def test_a_variant_with_the_format_of_its_parent_is_always_verified(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, --no-verify exported another model than the run's, and a window longer than 64 tokens was not seen."""
    parent = FAMILIES["llama3"]
    variants = {
        "same": replace(parent, build=lambda config: parent.build(config)),
        "window": replace(parent, build=with_window),
        "own": replace(parent, build=with_window, hugging_face=replace(parent.exported)),
    }

    for name, variant in variants.items():
        add_entry(FAMILIES, name, replace(variant, name=name), "register_family")
    saved = open_run(run)
    longer = replace(saved.manifest, config={**saved.manifest.config, "training": {"seq_len": 80}})

    def write(name: str, **options: bool) -> None:
        options_of = command.ExportOptions("", tmp_path / name, **options)
        command.write_export(replace(saved, family=FAMILIES[name], manifest=longer), options_of, 10**9)

    write("own", no_verify=True)
    with pytest.raises(UserError, match=r"has the hugging_face of 'llama3' and a build .*: leave out --no-verify"):
        write("window", no_verify=True)
    with monkeypatch.context() as patch:
        patch.setattr(verify, "available_memory_bytes", lambda: 1000)
        with pytest.raises(UserError, match=r"use --verify \(two copies of the model take .* are free\), or give"):
            write("window")
    with pytest.raises(UserError, match="family 'window' computes something else than LlamaForCausalLM"):
        write("window")
    setup_logging(0)
    write("same")
    assert "on 1 x 80 tokens" in capsys.readouterr().out


def test_a_model_that_does_not_fit_twice_is_verified_only_on_request(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "available_memory_bytes", lambda: 1000)
    export(run, tmp_path / "out")
    printed = capsys.readouterr().out
    assert "Not verified: two copies of the model take 0.0 GiB, and 0.0 GiB are free; use --verify" in printed
    export(run, tmp_path / "asked", "--verify")
    assert "Verified: " in capsys.readouterr().out
    export(run, tmp_path / "not", "--no-verify")
    printed = capsys.readouterr().out
    assert "Not verified (--no-verify)" in printed
    assert "warning: Not verified" not in printed
    assert contents(tmp_path / "out") == contents(tmp_path / "asked") == contents(tmp_path / "not")


def test_the_import_is_a_run_at_step_0(tmp_path: Path, tokenizer_files: Path) -> None:
    original = source(tmp_path / "original", tokenizer_files, rope_theta=123_456.0)
    main(["import", str(original), "--out", str(tmp_path / "run"), "--dtype", "float32"])
    found = open_run(tmp_path / "run")
    assert (found.manifest.step, found.manifest.content, found.dtype) == (0, "model", torch.float32)
    assert found.manifest.facts["imported_from"] == str(original)
    assert found.config.model.overrides["rope_theta"] == 123_456.0
    assert f'path = "{tmp_path / "run" / "tokenizer"}"' in (tmp_path / "run" / "config.toml").read_text()


def test_a_tokenizer_with_more_tokens_than_the_model_is_warned_of(
    tmp_path: Path, tokenizer_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = source(tmp_path / "original", tokenizer_files, vocab_size=200)
    main(["import", str(original), "--out", str(tmp_path / "run")])
    assert "ids up to 279, but the model has only 200 tokens: training" in capsys.readouterr().out


def test_nothing_is_overwritten_and_leftovers_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for arguments in (["export", str(run)], ["import", str(run.parent / "original")]):
        with pytest.raises(UserError, match="already exists and is not overwritten"):
            main([*arguments, "--out", str(out)])
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(UserError, match="link already exists"):
        export(run, tmp_path / "link")
    (tmp_path / "new.incomplete-1").mkdir()
    export(run, tmp_path / "new", "--no-verify")
    assert f"{tmp_path}/new.incomplete-1 was left by an interrupted conversion" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"nowhere contains no checkpoint"):
        export(tmp_path / "nowhere", tmp_path / "x")
    with pytest.raises(UserError, match=r"nowhere' is neither a folder nor ORGANIZATION/NAME"):
        main(["import", str(tmp_path / "nowhere"), "--out", str(tmp_path / "x")])
    with pytest.raises(UserError, match=r"rule: +a path"):  # not the current folder
        main(["import", "", "--out", str(tmp_path / "x")])


def test_digests_of_a_run_its_export_and_another_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export of another run's weights differs; names are those of the model."""
    export(run, tmp_path / "same")
    changed = tmp_path / "changed"
    shutil.copytree(tmp_path / "same", changed)
    file = changed / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    save_file(tensors, file, {"format": "pt"})
    narrow = tmp_path / "narrow"
    shutil.copytree(tmp_path / "same", narrow)
    save_file({name: each.bfloat16() for name, each in tensors.items()}, narrow / file.name, {"format": "pt"})
    for other, code in ((tmp_path / "same", 0), (changed, 1), (narrow, 1)):
        capsys.readouterr()
        with pytest.raises(SystemExit) as exited:
            digest.main([str(run), str(other)])
        first, second, result = capsys.readouterr().out.splitlines()
        assert exited.value.code == code
        assert (first.split()[1].strip(",") == second.split()[1]) == (code == 0)
        dtypes = f"dtype: torch.float32 in {first.split()[-1]}, torch.bfloat16 in {narrow}"
        assert result == {
            changed: f"weights: 1 of {len(tensors)} tensors of {changed} differ: norm.weight",
            narrow: f"{dtypes}: the same numbers have other bits",
        }.get(other, "equal: all tensors that they have in common, bit for bit")


def test_parts_that_only_one_has_are_named() -> None:
    run = digest.Sums("run", {"weights": {"w": 1}, "optimizer": {"w/exp_avg": 2}, "average": {}}, {torch.float32})
    exported = digest.Sums("exported", {"weights": {"w": 1}}, {torch.float32})
    assert [*digest.missing(exported, run)] == ["optimizer: only in run, not compared"]
