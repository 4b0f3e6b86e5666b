"""generation_config.json: what is read of it, and what a run keeps."""

import json
from typing import Any

import pytest

from titanlite.hf.generation_defaults import GenerationDefaults, read_generation_defaults, with_eos
from titanlite.runtime.json_files import JsonError


def read(**fields: Any) -> GenerationDefaults:
    return read_generation_defaults(json.dumps(fields).encode())


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, (None, None, None)),
        ({"do_sample": False, "temperature": 0.7}, (0.0, None, None)),
        ({"do_sample": True}, (1.0, 50, 1.0)),
        ({"do_sample": True, "top_k": 0, "temperature": 0.6}, (0.6, None, 1.0)),
        ({"temperature": None, "top_p": 0.9}, (1.0, 50, 0.9)),
    ],
)
def test_sampling(fields: dict[str, Any], sampling: tuple[float | None, ...]) -> None:
    found = read(**fields)
    assert (found.temperature, found.top_k, found.top_p) == sampling
    assert found.not_applied == ()


def test_settings_that_are_not_applied_are_named() -> None:
    neutral = {"repetition_penalty": 1.0, "min_p": 0.0, "bad_words_ids": [], "num_beams": 1, "stop_strings": None}
    assert read(**neutral, max_new_tokens=9, transformers_version="5").not_applied == ()
    found = read(repetition_penalty=1.1, top_k=-1, temperature="hot", eos_token_id=[1, "end"], min_p=0.05, top_p=0.9)
    assert {*found.not_applied} == {
        'eos_token_id = [1, "end"]',
        'temperature = "hot"',
        "top_k = -1",
        "repetition_penalty = 1.1",
        "min_p = 0.05",
    }
    assert (found.eos_ids, found.temperature, found.top_k, found.top_p) == ((), 1.0, 50, 0.9)
    found = read(eos_token_id=True, temperature=10**400)
    assert {*found.not_applied} == {"eos_token_id = true", f"temperature = {10**400}"}


def test_the_ids_that_end_a_text() -> None:
    assert read(eos_token_id=7).ends(None) == {7}
    assert read(eos_token_id=[7, 3]).ends(5) == {3, 5, 7}
    assert read().ends(5) == read_generation_defaults(None).ends(5) == {5}
    assert read().ends(None) == set()


def test_eos_of_the_run_comes_first_and_everything_else_is_kept() -> None:
    original = b'{ "eos_token_id": [7, 3],\n "top_h": 1e-1, "of another program": {"a": [1.50]} }'
    assert with_eos(original, [3]) == with_eos(original, []) == original
    found = with_eos(original, [5, 3])
    assert json.loads(found) == json.loads(original) | {"eos_token_id": [5, 7, 3]}
    assert json.loads(with_eos(b"{}", [5])) == {"eos_token_id": 5}
    with pytest.raises(JsonError):
        read_generation_defaults(b"[1]")
