"""The kinds of files that are mutated: how valid ones are made, and which commands read them."""

import gzip
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
import torch
import xxhash
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

import titanlite
from tests.security.mutations import zstd
from tests.unit.data.test_formats import documents
from tests.unit.data.test_formats import write as write_token_file
from tests.unit.hf.making import write_model
from titanlite.checkpoint.manifest import HASH, MANIFEST_FILE
from titanlite.ranks.job_lock import job_lock, require_own, this_process
from titanlite.runtime.errors import UserError
from titanlite.tools import digest, evaluate, inspect, ledger
from titanlite.tools.command import run_command
from titanlite.tools.convert import __main__ as convert
from titanlite.tools.generate import __main__ as generate
from titanlite.tools.replay import __main__ as replay
from titanlite.tools.report import __main__ as report
from titanlite.tools.tokenize import __main__ as tokenize

VOCAB_SIZE = 300


@dataclass(frozen=True)
class Command:
    """A command, which reads a file: {file} in its arguments, and {folder}, the file's. then: one that follows if it
    succeeds. trains: whether it trains, or computes in process groups."""

    main: Callable[[Sequence[str]], None]
    arguments: tuple[str, ...]
    then: "Command | None" = None
    trains: bool = False

    def __call__(self, file: str) -> int:
        """Run it as a user does; returns its exit code."""
        words = [each.format(file=file, folder=os.path.dirname(file)) for each in self.arguments]
        sys.argv = ["titanlite", *words]
        try:
            run_command(self.main)
        except SystemExit as end:
            code = int(end.code or 0)
            return code if code or self.then is None else self.then(file)
        raise AssertionError("run_command exits")

    def __str__(self) -> str:
        return f"{self.main.__module__.removeprefix('titanlite.tools.')} {' '.join(self.arguments)}"


def command(
    main: Callable[[Sequence[str]], None], text: str, then: Command | None = None, *, trains: bool = False
) -> Command:
    return Command(main, tuple(text.split()), then, trains)


@dataclass(frozen=True)
class Call:
    """A function of titanlite, which may raise UserError. trains: see Command."""

    function: Callable[[str], int | None]
    trains: bool = False

    def __call__(self, file: str) -> int:
        try:
            return int(self.function(file) or 0)
        except UserError as error:
            print(f"titanlite: {error}")
            return 1

    def __str__(self) -> str:
        return self.function.__name__


def nothing(*_: str) -> None:
    pass


@dataclass(frozen=True)
class Kind:
    """A kind of files. build: writes a valid set into the current folder. files: globs of those that are mutated, of
    which one is. readers: of which one is drawn; each returns an exit code. before, after: what is done in the copy of
    the set before and after the mutation of a file; `after` gets its path."""

    build: Callable[[], object]
    files: tuple[str, ...]
    readers: tuple[Command | Call, ...]
    before: Callable[[], object] = nothing
    after: Callable[[str], object] = nothing


