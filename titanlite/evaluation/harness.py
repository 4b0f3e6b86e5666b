"""Tasks of lm-evaluation-harness: their requests as rows of tokens, built once, and their scores, by its own code.

Rank 0 alone imports the harness, which sees one rank. All ranks compute the log-likelihoods of all rows (Evaluator);
the harness then finds them where it expects a model.
"""

import logging
import math
import os
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Library

from titanlite.data.chat.template import ChatTemplate, unmarked
from titanlite.data.config import ValidationConfig
from titanlite.data.sources.hub_files import import_datasets, names_outside
from titanlite.data.tokenizer import Tokenizer, library_errors
from titanlite.metrics.scores import TaskScores
from titanlite.runtime.environment import expand_home
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.plugins import loaded_plugins, split_entry

SEED = 1234
"""Of few-shot examples, numpy and torch, as in the harness, whose own default for Python's random numbers is 0."""
NEW_TOKENS = 256
"""Of a text that is generated if the task does not say, as in the harness."""
CLOSE = 1e-5
"""Nats between two choices whose order may depend on the mesh."""
GENERATES = "generate_until"
DATA_SETTINGS = {
    *("column_names", "data_dir", "data_files", "delimiter", "encoding", "field", "header", "keep_in_memory", "name"),
    *("names", "num_proc", "quotechar", "revision", "sep", "skiprows", "split", "storage_options", "streaming"),
    *("trust_remote_code", "verification_mode"),  # `datasets` has run no code of data sets since 4.0
}
"""Arguments of `datasets.load_dataset` that choose what is read and how, and not where it is written."""

Generate = Callable[[Sequence[int], int], Iterator[int]]
"""(prompt, maximum number of tokens) -> the greedy tokens, without EOS."""


@dataclass(frozen=True)
class Row:
    """Tokens of a context and its continuation, int64, of which those from `begin` on are scored.

    is_truncated: whether the context has lost its first tokens.
    """

    tokens: npt.NDArray[np.int64]
    begin: int
    is_truncated: bool = False


