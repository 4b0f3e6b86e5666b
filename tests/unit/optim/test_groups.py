"""Which optimizer updates a parameter, and with which hyper-parameters; problems of [[optimizer.groups]]."""

import fnmatch
from dataclasses import replace
from typing import Any

import pytest
import tomli
import torch
from torch import Tensor

from tests.unit.optim.building import STRUCTURE, optimizer_of
from tests.unit.optim.test_muon import model_of, set_gradients
from titanlite.config.load import load_config
from titanlite.config.toml import dump_config
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES, full_parameters
from titanlite.optim.groups import describe_groups, kinds_of_state
from titanlite.optim.optimizer import SCHEDULED, GroupConfig, OptimizerConfig
from titanlite.optim.registry import check_parameters
from titanlite.optim.schedule import build_factors
from titanlite.runtime.errors import Problem

NAMED = dict(model_of().named_parameters())


def section(*groups: GroupConfig, **keys: Any) -> OptimizerConfig:
    return OptimizerConfig(groups=groups, **keys)


def group(*parameters: str, **keys: Any) -> GroupConfig:
    return GroupConfig(parameters, **keys)


def problems_of(given: OptimizerConfig) -> list[Problem]:
    return check_parameters(given, NAMED, STRUCTURE, torch.float32)


def options(given: OptimizerConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """(optimizer, options) by parameter."""
    optimizer = optimizer_of(model_of(), given)
    return {
        name: (type(each).__name__, {key: entry[key] for key in ("lr_factor", "weight_decay", "betas", "momentum")})
        for each, entry in optimizer.param_groups
        for name in entry["param_names"]
    }


def test_muon_by_default_has_the_matrices_of_blocks_of_each_family() -> None:
    for family in FAMILIES:
        named, structure = full_parameters(ModelConfig(family, "debug" if family != "olmoe" else "1B-7B"))
        kinds = kinds_of_state(OptimizerConfig(name="Muon"), named, structure)
        assert isinstance(kinds, dict)
        others = {name for name, kind in kinds.items() if kind == "AdamW"}
        assert others >= {"tok_embeddings.weight", "norm.weight"}
        assert all(
            name.endswith(
                ("bias", "sinks.weight", "norm.weight", "embeddings.weight", "output.weight", "router.weight")
            )
            or name.split(".")[-2] in ("a_log", "dt_bias", "conv_q", "conv_k", "conv_v", "gate")
            for name in others
        )
        assert all(not fnmatch.fnmatch(name, "*norm*") for name in kinds.keys() - others)
        if family in ("qwen3_moe", "olmoe", "gpt_oss"):
            assert {name.split(".")[-1] for name in kinds.keys() - others} >= {"w1", "w2", "w3"}
            assert any("router" in name for name in others)


def test_names_precede_patterns_and_groups_the_defaults() -> None:
    found = options(
        section(
            group("block.*", optimizer="Lion", lr_factor=0.5, beta2=0.8),
            group("block.tall.weight", weight_decay=0.3),
            group("output.weight", optimizer="SGD", weight_decay=0.0),
            name="Muon",
            beta2=0.9,
            momentum=0.6,
        )
    )
    lion = {"lr_factor": 0.5, "weight_decay": 0.1, "betas": (0.9, 0.8), "momentum": 0.6}
    assert found == {
        "block.wide.weight": ("Lion", lion),
        "block.wide.bias": ("Lion", lion | {"weight_decay": 0.0}),
        "block.experts": ("Lion", lion),
        "block.router.weight": ("Lion", lion),
        "block.tall.weight": ("Muon", {"lr_factor": 1.0, "weight_decay": 0.3, "betas": (0.9, 0.9), "momentum": 0.6}),
        "output.weight": ("SGD", {"lr_factor": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.9), "momentum": 0.6}),
    }


def test_the_learning_rate_of_a_group_is_a_multiple_of_that_of_the_schedule() -> None:
    model = model_of()
    optimizer = optimizer_of(model, section(group("output.weight", lr_factor=0.25), name="SGD", weight_decay=0.0))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = set_gradients(model, 0)
    optimizer.set_lr(0.5)
    optimizer.step_if(torch.tensor(True))
    for name, parameter in model.named_parameters():
        lr = 0.125 if name == "output.weight" else 0.5
        torch.testing.assert_close(parameter.detach(), before[name] - lr * gradients[name], rtol=1e-14, atol=1e-15)


def test_weight_decay_and_momentum_of_groups_change_in_proportion() -> None:
    given = section(
        group("output.weight", weight_decay=0.3), name="SGD", weight_decay=0.1, weight_decay_end=0.04, momentum=0.8
    )
    given = replace(given, momentum_start=0.4, momentum_steps=2)
    optimizer = optimizer_of(model_of(), given)
    found = []
    for step in (1, 2, 10):
        optimizer.set_lr(0.5, build_factors(given, 10)(step))
        values = {name: each for _, each in optimizer.param_groups for name in each["param_names"]}
        found.append([values[name][key] for name in ("block.wide.weight", "output.weight") for key in SCHEDULED])
    assert found == [
        pytest.approx(row) for row in ([0.094, 0.6, 0.282, 0.6], [0.088, 0.8, 0.264, 0.8], [0.04, 0.8, 0.12, 0.8])
    ]