MODEL = f"""
[model]
family = "llama3"
dim = 16
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 24
vocab_size = {VOCAB_SIZE}
max_seq_len = 128
"""
TRAINING = """
[training]
steps = 4
seq_len = 16
local_batch_size = 2
global_batch_size = 2
[metrics]
log_freq = 1
"""
DATA = """
[tokenizer]
path = "tokenizer"
[data]
on_bad_row = "skip"
max_bad_rows = 1000000
ledger = true
[[data.sources]]
kind = "{kind}"
path = "{path}"
"""
RUN = """
[job]
dump_folder = "run"
[lr_schedule]
warmup_steps = 2
[validation]
enable = true
interval = 2
steps = 1
[[validation.sources]]
kind = "jsonl"
path = "rows.jsonl"
[samples]
interval = 2
max_new_tokens = 2
prompts = ["row"]
[checkpoint]
enable = true
interval = 2
"""
TEXTS = [f"row {n}: " + "some words " * (n % 5) + "and an end\n" for n in range(30)]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['tool_calls'] %}"
    "{{ message['tool_calls'] | tojson }}{% endif %}{{ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: str = "tokenizer") -> None:
    """One token per byte, and special tokens, some of them in the files beside; with a chat template."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary | {"an": 256}, [("a", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 257)]
    )
    path = Path(folder)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    config |= {"added_tokens_decoder": {"261": {"content": "<extra>", "special": True}}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<bos>", "pad_token": {"content": "<eos>"}}))
    (path / "added_tokens.json").write_text(json.dumps({"<more>": 262}))
    (path / "chat_template.jinja").write_text(CHATML)


def write_tokenizers() -> None:
    """A folder per kind of model, with the parts that tokenizers have."""
    write_data()
    Path("t").mkdir()
    write_tokenizer("t/bpe")
    letters = sorted({*"".join(TEXTS)} | {"▁"})
    pieces = [("<unk>", 0.0), *((each, -float(n)) for n, each in enumerate(letters, 2)), ("▁and", -3.0)]
    bytes_ = [(f"<0x{n:02X}>", -20.0) for n in range(256)]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces + bytes_, unk_id=0, byte_fallback=True))
    unigram.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = {word: n for n, word in enumerate(["[UNK]", *letters, *(f"##{letter}" for letter in letters), "row"])}
    wordpiece = tokenizers.Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    wordpiece.normalizer = normalizers.BertNormalizer()
    wordpiece.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    wordpiece.decoder = decoders.WordPiece()
    split = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "row": 1, "and": 2, "an": 3}, unk_token="[UNK]"))
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\s+|\d{1,3}"), "isolated"),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(),
        ]
    )
    split.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip(), normalizers.StripAccents()])
    for name, each in (("unigram", unigram), ("wordpiece", wordpiece), ("wordlevel", split)):
        Path("t", name).mkdir()
        each.add_special_tokens(["<eos>"])
        each.save(f"t/{name}/tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        Path("t", name, "tokenizer_config.json").write_text(json.dumps(config))


def write_config(name: str = "config.toml", kind: str = "jsonl", path: str = "rows.jsonl", more: str = "") -> None:
    text = MODEL + TRAINING + DATA.format(kind=kind, path=path) + more
    if kind == "tokens":
        text = re.sub(r'\[tokenizer\]\npath = "tokenizer"\n', "", text)
    Path(name).write_text(text)


def write_data() -> None:
    """Files of texts and a tokenizer, and a configuration of them."""
    write_tokenizer()
    rows = [{"text": text, "n": n, "more": {"a": [n]}} for n, text in enumerate(TEXTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    Path("rows.jsonl").write_bytes(lines)
    Path("rows.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    Path("rows.jsonl.zst").write_bytes(zstd(lines))
    write_config()


def write_csv() -> None:
    write_data()
    write_config(kind="csv", path="rows.csv")
    text = "n,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS))
    Path("rows.csv").write_text(text)
    Path("more.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def columns() -> dict[str, pyarrow.Array]:
    """Text columns of each type, with nulls."""
    texts = pyarrow.array([*TEXTS[:10], None, *TEXTS[10:20]])
    return {
        "string": texts,
        "large": texts.cast(pyarrow.large_string()),
        "view": texts.cast(pyarrow.string_view()),
        "dictionary": texts.dictionary_encode(),
    }


def write_parquet() -> None:
    write_data()
    write_config(kind="parquet", path="string-none.parquet")
    for name, column in columns().items():
        table = pyarrow.table({"n": range(len(column)), "text": column, "more": [[{"a": "b"}]] * len(column)})
        for compression in ("none", "snappy", "zstd"):
            if compression == "none" or name == "string":
                file = f"{name}-{compression}.parquet"
                pyarrow.parquet.write_table(table, file, row_group_size=8, compression=compression)


def write_arrow() -> None:
    write_data()
    write_config(kind="arrow", path="string-stream.arrow")
    for name, column in columns().items():
        table = pyarrow.table({"n": range(len(column)), "text": column, "more": [[{"a": "b"}]] * len(column)})
        for form, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
            for compression in (None, "lz4", "zstd"):
                if compression is None or name == "string":
                    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
                    with writer(f"{name}-{form}{compression or ''}.arrow", table.schema, options=options) as out:
                        out.write_table(table, max_chunksize=8)


def write_chat() -> None:
    write_data()
    write_config("chat.toml", "chat", "chat.jsonl")
    Path("chat.toml").write_text(Path("chat.toml").read_text().replace("seq_len = 16", "seq_len = 128"))
    rows: list[dict[str, Any]] = []
    for n, text in enumerate(TEXTS[:12]):
        answer = {"role": "assistant", "content": text}
        rows.append({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": f"{n}?"}, answer]})
        rows.append({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": text}]})
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": n}}}
        tool = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}, answer]
        rows.append({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, *tool], "tools": []})
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_token_files() -> None:
    """Token files of each program, a folder each."""
    write_config("tokens.toml", "tokens", "t")
    Path("tokens.toml").write_text(Path("tokens.toml").read_text().replace(f"= {VOCAB_SIZE}", "= 60000"))
    texts = documents(20)
    for name, width in (("datatrove", 2), ("Megatron", 4), ("OLMo-core", 2), ("llm.c", 2), ("raw", 2)):
        write_token_file(name, width, Path("t", name), texts)
    Path("t/numpy").mkdir()
    np.save("t/numpy/a.npy", np.concatenate(texts).astype(np.uint16))
    starts = np.cumsum([0, *map(len, texts)])[:-1].astype(np.int64)
    with open("t/numpy/a.documents", "wb") as file:
        np.save(file, starts)


def read_token_files(file: str) -> int:
    folder = os.path.dirname(file)
    keys = "--data.sources.0.dtype uint16 --data.sources.0.eos 0" if folder.endswith("raw") else ""
    keys += " --data.sources.0.eos 0" if folder.endswith("llm.c") else ""
    text = f"tokens.toml --data.sources.0.path {folder} --data.document_mask true {keys}"
    return command(inspect.main, text)(file)


def write_tokenized() -> None:
    """The folder of a tokenization, and one that was interrupted before its end."""
    write_data()
    write_config("tokens.toml", "tokens", "complete")
    arguments = ["config.toml", "--workers", "0", "--part-bytes", "700", "--out"]
    tokenize.main([*arguments, "complete"])
    finish = tokenize.finish

    def stop(job: Any) -> Any:  # noqa: ARG001
        raise KeyboardInterrupt

    tokenize.finish = stop
    try:
        tokenize.main([*arguments, "stopped"])
    except KeyboardInterrupt:
        pass
    finally:
        tokenize.finish = finish
    for each in sorted(Path("stopped").glob("tokens-0000[01].*")):
        each.unlink()


def write_run() -> None:
    """A run with all files that runs write, and data to evaluate it on."""
    write_data()
    write_config(more=RUN)
    titanlite.run("config.toml")
    run = Path("run")
    (run / "experts.jsonl").write_text("".join(f'{{"step": {n}, "loads": [[1, 2], [3, 4]]}}\n' for n in range(1, 5)))
    (run / "faults" / "20260101-000000").mkdir(parents=True)
    interval = {"first": 1, "last": 2, "verdict": "differs", "notes": ["a"], "differences": ["b"]}
    interval |= {"recorded": {"mesh": "x"}, "recomputed": {"device": "y"}, "command": "z", "created": "now"}
    (run / "audit").mkdir()
    (run / "audit" / "audit.json").write_text(json.dumps({"run": "run", "intervals": [interval]}))


def write_reported() -> None:
    """A run with few charts, which are slow to draw, and a ladder."""
    write_run()
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    kept = ("step", "loss", "lr", "step_time_s", "data_time_s", "skipped_steps", "tokens_seen", "validation/loss")
    rows = [{key: row[key] for key in kept if key in row} for row in rows]
    Path("run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    starts = json.loads(Path("run/run.json").read_text())
    starts["starts"].append(starts["starts"][0] | {"step": 2, "mesh": {"dp_shard": 2}})
    Path("run/run.json").write_text(json.dumps(starts))
    points = []
    for n in range(2):
        folder = Path("ladder", f"n{n}")
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
        row = {"rung": f"n{n}", "folder": f"n{n}", "parameters": 1000 + n, "tokens": 5000 * (n + 1)}
        points.append(row | {"loss": 3.0, "fitted": 3.1})
    law = {"E": 1.0, "A": 100.0, "alpha": 0.3, "B": 100.0, "beta": 0.3}
    target = {"parameters": 10_000, "tokens": 100_000, "fitted": 2.5, "interval": [2.4, 2.6]}
    found = {"law": law, "intervals": {name: [0.0, 1.0] for name in law}, "runs": points, "target": target}
    Path("ladder/ladder.json").write_text(json.dumps(found))


def seal(file: str) -> None:
    """Give a checkpoint's manifest the hash of the changed file, and its own: they find damage, not forgery."""
    path = Path(file).with_name(MANIFEST_FILE)
    if Path(file) != path:
        content = json.loads(path.read_bytes())
        changed = Path(file).read_bytes()
        content["files"][Path(file).name] |= {"bytes": len(changed), "hash": xxhash.xxh3_128_hexdigest(changed)}
        path.write_text(json.dumps(content, indent=1))
    text = path.read_bytes()
    found = [*re.finditer(rf'("{HASH}": ")[0-9a-f]{{32}}"'.encode(), text)]
    if found:
        begin, end = found[-1].end() - 33, found[-1].end() - 1
        empty = text[:begin] + b"0" * 32 + text[end:]
        path.write_bytes(text[:begin] + xxhash.xxh3_128_hexdigest(empty).encode() + text[end:])


