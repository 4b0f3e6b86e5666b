"""The generation defaults of a model: its generation_config.json, as transformers writes it.

A run keeps the file unchanged in each checkpoint, from the import to the export.
"""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.runtime.json_files import parse_json

GENERATION_FILE = "generation_config.json"

_TOP_K = 50
"""Of transformers, if a file asks for sampling and does not name it."""
_SAMPLING = ("temperature", "top_k", "top_p")
# Settings that change what transformers writes, and the values with which they do not.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(
        ("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale", "num_beams"), 1
    ),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens", "diversity_penalty"), 0),
    **dict.fromkeys(("top_h", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("stop_strings", "dola_layers", "watermarking_config")),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """What a generation_config.json says.

    eos_ids: the ids of eos_token_id, a number or a list. temperature: 0 if do_sample is false; None, like top_k and
    top_p, if the file does not say how to sample. top_k: None: all tokens. not_applied: "key = value" of settings that
    titanlite does not have, or whose values it cannot read.
    """

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    not_applied: tuple[str, ...] = ()

    def ends(self, eos_id: int | None) -> frozenset[int]:
        """The tokens that end a text: eos_ids, and the tokenizer's EOS."""
        return frozenset(self.eos_ids if eos_id is None else (*self.eos_ids, eos_id))


def read_generation_defaults(content: bytes | None) -> GenerationDefaults:
    """Read a generation_config.json; None: the model has no such file. Raises JsonError if it is not a JSON object.

    What the file leaves out has the value that transformers uses. Without do_sample, a file that names a temperature,
    top_k or top_p asks for sampling.
    """
    if content is None:
        return GenerationDefaults()
    fields = {key: value for key, value in parse_json(content).items() if value is not None}
    readable = {key for key, is_valid in _VALID.items() if key in fields and is_valid(fields[key])}
    not_applied = [key for key in fields if key in _VALID and key not in readable]
    not_applied += [key for key, value in fields.items() if key in _NEUTRAL and value not in (_NEUTRAL[key], [], {})]
    eos = fields["eos_token_id"] if "eos_token_id" in readable else []
    found = {key: fields[key] for key in _SAMPLING if key in readable}
    do_sample = fields["do_sample"] if "do_sample" in readable else bool(found) or None
    if do_sample:
        found = {"temperature": 1.0, "top_k": _TOP_K, "top_p": 1.0} | found
    elif do_sample is False:
        found = {"temperature": 0.0}
    return GenerationDefaults(
        tuple(eos) if isinstance(eos, list) else (eos,),
        temperature=found.get("temperature"),
        top_k=found.get("top_k") or None,
        top_p=found.get("top_p"),
        not_applied=tuple(f"{key} = {json.dumps(fields[key])}" for key in not_applied),
    )


def with_eos(content: bytes, eos_ids: Collection[int]) -> bytes:
    """The file with all of `eos_ids` in its eos_token_id, in front of the others; unchanged if they are there already.

    Raises JsonError if the file is not a JSON object.
    """
    known = read_generation_defaults(content).eos_ids
    missing = [token for token in eos_ids if token not in known]
    if not missing:
        return content
    ids = [*missing, *known]
    fields = parse_json(content) | {"eos_token_id": ids if len(ids) > 1 else ids[0]}
    return (json.dumps(fields, indent=2) + "\n").encode()


def defaults_of_config(fields: Mapping[str, Any]) -> bytes | None:
    """A generation_config.json for a model folder without one, if its config.json names EOS: the ids that transformers
    takes from there in that case."""
    if fields.get("eos_token_id") is None:
        return None
    ids = {key: fields.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return (json.dumps(ids, indent=2) + "\n").encode()


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "eos_token_id": lambda value: all(map(_is_id, value)) if isinstance(value, list) else _is_id(value),
    "do_sample": lambda value: isinstance(value, bool),
    "temperature": lambda value: _is_number(value) and value >= 0,
    "top_k": _is_id,
    "top_p": lambda value: _is_number(value) and 0 < value <= 1,
}
