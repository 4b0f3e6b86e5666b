"""Model folders: valid ones open, invalid ones are refused; generation_config.json."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.unit.hf.making import parameter_of, write_model
from titanlite.generation.model import empty_model
from titanlite.hf.folder import EMBEDDING, OUTPUT, open_folder
from titanlite.hf.generation_defaults import GenerationDefaults, read_generation_defaults, with_eos
from titanlite.hf.safetensors import read_box_
from titanlite.hf.source import check_model
from titanlite.models.family import saved_tensors
from titanlite.models.hugging_face import stored_names, stored_tensors
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import JsonError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
W1 = "model.layers.1.mlp.gate_proj.weight"

_opened: list[str] = []
_watching: list[bool] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _watching and isinstance(args[0], str | bytes | os.PathLike):
        _opened.append(os.path.abspath(os.fsdecode(args[0])))


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Records the files that are opened inside the block."""
    if not hasattr(sys, "_noted_for_model_folders"):
        sys.addaudithook(_note)  # an audit hook cannot be removed
        sys._noted_for_model_folders = True  # type: ignore[attr-defined]
    _opened.clear()
    _watching.append(True)
    try:
        yield _opened
    finally:
        _watching.clear()


def edit(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of a JSON file."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return apply


def retensor(file: str, change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """A change of the tensors of a file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)

    return apply


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for change in changes:
            change(folder)

    return apply


def moved_out(file: str, link: str) -> Callable[[Path], None]:
    """Move the file out of the folder and replace it by a link."""

    def apply(folder: Path) -> None:
        shutil.move(folder / file, folder.parent / "outside")
        os.symlink(link.format(folder.parent), folder / file)

    return apply


def in_index(name: str, file: str) -> Callable[[Path], None]:
    return edit(INDEX, lambda index: index["weight_map"].update({name: file}))


def place(folder: Path) -> str:
    """The shard of W1."""
    found: str = json.loads((folder / INDEX).read_text())["weight_map"][W1]
    return found


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "up": (in_index(Q, f"../{FIRST}"), f"{Q} is in '../{FIRST}'"),
    "up twice": (in_index(Q, "x/../../outside"), f"{Q} is in 'x/../../outside'"),
    "below": (in_index(Q, f"inner/{FIRST}"), f"{Q} is in 'inner/{FIRST}'"),
    "absolute": (in_index(Q, "/outside.safetensors"), f"{Q} is in '/outside.safetensors'"),
    "backslash": (in_index(Q, f"..\\{FIRST}"), f"{Q} is in "),
    "dots": (in_index(Q, ".."), f"{Q} is in '..'"),
    "empty": (in_index(Q, ""), f"{Q} is in ''"),
    "zero": (in_index(Q, "a\0.safetensors"), f"{Q} is in "),
    "number": (in_index(Q, 7), f"{Q} is in 7"),  # type: ignore[arg-type]
    "pickle": (in_index(Q, "pytorch_model.bin"), f"{Q} is in 'pytorch_model.bin'"),
    "symlink": (moved_out(FIRST, "{}/outside"), f"{FIRST} is a link that leaves the folder"),
    "relative symlink": (moved_out(FIRST, "../outside"), f"{FIRST} is a link that leaves the folder"),
    "symlinked index": (moved_out(INDEX, "../outside"), f"{INDEX} is a link that leaves the folder"),
    "symlinked config": (moved_out("config.json", "../outside"), "config.json is a link that leaves the folder"),
    **{
        f"symlinked {name}": (
            lambda f, n=name: ((f / n).parent.mkdir(exist_ok=True), os.symlink("/etc/passwd", f / n)),
            f"{Path(name).name} is a link that leaves the folder",
        )
        for name in ("tokenizer.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates/a.jinja")
    },
    "dangling": (lambda f: ((f / FIRST).unlink(), os.symlink("gone", f / FIRST)), f"{FIRST} is missing"),
    "loop": (lambda f: ((f / FIRST).unlink(), os.symlink(FIRST, f / FIRST)), f"{FIRST} is missing"),
    "folder": (lambda f: ((f / FIRST).unlink(), (f / FIRST).mkdir()), f"{FIRST} is not a file"),
    "pipe": (lambda f: ((f / FIRST).unlink(), os.mkfifo(f / FIRST)), f"{FIRST} is not a file"),
    "stale shard": (
        lambda f: shutil.copy(f / FIRST, f / "model-00003-of-00003.safetensors"),
        "unexpected file model-00003-of-00003.safetensors",
    ),
    "single beside index": (lambda f: shutil.copy(f / FIRST, f / SINGLE), f"unexpected file {SINGLE}"),
    "missing shard": (lambda f: (f / SECOND).unlink(), f"{SECOND} is missing"),
    "truncated shard": (lambda f: os.truncate(f / SECOND, 1000), f"{SECOND}: its "),
    "longer shard": (lambda f: os.truncate(f / SECOND, (f / SECOND).stat().st_size + 8), f"{SECOND}: its tensors end"),
    "no shard": (lambda f: (f / SECOND).write_text("version https://git-lfs"), f"{SECOND}: its header"),
    "missing tensor": (
        lambda f: both(
            retensor(place(f), lambda tensors: tensors.pop(W1)), edit(INDEX, lambda index: index["weight_map"].pop(W1))
        )(f),
        f"{W1} is missing",
    ),
    "tensor in the index alone": (in_index("model.layers.9.x.weight", FIRST), "lacks model.layers.9.x.weight"),
    "tensor in the shard alone": (
        lambda f: retensor(FIRST, lambda tensors: tensors.update(extra=torch.zeros(2)))(f),
        f"{FIRST} contains extra, but model.safetensors.index.json does not list it",
    ),
    "tensor in another shard": (
        lambda f: in_index(W1, SECOND if place(f) == FIRST else FIRST)(f),
        f"contains {W1}, but model.safetensors.index.json lists it in model-",
    ),
    "extra tensor": (
        both(
            retensor(FIRST, lambda tensors: tensors.update({"model.layers.0.bias": torch.zeros(2)})),
            in_index("model.layers.0.bias", FIRST),
        ),
        "model.layers.0.bias is not a tensor of this model",
    ),
    "transposed": (
        lambda f: retensor(place(f), lambda tensors: tensors.update({W1: tensors[W1].t()}))(f),
        ": it is transposed",
    ),
    "reshaped": (
        lambda f: retensor(place(f), lambda tensors: tensors.update({W1: tensors[W1][1:]}))(f),
        f"{W1} has shape ",
    ),
    "integers": (
        lambda f: retensor(place(f), lambda tensors: tensors.update({W1: tensors[W1].to(torch.int8)}))(f),
        f"{W1} has dtype 'I8'",
    ),
    "index of nothing": (edit(INDEX, lambda index: index.update(weight_map={})), f"{INDEX} has no weight_map"),
    "index twice": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'),
        f"{INDEX} has 'a' twice",
    ),
    "truncated index": (lambda f: (f / INDEX).write_text('{"weight_map": '), f"{INDEX} is not JSON"),
    "no weights": (
        lambda f: [(f / name).unlink() for name in (INDEX, FIRST, SECOND)],
        f"has neither {SINGLE} nor {INDEX}",
    ),
    "pickles": (
        lambda f: [(f / name).unlink() for name in (INDEX, FIRST)] + [(f / SECOND).rename(f / "pytorch_model.bin")],
        "pytorch_model.bin, a pickle file, which is not supported",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json is not a JSON object"),
    "other family": (edit("config.json", lambda c: c.update(model_type="gpt2")), "model_type is 'gpt2'"),
    "no family": (edit("config.json", lambda c: c.update(model_type=["llama"])), "model_type is ['llama']"),
    "quantized": (edit("config.json", lambda c: c.update(quantization_config={"a": 1})), "quantization_config"),
    "other layers": (
        edit("config.json", lambda c: c.update(num_hidden_layers=3)),
        "model.layers.2.input_layernorm.weight is missing",
    ),
    "fewer layers": (edit("config.json", lambda c: c.update(num_hidden_layers=1)), "is not a tensor of this model"),
    "endless layers": (
        edit("config.json", lambda c: c.update(num_hidden_layers=10**12)),
        "num_hidden_layers = 10000000",
    ),
    "no layers": (edit("config.json", lambda c: c.update(num_hidden_layers=-1)), "num_hidden_layers = -1"),
    "no heads": (edit("config.json", lambda c: c.update(num_attention_heads=0)), "num_attention_heads = 0"),
    "odd heads": (edit("config.json", lambda c: c.update(num_key_value_heads=3)), "divides model.n_heads"),
    "other vocabulary": (edit("config.json", lambda c: c.update(vocab_size=140)), f"{EMBEDDING} has shape (131,"),
    "missing field": (edit("config.json", lambda c: c.pop("hidden_size")), "config.json: hidden_size is missing"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    write_model(folder, shards=2)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_folders_are_refused_and_nothing_outside_is_read(made: Path, tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    folder = Path(shutil.copytree(made, tmp_path / "folder"))
    (tmp_path / "outside").write_bytes((made / FIRST).read_bytes())
    (tmp_path / FIRST).write_bytes((made / FIRST).read_bytes())
    change(folder)
    with opened_files() as opened, pytest.raises(UserError) as error:
        open_folder("hf:it", folder)
    assert str(error.value).startswith("hf:it")
    assert message in str(error.value)
    python = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[3]))
    assert [path for path in opened if not path.startswith((f"{folder}/", *python))] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_all_tensors_are_read_into_the_model(tmp_path: Path, family: str, shards: int, tied: bool) -> None:
    written = write_model(tmp_path / "it", family, torch.bfloat16, shards, tie_embeddings=tied)
    folder = open_folder("it", tmp_path / "it")
    names = folder.family.hugging_face.names(folder.hyper_parameters)
    model = empty_model(folder.family, folder.hyper_parameters, torch.device("cpu"), torch.float32)
    own = saved_tensors(model)
    with opened_files() as opened:
        read = folder.fill_(own)
    assert {os.path.dirname(path) for path in opened} == {str(tmp_path / "it")}
    assert read == sum(tensor.nbytes for tensor in written.values())
    stored = stored_tensors(own, names)
    assert stored.keys() == written.keys()
    assert all(torch.equal(tensor, written[name].float()) for name, tensor in stored.items())
    assert folder.describe(torch.float32) == f"{len(written)} tensors, converted from bfloat16 to float32"
    assert not any(folder.copies.values())


def test_experts_that_are_stored_as_one_tensor(tmp_path: Path) -> None:
    """As in the published folders of Qwen3.5, with the tensors of the prediction of further tokens."""
    written = write_model(tmp_path / "it", "qwen3_5_moe", torch.float32)
    config = open_folder("it", tmp_path / "it").hyper_parameters
    stacked = {name: tensor for name, tensor in written.items() if ".mlp.experts." not in name}
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        matrices = {
            kind: torch.stack([written[f"{prefix}.{expert}.{kind}.weight"] for expert in range(config.n_experts)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        stacked[f"{prefix}.down_proj"] = matrices["down_proj"]
        stacked[f"{prefix}.gate_up_proj"] = torch.cat((matrices["gate_proj"], matrices["up_proj"]), dim=1)
    save_file(stacked | {"mtp.norm.weight": torch.ones(3)}, tmp_path / "it" / SINGLE)
    folder = open_folder("it", tmp_path / "it")
    own = saved_tensors(empty_model(folder.family, config, torch.device("cpu"), torch.float32))
    folder.fill_(own)
    found = stored_tensors(own, folder.family.hugging_face.names(config))
    assert all(torch.equal(found[name], tensor) for name, tensor in written.items())
    assert folder.describe(torch.float32) == f"{len(stacked)} tensors, float32, 1 of mtp left out"
    save_file(stacked | {f"{prefix}.down_proj": matrices["down_proj"][1:].clone()}, tmp_path / "it" / SINGLE)
    with pytest.raises(UserError, match="is missing"):
        open_folder("it", tmp_path / "it")


def add_tensors(folder: Path, more: dict[str, Tensor]) -> None:
    save_file(load_file(folder / SINGLE) | more, folder / SINGLE)


def test_a_missing_output_may_be_tied(tmp_path: Path) -> None:
    write_model(tmp_path / "it", tie_embeddings=True)
    edit("config.json", lambda fields: fields.pop("tie_word_embeddings"))(tmp_path / "it")
    with pytest.raises(UserError) as refused:
        open_folder("it", tmp_path / "it")
    assert str(refused.value).endswith(
        f'lm_head.weight is missing: if it is tied to {EMBEDDING}, add "tie_word_embeddings": true to config.json'
    )
    edit("config.json", lambda fields: fields.update(tie_word_embeddings=True))(tmp_path / "it")
    open_folder("it", tmp_path / "it")


def test_an_output_beside_a_tied_embedding_must_equal_it(tmp_path: Path) -> None:
    written = write_model(tmp_path / "it", tie_embeddings=True)
    add_tensors(tmp_path / "it", {"lm_head.weight": written[EMBEDDING].clone()})
    folder = open_folder("it", tmp_path / "it")
    out = {"tok_embeddings.weight": torch.empty_like(written[EMBEDDING])}
    folder.fill_(out)
    assert torch.equal(out["tok_embeddings.weight"], written[EMBEDDING])
    other = written[EMBEDDING].clone()
    other[-1, -1] += 1
    add_tensors(tmp_path / "it", {"lm_head.weight": other})
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        open_folder("it", tmp_path / "it").fill_(out)
    add_tensors(tmp_path / "it", {"lm_head.weight": other[1:].clone()})
    with pytest.raises(UserError, match=r"lm_head.weight has shape \(130, "):
        open_folder("it", tmp_path / "it")


def test_rotary_frequencies_of_old_folders_are_ignored(tmp_path: Path) -> None:
    write_model(tmp_path / "it")
    add_tensors(tmp_path / "it", {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in (0, 1)})
    assert open_folder("it", tmp_path / "it").describe(torch.float64).endswith(", 2 rotary tables ignored")
    edit("config.json", lambda fields: fields.update(new_gate=True, no_layers=[]))(tmp_path / "it")
    assert open_folder("it", tmp_path / "it").describe(torch.float64).endswith("fields of config.json: new_gate")
    add_tensors(tmp_path / "it", {"model.layers.x.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.raises(UserError, match=r"layers\.x\..* is not a tensor of this model"):
        open_folder("it", tmp_path / "it")


@pytest.mark.parametrize("form", ["language_model.{}", "model.language_model.{}"])
def test_a_text_model_inside_another_model(tmp_path: Path, form: str) -> None:
    """As in folders of Gemma 3 with images, of transformers before 4.52 and of later ones."""
    written = write_model(tmp_path / "it", "gemma3", tie_embeddings=True)
    is_new = form.startswith("model.")
    renamed = {form.format(name.removeprefix("model.") if is_new else name): written[name] for name in written}
    outside = {f"{'model.' * is_new}{name}": torch.ones(3) for name in ("vision_tower.x.weight", "projector.weight")}
    save_file(renamed | outside, tmp_path / "it" / SINGLE)
    edit(
        "config.json",
        lambda fields: fields.update(model_type="gemma3", text_config={**fields, "tie_word_embeddings": False}),
    )(tmp_path / "it")
    folder = open_folder("it", tmp_path / "it")
    assert folder.describe(torch.float64) == f"{len(written)} tensors, float64, 2 of projector, vision_tower left out"
    out = {"norm.weight": torch.empty(written["model.norm.weight"].shape, dtype=torch.float64)}
    folder.fill_(out)
    assert torch.equal(out["norm.weight"], written["model.norm.weight"])
    add_tensors(tmp_path / "it", {form.format("layers.0.further.weight"): torch.ones(3)})
    with pytest.raises(UserError, match=r"layers\.0\.further\.weight is not a tensor of this model"):
        open_folder("it", tmp_path / "it")


@pytest.mark.parametrize(("wrapper", "family"), [("mistral3", "mistral"), ("internvl", "qwen2"), ("llava", "mistral")])
def test_the_embeddings_of_a_text_model_are_tied_by_default(tmp_path: Path, wrapper: str, family: str) -> None:
    """As the models of transformers that wrap it, which do not read the default of the text model."""
    written = write_model(tmp_path / "it", family, tie_embeddings=True)
    tensors = {f"language_model.{name}": tensor for name, tensor in written.items()}
    save_file(tensors, tmp_path / "it" / SINGLE)
    edit("config.json", lambda fields: fields.pop("tie_word_embeddings"))(tmp_path / "it")
    edit("config.json", lambda fields: fields.update(model_type=wrapper, text_config=dict(fields)))(tmp_path / "it")
    if wrapper == "llava":
        with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
            open_folder("it", tmp_path / "it")
        return
    assert open_folder("it", tmp_path / "it").hyper_parameters.tie_embeddings
    add_tensors(tmp_path / "it", {"language_model.lm_head.weight": written[EMBEDDING] + 1})
    assert not open_folder("it", tmp_path / "it").hyper_parameters.tie_embeddings  # as published: stored, not tied


def test_links_may_lead_into_an_allowed_folder(made: Path, tmp_path: Path) -> None:
    """As in the hub's cache, whose snapshots are links to blobs beside them."""
    repository = tmp_path / "models--a--b"
    (repository / "snapshots").mkdir(parents=True)
    shutil.copytree(made, repository / "blobs")
    snapshot = repository / "snapshots" / ("c0" * 20)
    snapshot.mkdir()
    for file in (repository / "blobs").iterdir():
        os.symlink(f"../../blobs/{file.name}", snapshot / file.name)
    assert open_folder("it", snapshot, repository).tensors
    with pytest.raises(UserError, match=r"config\.json is a link that leaves the folder"):
        open_folder("it", snapshot)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it: config\.json is missing"):
        open_folder("it", tmp_path / "nowhere")


def read(**fields: Any) -> GenerationDefaults:
    return read_generation_defaults(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, (None, None, None)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, None, None)),
        ({"do_sample": True}, (1.0, 50, 1.0)),
        ({"do_sample": True, "top_k": 0, "temperature": 0.6}, (0.6, None, 1.0)),
        ({"temperature": None, "top_p": 0.9}, (1.0, 50, 0.9)),
    ],
)
def test_sampling(fields: dict[str, Any], sampling: tuple[float | None, ...]) -> None:
    found = read(**fields)
    assert (found.temperature, found.top_k, found.top_p) == sampling
    assert found.not_applied == ()


