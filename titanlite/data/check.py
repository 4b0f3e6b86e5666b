"""Checks of the [data], [validation] and [tokenizer] sections before a run starts."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from titanlite.data.bpe import MIN_VOCAB_SIZE, QUICKSTART_VOCAB_SIZE, kept_tokenizer
from titanlite.data.chat.source import Chat
from titanlite.data.chat.template import ChatTemplate
from titanlite.data.config import DataConfig, TokenizerConfig, ValidationConfig
from titanlite.data.kinds import KINDS, open_source
from titanlite.data.sources.base import Source, conversations_as_lines, files_below
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import COMPRESSIONS, Jsonl
from titanlite.data.sources.parquet import Parquet
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.sources.tables import Arrow, Csv
from titanlite.data.sources.text import Text
from titanlite.data.sources.tokens import Tokens, manifests_of
from titanlite.data.tasks import check_tasks, tasks_with_conversations
from titanlite.data.tokenizer import Tokenizer, read_chat_template, tokenizer_file
from titanlite.runtime.errors import Problem, UserError, check_ranges, require
from titanlite.runtime.plugins import is_of_program

TRAIN_TOKENIZER = "titanlite train-tokenizer CONFIG --out DIR"

PACKED = {
    ".gz": ("gzip", "gunzip -k"),
    ".zst": ("zstd", "zstd -d"),
    ".bz2": ("bzip2", "bunzip2 -k"),
    ".xz": ("xz", "unxz -k"),
    ".lz4": ("lz4", "lz4 -dm"),
}
"""Suffix -> name of a compression, and the command that unpacks files."""

READS = {
    Text.kind: (Jsonl.kind, Csv.kind),
    Jsonl.kind: (Text.kind, *COMPRESSIONS),
    Chat.kind: (Text.kind, *COMPRESSIONS),
    Parquet.kind: (),
    Csv.kind: (Text.kind, *COMPRESSIONS),
    Arrow.kind: (),
}
"""Kinds of files -> the other kinds and compressions that it can read if the path selects such files."""


def check_data(
    section: DataConfig,
    *,
    global_batch_size: int,
    data_degree: int,
    vocab_size: int,
    checks_files: bool = True,
) -> list[Problem]:
    """Problems of the [data] section. A fact that is 0 or -1 is unknown: checks that need it are skipped.

    checks_files: also check the sources' files, which must exist.
    """
    problems = [
        *check_ranges(section, "data"),
        *require(bool(section.sources), "data.sources", [], "at least one source", "add a [[data.sources]] table"),
    ]
    streams = global_batch_size if section.num_streams == -1 else section.num_streams
    if streams >= 1:
        problems += require(
            data_degree <= streams,
            "data.num_streams",
            section.num_streams,
            f"at least dp_replicate x dp_shard = {data_degree}, so that each data rank has a stream of its own"
            + (f"; -1 is training.global_batch_size = {streams}" if section.num_streams == -1 else ""),
            "start fewer data ranks, or begin a new run with more streams",
        )
    for n, source in enumerate(section.sources):
        problems += require(
            section.num_workers < 1 or not is_of_program(KINDS, source.kind),
            "data.num_workers",
            section.num_workers,
            f"0 if this program has registered data.sources.{n}.kind = {source.kind!r}: data workers do not have it",
            "write 0, or register it in a module that job.plugins names",
        )
        problems += check_source(source, f"data.sources.{n}", section, vocab_size=vocab_size, checks_files=checks_files)
    return problems + _check_weights(section.sources)


def check_source(
    config: SourceConfig, key: str, section: DataConfig, *, vocab_size: int, checks_files: bool
) -> list[Problem]:
    """Problems of the source at `key`, read with the settings of `section`."""
    source = open_source(config)
    problems = [*_check_keys(config, key), *source.check_keys(key)]
    if checks_files:
        problems = problems or _check_formats(source, key)
        problems = problems or source.check_files(key)
        problems = problems or source.check_content(key, vocab_size=vocab_size, needs_documents=section.masks_documents)
    return problems + require(
        source.holds != "tokens" or section.packing == "concatenate",
        "data.packing",
        section.packing,
        f"not valid for token files ({key}): each sequence is a window of a file",
        'write packing = "concatenate", or use the text instead of token files',
    )


def _check_formats(source: Source, key: str) -> list[Problem]:
    """A problem if file names show another kind or a compression: of the selected files, or of all files in a folder
    without files of this kind. Reports the most frequent one."""
    if source.kind not in READS:
        return []
    is_selected = bool(source.files())
    files = source.files() or list(files_below(source.config.path))
    formats = {file: _other_format(file.name, source, is_selected) for file in files}
    if any(file.name.lower().endswith(source.suffixes) for file in files):  # the others may be a README
        formats = {file: "" if found in KINDS else found for file, found in formats.items()}
    counts = Counter(formats.values())
    if is_selected:
        del counts[""]
    found = counts.most_common(1)[0][0] if counts else ""
    if not found:
        return []
    first = min(file for file in files if formats[file] == found)
    if found in KINDS:
        remedy = f'write kind = "{found}", or add --{key}.kind {found}'
        if source.kind == Chat.kind and found in (Parquet.kind, Arrow.kind):
            remedy = conversations_as_lines(source.config, found)
        return [Problem(f"{key}.kind", source.kind, f"the kind of the files, such as {first}", remedy)]
    name, command = PACKED[found]
    rule = f"files that kind = {source.kind!r} can read; {first} is compressed with {name}"
    unpack = f"find {shlex.quote(str(first.parent))} -name '*{found}' -exec {command} {{}} +"
    remedy = f"select unpacked files; to unpack these: {unpack}"
    return [Problem(f"{key}.path", source.config.path, rule, remedy)]


def _other_format(name: str, source: Source, is_selected: bool) -> str:
    """The kind or the compression (a key of PACKED) that a file's name shows; "" if the source may read it.

    is_selected: whether the path selects this file. Such a file may have any other suffix.
    """
    name, reads = name.lower(), READS[source.kind]
    if name.endswith(source.suffixes):
        return ""
    packed = next((suffix for suffix in PACKED if name.endswith(suffix) and suffix not in reads), "")
    kind = next((kind for kind, other in KINDS.items() if other.needs_path and name.endswith(other.suffixes)), "")
    return kind if kind and (packed or not is_selected or kind not in reads) else packed


def _check_keys(config: SourceConfig, key: str) -> list[Problem]:
    """Problems of keys that this kind does not have, and of values out of range."""
    problems: list[Problem] = []
    for field in fields(config):
        kinds = [kind for kind, source in KINDS.items() if has_key(source, field.name)]
        value = getattr(config, field.name)
        problems += require(
            value == field.default or not kinds or config.kind in kinds,
            f"{key}.{field.name}",
            value,
            f"only for kind = {' or '.join(map(repr, kinds))}; the kind is {config.kind!r}",
            f"leave {field.name} out, or change {key}.kind",
        )
    return problems + check_ranges(config, key)


def has_key(kind: type[Source], name: str) -> bool:
    """Whether `name` is a key that only some kinds have, and this kind is one of them."""
    return kind.needs_path if name == "path" else name in kind.keys


def _check_weights(sources: Sequence[SourceConfig]) -> list[Problem]:
    """Require a weight for every source, or no weights and sizes in the same unit."""
    if len(sources) < 2:
        return []
    without = [n for n, source in enumerate(sources) if source.weight == -1]
    if without and len(without) < len(sources):
        n = without[0]
        rule = "set for every source, or left out for every source"
        return [Problem(f"data.sources.{n}.weight", -1, rule, "write its share of the sequences")]
    units = [open_source(source).size_unit for source in sources]
    if without and (units[0] == "" or len(set(units)) > 1):
        rule = "required unless all sources are text on disk, or all are tokens: sizes have different units"
        return [Problem("data.sources.0.weight", -1, rule, "write a weight for each: its share of the sequences")]
    return []


def check_tokenizer(
    section: TokenizerConfig,
    data: DataConfig,
    validation: ValidationConfig | None = None,
    *,
    vocab_size: int,
    model: str = "",
) -> list[Problem]:
    """Load the tokenizer; problems of the [tokenizer] section, and of token files that another tokenizer has written.

    validation: its sources and tasks need the tokenizer, too. vocab_size: the model's; 0 or less: unknown. model: the
    folder or the name on the hub of the model that the run starts from, or "".
    """
    if faults := _check_chat_template(section):
        return faults
    held_out, tasks = (validation.sources, validation.tasks) if validation and validation.enable else ((), ())
    if not section.path:
        kept = kept_tokenizer(data.sources)
        if kept:
            return _check_kept(section, data, held_out, tasks, kept)
        return _check_without_path(section, data, held_out, tasks, vocab_size, model)
    file = tokenizer_file(section.path)
    if not file.is_file():
        rule = "a tokenizer.json, or a folder that holds one"
        fault = "is not a regular file" if file.exists() else "does not exist"
        remedy = f"{file.absolute()} {fault}; train a tokenizer on your data: {TRAIN_TOKENIZER}"
        return [Problem("tokenizer.path", section.path, rule, remedy)]
    try:
        tokenizer = Tokenizer(file)
    except UserError as error:
        remedy = f"{error}; train a tokenizer on your data: {TRAIN_TOKENIZER}"
        return [Problem("tokenizer.path", section.path, "a tokenizer that the tokenizers library can load", remedy)]
    problems: list[Problem] = []
    for name, text in (("bos", section.bos), ("eos", section.eos)):
        rule, remedy = "a token of the vocabulary", f"write a token of {file}, or leave {name} out"
        problems += require(not text or tokenizer.is_token(text), f"tokenizer.{name}", text, rule, remedy)
    if data.add_bos and not section.bos and tokenizer.bos_id is None:
        rule = "requires a tokenizer with a known BOS token"
        problems.append(Problem("data.add_bos", True, rule, "write tokenizer.bos, or data.add_bos = false"))
    if 0 < vocab_size < tokenizer.vocab_size:
        rule = f"at least {tokenizer.vocab_size}, the vocabulary size of {file}"
        remedy = f"write vocab_size = {tokenizer.vocab_size} in [model], or use another tokenizer.path"
        problems.append(Problem("model.vocab_size", vocab_size, rule, remedy))
    if not section.chat_template and tokenizer.chat_template is None:
        problems += _require_chat_template(data, held_out, tasks, str(file.parent), tokenizer.unused_templates)
    if problems or all(source.kind != Tokens.kind for source in (*data.sources, *held_out)):
        return problems  # loading a large tokenizer again takes a second
    configured = Tokenizer(file, bos=section.bos, eos=section.eos)
    return _check_made_by(section, configured, data, held_out) + _check_written_with(data)


def _check_chat_template(section: TokenizerConfig) -> list[Problem]:
    """Problems of the file of tokenizer.chat_template."""
    if not section.chat_template:
        return []
    try:
        ChatTemplate(read_chat_template(section.chat_template), {})
    except UserError as error:
        rule = "a file with a Jinja template in UTF-8"
        remedy = f"{error}; the default is the template of the tokenizer's folder"
        return [Problem("tokenizer.chat_template", section.chat_template, rule, remedy)]
    return []


def _check_kept(
    section: TokenizerConfig, data: DataConfig, held_out: Sequence[SourceConfig], tasks: Sequence[str], file: Path
) -> list[Problem]:
    """Problems of `file`, the tokenizer in the folder of token files, which the run uses."""
    if problems := _check_no_separators(section):
        return problems
    try:
        tokenizer = Tokenizer(file)
    except UserError as error:
        n, source = next((n, source) for n, source in enumerate(data.sources) if kept_tokenizer([source]))
        rule = "token files with a tokenizer that the tokenizers library can load"
        return [Problem(f"data.sources.{n}.path", source.path, rule, f"{error}: copy {file.parent} again")]
    problems = _check_made_by(section, tokenizer, data, held_out) + _check_written_with(data)
    if not section.chat_template and tokenizer.chat_template is None:
        problems += _require_chat_template(data, held_out, tasks, str(file.parent), tokenizer.unused_templates)
    return problems


def _require_chat_template(
    data: DataConfig,
    held_out: Sequence[SourceConfig],
    tasks: Sequence[str],
    tokenizer: str,
    unused_templates: Sequence[str] = (),
) -> list[Problem]:
    """A problem if sources or tasks hold conversations. tokenizer: the one without a chat template, in words."""
    keys = [f"data.sources.{n}" for n, source in enumerate(data.sources) if source.is_chat]
    keys += [f"validation.sources.{n}" for n, source in enumerate(held_out) if source.is_chat]
    keys += [f"validation.tasks: {path}" for path in tasks_with_conversations(tasks)]
    if not keys:
        return []
    rule = f"required for conversations ({keys[0]}): {tokenizer} has no chat template"
    remedy = "write the path of a Jinja file that uses special tokens of this tokenizer, such as examples/chatml.jinja"
    if unused_templates:
        names = ", ".join(map(repr, unused_templates))
        rule += f" named 'default', only {names}"
        remedy = "copy one of them from tokenizer_config.json into a file, and write its path"
    return [Problem("tokenizer.chat_template", "", rule, remedy)]


def _check_made_by(
    section: TokenizerConfig, tokenizer: Tokenizer, data: DataConfig, held_out: Sequence[SourceConfig]
) -> list[Problem]:
    """A problem if token files name another tokenizer than the run's. Ignores unreadable manifests."""
    tables = {f"data.sources.{n}.path": source for n, source in enumerate(data.sources)}
    tables |= {f"validation.sources.{n}.path": source for n, source in enumerate(held_out)}
    for key, source in tables.items():
        for folder, manifest in _manifests(source).items():
            maker = manifest["tokenizer"]
            if maker["fingerprint"] == tokenizer.fingerprint:
                continue
            if section.path and source in data.sources:
                rule = f"the tokenizer, BOS and EOS of the token files in {folder}: {maker['description']}"
                use = "leave [tokenizer] out" if kept_tokenizer([source]) else "use the tokenizer of the token files"
                return [Problem("tokenizer.path", section.path, rule, f"[tokenizer] is {tokenizer.description}: {use}")]
            rule = f"token files of the run's tokenizer, {tokenizer.description}"
            remedy = f"{folder} was written with {maker['description']}: write or copy the entire folder again"
            return [Problem(key, source.path, rule, remedy)]
    return []


