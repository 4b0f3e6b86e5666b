"""Facts that must equal the checkpoint's at a resume, and changed settings that are logged."""

import json
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest

from titanlite.checkpoint.compatibility import changed_settings, check_facts, differences, optimizer_differences
from titanlite.checkpoint.config import Changeable
from titanlite.config.fields import keys_that_affect
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import UserError


def changes(saved: Any, now: Any) -> list[str]:
    return changed_settings(saved, now, keys_that_affect("numbers", "reports"))


NESTED = {"a": 1, "b": {"c": [1, 2, {"d": None}], "e": "x"}}


@pytest.mark.parametrize(
    ("saved", "now", "lines"),
    [
        (NESTED, json.loads(json.dumps(NESTED)), []),
        (1, 1.0, []),
        ((1, 2), [1, 2], []),
        (1, 2, ["f: 1 in the checkpoint, 2 now"]),
        (2048, 1_000_000, ["f: 2,048 in the checkpoint, 1,000,000 now"]),
        (True, False, ["f: True in the checkpoint, False now"]),
        (None, "x", ["f: unset in the checkpoint, x now"]),
        ("x", None, ["f: x in the checkpoint, unset now"]),
        ({"a": 1}, {"a": 2}, ["f.a: 1 in the checkpoint, 2 now"]),
        ({"a": 1}, {}, ["f.a: 1 in the checkpoint, unset now"]),
        ({}, {"a": 1}, ["f.a: unset in the checkpoint, 1 now"]),
        ({"z": 1, "a": 1}, {"n": 1, "a": 2}, [f"f.{line} now" for line in (
            "z: 1 in the checkpoint, unset", "a: 1 in the checkpoint, 2", "n: unset in the checkpoint, 1")]),
        ({"a": {"b": 1}}, {"a": 3}, ["f.a: {'b': 1} in the checkpoint, 3 now"]),
        ([1, {"a": 1}, 3], [1, {"a": 2}, 4], ["f.1.a: 1 in the checkpoint, 2 now", "f.2: 3 in the checkpoint, 4 now"]),
        ([1], [1, 2], ["f: [1] in the checkpoint, [1, 2] now"]),
        ([], {}, ["f: [] in the checkpoint, {} now"]),
        ("y" * 300, "z", [f"f: {'y' * 200} \u2026 in the checkpoint, z now"]),
    ],
)  # fmt: skip
def test_differences_are_found_recursively(saved: Any, now: Any, lines: list[str]) -> None:
    assert list(differences(saved, now, "f")) == lines


DATA = {
    "stream_version": 1,
    "shuffle": True,
    "seed": 0,
    "sources": [{"name": "text /a", "kind": "text", "content": "1"}],
}
FACTS: dict[str, Any] = {
    "model": {"family": "llama3", "dim": 64, "n_layers": 2},
    "seq_len": 2048,
    "dtype": "float32",
    "optimizer": "AdamW",
    "num_streams": 8,
    "data": DATA,
    "tokenizer": "aa",
    "streams_version": 1,
    "init_version": 1,
    "bit_equal": {"rows": 1, "threads": 1},
}
ACCEPTED = [name for name in get_args(Changeable) if name != "rope"]
"""Facts whose changes can be accepted."""
CHANGED: dict[str, Any] = {
    "model": FACTS["model"] | {"dim": 128},
    "seq_len": 1024,
    "dtype": "float64",
    "optimizer": "SGD",
    "num_streams": 16,
    "data": DATA | {"seed": 7},
    "tokenizer": "bb",
    "streams_version": 2,
    "init_version": 2,
    "bit_equal": {"rows": 2, "threads": 1},
}
EXPECTED = {
    "bit_equal": ["bit_equal.rows: 1 in the checkpoint, 2 now", "training.local_batch_size"],
    "model": ["model.dim: 64 in the checkpoint, 128 now", "remedy: resume with the model of the checkpoint"],
    "seq_len": ["seq_len: 2,048 in the checkpoint, 1,024 now", "training.seq_len"],
    "dtype": ["dtype: float32 in the checkpoint, float64 now", "training.dtype"],
    "optimizer": ["optimizer: AdamW in the checkpoint, SGD now", "optimizer.name"],
    "num_streams": ["num_streams: 8 in the checkpoint, 16 now", "data.num_streams: leave the key out"],
    "data": ["data: seed", "0", "7", "--checkpoint.accept_changes '[\"data\"]'"],
    "tokenizer": ["tokenizer: aa in the checkpoint, bb now", "--checkpoint.accept_changes '[\"tokenizer\"]'"],
    "streams_version": ["streams_version: 1 in the checkpoint, 2 now", "data.stream_version: leave the key out"],
    "init_version": ["init_version: 1 in the checkpoint, 2 now", "--checkpoint.accept_changes '[\"init_version\"]'"],
}