def test_settings_that_are_not_applied_are_named() -> None:
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "bad_words_ids": [], "num_beams": 1, "stop_strings": None}
    assert read(**neutral, max_new_tokens=9, transformers_version="5").not_applied == ()
    found = read(repetition_penalty=1.1, top_k=-1, temperature="hot", eos_token_id=[1, "end"], min_p=0.05, top_p=0.9)
    assert {*found.not_applied} == {
        'eos_token_id = [1, "end"]',
        'temperature = "hot"',
        "top_k = -1",
        "repetition_penalty = 1.1",
        "min_p = 0.05",
    }
    assert (found.eos_ids, found.temperature, found.top_k, found.top_p) == ((), 1.0, 50, 0.9)
    found = read(eos_token_id=True, temperature=10**400, top_k=10**400)
    assert {*found.not_applied} == {"eos_token_id = true", f"temperature = {10**400}", f"top_k = {10**400}"}


def test_the_ids_that_end_a_text() -> None:
    assert read(eos_token_id=7).ends(None) == {7}
    assert read(eos_token_id=[7, 3]).ends(5) == {3, 5, 7}
    assert read().ends(5) == read_generation_defaults(None).ends(5) == {5}
    assert read().ends(None) == set()


def test_eos_of_the_run_comes_first_and_everything_else_is_kept() -> None:
    original = b'{ "eos_token_id": [7, 3],\n "top_h": 1e-1, "of another program": {"a": [1.50]} }'
    assert with_eos(original, [3]) == with_eos(original, []) == original
    found = with_eos(original, [5, 3])
    assert json.loads(found) == json.loads(original) | {"eos_token_id": [5, 7, 3]}
    assert json.loads(with_eos(b"{}", [5])) == {"eos_token_id": 5}
    with pytest.raises(JsonError):
        read_generation_defaults(b"[1]")