def write_models() -> None:
    """Model folders of several families, also one of several files."""
    write_data()
    for family in ("llama3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5"):
        folder = Path("models", family)
        shards = 2 if family == "llama3" else 1
        write_model(folder, family, torch.float32, shards=shards, vocab_size=VOCAB_SIZE)
        about = {"eos_token_id": [258], "do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9}
        (folder / "generation_config.json").write_text(json.dumps(about))
        for file in Path("tokenizer").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


def write_lock() -> None:
    Path("run").mkdir()
    ended = replace(this_process(dict(os.environ)), process_start="0")
    Path("run/job.lock").write_bytes(ended.encode())


def lock(file: str) -> None:
    folder = os.path.dirname(file)
    with job_lock(folder, 0, take_over=False, environment={}, wait_s=0.1):
        require_own(folder)


def fill_cache(_: str = "") -> int:
    return command(inspect.main, "config.toml --all --data.sources.0.path rows.jsonl.gz")("")


def resume(_: str) -> None:
    titanlite.run("config.toml", {"training.steps": 5})


def begin(_: str) -> None:
    keys = {"job.dump_folder": "other", "checkpoint.initial_load_path": "run/checkpoint/step-4", "training.steps": 1}
    titanlite.run("config.toml", keys)


def train_copy(_: str) -> None:
    titanlite.run("run/config.toml", {"training.steps": 5})


def train_tokens(_: str) -> None:
    titanlite.run("tokens.toml", {"training.steps": 1, "data.document_mask": True, "job.dump_folder": "run"})


_INSPECT = command(inspect.main, "config.toml --all --data.sources.0.path {file}")
_GENERATE = command(generate.main, "run --prompt ro --max-new-tokens 2")
_EXPORT = command(convert.main, "export run --out exported")
_EVALUATE = command(evaluate.main, "run --data rows.jsonl", trains=True)
_REPLAY = command(replay.main, "run --step 3", trains=True)
_REPORT = command(report.main, "run --out report.html")
_CHECKPOINT = (
    _GENERATE,
    _EXPORT,
    _EVALUATE,
    _REPLAY,
    Call(resume, trains=True),
    Call(begin, trains=True),
    command(digest.main, "run"),
)
_IMPORTED = command(generate.main, "imported --prompt ro --max-new-tokens 2 --ignore-eos")
_IMPORT = command(convert.main, "import {folder} --out imported", _IMPORTED)

KINDS: dict[str, Kind] = {
    "jsonl": Kind(write_data, ("rows.*",), (_INSPECT,)),
    "csv": Kind(write_csv, ("*.csv*",), (_INSPECT,)),
    "parquet": Kind(write_parquet, ("*.parquet",), (_INSPECT,)),
    "arrow": Kind(write_arrow, ("*.arrow",), (_INSPECT,)),
    "chat": Kind(write_chat, ("chat.jsonl", "tokenizer/*"), (command(inspect.main, "chat.toml --all"),)),
    "token-files": Kind(write_token_files, ("t/*/*",), (Call(read_token_files),)),
    "tokenized": Kind(
        write_tokenized,
        ("complete/*.*",),
        (command(inspect.main, "tokens.toml --data.document_mask true"), Call(train_tokens, trains=True)),
    ),
    "tokenizing": Kind(
        write_tokenized,
        ("stopped/*.*",),
        (
            command(tokenize.main, "config.toml --workers 0 --out stopped"),
            command(tokenize.main, "config.toml --part 0 --out stopped"),
        ),
    ),
    "tokenizer": Kind(
        write_tokenizers,
        ("t/*/tokenizer.json",),
        (command(inspect.main, "config.toml --model.vocab_size 2000 --tokenizer.path {folder}"),),
    ),
    "safetensors": Kind(write_models, ("models/*/*.safetensors",), (_IMPORT, command(digest.main, "{folder}"))),
    "model-json": Kind(
        write_models,
        ("models/*/config.json", "models/*/generation_config.json", "models/*/model.safetensors.index.json"),
        (_IMPORT,),
    ),
    "manifest": Kind(write_run, ("run/checkpoint/step-4/MANIFEST.json",), _CHECKPOINT, after=seal),
    "metadata": Kind(write_run, ("run/checkpoint/step-4/.metadata",), _CHECKPOINT, after=seal),
    "shards": Kind(write_run, ("run/checkpoint/step-4/*.distcp",), _CHECKPOINT, after=seal),
    "run-config": Kind(
        write_run,
        ("run/config.toml",),
        (_REPORT, _GENERATE, _EVALUATE, _REPLAY, Call(resume, trains=True), Call(train_copy, trains=True)),
    ),
    "records": Kind(write_run, ("run/records/*.npz",), (_REPLAY,)),
    "ledger": Kind(write_run, ("run/ledger/*",), (command(ledger.main, "run"),)),
    "run-files": Kind(
        write_run,
        ("run/run.json", "run/*.jsonl", "run/tokenizer/*", "run/audit/*"),
        (_GENERATE, _EVALUATE, _REPLAY, Call(resume, trains=True)),
    ),
    "report": Kind(
        write_reported,
        ("run/*.json*", "run/config.toml", "run/audit/*", "ladder/ladder.json", "ladder/*/metrics.jsonl"),
        (
            command(report.main, "run ladder --out report.html"),
            command(report.main, "run ladder --over tokens --out report.html"),
        ),
    ),
    "lock": Kind(write_lock, ("run/job.lock",), (Call(lock),)),
    "cache": Kind(write_data, ("cache/**/*",), (Call(fill_cache),), before=fill_cache),
}