def _check_written_with(data: DataConfig) -> list[Problem]:
    """Problems of data.add_bos and data.add_eos, with which texts must become the tokens in the token files.

    Ignores folders without a tokenizer, and folders that differ from each other.
    """
    folders = {
        folder: manifest["settings"]
        for source in data.sources
        if kept_tokenizer([source])
        for folder, manifest in _manifests(source).items()
    }
    problems: list[Problem] = []
    for name in ("add_bos", "add_eos"):
        value = getattr(data, name)
        written = {folder: settings.get(name, value) for folder, settings in folders.items()}
        if written and value not in written.values():
            other = "false" if value else "true"
            rule = f"{other}, as in the token files in {next(iter(written))}"
            problems.append(Problem(f"data.{name}", value, rule, f"write {name} = {other} in [data]"))
    return problems


def _check_without_path(
    section: TokenizerConfig,
    data: DataConfig,
    held_out: Sequence[SourceConfig],
    tasks: Sequence[str],
    vocab_size: int,
    model: str,
) -> list[Problem]:
    kinds = {source.kind for source in data.sources}
    needing = sorted(kind for kind in kinds if KINDS[kind].holds == "text" and KINDS[kind] is not PythonStdlib)
    if needing:
        rule = f"required for {' and '.join(needing)} sources"
        remedy = f"write the path of a tokenizer.json, or train one: {TRAIN_TOKENIZER}"
        if model:
            rule += f": {model} is not a folder with a tokenizer.json"
            remedy = (
                "write the path of the model's tokenizer.json (a run has a copy in its dump folder); of a model on the "
                'hub: hf download NAME --local-dir FOLDER, then initial_load_path = "hf:FOLDER"'
            )
        return [Problem("tokenizer.path", section.path, rule, remedy)]
    problems = _check_no_separators(section)
    if PythonStdlib.kind in kinds:
        if not section.chat_template:
            problems += _require_chat_template(data, held_out, tasks, "the tokenizer trained at the start")
        rule = "false: the tokenizer trained at the start has no BOS"
        problems += require(not data.add_bos, "data.add_bos", data.add_bos, rule, "write false")
        if 0 < vocab_size < MIN_VOCAB_SIZE:
            rule = f"at least {MIN_VOCAB_SIZE}: 256 bytes and EOS"
            problems.append(
                Problem("model.vocab_size", vocab_size, rule, f"write vocab_size = {QUICKSTART_VOCAB_SIZE}")
            )
    return problems


