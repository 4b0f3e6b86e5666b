"""Which optimizer updates a parameter, and with which hyper-parameters."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from titanlite.models.family import Structure
from titanlite.models.parts import BASE, HIDDEN, Role, Transfer
from titanlite.optim.optimizer import OPTIMIZERS, GroupConfig, OptimizerConfig, OptimizerKind
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.text import aligned

DEFAULT = GroupConfig()
"""Of the parameters that no group has."""


@dataclass(frozen=True)
class Group:
    """Parameters, by name, that one optimizer updates with the same hyper-parameters.

    label: of its [[optimizer.groups]], for the log. optimizer: its name. options: see Arguments.groups.
    """

    label: str
    optimizer: str
    options: Mapping[str, Any]
    parameters: Mapping[str, Tensor]


def divide(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> list[Group]:
    """The groups of these parameters. structure: of the full model, or of the stage that has
    the parameters."""
    found: dict[tuple[int, str, tuple[bool, float, float]], dict[str, Tensor]] = {}
    for name, parameter in named.items():
        index = next(iter(groups_of(section.groups, name)), -1)
        group = section.groups[index] if index >= 0 else DEFAULT
        given = group.optimizer
        is_matrix = has_matrices(structure, name, parameter)
        optimizer = default_optimizer(section, structure, name, is_matrix=is_matrix) if given == "auto" else given
        is_asked = is_matrix or group.weight_decay != -1 or not section.weight_decay_skip
        decays = is_asked and not any(fnmatchcase(name, pattern) for pattern in section.weight_decay_skip)
        transfer = role_of(structure, name).transfer
        others = decays, lr_factor(section, optimizer, transfer), transfer.eps
        found.setdefault((index, optimizer, others), {})[name] = parameter
    return [
        Group(
            f"groups.{index}" if index >= 0 else "-",
            optimizer,
            options_of(section, section.groups[index] if index >= 0 else DEFAULT, OPTIMIZERS[optimizer], *others),
            parameters,
        )
        for (index, optimizer, others), parameters in sorted(found.items(), key=lambda item: item[0][0])
    ]


def lr_factor(section: OptimizerConfig, optimizer: str, transfer: Transfer) -> float:
    """Factor of the learning rate of a parameter. Muon's updates have the same spectral norm at all widths, as they
    must have, times its own factor: the root of the width for match_rms_adamw, 1 for original."""
    if optimizer != "Muon":
        return transfer.lr
    return transfer.scale * (transfer.width**-0.5 if section.adjust_lr == "match_rms_adamw" else 1.0)


def options_of(
    section: OptimizerConfig, group: GroupConfig, kind: OptimizerKind, decays: bool, lr: float, eps: float
) -> dict[str, Any]:
    """The hyper-parameters of a group. decays: whether its parameters have weight decay. lr, eps: factors of their
    Transfer; learning rate times weight decay stays the same."""

    def value(key: str) -> float:
        own: float = getattr(group, key)
        return own if own != -1 else getattr(section, key)

    return {
        "lr_factor": group.lr_factor * lr,
        "eps": section.eps * eps,
        "weight_decay": value("weight_decay") / lr if decays else 0.0,
        "betas": (section.beta1, value("beta2")),
        "momentum": kind.momentum if section.momentum == -1 else section.momentum,
        "cautious": section.cautious_weight_decay,
    }


def has_matrices(structure: Structure, name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of them: not a vector, nor the stacked biases of experts."""
    return parameter.dim() >= 2 and role_of(structure, name).optimizer != "vector"


def default_optimizer(section: OptimizerConfig, structure: Structure, name: str, *, is_matrix: bool) -> str:
    """The optimizer of a parameter without a group's own. Muon: of matrices of blocks, and stacks of them, but for
    routers and numbers of heads."""
    if section.name != "Muon":
        return section.name
    in_block = any(name[: dot.start()] in structure.blocks for dot in re.finditer(r"\.", name))
    return "Muon" if in_block and is_matrix and role_of(structure, name).optimizer == "matrix" else "AdamW"


def role_of(structure: Structure, name: str) -> Role:
    """That of a parameter; one without a role is an ordinary matrix."""
    return structure.roles.get(name, HIDDEN)


