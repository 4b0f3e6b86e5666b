"""The table of hostile inputs: what a stranger may put where a careful user expects data."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.security.commands import Kind
from tests.security.running import FORGED, SCRIPT
from tests.security.workplace import ROWS, Workplace
from tests.task_files import TASK

NASTY = f"x\n{FORGED}: verified\r\x1b[2J\x1b]0;title\x07\u202e\u2028\x9b31m"
NASTY += f"</title><script>{SCRIPT}</script><b onclick={SCRIPT}>"
"""A text that forges a line, changes the terminal and leaves an HTML element."""


@dataclass(frozen=True)
class Hostile:
    """kind: of the input. command: the one that the default suite starts. build: changes a workplace.

    in_default_suite: False: another input passes the same check.
    """

    kind: Kind
    command: str
    build: Callable[[Workplace], None]
    in_default_suite: bool = True


HOSTILE: dict[str, Hostile] = {}


def hostile(
    name: str, kind: Kind, command: str, *, in_default_suite: bool = True
) -> Callable[[Callable[[Workplace], None]], Callable[[Workplace], None]]:
    """Add a hostile input to the table."""

    def add(build: Callable[[Workplace], None]) -> Callable[[Workplace], None]:
        assert name not in HOSTILE
        HOSTILE[name] = Hostile(kind, command, build, in_default_suite)
        return build

    return add


class Payload:
    """Its pickle runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def payload(place: Workplace) -> bytes:
    return pickle.dumps(Payload(place.touch))


# Runs: code


@hostile("a task that the run's configuration names", "run", "evaluate")
def _(place: Workplace) -> None:
    _write_task(place.here / "run" / "task.yaml", f'doc_to_text: "{place.expression}"\n')
    place.change_run(validation__tasks=["run/task.yaml"])


@hostile("a task of code that the run's configuration names", "run", "evaluate")
def _(place: Workplace) -> None:
    (place.here / "run" / "util.py").write_text(place.python)
    _write_task(place.here / "run" / "task.yaml", "doc_to_text: !function util.f\n")
    place.change_run(validation__tasks=["run/task.yaml"])


@hostile("a plugin of the run's configuration", "run", "generate")
def _(place: Workplace) -> None:
    (place.here / "run" / "plugin.py").write_text(place.python)
    place.change_run(job__plugins=[str(place.here / "run" / "plugin.py")])


@hostile("a module as plugin", "run", "evaluate")
def _(place: Workplace) -> None:
    (place.here / "helper.py").write_text(place.python)
    place.change_run(job__plugins=["helper"])


@hostile("the name of a plugin that answers the question for permission", "run", "convert")
def _(place: Workplace) -> None:
    place.change_run(job__plugins=[f"x\n{FORGED}: verified, add --allow-import\x1b[2J"])


@hostile("pickles in place of the tensors", "run", "digest")
def _(place: Workplace) -> None:
    _replace_files(place, lambda name: name.endswith(".distcp"))


@hostile("a pickle in place of the metadata", "run", "generate")
def _(place: Workplace) -> None:
    _replace_files(place, lambda name: name == ".metadata")


# Runs: servers and places of others


@hostile("a server in the run's [storage]", "run", "evaluate")
def _(place: Workplace) -> None:
    place.change_run(
        storage__endpoint=place.stranger,
        validation__sources=[{"kind": "jsonl", "path": "s3://data/rows.jsonl"}],
        data__sources=[{"kind": "jsonl", "path": "s3://data/rows.jsonl"}],
    )


@hostile("checkpoints in a folder of the user", "run", "generate")
def _(place: Workplace) -> None:
    place.change_run(checkpoint__folder=str(place.home / "runs" / "mine" / "checkpoint"))


@hostile("all files of the machine as data of a run", "run", "evaluate")
def _(place: Workplace) -> None:
    everything = [{"kind": "jsonl", "path": "/**/*"}]
    place.change_run(data__sources=everything, validation__sources=everything)


@hostile("checkpoints in a store", "run", "report")
def _(place: Workplace) -> None:
    place.change_run(checkpoint__folder="s3://of-the-user/checkpoint")


# Runs: links


def _links(name: str, command: str, targets: dict[str, str]) -> None:
    """targets: a folder or file of the user by path in the run."""

    @hostile(f"{name} out of the run, {command}", "run", command)
    def _(place: Workplace) -> None:
        for path, target in targets.items():
            place.link(f"run/{path}", place.home / target)


