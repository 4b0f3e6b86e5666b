"""The [data], [validation] and [tokenizer] sections."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from titanlite.data.packing import Packing
from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.settings import Affects, Needs, setting

MIN_CACHE_BYTES = 2**28
MIN_PIECE_BYTES = 16
PIECE_BYTES_PER_POSITION = 64

_ORDERS = Needs("data.shuffle = true or several data.sources", lambda data: data.shuffle or len(data.sources) > 1)
_SKIPS = Needs('data.on_bad_row = "skip"', lambda data: data.on_bad_row == "skip")
_VALIDATES = Needs("validation.enable = true", lambda validation: validation.enable)
_HAS_TASKS = Needs("validation.tasks", lambda validation: validation.enable and bool(validation.tasks))


@dataclass(frozen=True)
class DataConfig:
    """Training data and its order."""

    AFFECTS: ClassVar[Affects] = "facts"

    num_streams: int = setting(
        -1, "leave it out", least=1, most=2**20, unset=-1, automatic="training.global_batch_size"
    )
    """Number of streams S. It decides the order of the tokens, on every mesh. -1: one per row of the largest global
    batch of all stages, resolved at the first start and kept in the checkpoints."""
    shuffle: bool = True
    """Whether to permute the pieces, differently in each epoch."""
    seed: int = setting(0, "write a number from 0", least=0, most=2**63 - 1, needs=_ORDERS)
    """Seed of the permutation and of the mixture of sources."""
    max_piece_bytes: int = setting(
        -1, "leave it out", least=MIN_PIECE_BYTES, unset=-1, automatic="64 x training.seq_len"
    )
    """Maximum size of a piece. Longer documents are cut into several pieces, at line ends if possible; conversations
    never. -1: 64 x the training.seq_len of the longest stage."""
    stream_version: int = setting(
        -1, "leave it out", least=2, most=4, unset=-1, automatic="that of the checkpoint, or the newest"
    )
    """Version of the tokens and their order. 4: conversations are rendered with the tools and chat_template_kwargs of
    their rows, and shuffled windows of token files are dealt to the streams in blocks. 3: rows with tools are bad,
    chat_template_kwargs is ignored, and windows are shuffled as documents are. 2: as 3, and each part of a document
    that is cut is tokenized by itself. -1: that of the checkpoint to resume from, else the newest."""
    packing: Packing = "concatenate"
    """concatenate: fill each sequence with consecutive documents, or with the consecutive conversations that fit.
    best_fit: cut only documents that are longer than a sequence, and choose for each sequence, in windows of about 128
    sequences, pieces that fill it; the rest is padded and masked. none: start a sequence with each piece (a document or
    a part of a long one, or a conversation), pad and mask the rest of the piece's last sequence."""
    document_mask: bool | Literal["auto"] = setting("auto", automatic="true if a source of data is of kind chat")
    """Whether attention stays inside a document or conversation and positions restart at each. auto: true if a source
    of training data is of kind chat, resolved at the first start and kept in the checkpoints."""
    add_bos: bool | Literal["auto"] = setting("auto", automatic="as the model or the token files have it, else false")
    """Whether each document starts with the tokenizer's BOS token, and with it each text that the run continues, scores
    or exports a tokenizer for. Conversations have those of the chat template. auto: as in the token files; as the model
    in checkpoint.initial_load_path has it; else false. Resolved at the first start and kept in the checkpoints."""
    add_eos: bool = True
    """Whether each document ends with the tokenizer's EOS token, if it has one."""
    on_bad_row: Literal["error", "skip"] = setting("error", affects="numbers")
    """Bad rows: error stops the run at the step that needs the row; skip skips and counts the row."""
    max_bad_rows: int = setting(100, "0 stops at the first bad row", least=0, affects="nothing", needs=_SKIPS)
    """With on_bad_row = "skip": the run stops if more rows than this are bad."""
    num_workers: int = setting(
        -1,
        "0 prepares data in a thread",
        least=0,
        unset=-1,
        affects="nothing",
        per_node=True,
        automatic="by the devices and the kinds of the sources",
    )
    """Processes per rank that tokenize and pack, at most one for each stream of the rank. 0: a thread of the training
    process. -1: 1 on CUDA if a source holds text, else 0."""
    cache_bytes: int = setting(
        -1,
        f"write at least {MIN_CACHE_BYTES} (256 MiB), or leave it out",
        least=MIN_CACHE_BYTES,
        unset=-1,
        affects="nothing",
        per_node=True,
        automatic="half of the space that the disk of the cache folder has for it",
    )
    """Maximum size, per node, of the parts of stored files (sources at an address such as s3://bucket/corpus) in the
    cache folder. The least recently used parts are removed. -1: half of the space that its disk has."""
    ledger: bool = setting(False, affects="nothing")
    """Whether to record the origin of each sequence in <dump_folder>/ledger."""
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Corpora to train on: [[data.sources]] tables."""

    @property
    def reads_context(self) -> bool:
        """Whether the tokens of a part of a document are those of the entire document."""
        return self.stream_version != 2

    @property
    def reads_fields(self) -> bool:
        """Whether a chat template gets the tools and chat_template_kwargs of a row."""
        return self.stream_version not in (2, 3)

    @property
    def deals_blocks(self) -> bool:
        """Whether shuffled windows of token files have the order of titanlite.data.segments."""
        return self.shuffle and self.stream_version not in (2, 3)

    @property
    def adds_bos(self) -> bool:
        """add_bos, resolved; see titanlite.config.conventions."""
        return self.add_bos is True

    @property
    def masks_documents(self) -> bool:
        """document_mask, resolved."""
        return any(source.is_chat for source in self.sources) if self.document_mask == "auto" else self.document_mask


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out data: [[validation.sources]] tables, with the keys of [[data.sources]]; and scores of tasks.

    Each source is read once, unshuffled; the other settings are those of [data].
    """

    AFFECTS: ClassVar[Affects] = "reports"

    enable: bool = setting(False, affects="nothing")
    """Whether to validate after every interval-th step and after the last step."""
    interval: int = setting(1000, "1 validates every step", least=1, affects="nothing", needs=_VALIDATES)
    """Steps between validations."""
    steps: int = setting(-1, "leave it out", least=1, unset=-1, needs=_VALIDATES)
    """Maximum batches of training.global_batch_size sequences per source; -1: all of each source."""
    sources: tuple[SourceConfig, ...] = setting((), needs=_VALIDATES)
    """Corpora to validate on, each read once and unshuffled: [[validation.sources]] tables."""
    tasks: tuple[str, ...] = setting((), needs=_VALIDATES, per_node=True, is_path=True)
    """Tasks of lm-evaluation-harness: names such as "hellaswag", or YAML files (docs/evaluation.md#tasks)."""
    task_fewshot: int = setting(-1, "leave it out", least=0, unset=-1, needs=_HAS_TASKS)
    """Examples before each question; -1: as many as the task says. A task that says 0 has none."""
    task_limit: int = setting(-1, "leave it out", least=1, unset=-1, needs=_HAS_TASKS)
    """Maximum documents per task, the first ones; -1: all."""
    task_interval: int = setting(-1, "leave it out", least=1, unset=-1, affects="nothing", needs=_HAS_TASKS)
    """Steps between evaluations on tasks, a multiple of interval; -1: interval."""
    task_chat: bool = setting(False, needs=_HAS_TASKS)
    """Whether to write the questions as conversations, by the chat template."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of text sources."""

    AFFECTS: ClassVar[Affects] = "facts"

    path: str = setting("", per_node=True, is_path=True, automatic="the model folder in checkpoint.initial_load_path")
    """A tokenizer.json or its folder. Empty: the tokenizer in the folder of the token files, if any (kind tokens), or
    in the model folder of checkpoint.initial_load_path = "hf:FOLDER", or one that is trained on the corpus
    (python-stdlib)."""
    bos: str = ""
    """Token that starts a document; default: that of the files beside the tokenizer, if any."""
    eos: str = ""
    """Token that ends a document; default: that of the files beside the tokenizer, if any."""
    chat_template: str = setting("", per_node=True, is_path=True)
    """Jinja file that turns messages into text; default: chat_template.jinja beside the tokenizer, or the one in its
    tokenizer_config.json, if any. Stored with the run, and exported."""