def pack(folder: Path) -> dict[str, Tensor]:
    """Store the matrices of experts in MXFP4, with random bytes; returns them as transformers reads them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # imported here: it takes seconds

    tensors, expected = load_file(folder / SINGLE), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 132, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        scales[0, 0, 0], scales[0, 1, 0] = 0, 250
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, folder / SINGLE)
    edit("config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))(folder)
    return expected


DOWN = "model.layers.0.mlp.down_proj.weight"


def pack_fp8(folder: Path) -> dict[str, Tensor]:
    """Store the matrices of a folder in float8 by blocks; returns them as transformers dequantizes them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, expected = load_file(folder / SINGLE), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        if name.endswith("_proj.weight"):
            tensors[name] = (100 * torch.randn(tensor.shape, generator=generator)).to(torch.float8_e4m3fn)
            scales = torch.rand([-(-size // 128) for size in tensor.shape], generator=generator) / 1000
            tensors[f"{name}_scale_inv"] = scales
            rows, columns = (128 * size for size in scales.shape)  # its blocks must be whole
            padded = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
            padded[: tensor.shape[0], : tensor.shape[1]] = tensors[name]
            expected[name] = Fp8Dequantize(None)._dequantize_one(padded, scales)[: tensor.shape[0], : tensor.shape[1]]
    save_file(tensors, folder / SINGLE)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit("config.json", lambda c: c.update(quantization_config=quantization))(folder)
    return expected


FURTHER = "model.layers.2"


def test_copies_of_a_layer_of_further_tokens(tmp_path: Path) -> None:
    """They may be missing, and must be equal otherwise."""
    tensors = write_model(tmp_path / "it", "deepseek_v3", n_further_tokens=1, vocab_size=131)
    del tensors[f"{FURTHER}.embed_tokens.weight"]
    tensors[f"{FURTHER}.shared_head.head.weight"][3, 1] += 1
    save_file(tensors, tmp_path / "it" / SINGLE)
    folder = open_folder("it", tmp_path / "it")
    assert folder.hyper_parameters.n_further_tokens == 1
    folder.fill_({"tok_embeddings.weight": torch.empty_like(tensors[EMBEDDING])})
    with pytest.raises(UserError, match=r"shared_head\.head\.weight differs from lm_head\.weight, which the layer"):
        folder.fill_({"output.weight": torch.empty_like(tensors[OUTPUT])})


def test_a_layer_of_further_tokens_without_a_field(tmp_path: Path) -> None:
    """As in the published folders of Qwen3-Next."""
    write_model(tmp_path / "it", "qwen3_next", n_further_tokens=1)
    edit("config.json", lambda c: c.pop("num_nextn_predict_layers"))(tmp_path / "it")
    folder = open_folder("it", tmp_path / "it")
    assert folder.hyper_parameters.n_further_tokens == 1
    assert (folder.left_out, folder.unknown) == ((), ())
    assert "layers.2.projection.weight" in folder.tensors


def test_a_layer_of_further_tokens_beside_a_text_model(tmp_path: Path) -> None:
    """As in the published folders of Qwen3.5, which have images, too."""
    written = write_model(tmp_path / "it", "qwen3_5", n_further_tokens=1)
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in written.items()}
    save_file(renamed | {"model.visual.x.weight": torch.ones(3)}, tmp_path / "it" / SINGLE)
    edit("config.json", lambda c: c.update(model_type="qwen3_5", text_config=dict(c)))(tmp_path / "it")
    folder = open_folder("it", tmp_path / "it")
    assert folder.hyper_parameters.n_further_tokens == 1
    assert folder.left_out == ("model.visual.x.weight",)
    found = torch.empty(folder.tensors["layers.2.projection.weight"].shape)
    folder.fill_({"layers.2.projection.weight": found})
    assert torch.equal(found, written["mtp.fc.weight"].float())


def test_a_layer_of_further_tokens_that_is_not_there(tmp_path: Path) -> None:
    """Without its tensors the model has none, as in folders that transformers has saved; with a part of them, it is
    damaged. A run may leave the layer out, and cannot ask for one that is missing."""
    tensors = write_model(tmp_path / "it", "deepseek_v3", n_further_tokens=1)
    with_layer = open_folder("it", tmp_path / "it")
    without = replace(with_layer.hyper_parameters, n_further_tokens=0)
    assert check_model(with_layer, with_layer.family, without) == []
    part = {name: tensor for name, tensor in tensors.items() if name != f"{FURTHER}.eh_proj.weight"}
    save_file(part, tmp_path / "it" / SINGLE)
    with pytest.raises(UserError, match=r"layers\.2\.eh_proj\.weight is missing"):
        open_folder("it", tmp_path / "it")
    save_file({name: t for name, t in tensors.items() if not name.startswith(FURTHER)}, tmp_path / "it" / SINGLE)
    folder = open_folder("it", tmp_path / "it")
    assert folder.hyper_parameters == without
    (problem,) = check_model(folder, folder.family, with_layer.hyper_parameters)
    assert (problem.key, problem.value) == ("model.n_further_tokens", 1)


FP8 = {"dim": 200, "ffn_dim": 130, "dense_ffn_dim": 260}


def test_matrices_in_float8(tmp_path: Path) -> None:
    """Bit for bit as transformers dequantizes them: entire parameters, and a part as a rank has it."""
    write_model(tmp_path / "it", "deepseek_v3", torch.bfloat16, n_further_tokens=1, **FP8)
    expected = pack_fp8(tmp_path / "it")
    folder = open_folder("it", tmp_path / "it")
    names = folder.family.hugging_face.names(folder.hyper_parameters)
    compared = 0
    for name, stored in names.items():
        if stored_names(stored)[0] in expected:
            right = parameter_of(expected, stored)
            found = torch.empty(right.shape)
            folder.fill_({name: found})
            assert torch.equal(found, right), name
            sizes = [size - size // 3 for size in right.shape]
            part = torch.empty(sizes)
            read_box_(part, folder.tensors[name], [size // 3 for size in right.shape])
            assert torch.equal(part, right[tuple(slice(size // 3, None) for size in right.shape)]), name
            compared += 1
    assert compared > 10
    assert "converted from bfloat16 and float32 to bfloat16" in folder.describe(torch.bfloat16)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{DOWN}_scale_inv"), "down_proj.weight has dtype torch.float8_e4m3fn; those with"),
        (lambda t: t.update({DOWN: t[DOWN].float()}), "down_proj.weight has dtype torch.float32; those with"),
        (lambda t: t.update({f"{DOWN}_scale_inv": torch.ones(1, 1)}), r"_scale_inv has shape \(1, 1\)"),
    ],
)
def test_damaged_float8(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str) -> None:
    write_model(tmp_path / "it", "deepseek_v3", **FP8)
    pack_fp8(tmp_path / "it")
    tensors = load_file(tmp_path / "it" / SINGLE)
    damage(tensors)
    save_file(tensors, tmp_path / "it" / SINGLE)
    with pytest.raises(UserError, match=message):
        open_folder("it", tmp_path / "it")


def test_other_blocks_of_float8_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "it", "deepseek_v3", **FP8)
    edit("config.json", lambda c: c.update(quantization_config={"quant_method": "fp8"}))(tmp_path / "it")
    with pytest.raises(UserError, match="weight_block_size = None: only blocks of 128 rows and columns"):
        open_folder("it", tmp_path / "it")


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Bit for bit as transformers reads them: entire parameters, and a part as a rank has it."""
    write_model(tmp_path / "it", "gpt_oss", torch.bfloat16, dim=64, ffn_dim=96)
    expected = pack(tmp_path / "it")
    folder = open_folder("it", tmp_path / "it")
    names = folder.family.hugging_face.names(folder.hyper_parameters)
    for name, stored in names.items():
        if name.endswith((".w1", ".w2", ".w3")):
            right = parameter_of(expected, stored)
            found = torch.empty(right.shape, dtype=torch.bfloat16)
            folder.fill_({name: found})
            assert torch.equal(found, right)
            part = torch.empty(1, 5, 23)
            read_box_(part, folder.tensors[name], (1, 7, 20))
            assert torch.equal(part, right[1:2, 7:12, 20:43].float())
    assert folder.describe(torch.bfloat16).endswith("tensors, bfloat16")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.down_proj_scales"), "down_proj_scales is missing"),
        (lambda t: t["model.layers.1.mlp.experts.down_proj_scales"].fill_(255), "a scale of MXFP4 is 255"),
        (lambda t: t.update({"model.norm_blocks": torch.zeros(2, dtype=torch.uint8)}), "model.norm_blocks is not"),
    ],
)
def test_damaged_mxfp4(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str) -> None:
    write_model(tmp_path / "it", "gpt_oss", dim=64, ffn_dim=96)
    pack(tmp_path / "it")
    tensors = load_file(tmp_path / "it" / SINGLE)
    damage(tensors)
    save_file(tensors, tmp_path / "it" / SINGLE)

    def read() -> None:
        folder = open_folder("it", tmp_path / "it")
        folder.fill_({name: torch.empty(stored.shape) for name, stored in folder.tensors.items()})

    with pytest.raises(UserError, match=message):
        read()