def test_equal_facts_yield_no_lines() -> None:
    assert check_facts(FACTS, json.loads(json.dumps(FACTS)), (), "here", 0) == []


@pytest.mark.parametrize("name", FACTS)
def test_one_difference_raises_with_both_values_and_a_remedy(name: str) -> None:
    with pytest.raises(UserError) as caught:
        check_facts(FACTS, FACTS | {name: CHANGED[name]}, (), "step 5 of /folder", 5)
    text = str(caught.value)
    assert text.startswith("cannot resume from step 5 of /folder: the run's settings differ from the checkpoint's\n")
    for part in [*EXPECTED[name], "remedy: ", "--checkpoint.initial_load_path", "--job.dump_folder"]:
        assert part in text
    assert text.count("remedy") == 1
    assert ("accept_changes" in text) == (name in ACCEPTED)


def test_the_base_model_stays_and_earlier_checkpoints_have_none() -> None:
    def facts(**values: int) -> dict[str, Any]:
        return {"model": FACTS["model"] | values}

    assert check_facts(facts(), facts(base_dim=0, base_layers=0), (), "here", 0) == []
    for saved, now in ((facts(), facts(base_dim=32)), (facts(base_dim=32), facts(base_dim=64))):
        with pytest.raises(UserError, match=r"model\.base_dim: \d+ in the checkpoint, \d+ now\n.*the model of the"):
            check_facts(saved, now, get_args(Changeable), "here", 0)


def test_coefficients_of_experts_may_change_but_biases_not_appear() -> None:
    def facts(**values: float) -> dict[str, Any]:
        return {"model": FACTS["model"] | {"balance_loss": 0.01, "z_loss": 0.0, "bias_rate": 0.001} | values}

    assert check_facts(facts(), facts(balance_loss=0.0, z_loss=0.001, bias_rate=0.002), (), "here", 0) == []
    for saved, now in ((facts(), facts(bias_rate=0.0, z_loss=1.0)), (facts(bias_rate=0.0), facts(z_loss=1.0))):
        with pytest.raises(
            UserError, match=r"\n  model\.bias_rate: .*\n.*the biases are in the checkpoint or not"
        ) as error:
            check_facts(saved, now, (), "here", 0)
        assert str(error.value).count(" in the checkpoint, ") == 1
    saved, now = ({"model": {"overrides": overrides}} for overrides in ({"dim": 8, "z_loss": 0.0}, {"dim": 9}))
    assert changes(saved, now) == ["model.z_loss: 0.0 in the checkpoint, unset now"]


def test_optimizers_are_compared_by_parameter() -> None:
    muon = {"layers.*.wq.weight": "Muon", "layers.*.norm.weight": "AdamW", "output.weight": "AdamW"}
    for saved, now in (("AdamW", muon), (muon, "AdamW"), (muon, muon | {"output.weight": "Lion"})):
        with pytest.raises(UserError) as caught:
            check_facts({"optimizer": saved}, {"optimizer": now}, (), "here", 0)
        assert str(caught.value).count(" in the checkpoint, ") == 1
        assert "accept_changes '[\"optimizer\"]'" in str(caught.value)
    (line,) = check_facts({"optimizer": "AdamW"}, {"optimizer": muon}, ["optimizer"], "here", 0)
    assert line == (
        "accepted change since the checkpoint: optimizer.layers.*.wq.weight: AdamW in the checkpoint, Muon now"
    )
    assert check_facts({"optimizer": muon}, {"optimizer": dict(muon)}, (), "here", 0) == []