_WRITTEN = ("train.log", "metrics.jsonl", "run.json", "config.toml", "samples.jsonl")
_links("links to files", "train", {**dict.fromkeys(_WRITTEN, ".bashrc"), "ledger/x": ".bashrc"})
_links(
    "links to folders", "train", {**dict.fromkeys(("records", "faults", "ledger"), "runs/mine"), "tokenizer": ".ssh"}
)
_links("a link job.lock", "train", {"job.lock": ".bashrc"})
_links("a link audit", "audit", {"audit": "runs/mine"})
_links("a link checkpoint/step-4", "digest", {"checkpoint/step-4": "runs/mine/checkpoint/step-2"})


# Runs: damage and size


def _model(name: str, **facts: Any) -> None:
    @hostile(f"a model of the manifest with {name}", "run", "generate")
    def _(place: Workplace) -> None:
        manifest = next((place.here / "run" / "checkpoint").glob("step-4/MANIFEST.json"))
        saved = json.loads(manifest.read_bytes())["facts"]["model"]
        place.change_manifests(facts={"model": {**saved, **facts}})


_model("ten million layers", n_layers=10_000_000)
_model("long contexts and many tokens", max_seq_len=1_000_000_000, vocab_size=2_000_000_000)
_model("a negative width", dim=-1)
_model("a text as number", norm_eps="x")
_model("an escape in its family", family=NASTY)


@hostile("a position in the data of gigabytes", "run", "train")
def _(place: Workplace) -> None:
    def widen(content: bytes) -> bytes:
        metadata = pickle.loads(content)
        metadata.state_dict_metadata["data/streams"].size = torch.Size((4, 2**33))
        return pickle.dumps(metadata)

    _replace_files(place, lambda name: name == ".metadata", widen)


@hostile("a grid of exabytes in place of the metadata", "run", "digest")
def _(place: Workplace) -> None:
    from titanlite.checkpoint.manifest import GRID_FILE, GRID_FORMAT_VERSION, read_manifest, write_recorded

    large = {"name": "model/x.weight", "dtype": "torch.float32", "shape": [2**40, 2**20], "cuts": 0, "writers": 0}
    tables = {"tensors": [large], "cuts": [[[0], [0]]], "writers": [[0]], "places": [[[0, 0, 2**62]]]}
    for manifest in (place.here / "run" / "checkpoint").glob("*/MANIFEST.json"):
        files = dict(read_manifest(manifest.parent).files)
        file = next(name for name in files if name.endswith(".distcp"))
        content = json.dumps({**tables, "files": [{"name": file, "places": 0}]}).encode()
        del files[".metadata"]
        files[GRID_FILE] = write_recorded(manifest.parent / GRID_FILE, content)
        place.seal(manifest, files=files, format=GRID_FORMAT_VERSION)


@hostile("an unknown schedule in the manifest", "run", "train")
def _(place: Workplace) -> None:
    for manifest in (place.here / "run" / "checkpoint").glob("*/MANIFEST.json"):
        config = {name: dict(table) for name, table in json.loads(manifest.read_bytes())["config"].items()}
        config["lr_schedule"]["decay"] = "unknown"
        place.seal(manifest, config=config)


@hostile("escapes in the versions of a manifest", "run", "audit")
def _(place: Workplace) -> None:
    place.change_manifests(versions={"torch": NASTY, "code": NASTY, "titanlite": NASTY})


@hostile("escapes in the configuration", "run", "generate")
def _(place: Workplace) -> None:
    place.change_run(job__description=NASTY, lr_schedule__decay=NASTY, tokenizer__path=NASTY)


@hostile("a manifest that lists ../ files", "run", "generate")
def _(place: Workplace) -> None:
    for manifest in (place.here / "run" / "checkpoint").glob("*/MANIFEST.json"):
        text = manifest.read_text().replace('".metadata"', '"../../../../home/.bashrc"')
        manifest.write_text(text)


@hostile("pipes in place of a run's files", "run", "report")
def _(place: Workplace) -> None:
    for name in ("metrics.jsonl", "run.json", "config.toml"):
        (place.here / "run" / name).unlink(missing_ok=True)
        os.mkfifo(place.here / "run" / name)


@hostile("a pipe in place of a manifest", "run", "evaluate")
def _(place: Workplace) -> None:
    manifest = place.here / "run" / "checkpoint" / "step-4" / "MANIFEST.json"
    manifest.unlink()
    os.mkfifo(manifest)