@pytest.mark.parametrize(
    ("groups", "key", "words"),
    [
        ((group(),), "groups.0.parameters", ["names or patterns"]),
        ((group("output.weigth"),), "groups.0.parameters", ["the name of a parameter", '"output.weight"?']),
        ((group("layers.*.router"),), "groups.0.parameters", ['such as "block.router.weight"']),
        (
            (group("block.*"), group("*.experts")),
            "groups.1.parameters",
            ['"block.experts"', '"block.*"', '"*.experts"'],
        ),
        (
            (group("output.weight"), group("output.weight")),
            "groups.1.parameters",
            ['"output.weight"', "groups.0 and groups.1"],
        ),
        ((group("output.*"), group("output.weight")), "groups.0.parameters", ["no other group names"]),
        (
            (group("output.weight", "*.bias", optimizer="Muon"),),
            "groups.0.optimizer",
            ['"block.wide.bias"', "is for matrices"],
        ),
        ((group("output.weight", optimizer="Muon", beta2=0.5),), "groups.0.beta2", ["Muon", "leave it out"]),
    ],
)
def test_problems_name_the_key_and_a_remedy(groups: tuple[GroupConfig, ...], key: str, words: list[str]) -> None:
    (problem,) = problems_of(section(*groups))
    assert problem.key == f"optimizer.{key}"
    for word in words:
        assert word in f"{problem.rule} {problem.remedy}"


def test_a_name_settles_a_conflict_of_patterns() -> None:
    patterns = group("block.*"), group("*.weight", "output.weight")
    (problem,) = problems_of(section(*patterns))
    assert problem.value == "*.weight"
    names = ("block.wide.weight", "block.tall.weight", "block.router.weight")
    assert problems_of(section(*patterns, group(*names))) == []
    assert problems_of(section(group("block.*", "*.weight"))) == []  # of one group


def test_the_table_has_all_elements() -> None:
    lines = describe_groups(
        section(group("output.weight", optimizer="Lion", lr_factor=0.5), name="Muon"), NAMED, STRUCTURE
    )
    cells = [line.split() for line in lines]
    assert [word for word in cells[0] if word != "or"] == [
        *("group", "optimizer", "parameters", "elements", "lr", "weight", "decay", "betas", "momentum")
    ]
    assert ["groups.0", "Lion", "1", "48", "x", "0.5", "0.1", "0.9,", "0.95"] in cells
    assert ["-", "Muon", "3", "446", "x", "1", "0.1", "0.95"] in cells
    assert lines[-1].startswith("without weight decay: ")
    assert sum(int(row[3].replace(",", "")) for row in cells[1:-1]) == sum(each.numel() for each in NAMED.values())


@pytest.mark.parametrize(
    ("given", "decays"),
    [
        (section(), False),
        (section(group("*.scale", lr_factor=2.0)), False),
        (section(group("*.scale", weight_decay=0.3)), True),
        (section(weight_decay_skip=()), True),
    ],
)
def test_vectors_and_scalars_decay_only_if_asked(given: OptimizerConfig, decays: bool) -> None:
    named: dict[str, Tensor] = {"output.weight": torch.empty(2, 2), "block.scale": torch.empty(1)}
    *_, last = describe_groups(given, named, STRUCTURE)
    assert (last == "without weight decay: block.scale") != decays


def test_states_are_named_by_pattern_unless_blocks_differ() -> None:
    blocks = {f"layers.{n}.w.weight": torch.empty(2, 2, device="meta") for n in range(3)}
    named: dict[str, Tensor] = {**blocks, "output.weight": torch.empty(2, 2, device="meta")}
    assert kinds_of_state(OptimizerConfig(), named, STRUCTURE) == "AdamW"
    sgd = group("output.weight", optimizer="SGD")
    assert kinds_of_state(section(sgd, momentum=0.9, state_dtype="bfloat16"), named, STRUCTURE) == {
        "layers.*.w.weight": "AdamW with bfloat16 moments",
        "output.weight": "SGD with momentum",
    }
    assert kinds_of_state(section(group("layers.1.*", optimizer="Lion")), named, STRUCTURE) == {
        **{f"layers.{n}.w.weight": "Lion" if n == 1 else "AdamW" for n in range(3)},
        "output.weight": "AdamW",
    }
    assert kinds_of_state(section(group("layers.1.*", lr_factor=0.5)), named, STRUCTURE) == "AdamW"


def test_groups_are_read_and_written() -> None:
    argv = [
        *("quickstart", "--optimizer.name", "Muon", "--optimizer.groups.0.parameters", '["output.weight"]'),
        *("--optimizer.groups.0.optimizer", "Lion", "--optimizer.newton_schulz_coefficients", "[2, -1.5, 0.5]"),
    ]
    config = load_config(argv, world_size=1, device_type="cpu", checks_files=False)
    assert config.optimizer.groups == (group("output.weight", optimizer="Lion"),)
    assert config.optimizer.newton_schulz_coefficients == (2.0, -1.5, 0.5)
    assert tomli.loads(dump_config(config))["optimizer"]["groups"] == [
        {"parameters": ["output.weight"], "optimizer": "Lion"}
    ]
