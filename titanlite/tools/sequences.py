"""The sequences that a run is trained on, as text."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import groupby

from titanlite.batch import IGNORE_INDEX
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.data.config import DataConfig
from titanlite.data.corpus import open_index
from titanlite.data.kinds import open_source
from titanlite.data.loader import Loader, build_loader
from titanlite.data.sources.base import StreamedSource, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import STARTS_DOCUMENT
from titanlite.data.sources.tokens import Tokens
from titanlite.data.streams import Origin
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.text import visible

TRAINED = ("⟦", "⟧")
"""Marks of the first and the last token that are trained on."""


def sequences_as_text(config: JobConfig, tokenizer: Tokenizer | None, vocab_size: int, count: int) -> Iterator[str]:
    """The run's first `count` sequences, as the trainer's loader yields them; without a tokenizer, the ids. The text is
    that of the data: not `visible`.

    A rule stands before each document and before the padding. TRAINED encloses the tokens of conversations that are
    trained on.
    """
    data, training, stages = config.data, config.training, batch_stages(config)
    # Only the streams that have them: a few first ones, as of the first data rank of many.
    sizes = [data.num_streams, *(stage.global_batch_size for stage in stages)]
    together = next((n for n in range(max(count, 1), min(sizes)) if not any(size % n for size in sizes)), 0)

    def loader(document_mask: bool) -> Loader:
        return build_loader(
            replace(data, document_mask=document_mask, num_workers=0),
            tokenizer,
            seq_len=training.seq_len,
            vocab_size=vocab_size,
            global_batch_size=training.global_batch_size,
            local_batch_size=training.global_batch_size,
            data_rank=0,
            data_degree=data.num_streams // together if together else 1,
            together=max(together, 1),
            later=[replace(stage, local_batch_size=stage.global_batch_size) for stage in stages[1:]],
        )

    # A document mask shows where documents start, but it also changes labels: a second loader provides the mask.
    with ExitStack() as stack:
        plain = stack.enter_context(closing(loader(False)))
        marked = stack.enter_context(closing(loader(True))) if documents_are_known(data.sources) else None
        while count and not all(plain.ended):
            (batch,) = plain.next_step()
            (masked,) = marked.next_step() if marked else (batch,)
            for row, origin in enumerate(plain.origins):
                assert batch.lengths is not None
                length = int(batch.lengths[row])
                starts = [0] if masked.positions is None else (masked.positions[row] == 0).nonzero().flatten().tolist()
                begins = [start for start in starts if start < length]
                labels = (masked if data.masks_documents else batch).labels[row].tolist()
                is_chat = data.sources[origin.source].is_chat
                name, ids = visible(plain.source_names[origin.source]), batch.tokens[row].tolist()
                at = (
                    f"epoch {origin.epoch}, from token {origin.offset} of piece {origin.piece}"
                    if length
                    else "at its end"
                )
                lines = [f"\n════ sequence {batch.sequences[row]} of the run: {name}, {at} ════"]
                for begin, end in zip(begins, [*begins[1:], length], strict=True):
                    what = "conversation" if is_chat else "document" if begin else head_of(origin, data)
                    if is_chat and tokenizer is not None:
                        trained = [place > 0 and labels[place - 1] != IGNORE_INDEX for place in range(begin, end)]
                        rest = f", {sum(trained)} of them trained on, in {''.join(TRAINED)}"
                        lines.append(f"──── {what}: {name}, tokens {begin} to {end - 1}{rest} ────")
                        lines.append(marked_text(tokenizer, ids[begin:end], trained))
                        continue
                    places = ", ".join(str(place) for place in range(begin, end) if labels[place] == IGNORE_INDEX)
                    rest = f", masked labels at {places}" if places else ""
                    lines.append(f"──── {what}: {name}, tokens {begin} to {end - 1}{rest} ────")
                    part = ids[begin:end]
                    lines.append(tokenizer.decode(part) if tokenizer else " ".join(map(str, part)))
                if length < len(ids):
                    lines.append(f"──── padding, masked: tokens {length} to {len(ids) - 1} ────")
                yield "\n".join(lines)
                count -= 1
                if not count:
                    return


def marked_text(tokenizer: Tokenizer, ids: Sequence[int], trained: Sequence[bool]) -> str:
    """The text of tokens, with TRAINED around those that are trained on."""
    parts = []
    for is_trained, places in groupby(range(len(ids)), lambda place: trained[place]):
        text = tokenizer.decode([ids[place] for place in places])
        parts.append(f"{TRAINED[0]}{text}{TRAINED[1]}" if is_trained else text)
    return "".join(parts)


def head_of(origin: Origin, data: DataConfig) -> str:
    """Label of the document that a sequence's first token belongs to."""
    source = open_source(data.sources[origin.source])
    if source.holds == "tokens":
        return "window"
    if origin.offset > 0:
        return "document, continued"
    if isinstance(source, StreamedSource) or origin.piece < 0:
        return "document"
    assert isinstance(source, TextSource)
    piece = open_index(source, data.max_piece_bytes)[origin.piece]
    return "document" if piece.flags & STARTS_DOCUMENT else "part of a document"


def documents_are_known(sources: Sequence[SourceConfig]) -> bool:
    """Whether the starts of documents are known: some token files of other programs lack them."""
    return all(source.has_documents for source in map(open_source, sources) if isinstance(source, Tokens))