def _check_no_separators(section: TokenizerConfig) -> list[Problem]:
    """Problems of tokenizer.bos and tokenizer.eos without a tokenizer.path."""
    problems: list[Problem] = []
    for name, text in (("bos", section.bos), ("eos", section.eos)):
        remedy = f"leave {name} out, or write tokenizer.path"
        problems += require(not text, f"tokenizer.{name}", text, "only valid with a tokenizer.path", remedy)
    return problems


def _manifests(source: SourceConfig) -> dict[Path, dict[str, Any]]:
    """The manifests of a source of token files, by folder; {} for other sources, and if one cannot be read."""
    try:
        return manifests_of(Tokens(source).files()) if source.kind == Tokens.kind else {}
    except UserError:
        return {}


def check_validation(
    section: ValidationConfig, data: DataConfig, *, vocab_size: int, has_tokenizer: bool, checks_files: bool = True
) -> list[Problem]:
    """Problems of the [validation] section. Sources are checked only if validation is enabled.

    data: the [data] section, whose settings apply to validation. vocab_size: the model's; 0 or less: unknown.
    has_tokenizer: whether the run has a tokenizer.
    """
    key, sources = "validation", section.sources
    problems = check_ranges(section, key)
    if not section.enable:
        return problems
    problems += require(
        bool(sources or section.tasks),
        f"{key}.sources",
        [],
        "at least one source, or a file in validation.tasks",
        "add a [[validation.sources]] table",
    )
    problems += require(
        has_tokenizer or not section.tasks,
        "tokenizer.path",
        "",
        "required: validation.tasks are text and data.sources are tokens",
        "write the path of the tokenizer that made the tokens",
    )
    problems += check_tasks(f"{key}.tasks", section.tasks) if checks_files else []
    problems += require(
        has_tokenizer or all(open_source(source).holds == "tokens" for source in sources),
        "tokenizer.path",
        "",
        "required: validation.sources are text and data.sources are tokens",
        "write the path of the tokenizer that made the tokens, or validate on tokens sources",
    )
    for n, source in enumerate(sources):
        for name in ("weight", "epochs"):
            value = getattr(source, name)
            rule = "not valid for validation: it reads each source once and weighs all tokens equally"
            problems += require(value == -1, f"{key}.sources.{n}.{name}", value, rule, "leave it out")
        problems += check_source(source, f"{key}.sources.{n}", data, vocab_size=vocab_size, checks_files=checks_files)
    return problems
