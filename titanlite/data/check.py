"""Checks of the [data], [validation] and [tokenizer] sections before a run starts."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from titanlite.data.bpe import MIN_VOCAB_SIZE, QUICKSTART_VOCAB_SIZE, kept_tokenizer
from titanlite.data.chat.source import Chat
from titanlite.data.chat.template import ChatTemplate
from titanlite.data.config import DataConfig, TokenizerConfig, ValidationConfig
from titanlite.data.kinds import KINDS, open_source
from titanlite.data.sources.base import STORE_RULE, Source, conversations_as_lines
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import COMPRESSIONS, Jsonl
from titanlite.data.sources.parquet import Parquet
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.sources.stored import SourceFile
from titanlite.data.sources.tables import Arrow, Csv
from titanlite.data.sources.text import Text
from titanlite.data.sources.tokens import Tokens
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokenizer_files import read_chat_template, tokenizer_file
from titanlite.runtime.errors import Problem, Rules, UserError
from titanlite.runtime.plugins import is_of_program

TRAIN_TOKENIZER = "titanlite train-tokenizer CONFIG --out DIR"

HARNESS = "0.4.13"
"""Oldest version of lm_eval that runs tasks."""
TASKS_PAGE = "docs/evaluation.md#tasks"
YAML = (".yaml", ".yml")

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
    section: DataConfig, *, global_batch_size: int, data_degree: int, vocab_size: int, checks_files: bool = True
) -> list[Problem]:
    """Problems of the [data] section. A fact that is 0 or -1 is unknown: checks that need it are skipped.

    checks_files: also check the sources' files, which must exist.
    """
    rules = Rules("data", section)
    rules.require("sources", section.sources, "at least one source", "add a [[data.sources]] table")
    streams = global_batch_size if section.num_streams == -1 else section.num_streams
    automatic = f"; -1 is training.global_batch_size = {streams}" if section.num_streams == -1 else ""
    rule = f"at least dp_replicate x dp_shard = {data_degree}, one for each data rank{automatic}"
    enough = streams < 1 or data_degree <= streams
    rules.require("num_streams", enough, rule, "start fewer data ranks, or begin a new run with more streams")
    for n, source in enumerate(section.sources):
        rule = f"0 with data.sources.{n}.kind = {source.kind!r}, which data workers do not have"
        has_kind = section.num_workers < 1 or not is_of_program(KINDS, source.kind)
        rules.require("num_workers", has_kind, rule, "write 0, or register it in a module that job.plugins names")
        rules.problems += check_source(
            source, f"data.sources.{n}", section, vocab_size=vocab_size, checks_files=checks_files
        )
    return rules.problems + _check_weights(section.sources)


def check_source(
    config: SourceConfig, key: str, section: DataConfig, *, vocab_size: int, checks_files: bool
) -> list[Problem]:
    """Problems of the source at `key`, read with the settings of `section`."""
    source, rules = open_source(config), Rules(key, config)
    for field in fields(config):
        kinds = [kind for kind, other in KINDS.items() if has_key(other, field.name)]
        has_kind = getattr(config, field.name) == field.default or not kinds or config.kind in kinds
        rules.needs(field.name, has_kind, f"kind = {' or '.join(map(repr, kinds))}, not {config.kind!r}")
    problems = [*rules.problems, *source.check_keys(key)]
    if checks_files:
        problems = problems or source.check_folder(f"{key}.path")
        problems = problems or source.check_store(key)
        problems = problems or _check_formats(source, key)
        problems = problems or source.check_files(key)
        try:
            problems = problems or source.check_content(
                key, vocab_size=vocab_size, needs_documents=section.masks_documents
            )
        except UserError as error:
            if not source.is_stored:
                raise
            problems = [Problem(f"{key}.path", config.path, STORE_RULE, str(error))]
    rules = Rules("data", section, problems)
    rule = f"not valid for token files ({key}): each sequence is a window of a file"
    remedy = 'write packing = "concatenate", or use the text instead of token files'
    rules.require("packing", source.holds != "tokens" or section.packing == "concatenate", rule, remedy)
    return problems


def _check_formats(source: Source, key: str) -> list[Problem]:
    """A problem if file names show another kind or a compression: of the selected files, or of all files in a folder
    without files of this kind. Reports the most frequent one."""
    if source.kind not in READS:
        return []
    is_selected = bool(source.files())
    files = source.files() or [*source.files_below()]
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
    if source.is_stored:
        remedy = f"select unpacked files; to unpack these, copy them to a disk and use {command}"
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


def has_key(kind: type[Source], name: str) -> bool:
    """Whether `name` is a key that only some kinds have, and this kind is one of them."""
    return kind.needs_path if name == "path" else name in kind.keys


def _check_weights(sources: Sequence[SourceConfig]) -> list[Problem]:
    """Require a weight for every source, or no weights and sizes in the same unit."""
    without = [n for n, source in enumerate(sources) if source.weight == -1]
    units = {open_source(source).size_unit for source in sources}
    if len(sources) < 2 or not without:
        return []
    if len(without) < len(sources):
        rule = "set for every source, or left out for every source"
    elif "" in units or len(units) > 1:
        rule = "required unless all sources are text on disk, or all are tokens: sizes have different units"
    else:
        return []
    remedy = "write a weight for each: its share of the sequences"
    return [Problem(f"data.sources.{without[0]}.weight", -1, rule, remedy)]


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
    rules = Rules("tokenizer", section)
    validation = validation if validation and validation.enable else ValidationConfig()
    held_out = validation.sources
    try:
        if section.chat_template:
            ChatTemplate(read_chat_template(section.chat_template), {})
    except UserError as error:
        remedy = f"{error}; the default is the template of the tokenizer's folder"
        rules.require("chat_template", False, "a file with a Jinja template in UTF-8", remedy)
        return rules.problems
    file = tokenizer_file(section.path) if section.path else kept_tokenizer(data.sources)
    if file is None:
        return _check_without_path(rules, data, validation, vocab_size, model)
    tokenizer = _load_tokenizer(rules, file, data.sources)
    if tokenizer is None:
        return rules.problems
    for name in ("bos", "eos"):
        is_token = not getattr(section, name) or tokenizer.is_token(getattr(section, name))
        rules.require(name, is_token, "a token of the vocabulary", f"write a token of {file}, or leave {name} out")
    if not rules.problems and (section.bos or section.eos):  # in place of tokens that the files may add
        tokenizer = Tokenizer(file, bos=section.bos, eos=section.eos)
    if section.path and data.adds_bos and not section.bos and tokenizer.bos_id is None:
        rule = "requires a tokenizer with a known BOS token"
        rules.problems.append(Problem("data.add_bos", True, rule, "write tokenizer.bos, or data.add_bos = false"))
    if section.path and 0 < vocab_size < tokenizer.vocab_size:
        rule = f"at least {tokenizer.vocab_size}, the vocabulary size of {file}"
        remedy = f"write vocab_size = {tokenizer.vocab_size} in [model], or use another tokenizer.path"
        rules.problems.append(Problem("model.vocab_size", vocab_size, rule, remedy))
    if tokenizer.chat_template is None:
        _require_chat_template(rules, data, validation, str(file.parent), tokenizer.unused_templates)
    if rules.problems or all(source.kind != Tokens.kind for source in (*data.sources, *held_out)):
        return rules.problems
    return _check_made_by(section, tokenizer, data, held_out) + _check_written_with(data)


def _load_tokenizer(rules: Rules, file: Path, sources: Sequence[SourceConfig]) -> Tokenizer | None:
    """The tokenizer of tokenizer.path, or of the folder of token files; None, with a problem, if it cannot be used."""
    if not rules.section.path:
        _check_no_separators(rules)
    elif not file.is_file():
        fault = "is not a regular file" if file.exists() else "does not exist"
        remedy = f"{file.absolute()} {fault}; train a tokenizer on your data: {TRAIN_TOKENIZER}"
        rules.require("path", False, "a tokenizer.json, or a folder that holds one", remedy)
    if rules.problems:
        return None
    try:
        return Tokenizer(file)
    except UserError as error:
        rule = "a tokenizer that the tokenizers library can load"
        if rules.section.path:
            rules.require("path", False, rule, f"{error}; train a tokenizer on your data: {TRAIN_TOKENIZER}")
            return None
        n, source = next((n, source) for n, source in enumerate(sources) if kept_tokenizer([source]))
        remedy = f"{error}: copy {file.parent} again"
        rules.problems.append(Problem(f"data.sources.{n}.path", source.path, f"token files with {rule}", remedy))
        return None


def _require_chat_template(
    rules: Rules, data: DataConfig, validation: ValidationConfig, tokenizer: str, unused_templates: Sequence[str] = ()
) -> None:
    """Add a problem if sources or tasks hold conversations. tokenizer: the one without a chat template, in words."""
    if rules.section.chat_template:
        return
    keys = [f"data.sources.{n}" for n, source in enumerate(data.sources) if source.is_chat]
    keys += keys_with_conversations(validation)
    rule = f"required for conversations ({', '.join(keys[:1])}): {tokenizer} has no chat template"
    remedy = "write the path of a Jinja file that uses special tokens of this tokenizer, such as examples/chatml.jinja"
    if unused_templates:
        rule += f" named 'default', only {', '.join(map(repr, unused_templates))}"
        remedy = "copy one of them from tokenizer_config.json into a file, and write its path"
    rules.require("chat_template", not keys, rule, remedy)


def keys_with_conversations(validation: ValidationConfig) -> list[str]:
    """Which sources of the validation hold conversations, and whether its tasks become conversations."""
    keys = [f"validation.sources.{n}" for n, source in enumerate(validation.sources) if source.is_chat]
    return keys + (["validation.task_chat"] if validation.tasks and validation.task_chat else [])


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
        if value == "auto":
            continue
        written = {folder: settings.get(name, value) for folder, settings in folders.items()}
        if written and value not in written.values():
            other = "false" if value else "true"
            rule = f"{other}, as in the token files in {next(iter(written))}"
            problems.append(Problem(f"data.{name}", value, rule, f"write {name} = {other} in [data]"))
    return problems


def _check_without_path(
    rules: Rules, data: DataConfig, validation: ValidationConfig, vocab_size: int, model: str
) -> list[Problem]:
    kinds = {source.kind for source in data.sources}
    needing = sorted(kind for kind in kinds if KINDS[kind].holds == "text" and KINDS[kind] is not PythonStdlib)
    rule = f"required for {' and '.join(needing)} sources"
    remedy = f"write the path of a tokenizer.json, or train one: {TRAIN_TOKENIZER}"
    if model:
        rule += f": {model} is not a folder with a tokenizer.json"
        remedy = (
            "write the path of the model's tokenizer.json (a run has a copy in its dump folder); of a model on the "
            'hub: hf download NAME --local-dir FOLDER, then initial_load_path = "hf:FOLDER"'
        )
    if not rules.require("path", not needing, rule, remedy):
        return rules.problems
    _check_no_separators(rules)
    if PythonStdlib.kind in kinds:
        _require_chat_template(rules, data, validation, "the tokenizer trained at the start")
        of_data = Rules("data", data, rules.problems)
        rule = "false: the tokenizer trained at the start has no BOS"
        of_data.require("add_bos", not data.adds_bos, rule, "write false")
        if 0 < vocab_size < MIN_VOCAB_SIZE:
            rule = f"at least {MIN_VOCAB_SIZE}: 256 bytes and EOS"
            remedy = f"write vocab_size = {QUICKSTART_VOCAB_SIZE}"
            rules.problems.append(Problem("model.vocab_size", vocab_size, rule, remedy))
    return rules.problems


def _check_no_separators(rules: Rules) -> None:
    """Add problems of tokenizer.bos and tokenizer.eos without a tokenizer.path."""
    for name in ("bos", "eos"):
        rules.needs(name, not getattr(rules.section, name), "a tokenizer.path")


def _manifests(source: SourceConfig) -> Mapping[SourceFile, dict[str, Any]]:
    """The manifests of a source of token files, by folder; {} for other sources, and if one cannot be read."""
    try:
        return Tokens(source).manifests() if source.kind == Tokens.kind else {}
    except UserError:
        return {}


def check_tasks(key: str, tasks: Sequence[str]) -> list[Problem]:
    """Problems of tasks, without those that only the harness itself can find, on rank 0."""
    problems = []
    for task in tasks:
        rule = "the name of a task of lm-evaluation-harness, or the path of a task in YAML"
        remedy = f"for a file of questions, write a YAML with `dataset_path: json` that names {task} ({TASKS_PAGE})"
        if Path(task).is_file() and not task.endswith(YAML):
            problems.append(Problem(key, task, rule, remedy))
        elif task.endswith((*YAML, ".jsonl", ".json")) and not Path(task).is_file():
            problems.append(Problem(key, task, f"{rule}; there is no such file", "fix the path"))
    try:
        found = version("lm_eval") if tasks else HARNESS
    except PackageNotFoundError:
        found = ""
    if tuple(map(int, re.findall(r"\d+", found)[:3])) < tuple(map(int, HARNESS.split("."))):
        rule = f"none without lm_eval {HARNESS} or newer, which is {f'version {found}' if found else 'not installed'}"
        problems.append(Problem(key, list(tasks), rule, "pip install 'titanlite[eval]' on all nodes"))
    return problems


def check_validation(
    section: ValidationConfig, data: DataConfig, *, vocab_size: int, has_tokenizer: bool, checks_files: bool = True
) -> list[Problem]:
    """Problems of the [validation] section. Sources are checked only if validation is enabled.

    data: the [data] section, whose settings apply to validation. vocab_size: the model's; 0 or less: unknown.
    has_tokenizer: whether the run has a tokenizer.
    """
    rules = Rules("validation", section)
    if not section.enable:
        return rules.problems
    remedy = "add a [[validation.sources]] table"
    has_any = section.sources or section.tasks
    rules.require("sources", has_any, "at least one source, or an entry in validation.tasks", remedy)
    rules.problems += check_tasks("validation.tasks", section.tasks) if checks_files else []
    is_multiple = section.task_interval % section.interval == 0
    rule = f"a multiple of validation.interval = {section.interval}"
    rules.require("task_interval", section.task_interval == -1 or is_multiple, rule, "change one of them")
    needing = ["validation.tasks"] if section.tasks else []
    needing += [f"validation.sources.{n}" for n, one in enumerate(section.sources) if open_source(one).holds == "text"]
    if needing and not has_tokenizer:
        rule = f"required: {needing[0]} is text and data.sources are tokens"
        remedy = "write the path of the tokenizer that made the tokens"
        rules.problems.append(Problem("tokenizer.path", "", rule, remedy))
    for n, source in enumerate(section.sources):
        table = Rules(f"validation.sources.{n}", source, rules.problems)
        for name in ("weight", "epochs"):
            rule = "not valid for validation: it reads each source once and weighs all tokens equally"
            table.require(name, getattr(source, name) == -1, rule, "leave it out")
        rules.problems += check_source(source, table.name, data, vocab_size=vocab_size, checks_files=checks_files)
    return rules.problems
