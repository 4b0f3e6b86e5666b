"""Settings that are given but have no effect under the others: what the keys declare, and rules across sections."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from titanlite.config.fields import SECTIONS, keys_of
from titanlite.config.schema import JobConfig
from titanlite.config.stages import largest_batch
from titanlite.config.value_types import literal
from titanlite.data.bpe import kept_tokenizer
from titanlite.data.check import has_key
from titanlite.data.deal import most_sequences
from titanlite.data.kinds import KINDS, open_source
from titanlite.data.sources.config import SourceConfig
from titanlite.parallel import mesh
from titanlite.runtime.errors import Problem
from titanlite.runtime.settings import Needs, settings_of
from titanlite.storage.address import is_address
from titanlite.storage.config import StorageConfig

SEARCHED = ("parallelism", "activation_checkpoint")
"""Sections of which a search of layouts chooses keys that are not given, so that any other key may have an effect."""


@dataclass(frozen=True)
class Facts:
    """What rules across sections read: the resolved configuration, the given keys, the number of processes."""

    config: JobConfig
    given: Collection[str]
    world_size: int

    @property
    def sources(self) -> Sequence[SourceConfig]:
        """Of training, and of validation if it is enabled."""
        validation = self.config.validation
        return (*self.config.data.sources, *(validation.sources if validation.enable else ()))

    @property
    def is_searched(self) -> bool:
        return self.config.parallelism.layout == "auto"

    def has_text(self) -> bool:
        return any(open_source(source).holds == "text" for source in self.sources)

    def has_documents(self) -> bool:
        return any(open_source(source).holds == "text" and not source.is_chat for source in self.sources)

    def separates(self) -> bool:
        """Whether separators of documents matter: token files with a tokenizer must have been written with the same."""
        return self.has_documents() or kept_tokenizer(self.sources) is not None

    def shards(self) -> int:
        degrees = mesh.resolve_degrees(self.config.parallelism, self.world_size)
        return degrees["dp_shard"] * degrees["cp"]

    def accumulates(self) -> bool:
        """Whether a data rank has more sequences per step than a microbatch, or than a batch of the pipeline."""
        training, degree = self.config.training, mesh.data_degree(self.config.parallelism, self.world_size)
        sequences = most_sequences(largest_batch(self.config), self.config.data.num_streams, degree)
        return training.local_batch_size == -1 or sequences > training.local_batch_size

    def uses_store(self) -> bool:
        """Whether checkpoints or data are in a store."""
        section = self.config.checkpoint
        paths = [section.folder, section.initial_load_path, *(source.path for source in self.sources)]
        return any(map(is_address, paths))

    def syncs(self) -> bool:
        """Whether parallelism.gradient_sync decides when gradients are reduced."""
        section = self.config.parallelism
        return self.is_searched or (
            self.accumulates() and (section.pp > 1 or section.dp_replicate > 1 or self.shards() > 1)
        )

    def divides(self) -> bool:
        """Whether training.local_batch_size decides a batch."""
        section, is_given = self.config.parallelism, "training.global_batch_size" in self.given
        return self.is_searched or section.pp == 1 or section.gradient_sync == "every" or not is_given


_STORE = Needs("checkpoints or data at an address, such as s3://BUCKET/NAME", Facts.uses_store)
_TEXT = Needs("a source of text, not of tokens", Facts.has_text)
_DOCUMENTS = Needs("a source of documents, not of tokens or conversations", Facts.has_documents)
ACROSS: Mapping[str, Needs] = {
    "data.max_piece_bytes": _DOCUMENTS,
    "data.stream_version": _DOCUMENTS,
    "data.packing": _TEXT,
    "data.on_bad_row": _TEXT,
    "data.add_eos": Needs(_DOCUMENTS.condition, Facts.separates),
    "training.local_batch_size": Needs(
        'parallelism.pp = 1, gradient_sync = "every" or no training.global_batch_size', Facts.divides
    ),
    "parallelism.gradient_sync": Needs(
        "several data ranks or pipeline stages, and several microbatches of training.local_batch_size per step",
        Facts.syncs,
    ),
    "parallelism.fsdp_reshard_after_forward": Needs(
        "parallelism.dp_shard or cp above 1", lambda facts: facts.is_searched or facts.shards() > 1
    ),
    **{
        f"lr_schedule.{key}": Needs("training.stages", lambda facts: facts.config.training.stages)
        for key in ("over", "batch_scaling")
    },
    "faults.check_replicas_every": Needs(
        "several processes per pipeline stage",
        lambda facts: facts.is_searched or facts.world_size > facts.config.parallelism.pp,
    ),
    "data.cache_bytes": Needs(
        "data at an address, such as s3://BUCKET/NAME",
        lambda facts: any(is_address(source.path) for source in facts.sources),
    ),
    **{f"storage.{name}": _STORE for name in settings_of(StorageConfig)},
    "loss.further_tokens_weight": Needs(
        "model.n_further_tokens above 0",
        lambda facts: getattr(facts.config.hyper_parameters, "n_further_tokens", 0) > 0,
    ),
    "comm.save_timeout_s": Needs(
        "checkpoint.enable = true or an initial_load_path",
        lambda facts: facts.config.checkpoint.enable or facts.config.checkpoint.initial_load_path,
    ),
}
"""Rules across sections, by full key; is_met takes Facts."""


SEVERAL = Needs("several data.sources", lambda facts: len(facts.config.data.sources) > 1)


def ineffective(given: JobConfig, config: JobConfig, origins: Mapping[str, str], world_size: int) -> list[Problem]:
    """A Problem for each given setting that has no effect under the others.

    given: as read. config: resolved, and valid for world_size processes. origins: full key that is given -> its file,
    or the command line. A file with most of all keys does not count: titanlite has written it. Nor does a value that
    stands for an automatic choice.
    """
    counts = Counter(origin for key, origin in origins.items() if key.count(".") == 1)
    most = sum(len(keys_of(section, None)) for section in SECTIONS) / 2
    facts = Facts(config, origins.keys(), world_size)
    problems: list[Problem] = []
    for key, origin in origins.items():
        section, name, *row = key.split(".")
        values = getattr(given, section)
        if row:
            values, name = getattr(values, name)[int(row[0])], row[1]
        if counts[origin] >= most or _is_automatic(values, name):
            continue
        if condition := _unmet(facts, key):
            value = values.overrides[name] if section == "model" else getattr(values, name)
            if isinstance(value, tuple):
                value = None if value and is_dataclass(value[0]) else list(value)  # tables have no short form
            problems.append(Problem(key, value, f"has an effect only with {condition}", "leave it out"))
    return problems


def describe(problem: Problem) -> str:
    """A setting without effect, in one line."""
    value = "" if problem.value is None else f" = {literal(problem.value)}"
    return f"{problem.key}{value}{f' in {problem.file}' if problem.file else ''} {problem.rule}"


def _unmet(facts: Facts, key: str) -> str:
    """What a key needs to have an effect; "" if it has one."""
    section, name, *row = key.split(".")
    values = getattr(facts.config, section)
    if row and name == "sources":
        return _unmet_in_source(facts, section, getattr(values, name)[int(row[0])], row[1])
    begins = bool(row) and row[1] in ("from_step", "from_tokens")
    if begins and name == "stages" and (first := values.stages[int(row[0])].from_step) > values.steps:
        return f"training.steps of at least {first}"
    if row:
        return ""
    if section == "model":
        family, hyper_parameters = facts.config.family, facts.config.hyper_parameters
        needs = [(family.needs.get(name), hyper_parameters)]
    else:
        own = keys_of(section, None)[name].setting.needs
        searched = facts.is_searched and section in SEARCHED and name != "hardware"
        needs = [(None if searched else own, values), (ACROSS.get(key), facts)]
    return next((need.condition for need, of in needs if need is not None and not need.is_met(of)), "")


def _unmet_in_source(facts: Facts, section: str, source: SourceConfig, name: str) -> str:
    """As _unmet, for a key of a table of sources."""
    if section == "validation" and not facts.config.validation.enable:
        return ""  # the array itself has no effect
    kinds = _kinds_with(name)
    if kinds and source.kind not in kinds:
        return f"kind = {' or '.join(map(literal, kinds))}"
    if name == "weight" and not SEVERAL.is_met(facts):
        return SEVERAL.condition
    return ""


def _kinds_with(name: str) -> list[str]:
    """The kinds of sources that have a key of the table, [] if all have it."""
    return [kind for kind, source in KINDS.items() if has_key(source, name)]


def _is_automatic(section: Any, name: str) -> bool:
    """Whether the value of a key stands for an automatic choice, as if it were left out."""
    kind: type = type(section)
    found = settings_of(kind).get(name)
    limits = found.range if found else None
    return limits is not None and limits.unset is not None and getattr(section, name) == limits.unset