class Encoder:
    """Tokens by the rules of HFLM, the harness's model for transformers, in rows of at most seq_len inputs.

    Unlike in training, the text of a special token is this token. Added are BOS if the documents of the run begin with
    it, and other special tokens of the post-processor of tokenizer.json; none if the text begins with BOS (EOS without
    BOS).
    """

    def __init__(self, tokenizer: Tokenizer, seq_len: int, *, adds_bos: bool) -> None:
        self._library = Library.from_str(tokenizer.content_with_bos(adds=adds_bos).decode())
        self._library.no_truncation()
        self._library.no_padding()
        self.seq_len = seq_len
        self._prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        self._start = None if self._prefix is None else tokenizer.decode([self._prefix])

    def encode(self, texts: Iterable[str], *, adds: bool = True) -> dict[str, list[int]]:
        """Text -> its tokens. adds: whether to add special tokens. Raises UserError."""
        found: dict[str, list[int]] = {}
        texts = dict.fromkeys(texts)
        begun = {text for text in texts if self._start and text.startswith(self._start)}
        for group, adds_here in ((begun, False), (texts.keys() - begun, adds)):
            ordered = [text for text in texts if text in group]
            with library_errors("the tokenizer cannot encode a text of a task"):
                encoded = self._library.encode_batch(ordered, add_special_tokens=adds_here)
            found |= zip(ordered, (one.ids for one in encoded), strict=True)
        return found

    def rows(self, requests: Sequence[Any]) -> list[list[Row]]:
        """The rows of each request for a log-likelihood: one, or for a rolling one, one per window.

        Whitespace at the end of a context belongs to the continuation, whose tokens are those of both texts after as
        many as the context alone has. An empty context is BOS, or EOS. A row of more than seq_len inputs loses its
        first tokens. Raises UserError, which names the task and the document.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs = {id(each): _moved(*each.args) for each in requests if len(each.args) == 2}
        bare = self.encode((end for context, end in pairs.values() if context is None), adds=False)
        texts = [text for context, end in pairs.values() if context is not None for text in (context, context + end)]
        encoded = self.encode([*texts, *(each.args[0] for each in requests if len(each.args) == 1)])
        rows = []
        for each in requests:
            parts: list[tuple[Sequence[Any], Sequence[int]]]
            if len(each.args) == 1:
                windows = get_rolling_token_windows(encoded[each.args[0]], self._prefix, self.seq_len, context_len=1)
                parts = [make_disjoint_window(window) for window in windows]
            else:
                context, end = pairs[id(each)]
                if context is not None:
                    own = encoded[context]
                    parts = [(own, encoded[context + end][len(own) :])]
                else:
                    ids = bare[end]
                    parts = [(ids[:1], ids[1:]) if ids[:1] == [self._prefix] else ([self._prefix], ids)]
            where = f"{each.task_name}, document {each.doc_id}"
            rows.append([self._row(context, end, where) for context, end in parts])
        return rows

    def decode(self, ids: Sequence[int], *, skips_special: bool) -> str:
        """The text of the ids. skips_special: without special tokens. Raises UserError."""
        with library_errors("the tokenizer cannot decode tokens"):
            return str(self._library.decode(ids, skip_special_tokens=skips_special))

    def _row(self, context: Sequence[Any], end: Sequence[int], where: str) -> Row:
        if not context or context[0] is None:
            remedy = "write a context, or set tokenizer.eos"
            raise UserError(f"{where}: the context has no tokens, and the tokenizer neither BOS nor EOS: {remedy}")
        if not 0 < len(end) <= self.seq_len:
            rule = f"1 to training.seq_len = {self.seq_len:,} tokens can be scored after a context"
            raise UserError(f"{where}: {rule}, not {len(end):,}: change the task, or raise this key")
        cut = max(0, len(context) + len(end) - self.seq_len - 1)
        return Row(np.array([*context, *end][cut:], np.int64), len(context) - cut, cut > 0)


def _moved(context: str, continuation: str) -> tuple[str | None, str]:
    """Context and continuation, without whitespace at the end of the context; None: an empty context."""
    kept = context.rstrip()
    return kept if context else None, context[len(kept) :] + continuation


class Harness:
    """The tasks of a run on rank 0: their rows, and the model that lm_eval.evaluator.evaluate calls.

    rows: of all requests. The names of its methods are the harness's.
    """

    rank, world_size = 0, 1

    def __init__(
        self,
        section: ValidationConfig,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        adds_bos: bool,
        allows_code: bool,
        why_no_text: str,
    ) -> None:
        """adds_bos: see Encoder. allows_code: whether the tasks may run any code of the user. why_no_text: why tasks
        cannot generate text; "": they can. Raises UserError."""
        self._tokenizer, self._encoder = tokenizer, Encoder(tokenizer, seq_len, adds_bos=adds_bos)
        self._limit = None if section.task_limit == -1 else section.task_limit
        self._generate: Generate | None = None
        with _on_the_side():
            self._loaded = _load(section.tasks, allows_code=allows_code)
            for name, task in self._loaded["tasks"].items():
                self._build(name, task, section, why_no_text)
            self._scored = [
                each
                for task in self._loaded["tasks"].values()
                for each in task.instances
                if each.request_type != GENERATES
            ]
            rows = self._encoder.rows(self._scored)
        self.rows = [row for of_request in rows for row in of_request]
        self._counts = [len(of_request) for of_request in rows]
        self._answers: dict[int, tuple[float, bool]] = {}
        self._truncated = Counter(
            each.task_name
            for each, of_request in zip(self._scored, rows, strict=True)
            if any(row.is_truncated for row in of_request)
        )

    def _build(self, name: str, task: Any, section: ValidationConfig, why_no_text: str) -> None:
        """Build the requests of a task, once: evaluate would draw other few-shot examples at each call."""
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"validation.tasks: {name} runs generated code, or reads images or sound: leave it out")
        given = task.get_config("num_fewshot")
        if given != 0:  # the task's own 0 stays, as in the harness
            task.set_config("num_fewshot", section.task_fewshot if section.task_fewshot != -1 else given or 0)
        task.set_fewshot_seed(SEED)
        try:
            task.build_all_requests(
                limit=self._limit,
                apply_chat_template=section.task_chat,
                fewshot_as_multiturn=section.task_chat,
                chat_template=self.apply_chat_template if section.task_chat else None,
            )
        except Exception as error:
            raise _unusable(name, error) from error
        task.build_all_requests = lambda **_: None
        for method in ("apply_filters", "process_results"):
            setattr(task, method, _naming(name, getattr(task, method)))
        if why_no_text and any(each.request_type == GENERATES for each in task.instances):
            raise UserError(f"validation.tasks: {name} generates text (output_type: {GENERATES}): {why_no_text}")

    def describe(self) -> list[str]:
        """Name and sizes of each task, for the log."""
        return [
            f"{name}, {task.OUTPUT_TYPE}: {len({each.doc_id for each in task.instances}):,} documents, "
            f"{len(task.instances):,} requests, {task.get_config('num_fewshot')} examples"
            for name, task in self._loaded["tasks"].items()
        ]

    def scores(
        self, losses: Sequence[float], misses: Sequence[float], generate: Generate | None
    ) -> dict[str, TaskScores]:
        """The scores of all tasks and groups, by name. losses: of each row; misses: labels that are not the most likely
        token. generate: None if no task generates text."""
        from lm_eval.evaluator import evaluate

        ends = np.cumsum(self._counts)
        for each, count, end in zip(self._scored, self._counts, ends, strict=True):
            own = slice(end - count, end)
            self._answers[id(each)] = -sum(losses[own]), sum(misses[own]) == 0
        self._generate = generate
        tasks, groups = self._loaded["tasks"], self._loaded["groups"]
        for task in tasks.values():
            for each in task.instances:
                each.resps, each.filtered_resps = [], {}
        with _on_the_side():
            found = evaluate(self, self._loaded, limit=self._limit, log_samples=False)
            in_groups = {name for names in found["group_subtasks"].values() for name in names}
            scores = {name: self._task_scores(task, found["results"][name]) for name, task in tasks.items()}
        for name, group in groups.items():
            members = [scores[task.task_name] for task in group.get_all_tasks()]
            numbers = _numbers(found["results"][name])
            counts = [(each.num_documents, each.num_truncated, each.num_close) for each in members]
            num_documents, num_truncated, num_close = map(sum, zip(*counts, strict=True))
            scores[name] = TaskScores(num_documents, num_truncated, num_close, numbers)
        return {name: replace(each, in_group=name in in_groups) for name, each in scores.items()}

    def _task_scores(self, task: Any, found: Mapping[str, Any]) -> TaskScores:
        documents = defaultdict(list)
        for each in task.instances:
            documents[each.doc_id].append(each)
        numbers, sums, num_close = _numbers(found), [], 0
        nats = num_bytes = 0.0
        for requests in documents.values():
            requests.sort(key=lambda each: each.idx)
            likely = [self._answers[id(each)][0] for each in requests if each.request_type != GENERATES]
            sums.append(tuple(likely))
            if (right := _right(task, requests)) is not None:
                nats -= likely[right]
                num_bytes += len(requests[right].args[1].encode())
            if task.OUTPUT_TYPE == "multiple_choice":
                choices = task.doc_to_choice(requests[0].doc)
                per_character = [each / len(text) for each, text in zip(likely, choices, strict=False)]
                num_close += _is_close(likely[: len(choices)]) or _is_close(per_character)
        if num_bytes:
            numbers["bits_per_byte"] = nats / math.log(2) / num_bytes
        num_truncated = self._truncated[task.task_name]
        return TaskScores(len(documents), num_truncated, num_close, numbers, log_likelihoods=tuple(sums))

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation in nats, and whether each of its tokens is the most likely one."""
        return [self._answers[id(each)] for each in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-likelihood of each text."""
        return [self._answers[id(each)][0] for each in requests]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The greedy text after each context, up to the first of the stop texts."""
        return [self._text_after(each.task_name, *each.args) for each in requests]

    def _text_after(self, task: str, context: str, settings: Mapping[str, Any]) -> str:
        assert self._generate is not None
        if settings.get("do_sample") or settings.get("temperature"):
            rule = "titanlite generates greedily: remove do_sample and temperature"
            raise UserError(f"{task}: generation_kwargs = {dict(settings)}: {rule}")
        most, until = settings.get("max_gen_toks", NEW_TOKENS), settings.get("until") or []
        if most >= self._encoder.seq_len:
            rule = f"below training.seq_len = {self._encoder.seq_len:,}"
            remedy = "write a smaller one in generation_kwargs of the task, or raise this key"
            raise UserError(f"{task}: max_gen_toks = {most:,} must be {rule}: {remedy}")
        stops = [text for text in ([until] if isinstance(until, str) else until) if text]
        prompt = self._encoder.encode([context])[context][most - self._encoder.seq_len :]
        tokens: list[int] = []
        for token in self._generate(prompt, most):
            tokens.append(token)
            text = self._encoder.decode(tokens, skips_special=False)
            if any(stop in text for stop in stops):
                break
        text = self._encoder.decode(tokens, skips_special=True)
        return min((text.partition(stop)[0] for stop in stops), key=len, default=text)

    def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, by the chat template of the run."""
        if not add_generation_prompt:
            raise UserError("gen_prefix in a task, with validation.task_chat = true: remove it from the task")
        assert self._tokenizer.chat_template is not None, "see check_tokenizer"
        template = ChatTemplate(self._tokenizer.chat_template, self._tokenizer.special_tokens)
        return unmarked(template.render(chat_history, prompts=True)).text


def _is_close(values: Sequence[float]) -> bool:
    """Whether the two largest values differ by less than CLOSE."""
    first, *others = sorted(values, reverse=True)
    return bool(others) and first - others[0] < CLOSE


def _right(task: Any, requests: Sequence[Any]) -> int | None:
    """Index of the request with the right continuation; None if it is not one of a multiple choice or cloze."""
    if task.OUTPUT_TYPE == "loglikelihood":
        return 0
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    doc = requests[0].doc
    right = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    choices = task.doc_to_choice(doc)
    if isinstance(right, str):
        right = choices.index(right) if right in choices else None
    return right if isinstance(right, int) and 0 <= right < len(choices) else None


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Metric -> value: "acc" of the harness's "acc,none", without values that are not numbers."""
    numbers = {}
    for key, value in found.items():
        if "," in key and isinstance(value, int | float) and value == value:
            numbers[key.removesuffix(",none")] = float(value)
    return numbers


def task_file(spec: str) -> Path | None:
    """The file that an entry of validation.tasks names, behind all links; None: it is the name of a task. Raises
    UserError."""
    path = Path(expand_home(spec))
    return path.resolve() if path.is_file() else None


def _load(specs: Sequence[str], *, allows_code: bool) -> Any:
    """Tasks and groups by name, with their data sets. Raises UserError."""
    from lm_eval.tasks import TaskManager

    files = {spec: file for spec in specs if (file := task_file(spec))}
    for spec, file in files.items():
        _check_file(spec, file, allows_code=allows_code)
    manager = TaskManager(include_defaults=not files.keys() >= {*specs})  # reads 14,000 files
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    for spec in specs:
        try:
            if spec in files:
                with _refusing_code(spec, allows_code=allows_code):
                    found = manager.load([str(files[spec])])
            elif spec in manager.all_tasks:
                found = manager.load([spec])
            else:
                raise KeyError(f"the harness has no task {spec!r}")
        except UserError:
            raise
        except Exception as error:
            close = get_close_matches(spec, manager.all_tasks, 1) if spec not in manager.all_tasks else []
            raise _unusable(spec, error, *(f"did you mean {name}?" for name in close)) from error
        if twice := found["tasks"].keys() & loaded["tasks"].keys():
            raise UserError(f"validation.tasks: {spec} has the task {min(twice)}, which another entry has, too")
        loaded = {key: {**loaded[key], **found[key]} for key in loaded}
    return loaded


def _unusable(spec: str, error: Exception, remedy: str = "correct the task or its data") -> UserError:
    reason = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))
    if isinstance(error, OSError):
        remedy = 'a data set must be on this machine or reachable; "dataset_path: json" reads local files'
    return UserError(f"validation.tasks: {spec} cannot be used: {reason}: {remedy}")