def test_blocks_with_different_optimizers_are_compared_with_a_pattern() -> None:
    muon = {"layers.*.wq.weight": "Muon", "output.weight": "AdamW"}
    other = {"layers.0.wq.weight": "AdamW", "layers.1.wq.weight": "Muon", "output.weight": "AdamW"}
    for saved, now in ((muon, other), (other, muon)):
        (line,) = optimizer_differences(saved, now)
        assert line.startswith("optimizer.layers.0.wq.weight: ")
    assert optimizer_differences(muon, {name: muon.get(name, "Muon") for name in other}) == []


def test_stages_may_change_before_they_begin() -> None:
    def facts(batch: int = 8, **sizes: int) -> dict[str, Any]:
        stages = {f"from step {step}": {"from_step": step, "seq_len": sizes[f"at_{step}"]} for step in (4, 9)}
        first = {"from_step": 1, "global_batch_size": batch}
        return FACTS | {"stages": {"from step 1": first, **stages}}

    saved = facts(at_4=32, at_9=64)
    assert check_facts(saved, facts(at_4=32, at_9=128), (), "here", 8) == []
    assert check_facts(saved, FACTS, (), "here", 3) == []
    assert check_facts(saved, facts(batch=4, at_4=32, at_9=64), (), "here", 3) == []
    before = FACTS | {"stages": {name: saved["stages"][name] for name in ("from step 4", "from step 9")}}
    assert check_facts(before, saved, (), "here", 9) == []
    for step, now, line in (
        (9, facts(at_4=32, at_9=128), r"stages\.from step 9\.seq_len: 64 in the checkpoint, 128 now"),
        (4, facts(at_4=16, at_9=64), r"stages\.from step 4\.seq_len: 32 in the checkpoint, 16 now"),
        (4, facts(batch=4, at_4=32, at_9=64), r"from step 1\.global_batch_size: 8 .*, 4 now"),
        (4, FACTS, r"(?s)stages\.from step 4: .*training\.stages that have begun by this step"),
    ):
        with pytest.raises(UserError, match=line):
            check_facts(saved, now, (), "here", step)


def test_rotary_embeddings_may_change_if_accepted() -> None:
    qwen3 = FACTS | {"model": {"family": "qwen3", "rope_theta": 1e6, "rope_scaling_factor": 1.0}}
    longer = qwen3 | {"model": qwen3["model"] | {"rope_scaling_factor": 4.0}}
    text = (
        r"(?s)model\.rope_scaling_factor: 1\.0 in the checkpoint, 4\.0 now.*checkpoint\.accept_changes = \[\"rope\"\]"
    )
    with pytest.raises(UserError, match=text):
        check_facts(qwen3, longer, (), "here", 0)
    (line,) = check_facts(qwen3, longer, ["rope"], "here", 0)
    assert line == "accepted change since the checkpoint: model.rope_scaling_factor: 1.0 in the checkpoint, 4.0 now"
    with pytest.raises(UserError, match=r"model\.family") as caught:
        check_facts(FACTS, longer, ["rope"], "here", 0)
    assert "rope" not in str(caught.value).partition("remedy")[0]


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_change_is_logged_and_others_still_raise(name: Any) -> None:
    (line,) = check_facts(FACTS, FACTS | {name: CHANGED[name]}, [name], "here", 0)
    assert line.startswith(f"accepted change since the checkpoint: {name}")
    others = [other for other in FACTS if other != name]
    with pytest.raises(UserError) as caught:
        check_facts(FACTS, CHANGED, [name], "here", 0)
    assert f"  {EXPECTED[name][0]}" not in str(caught.value)
    assert all(f"  {EXPECTED[other][0]}" in str(caught.value) for other in others)


def test_a_missing_fact_is_a_difference() -> None:
    fewer = {name: value for name, value in FACTS.items() if name != "seq_len"}
    for saved, now in ((FACTS, fewer), (fewer, FACTS)):
        with pytest.raises(UserError, match=r"seq_len: .*unset"):
            check_facts(saved, now, (), "here", 0)


def test_data_may_be_moved_and_renamed() -> None:
    moved = DATA | {"sources": [{"name": "text /b", "kind": "text", "content": "1"}]}
    assert check_facts(FACTS, FACTS | {"data": moved}, (), "here", 0) == []
    edited = DATA | {"sources": [{"name": "text /b", "kind": "text", "content": "2"}]}
    with pytest.raises(UserError, match=r"source 0 \(text /b\): it takes the place .* of text /a; content differs"):
        check_facts(FACTS, FACTS | {"data": edited}, (), "here", 0)


