"""What is decided for each parameter of every shipped model: how tensor parallelism cuts it, its initial distribution,
what it transfers from a base model, the optimizer with Muon, float8, and the dtype in which it is saved.

`parameter_facts.json` has those of the debug flavors, and a hash of those of the others, of every flavor as it is, with
the embeddings tied or untied, and with a base model. If a fact changes on purpose, the commit message says why:
`python -m tests.unit.models.test_parameter_facts` writes the file.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.models.family import FAMILIES, DecoderConfig, ModelConfig, resolve_model, stored_dtype
from titanlite.models.registry import SHIPPED, full_model, full_parameters
from titanlite.optim.groups import default_optimizer, has_matrices
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.parallel.float8 import float8_layers
from titanlite.parallel.tensor import form_of, tensor_dimension

FILE = Path(__file__).with_name("parameter_facts.json")
MUON = OptimizerConfig(name="Muon")
FLAVORS = [(family.name, flavor) for family in SHIPPED for flavor in family.flavors]


def variants(family: str, flavor: str) -> Iterator[tuple[str, ModelConfig]]:
    """(name, model section) of a flavor as it is, with the other kind of embeddings, and with a base model."""
    config = FAMILIES[family].flavors[flavor]
    names = {field.name for field in fields(config)}
    changes: dict[str, dict[str, Any]] = {"plain": {}}
    if "tie_embeddings" in names:
        changes["untied" if config.tie_embeddings else "tied"] = {"tie_embeddings": not config.tie_embeddings}
    if "linear_key_heads" not in names:  # there is no rule for linear attention
        changes["base model"] = {"base_dim": config.dim // 2, "base_layers": max(1, config.n_layers // 2)}
    for name, overrides in changes.items():
        yield name, ModelConfig(family=family, flavor=flavor, overrides=overrides)


def facts_of(section: ModelConfig) -> dict[str, str]:
    """The facts of each parameter and persistent buffer, by its first name."""
    _, config = resolve_model(section)
    model, (_, structure) = full_model(section), full_parameters(section)
    rounded = {name for name, _ in float8_layers(model, structure)}
    modules = dict(model.named_modules())
    found = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        form = form_of(modules[module])
        kind, dimension = ("Experts", None) if form is None else (form.__name__, tensor_dimension(modules[module], own))
        role = structure.roles[name]
        init, transfer = structure.init(name), role.transfer
        optimizer = default_optimizer(MUON, structure, name, is_matrix=has_matrices(structure, name, parameter))
        words = [f"tp {kind} {dimension}", f"{init.kind} {init.value:.9g}", optimizer]
        if config.transfers:
            words.append(f"width {transfer.width:.9g} depth {transfer.depth:.9g} scale {transfer.scale:.9g}")
            words += ["hidden"] if transfer.is_hidden else []
        words += ["float8"] if module in rounded else []
        found[name] = ", ".join([*words, str(stored_dtype(name, torch.bfloat16))])
    for prefix, module_ in modules.items():
        for own, _ in module_.named_buffers(recurse=False):
            if own not in module_._non_persistent_buffers_set:
                name = f"{prefix}.{own}"
                found[name] = f"buffer, {stored_dtype(name, torch.bfloat16)}"
    return found


def of_layers(facts: Mapping[str, str]) -> dict[str, str]:
    """The facts with one line for layers that are alike, such as layers.0,2.attention.wq.weight."""
    layers: dict[tuple[str, str, str], list[str]] = {}
    for name, text in facts.items():
        match = re.fullmatch(r"(.*?layers\.)(\d+)(\..*)", name)
        before, index, after = match.groups() if match else (name, "", "")
        layers.setdefault((before, after, text), []).append(index)
    return {f"{before}{','.join(indexes)}{after}": text for (before, after, text), indexes in layers.items()}


def all_facts(family: str, flavor: str) -> dict[str, Any]:
    """By variant: the facts of a debug flavor, the hash of those of another one, or why the variant is refused."""
    found: dict[str, Any] = {}
    for name, section in variants(family, flavor):
        try:
            facts = of_layers(facts_of(section))
        except (ValueError, KeyError) as error:
            found[name] = f"refused: {error}"
            continue
        text = json.dumps(facts, sort_keys=True)
        found[name] = facts if flavor == "debug" else hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


@pytest.mark.parametrize(
    ("family", "flavor"),
    [pytest.param(*each, marks=() if each[1] == "debug" else pytest.mark.soak) for each in FLAVORS],
)
def test_facts_of_parameters(family: str, flavor: str) -> None:
    assert all_facts(family, flavor) == json.loads(FILE.read_text())[f"{family} {flavor}"]


def test_each_flavor_has_facts() -> None:
    assert [*json.loads(FILE.read_text())] == [f"{family} {flavor}" for family, flavor in FLAVORS]
    assert all(isinstance(config, DecoderConfig) for family in SHIPPED for config in family.flavors.values())


if __name__ == "__main__":
    FILE.write_text(
        json.dumps({f"{family} {name}": all_facts(family, name) for family, name in FLAVORS}, indent=0) + "\n"
    )