def groups_of(groups: Sequence[GroupConfig], name: str) -> dict[int, str]:
    """The groups that have a parameter, by index, with its name or the first pattern there that matches it.

    Those with its name, else those with a pattern. There is at most one in a valid configuration.
    """
    exact = {index: name for index, group in enumerate(groups) if name in group.parameters}
    matches = ((index, text) for index, group in enumerate(groups) for text in group.parameters[::-1])
    return exact or {index: text for index, text in matches if fnmatchcase(name, text)}


def check_groups(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> list[Problem]:
    """Problems of [[optimizer.groups]]. named: the parameters of the full model. structure: of the full model."""
    problems: list[Problem] = []
    for index, group in enumerate(section.groups):
        name = f"optimizer.groups.{index}"
        problems += _check_names(Rules(name, group), list(named))
    problems += _check_conflicts(section.groups, list(named))
    return problems or _check_options(section, named, structure)


def _check_names(rules: Rules, names: Sequence[str]) -> list[Problem]:
    """Problems of a group, with those of names and patterns without a parameter."""
    texts = rules.section.parameters
    rules.require("parameters", texts, "names or patterns of parameters", f'for example ["{names[0]}"]')
    for text in (text for text in texts if not any(fnmatchcase(name, text) for name in names)):
        close = get_close_matches(text, names, 1)
        words = re.findall(r"\w+", text)
        similar = [name for name in names if words and words[-1] in name] or list(names[::-1])
        remedy = f'did you mean "{close[0]}"?' if close else f'parameters have names such as "{similar[0]}"'
        rule = "the name of a parameter (of tied ones, the first), or a pattern of some"
        rules.problems.append(Problem(f"{rules.name}.parameters", text, rule, remedy))
    return rules.problems


def _check_conflicts(groups: Sequence[GroupConfig], names: Sequence[str]) -> list[Problem]:
    """Parameters that several groups name, or, if no group names them, match. One problem per pair of texts."""
    found: dict[tuple[str, str], Problem] = {}
    for name in names:
        (first, text), *others = groups_of(groups, name).items() or [(-1, "")]
        for other, second in others:
            if text == second == name:
                rule = f'one group per parameter; "{name}" is in groups.{first} and groups.{other}'
                remedy = "remove one of them"
            else:
                rule = f'one pattern per parameter; "{name}" matches "{text}" of groups.{first} and "{second}" of '
                rule += f"groups.{other}"
                remedy = f'narrow a pattern, or add "{name}" itself to one of the groups'
            found.setdefault((text, second), Problem(f"optimizer.groups.{other}.parameters", second, rule, remedy))
    return list(found.values())


def _check_options(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> list[Problem]:
    """Problems between groups and the optimizers of their parameters. The groups' names are valid."""
    problems: list[Problem] = []
    of_group: dict[str, set[str]] = {}
    groups = divide(section, named, structure)
    if any(role.transfer is not BASE for role in structure.roles.values()):
        problems += _check_transfer(groups, lambda name: role_of(structure, name).transfer)
    for group in groups:
        of_group.setdefault(group.label, set()).add(group.optimizer)
        small = [name for name, parameter in group.parameters.items() if not has_matrices(structure, name, parameter)]
        if small and OPTIMIZERS[group.optimizer].takes_matrices:
            rule = f'an optimizer that updates vectors: "{small[0]}" has no matrices, {group.optimizer} is for matrices'
            remedy = 'write "AdamW", or leave this parameter out of the group'
            problems.append(Problem(f"optimizer.{group.label}.optimizer", group.optimizer, rule, remedy))
    for index, each in enumerate(section.groups):
        rules = Rules(f"optimizer.groups.{index}", each, problems)
        optimizers = of_group.get(f"groups.{index}", set())
        remedy = "remove this group, or a name from the others"
        rules.require("parameters", optimizers, "at least one parameter that no other group names", remedy)
        used = {option for name in optimizers for option in OPTIMIZERS[name].options}
        has_option = not optimizers or "beta2" in used or each.beta2 == -1
        rules.needs("beta2", has_option, f"an optimizer that has it, not with {' and '.join(sorted(optimizers))}")
    return problems


def _check_transfer(groups: Sequence[Group], transfer: Callable[[str], Transfer]) -> list[Problem]:
    """Problems of optimizers for which there is no rule with a base model."""
    rule = "with model.base_dim or model.base_layers "
    problems = {}
    for group in groups:
        key = f"optimizer.{'name' if group.label == '-' else f'{group.label}.optimizer'}"
        others = [name for name in group.parameters if not transfer(name).is_hidden]
        if group.optimizer not in ("AdamW", "Lion", "Muon"):
            text = f"{rule}AdamW, Lion or Muon: there is no rule for the learning rate of others"
            problems[key] = Problem(key, group.optimizer, text, "choose one of them, or leave these keys out")
        elif group.optimizer == "Muon" and others:
            text = f'{rule}no Muon for "{others[0]}": its rule is for matrices whose rows and columns both grow'
            problems[key] = Problem(key, group.optimizer, text, "leave this parameter out of the group")
    return [*problems.values()]


def describe_groups(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> list[str]:
    """A table, line by line: group, optimizer, parameters, elements, hyper-parameters; then the parameters without
    weight decay. named, structure: as for `divide`."""
    rows = [["group", "optimizer", "parameters", "elements", "lr", "weight decay", "betas or momentum"]]
    if any(role.transfer is not BASE for role in structure.roles.values()):
        rows[0].append("eps")
    for group in divide(section, named, structure):
        elements = sum(parameter.numel() for parameter in group.parameters.values())
        options, used = group.options, OPTIMIZERS[group.optimizer].options
        decays = options["betas"] if "beta1" in used else (options["momentum"],)
        rows.append(
            [
                group.label,
                group.optimizer,
                f"{len(group.parameters):,}",
                f"{elements:,}",
                f"x {options['lr_factor']:g}",
                f"{options['weight_decay']:g}",
                ", ".join(f"{decay:g}" for decay in decays),
                *([f"{options['eps']:.3g}" if group.optimizer == "AdamW" else "-"] if len(rows[0]) > 7 else []),
            ]
        )
    kept = [group.parameters for group in divide(section, named, structure) if not group.options["weight_decay"]]
    names = dict.fromkeys(_without_numbers(name) for parameters in kept for name in parameters)
    return [*aligned(rows), *([f"without weight decay: {', '.join(names)}"] if names else [])]


def has_owners(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> bool:
    """Whether an update needs `shard_groups`. named, structure: of the full model, so that all ranks agree."""
    return any(OPTIMIZERS[group.optimizer].takes_matrices for group in divide(section, named, structure))


def names_of_muon(groups: Sequence[Group]) -> list[str]:
    """The parameters that Muon updates, in the order in which it deals them out."""
    return [name for group in groups if group.optimizer == "Muon" for name in group.parameters]


def kinds_of_state(section: OptimizerConfig, named: Mapping[str, Tensor], structure: Structure) -> str | dict[str, str]:
    """What decides names, shapes and dtypes of the state: the optimizer by parameter; one text if all have the same.

    named, structure: of the full model. Numbers in names are "*" if names that differ only in them have the same state.
    """

    def kind(group: Group) -> str:
        if group.optimizer == "SGD" and group.options["momentum"] > 0:
            return "SGD with momentum"
        if group.optimizer == "Muon" and section.normuon_beta2 != -1:
            return "Muon with mean squares of rows"
        is_small = group.optimizer == "AdamW" and section.state_dtype == "bfloat16"
        return "AdamW with bfloat16 moments" if is_small else group.optimizer

    by_name = {name: kind(group) for group in divide(section, named, structure) for name in group.parameters}
    if len(set(by_name.values())) == 1:
        return next(iter(by_name.values()))
    by_pattern: dict[str, set[str]] = {}
    for name, text in by_name.items():
        by_pattern.setdefault(_without_numbers(name), set()).add(text)
    return {
        _without_numbers(name) if len(by_pattern[_without_numbers(name)]) == 1 else name: text
        for name, text in sorted(by_name.items())
    }


def _without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