@hostile("a record of steps that unpacks to gigabytes", "run", "replay")
def _(place: Workplace) -> None:
    (file,) = (place.here / "run" / "records").glob("*.npz")
    blocks, deflate, header = 66, zlib.compressobj(wbits=-zlib.MAX_WBITS), io.BytesIO()
    shape = (blocks * 2**24,)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    start = deflate.compress(header.getvalue()) + deflate.flush(zlib.Z_FULL_FLUSH)
    block = deflate.compress(bytes(2**24)) + deflate.flush(zlib.Z_FULL_FLUSH)  # depends on nothing before it
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("step.npy", start + blocks * block + deflate.flush())
        member = archive.getinfo("step.npy")
        # Its checksum is wrong: a reader knows that after the last byte only.
        member.compress_type, member.file_size = zipfile.ZIP_DEFLATED, len(header.getvalue()) + shape[0]


@hostile("HTML and escapes in rows of a report", "run", "report")
def _(place: Workplace) -> None:
    metrics = place.here / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    keys = {NASTY: 1.0, f"loss/{NASTY}": 1.0, f"watch/{NASTY}": 2.0}
    metrics.write_text("".join(json.dumps(row | keys) + "\n" for row in rows))
    place.change_run(job__description=NASTY)


@hostile("many charts of a report", "run", "report")
def _(place: Workplace) -> None:
    keys = {f"watch/{number}/norm": 1.0 for number in range(1000)}
    (place.here / "run" / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **keys}) + "\n" for n in (1, 2)))


@hostile("an index of other rows of a report", "run", "report")
def _(place: Workplace) -> None:
    metrics = place.here / "run" / "metrics.jsonl"
    metrics.write_text(
        "".join(json.dumps({"step": n, "loss": 1.0, "text": n * "x" * 2**20}) + "\n" for n in (1, 2, 5, 6))
    )
    entries = [(0, 1, 0), (7, 2**62, -1), (2**20, 1, 1), (2**23, 3, 0)]
    metrics.with_name("metrics.jsonl.index").write_bytes(b"".join(struct.pack("<3q", *each) for each in entries))


def _odd(name: str, file: str, content: str, *, in_default_suite: bool = True) -> None:
    @hostile(f"odd values: {name}", "run", "report", in_default_suite=in_default_suite)
    def _(place: Workplace) -> None:
        (place.here / "run" / file).write_text(content)


_TIME = "2026-05-01T12:00:00"
_odd(
    "naive beside aware times",
    "run.json",
    json.dumps({"run_id": "a", "starts": [{"step": 0, "time": t, "mesh": {}} for t in (_TIME, f"{_TIME}+02:00")]}),
)
_odd(
    "a list as step of a start",
    "run.json",
    json.dumps({"run_id": "a", "starts": [{"step": [], "time": _TIME, "mesh": {}}]}),
    in_default_suite=False,
)
_odd("a list as step", "metrics.jsonl", '{"step": [], "loss": 1.0}\n{"step": 2, "loss": 1.0}\n')
_odd("ragged loads", "metrics.jsonl", '{"step": 1, "loss": 1.0, "experts/load": [[1.0], []]}\n')
_odd(
    "huge losses", "metrics.jsonl", '{"step": 1, "loss": 1e308}\n{"step": 2, "loss": -1e308}\n', in_default_suite=False
)
_odd("a date in the configuration", "config.toml", "[job]\ndescription = 2026-05-01\n")
_odd("not a number in the ledger", "metrics.jsonl", '{"step": 1, "loss": NaN}\n', in_default_suite=False)


# Buckets


@hostile("keys with ../", "bucket", "report")
def _(place: Workplace) -> None:
    place.objects = {
        f"{folder}/{name}": b"of a stranger\n"
        for folder in ("faults", "records", "ledger")
        for name in (
            *("../../../home/.bashrc", "../" * 30 + f"{place.root}/pwned".lstrip("/"), f"/{place.root}/pwned"),
            *(f"x/../../../{FORGED}", "./x", "x//y", "a\\..\\b"),
        )
    }


# Model folders