def _naming(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a task, whose errors name the task."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        except Exception as error:
            raise _unusable(name, error) from error

    return call


def _check_file(spec: str, file: Path, *, allows_code: bool) -> None:
    """Raise UserError if a task in YAML is a group, or reads data by code that was not permitted; see _refusing_code.

    Checked is what the harness will use: the file as it reads it, with all that it includes.
    """
    from lm_eval.prompts import PROMPT_REGISTRY
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        _require_regular_files(file)
        config = load_yaml(file, resolve_func=False, recursive=True)
        settings = dict(config.get("dataset_kwargs") or {})
        elsewhere = [] if allows_code else _data_elsewhere(str(config.get("dataset_path")), settings)
    except Exception as error:
        raise _unusable(spec, error) from error
    if "group" in config:
        raise UserError(f"validation.tasks: {spec} is a group, which lm_eval loads by its name only: list its tasks")
    if allows_code:
        return
    allows = "if you trust it, give titanlite evaluate --allow-import"
    if config.get("dataset_path") == "pandas":
        raise UserError(f"validation.tasks: {spec} reads pickled data, which runs code: use Parquet or JSON; {allows}")
    if set(settings.get("storage_options") or ()) - {"anon"}:
        raise UserError(
            f"validation.tasks: {spec} has storage_options, which choose who gets this machine's keys of a store: set "
            f"its environment instead, as AWS_ENDPOINT_URL; {allows}"
        )
    if others := sorted(settings.keys() - DATA_SETTINGS):
        raise UserError(
            f"validation.tasks: {spec} has dataset_kwargs that may write files or reach other servers: "
            f"{', '.join(map(repr, others))}; leave them out; {allows}"
        )
    if elsewhere:
        raise UserError(
            f"validation.tasks: {spec} reads {elsewhere[0]!r}, of a server or another data set: copy it here "
            f"and name the file; {allows}"
        )
    prompt = str(config.get("use_prompt") or "")
    if prompt and prompt.partition(":")[0] not in PROMPT_REGISTRY:
        _require_permission(spec, prompt, f"{prompt}, a prompt of another file or package")


def _data_elsewhere(path: str, settings: Mapping[str, Any]) -> list[str]:
    """The names in dataset_path, dataset_kwargs and the card of a local data set that `datasets` would ask a server
    for, other than the hub, or would take from outside of the data set. Raises errors of many types."""
    names = [path, *_texts(settings)]
    found = [name for name in names if "::" in name or ("://" in name and not name.startswith("hf://"))]
    return found + (list(map(str, names_outside(Path(path).absolute()))) if Path(path).is_dir() else [])


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of YAML, whose references may form a loop or repeat a list very often."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, list | Mapping) and id(each) not in seen:
            seen.add(id(each))
            waiting += [*each, *each.values()] if isinstance(each, Mapping) else each


def _require_regular_files(file: Path) -> None:
    """Raise OSError if a task, or what it includes, is a pipe or a device: lm_eval could wait for it forever."""
    from lm_eval.tasks._yaml_loader import load_yaml

    waiting, seen = [file], set()
    while waiting:
        path = waiting.pop().resolve()
        if path not in seen:
            seen.add(path)
            open_regular(path).close()
            includes = load_yaml(path, resolve_func=False, recursive=False).get("include") or ()
            waiting += [path.parent / each for each in ([includes] if isinstance(includes, str) else includes)]


@contextmanager
def _refusing_code(spec: str, *, allows_code: bool) -> Iterator[None]:
    """Refuse code that a task in YAML names, where the harness would import it. Inside, lm_eval raises UserError.

    A `!function` is looked up beside the file that has the line, behind links and `include`. The harness's own
    functions are refused, too: with arguments that a YAML gives, some of them run the code of a model folder.
    """
    from lm_eval.api import task
    from lm_eval.api.registry import metric_registry
    from lm_eval.tasks import _yaml_loader

    imported, get_metric = _yaml_loader._import_func_in_yml, task.get_metric

    def permitted(function: str, folder: Path) -> Any:
        module = function.rpartition(".")[0]
        file = (folder / f"{module.replace('.', '/')}.py").resolve()
        name = str(file) if file.exists() else module
        _require_permission(spec, name, name)
        return imported(function, folder)

    def registered(name: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in metric_registry:
            _require_permission(spec, name, f"{name}, a metric that lm_eval would load from the hub")
        return get_metric(name, hf_evaluate_metric)

    if not allows_code:
        _yaml_loader._import_func_in_yml, task.get_metric = permitted, registered
    try:
        yield
    finally:
        _yaml_loader._import_func_in_yml, task.get_metric = imported, get_metric


def _require_permission(spec: str, name: str, shown: str) -> None:
    """Raise UserError if job.plugins does not name this code of a task in YAML."""
    names = {split_entry(entry)[0] for entry in loaded_plugins()}
    if name not in names | {os.path.realpath(each) for each in names if each.endswith(".py")}:
        raise UserError(
            f"validation.tasks: {spec} runs the code of {shown}; if you trust it, add it to job.plugins of the run, "
            "or give titanlite evaluate --allow-import"
        )


@contextmanager
def _on_the_side() -> Iterator[None]:
    """The harness's code inside: with its seeds, with templates in a sandbox, without progress bars and resampling;
    random states stay as they were.

    lm_eval estimates the error of a perplexity by 100,000 resamplings, in processes of its own.
    """
    from lm_eval import utils
    from lm_eval.api import metrics, task

    import_datasets()
    states = random.getstate(), np.random.get_state()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of its defaults for metrics
    bar, resample, templates = task.tqdm, metrics.bootstrap_stderr, utils.env
    task.tqdm = lambda documents, **_: documents
    metrics.bootstrap_stderr = lambda *_, **__: float("nan")
    utils.env = _sandbox(templates)
    try:
        with torch.random.fork_rng([]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            random.seed(0)
            np.random.seed(SEED)
            torch.manual_seed(SEED)
            yield
    finally:
        task.tqdm, metrics.bootstrap_stderr, utils.env = bar, resample, templates
        random.setstate(states[0])
        np.random.set_state(states[1])


def _sandbox(templates: jinja2.Environment) -> ImmutableSandboxedEnvironment:
    """The harness's environment of templates, in which they reach neither Python's own attributes nor its modules."""
    sandbox = ImmutableSandboxedEnvironment(
        loader=templates.loader, undefined=templates.undefined, keep_trailing_newline=templates.keep_trailing_newline
    )
    sandbox.filters |= templates.filters
    return sandbox