def test_a_source_cannot_be_removed_but_added() -> None:
    two = DATA | {"sources": [*DATA["sources"], {"name": "text /b", "kind": "text", "content": "2"}]}
    for accepted in ([], ["data"]):
        with pytest.raises(UserError, match="a source cannot be removed, also not with") as caught:
            check_facts(FACTS | {"data": two}, FACTS, accepted, "here", 0)
        assert "source 1 (text /b) is missing" in str(caught.value)
        assert "or accept the change" not in str(caught.value)
    (line,) = check_facts(FACTS, FACTS | {"data": two}, ["data"], "here", 0)
    assert line == "accepted change since the checkpoint: data: source 1 (text /b) is new: it begins at its start"


# Settings whose change is logged at a resume. The other settings are silent: layout, logging, and those that the facts
# cover.
LOGGED = {
    *("training.global_batch_size", "training.max_norm"),
    *("training.mixed_precision_param", "training.mixed_precision_reduce", "data.on_bad_row"),
    *("optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.weight_decay"),
    *("optimizer.weight_decay_skip", "optimizer.groups", "optimizer.momentum", "optimizer.weight_decay_end"),
    *("optimizer.weight_decay_shape", "optimizer.momentum_start", "optimizer.momentum_steps"),
    "optimizer.momentum_shape",
    *("optimizer.newton_schulz_steps", "optimizer.newton_schulz_coefficients", "optimizer.orthogonalization"),
    *("optimizer.normuon_beta2", "optimizer.cautious_weight_decay", "optimizer.qk_clip"),
    *("optimizer.newton_schulz_dtype", "optimizer.adjust_lr", "optimizer.state_dtype", "optimizer.state_rounding"),
    *("optimizer.ema_decay", "loss.name", "loss.terms", "loss.z_loss", "loss.further_tokens_weight"),
    *("lr_schedule.warmup_steps", "lr_schedule.decay", "lr_schedule.decay_steps", "lr_schedule.decay_ratio"),
    *("lr_schedule.final_decay_steps", "lr_schedule.min_lr_factor", "lr_schedule.over", "lr_schedule.batch_scaling"),
    *("float8.recipe", "float8.scale", "float8.exclude"),
    *("debug.seed", "debug.deterministic", "faults.spike_factor", "faults.on_spike"),
    *("validation.steps", "validation.sources", "validation.tasks", "validation.task_fewshot"),
    *("validation.task_limit", "validation.task_chat", "job.plugins"),
}


def resolved(config: JobConfig) -> dict[str, Any]:
    """Return the configuration as a manifest stores it."""
    return dict(json.loads(json.dumps(asdict(config))))


def another(value: Any) -> Any:
    """Return a different value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {"other": 1} if isinstance(value, dict) else [*value, "other"]


def test_settings_that_affect_numbers_are_logged_when_changed() -> None:
    config = JobConfig()
    saved = resolved(config)
    logged = set()
    for section, values in saved.items():
        for key, value in values.items():
            lines = changes(saved, saved | {section: values | {key: another(value)}})
            assert all(line.startswith(f"{section}.{key}") for line in lines)
            logged |= {f"{section}.{key}"} if lines else set()
    assert logged == LOGGED


def test_a_changed_setting_is_listed_with_both_values() -> None:
    config = JobConfig()
    now = replace(config, optimizer=replace(config.optimizer, lr=1e-3, weight_decay_skip=()))
    assert changes(resolved(config), resolved(config)) == []
    assert changes(resolved(config), resolved(now)) == [
        "optimizer.lr: 0.0003 in the checkpoint, 0.001 now",
        "optimizer.weight_decay_skip: ['*norm*', '*bias*'] in the checkpoint, [] now",
    ]


def test_a_setting_missing_in_the_checkpoint_is_listed() -> None:
    saved, now = resolved(JobConfig()), resolved(JobConfig())
    del saved["optimizer"]["eps"]
    del saved["debug"]
    assert changes(saved, now) == [
        "optimizer.eps: unset in the checkpoint, 1e-08 now",
        *(f"debug.{key}: unset in the checkpoint, {value} now" for key, value in now["debug"].items()),
    ]
