"""The post-processor of a tokenizer.json: the special tokens that the `tokenizers` library adds to a text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TEMPLATE = "TemplateProcessing"
Processor = Mapping[str, Any]
"""A post-processor or a step of one, as tokenizer.json has it."""


def with_bos(processor: Processor | None, text: str, token_id: int, *, adds: bool) -> Processor | None:
    """The post-processor that puts the token `text` first, or not before a text; it adds its other tokens."""
    steps = list(_steps(processor))
    if adds and all(step["type"] != TEMPLATE for step in steps):
        steps.append(_template([_A], [_A, _B], {}))
    steps = [_changed(step, text, token_id, adds=adds) if step["type"] == TEMPLATE else step for step in steps]
    return {"type": "Sequence", "processors": steps} if steps else None


def _steps(processor: Processor | None) -> Iterator[Processor]:
    """The steps, with templates in place of those of BERT and RoBERTa, which cannot do without their first token."""
    if processor is None:
        return
    if processor["type"] == "Sequence":
        for step in processor["processors"]:
            yield from _steps(step)
    elif processor["type"] in ("BertProcessing", "RobertaProcessing"):
        ids = dict((processor["cls"], processor["sep"]))  # one, if both are the same token
        first, last = (_token(processor[name][0]) for name in ("cls", "sep"))
        between = [last, last] if processor["type"] == "RobertaProcessing" else [last]
        yield _template([first, _A, last], [first, _A, *between, _B, last], ids)
    else:
        yield processor


_A, _B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
"""The first text in a template, and the second one."""


def _template(single: Sequence[Processor], pair: Sequence[Processor], ids: Mapping[str, int]) -> Processor:
    """ids: of the special tokens in it."""
    tokens = {text: {"id": text, "ids": [token_id], "tokens": [text]} for text, token_id in ids.items()}
    return {"type": TEMPLATE, "single": single, "pair": pair, "special_tokens": tokens}


def _token(text: str) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": text, "type_id": 0}}


def _changed(template: Processor, text: str, token_id: int, *, adds: bool) -> Processor:
    """The template without the token among those before its first text, or with it as the first one. The second text of
    a pair stays as it is: what stands before it may be the end of the first one."""

    def pieces(name: str) -> list[Processor]:
        given = template[name]
        end = next((place for place, piece in enumerate(given) if "Sequence" in piece), len(given))
        before = [piece for piece in given[:end] if piece["SpecialToken"]["id"] != text]
        return [*([_token(text)] if adds else []), *before, *given[end:]]

    own = {text: {"id": text, "ids": [token_id], "tokens": [text]}} if adds else {}
    tokens = {**template["special_tokens"], **own}
    return {**template, "single": pieces("single"), "pair": pieces("pair"), "special_tokens": tokens}