@hostile("code of a model folder", "model", "convert")
def _(place: Workplace) -> None:
    _change_json(
        place.here / "model" / "config.json", auto_map={"AutoModel": "modeling.Model", "AutoConfig": "modeling.C"}
    )
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py"):
        (place.here / "model" / name).write_text(place.python)
    _change_json(place.here / "model" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization.T", None]})


@hostile("a model folder with pickled weights", "model", "convert")
def _(place: Workplace) -> None:
    (place.here / "model" / "model.safetensors").unlink()
    (place.here / "model" / "pytorch_model.bin").write_bytes(payload(place))


@hostile("an index of a model folder with ../", "model", "digest")
def _(place: Workplace) -> None:
    model = place.here / "model"
    shutil.copy(model / "model.safetensors", place.home / "model.safetensors")
    (model / "model.safetensors").unlink()
    _change_json(model / "model.safetensors.index.json", weight_map={"x": "../../home/model.safetensors"})


@hostile("a link out of a model folder", "model", "convert")
def _(place: Workplace) -> None:
    place.link("model/model.safetensors", place.home / ".bashrc")


@hostile("a pipe in a model folder", "model", "convert")
def _(place: Workplace) -> None:
    (place.here / "model" / "config.json").unlink()
    os.mkfifo(place.here / "model" / "config.json")


@hostile("a header of 2^63 bytes", "model", "digest")
def _(place: Workplace) -> None:
    (place.here / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")


@hostile("a model of a billion layers", "model", "train")
def _(place: Workplace) -> None:
    _change_json(place.here / "model" / "config.json", num_hidden_layers=10**9, hidden_size=2**40)


@hostile("escapes in a model folder", "model", "convert")
def _(place: Workplace) -> None:
    _change_json(place.here / "model" / "config.json", hidden_act=NASTY, model_type=NASTY)


# Corpora


@hostile("escapes in the names of files", "corpus", "inspect")
def _(place: Workplace) -> None:
    folder = place.here / "data" / "x"
    folder.mkdir()
    (folder / f"a\n{FORGED}: fine\x1b[2J\u202e.jsonl").write_text('{"text": 1}\n')
    place.use("jsonl", "data/x/*")


@hostile("escapes in rows", "corpus", "inspect")
def _(place: Workplace) -> None:
    (place.here / "data" / "rows.jsonl").write_text((json.dumps({"text": NASTY.replace("\n", " ") * 9}) + "\n") * 40)


@hostile("escapes in the keys of a row", "corpus", "train")
def _(place: Workplace) -> None:
    (place.here / "data" / "rows.jsonl").write_text(json.dumps({NASTY: "x"}) + "\n")


@hostile("a Parquet file of 300 bytes and gigabytes of text", "corpus", "inspect")
def _(place: Workplace) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(6000, np.int32)), pa.array(["a" * 2**20]))
    pq.write_table(pa.table({"text": text}), place.here / "data" / "rows.parquet", compression="zstd")
    place.use("parquet", "data/rows.parquet")


@hostile("a zstd file of RLE blocks", "corpus", "evaluate", in_default_suite=False)
def _(place: Workplace) -> None:
    _zstd(place, b"a")


@hostile("a zstd file of line ends", "corpus", "evaluate")
def _(place: Workplace) -> None:
    _zstd(place, b"\n")


@hostile("a line of gigabytes", "corpus", "evaluate")
def _(place: Workplace) -> None:
    _sparse(place, "rows.jsonl")
    place.use("jsonl", "data/rows.jsonl")


@hostile("a row of CSV of gigabytes", "corpus", "evaluate", in_default_suite=False)
def _(place: Workplace) -> None:
    _sparse(place, "rows.csv")
    place.use("csv", "data/rows.csv")


@hostile("a long text without line ends", "corpus", "tokenize", in_default_suite=False)
def _(place: Workplace) -> None:
    # A text may be as long as its file, and is read at about 150 MB/s: it is to fit into the limit of time.
    os.truncate(place.here / "data" / "text.txt", 2**28)
    place.use("text", "data/text.txt")


@hostile("a table of Arrow whose offsets are outside of it", "corpus", "inspect")
def _(place: Workplace) -> None:
    file = place.here / "data" / "rows.arrow"
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    content = file.read_bytes()
    offsets = np.cumsum([0, *(len(row["text"]) for row in ROWS)], dtype=np.int32).tobytes()
    assert content.count(offsets) == 1
    wrong = np.frombuffer(offsets, np.int32).copy()
    wrong[3:] += 2**30
    file.write_bytes(content.replace(offsets, wrong.tobytes()))
    place.use("arrow", "data/rows.arrow")


@hostile("pickles as tokens", "corpus", "train")
def _(place: Workplace) -> None:
    array = np.empty(1, object)
    array[0] = Payload(place.touch)
    np.save(place.here / "data" / "tokens.npy", array, allow_pickle=True)
    place.use("tokens", "data/tokens.npy")


@hostile("pipes and devices as data", "corpus", "train-tokenizer")
def _(place: Workplace) -> None:
    (place.here / "data" / "rows.jsonl").unlink()
    os.mkfifo(place.here / "data" / "rows.jsonl")


@hostile("a loop of links as data", "corpus", "inspect")
def _(place: Workplace) -> None:
    (place.here / "data" / "loop").symlink_to(".")
    place.link("data/rows.jsonl", place.here / "data" / "rows.jsonl")
    place.use("jsonl", "data/**/*.jsonl")


@hostile("all files of the machine as data", "corpus", "evaluate")
def _(place: Workplace) -> None:
    place.use("jsonl", "/**/*.jsonl")


@hostile("links to all files of the machine as data", "corpus", "inspect")
def _(place: Workplace) -> None:
    (place.here / "data" / "root").symlink_to("/")
    (place.here / "data" / "processes").symlink_to("/proc")
    place.use("jsonl", "data")


@hostile("200,000 levels of JSON", "corpus", "inspect")
def _(place: Workplace) -> None:
    (place.here / "data" / "rows.jsonl").write_text("[" * 200_000 + "\n" + '{"text": ' + "9" * 5_000_000 + "}\n")


@hostile("a script beside data", "corpus", "inspect")
def _(place: Workplace) -> None:
    folder = place.here / "data" / "set"
    folder.mkdir()
    (folder / "set.py").write_text(place.python)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    place.use("hf", "data/set")


@hostile("a README of data that names a server and other folders", "corpus", "inspect")
def _(place: Workplace) -> None:
    HOSTILE["a script beside data"].build(place)
    files = f"['{place.stranger}/rows.jsonl', '../../../home/.bashrc']"
    names = f"---\nconfigs:\n- config_name: default\n  data_files: {files}\n---\n"
    (place.here / "data" / "set" / "README.md").write_text(names)


# Tokenizers and templates


@hostile("a decoder that grows", "tokenizer", "inspect")
def _(place: Workplace) -> None:
    steps = [{"type": "Replace", "pattern": {"String": ""}, "content": "x" * 10}] * 8
    _change_json(place.here / "tokenizer" / "tokenizer.json", decoder={"type": "Sequence", "decoders": steps})


@hostile("a table of a normalizer that is too short", "tokenizer", "tokenize")
def _(place: Workplace) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
    _change_json(place.here / "tokenizer" / "tokenizer.json", normalizer=normalizer)


@hostile("code of a tokenizer", "tokenizer", "inspect")
def _(place: Workplace) -> None:
    folder = place.here / "tokenizer"
    _change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.T", None]}, tokenizer_class="T")
    (folder / "tok.py").write_text(place.python)


def _template(name: str, text: str, command: str) -> None:
    @hostile(f"a chat template: {name}", "template", command)
    def _(place: Workplace) -> None:
        body = text.replace("TOUCH", place.touch)
        (place.here / "template.jinja").write_text(body + (place.here / "template.jinja").read_text())


_template("os of cycler", "{{ cycler.__init__.__globals__.os.system('TOUCH') }}", "inspect")
_template("attr", "{{ (''|attr('__class__')).__mro__[1].__subclasses__() }}", "inspect")
_template("format", "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "generate")
_template("an include", "{% include '../../home/.bashrc' %}", "inspect")
_template("escapes in an error", "{{ raise_exception('a\\nFORGED: fine\\x1b[2J') }}", "generate")


# Tasks that the user names


@hostile("a template of a task", "task", "evaluate")
def _(place: Workplace) -> None:
    _write_task(place.here / "task.yaml", f'doc_to_text: "{place.expression}"\n')


@hostile("a link to a task with code below include", "task", "evaluate")
def _(place: Workplace) -> None:
    real = place.here / "real"
    real.mkdir()
    (real / "util.py").write_text(f"{place.python}\ndef f(doc): return 'x'\n")
    _write_task(real / "base.yaml", "doc_to_text: !function util.f\n")
    _write_task(place.here / "base.yaml", "")
    _write_task(real / "task.yaml", "include: base.yaml\n")
    place.link("task.yaml", real / "task.yaml")


@hostile("a link to a task with code in a module lm_eval", "task", "evaluate")
def _(place: Workplace) -> None:
    real = place.here / "real"
    (real / "lm_eval").mkdir(parents=True)
    (real / "lm_eval" / "x.py").write_text(f"{place.python}\ndef f(doc): return 'x'\n")
    _write_task(real / "task.yaml", "doc_to_text: !function lm_eval.x.f\n")
    place.link("task.yaml", real / "task.yaml")


@hostile("a task that includes itself", "task", "evaluate")
def _(place: Workplace) -> None:
    _write_task(place.here / "task.yaml", "include: task.yaml\n")


# Ladders, profiles, names, the current folder, the cache


@hostile("a ladder that shows another run", "ladder", "report")
def _(place: Workplace) -> None:
    place.run = "ladder"
    (place.here / "ladder").mkdir()
    row = {"folder": "../../home/runs/mine", "parameters": 1, "tokens": 1, "loss": 1.0, "name": "x"}
    (place.here / "ladder" / "ladder.json").write_text(json.dumps({"runs": [row], "law": {}, "target": {}}))


@hostile("a profile with escapes", "profile", "plan")
def _(place: Workplace) -> None:
    (place.here / "profile.toml").write_text(f"name = {json.dumps(NASTY)}\n")


@hostile("a line end in the name of the configuration", "name", "sweep")
def _(place: Workplace) -> None:
    # A name has no slash: the command of the third line would touch a file in the current folder.
    name = f"mine\n{FORGED}: fine\ntouch pwned\n.toml"
    shutil.copy(place.here / "mine.toml", place.here / name)
    place.config = name


@hostile("modules in the current folder", "folder", "audit")
def _(place: Workplace) -> None:
    for name in ("tomli", "xxhash", "tyro", "sitecustomize", "titanlite_plugin", "torch", "lm_eval", "matplotlib"):
        (place.here / f"{name}.py").write_text(place.python)
    (place.here / "titanlite").mkdir()
    (place.here / "titanlite" / "__init__.py").write_text(place.python)


@hostile("pickles in the cache", "cache", "inspect")
def _(place: Workplace) -> None:
    for path in [*(place.root / "cache").rglob("*")]:
        if path.is_file():
            path.write_bytes(payload(place))


@hostile("links in the cache", "cache", "train")
def _(place: Workplace) -> None:
    for path in [*(place.root / "cache").rglob("*")]:
        if path.is_file():
            path.unlink()
            path.symlink_to(place.home / ".bashrc")


# Making them


def _write_task(path: Path, more: str) -> None:
    """A task on data beside it. more: lines in place of the template's."""
    rows = [{"context": "the model", "choices": [" reads", " says"], "answer": 0, "q": "x"}] * 3
    data = path.with_suffix(".jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {line.partition(":")[0] for line in more.splitlines()}
    lines = TASK.format(name=path.stem, data=data).splitlines()
    kept = [line for line in lines if line.partition(":")[0] not in own]
    choice = [
        "output_type: multiple_choice",
        "doc_to_choice: choices",
        "doc_to_target: answer",
        "metric_list: [{metric: acc}]",
    ]
    path.write_text("\n".join([*kept, *choice, more]))


def _replace_files(
    place: Workplace, is_replaced: Callable[[str], bool], change: Callable[[bytes], bytes] | None = None
) -> None:
    """Change files of the checkpoints, and seal the manifests again. change: None: replace them by a payload."""
    import dataclasses

    from titanlite.checkpoint.manifest import read_manifest
    from titanlite.runtime.cache import hash_of

    for manifest in (place.here / "run" / "checkpoint").glob("*/MANIFEST.json"):
        files = dict(read_manifest(manifest.parent).files)
        for name in filter(is_replaced, files):
            file = manifest.parent / name
            file.write_bytes(payload(place) if change is None else change(file.read_bytes()))
            files[name] = dataclasses.replace(files[name], bytes=file.stat().st_size, hash=hash_of(file))
        place.seal(manifest, files=files)


def _change_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def _zstd(place: Workplace, byte: bytes) -> None:
    """9,000 blocks of 128 KiB of one byte, 4 bytes each: 1.1 GiB."""
    block = struct.pack("<I", (2**17 << 3) | (1 << 1))[:3] + byte
    last = struct.pack("<I", (2**17 << 3) | (1 << 1) | 1)[:3] + byte
    frame = b"\x28\xb5\x2f\xfd\x00\x38" + block * 8999 + last
    (place.here / "data" / "rows.jsonl.zst").write_bytes(frame)
    place.use("jsonl", "data/rows.jsonl.zst")


def _sparse(place: Workplace, name: str) -> None:
    """A file of 1.1 GiB of zero bytes without line ends, which takes no space."""
    os.truncate(place.here / "data" / name, 9 * 2**27)
