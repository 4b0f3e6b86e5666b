"""µP: titanlite's weights are trained as those of the published form, with its factors in the forward pass, and what a
step changes does not depend on width and depth."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unit.models.test_families import every_family, small
from tests.unit.optim.building import optimizer_of
from titanlite.config.load import load_config
from titanlite.models.experts import Router, mixtures_of
from titanlite.models.family import Family, Init, LanguageModel
from titanlite.models.init import init_parameters_
from titanlite.models.llama3 import LLAMA3, Llama3Config
from titanlite.models.registry import FAMILIES, structure_of
from titanlite.models.transfer import roles_of
from titanlite.optim.groups import divide
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
WIDTH, DEPTH = 4.0, 0.5
"""Of the model of these tests, relative to its base model: powers of 2, whose products are exact."""
SECTION = OptimizerConfig(lr=0.02, weight_decay=0.5, eps=1e-3)
POST = ("attention_post_norm", "ffn_post_norm")


def model_of(family: Family, config: Any, values: Callable[[LanguageModel], Callable[[str], Init]]) -> LanguageModel:
    model = family.build(config).double()
    model.tie_weights()
    model.init_buffers(CPU)
    init_parameters_(model, 0, values(model))
    return model


def own_model(family: Family, config: Any) -> LanguageModel:
    return model_of(family, config, lambda model: structure_of(family, config, model).init)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    for mixture in mixtures_of([model]):
        mixture.start_step(*tokens.shape[:1], tokens.numel())
    logits: Tensor = model(tokens)
    return logits


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits_of(model, tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def is_hidden(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and parameter.dim() > 1 and not name.endswith("bias") and "router" not in name


def published_init(family: Family, config: Any, model: LanguageModel, name: str) -> Init:
    """Values of table 8: a variance of 1 / fan-in for hidden matrices, all others as in the base model."""
    base = replace(config, n_layers=int(config.n_layers * DEPTH))
    own = roles_of(model, base, family.structure(config))[name].init
    assert own is not None
    matrix = name.startswith("layers.") and own.kind == "normal" and "router" not in name and "sinks" not in name
    return replace(own, value=own.value / math.sqrt(WIDTH)) if matrix else own


def add_factors(model: Any, growth: float) -> None:
    """Table 8's factor of the logits and of the router's scores, CompleteP's of the residual branches. growth: of the
    embeddings, by a factor that the family has."""
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf == "output" or isinstance(module, Router):
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0] / WIDTH, *inputs[1:]))
        is_branch = leaf in (("attention", "feed_forward") if model.config.norms == "before" else POST)
        if leaf == "tok_embeddings" or is_branch:
            factor = DEPTH if is_branch else 1 / growth
            module.register_forward_hook(lambda _, __, out, factor=factor: out * factor)


def published_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """CompleteP, table 1, with alpha = 1."""
    lr, decay, eps, groups = SECTION.lr, SECTION.weight_decay, SECTION.eps, []
    for name, parameter in model.named_parameters():
        hidden, decays = is_hidden(name, parameter), parameter.dim() > 1 and not name.endswith("bias")
        groups.append(
            {
                "params": [parameter],
                "lr": lr / WIDTH if hidden else lr,
                "weight_decay": decay * (WIDTH if hidden else 1) if decays else 0.0,
                "eps": eps / WIDTH * (DEPTH if name.startswith("layers.") else 1),
            }
        )
    return torch.optim.AdamW(groups, betas=(SECTION.beta1, SECTION.beta2))


OWN_ROLES = ("llama3", "qwen2", "olmo2", "gemma2", "gpt_oss", "deepseek_v3")
"""Families whose parameters have roles that no other one has; the others are soak tests."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=[] if name in OWN_ROLES else pytest.mark.soak)
        for name, family in FAMILIES.items()
        if name not in ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # refused
    ],
)
def test_training_is_that_of_the_published_form(family: Family) -> None:
    tied = family.name in ("qwen2", "olmo3", "gemma2", "gpt_oss")
    plain = small(family, n_layers=2, tie_embeddings=tied)
    config = replace(plain, base_dim=int(plain.dim / WIDTH), base_layers=int(plain.n_layers * DEPTH))
    growth = config.embedding_scale / replace(config, dim=config.base_dim).embedding_scale
    ours = own_model(family, config)
    theirs = model_of(family, plain, lambda model: partial(published_init, family, plain, model))
    add_factors(theirs, growth)
    optimizers = optimizer_of(ours, SECTION, structure_of(family, config, ours)), published_optimizer(theirs)
    optimizers[0].set_lr(SECTION.lr)
    tokens, losses = torch.randint(51, (3, 2, 8), generator=torch.Generator().manual_seed(1)), []
    for batch in tokens:
        found = [loss_of(model, batch) for model in (ours, theirs)]
        for model, loss in zip((ours, theirs), found, strict=True):
            model.zero_grad()
            loss.backward()
        optimizers[0].step_if(torch.tensor(True))
        optimizers[1].step()
        losses.append([loss.item() for loss in found])
    assert len({first for first, _ in losses}) == len(losses)
    for first, second in losses:
        assert first == pytest.approx(second, rel=1e-12)
    torch.testing.assert_close(logits_of(ours, tokens[0]), logits_of(theirs, tokens[0]), rtol=1e-9, atol=1e-11)


@every_family
def test_the_base_model_is_the_model_without_one(family: Family) -> None:
    plain = small(family)
    config = replace(plain, base_dim=plain.dim, base_layers=plain.n_layers)
    with torch.device("meta"):
        model = family.build(plain)
    named, structures = dict(model.named_parameters()), [structure_of(family, each, model) for each in (plain, config)]
    assert all(structures[0].init(name) == structures[1].init(name) for name in named)
    for name in ("AdamW", "Muon"):
        groups = [divide(OptimizerConfig(name), named, structure) for structure in structures]
        assert [asdict(replace(each, parameters={})) for each in groups[0]] == [
            asdict(replace(each, parameters={})) for each in groups[1]
        ]


def changes(optimizer: str, dim: int, **keys: int) -> dict[str, float]:
    """The root mean square of what three steps change in the last block's output and in the logits."""
    shape = {"n_layers": 2, "max_seq_len": 32} | keys
    config = Llama3Config(dim=dim, n_heads=dim // 16, n_kv_heads=dim // 16, ffn_dim=2 * dim, vocab_size=64, **shape)
    model = own_model(LLAMA3, config)
    tokens = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(1))
    seen: dict[str, Tensor] = {}
    for place in (f"layers.{config.n_layers - 1}", "output"):
        model.get_submodule(place).register_forward_hook(
            lambda _, __, out, place=place: seen.update({place: out.detach()})
        )
    trained = optimizer_of(model, OptimizerConfig(optimizer, weight_decay=0.0), structure_of(LLAMA3, config, model))
    trained.set_lr(0.01)
    before: dict[str, Tensor] = {}
    for _ in range(3):
        model.zero_grad()
        loss_of(model, tokens).backward()
        before = before or dict(seen)
        trained.step_if(torch.tensor(True))
    logits_of(model, tokens)
    return {place.split(".")[0]: (seen[place] - before[place]).square().mean().sqrt().item() for place in seen}


@pytest.mark.parametrize(
    ("optimizer", "base", "sizes", "grows"),
    [
        ("AdamW", {"base_dim": 32}, [{"dim": 32}, {"dim": 96}, {"dim": 256}], ("layers", "output")),
        ("AdamW", {"base_layers": 4}, [{"dim": 32, "n_layers": 4}, {"dim": 32, "n_layers": 12}], ("layers",)),
        ("Muon", {"base_dim": 32}, [{"dim": 32}, {"dim": 128}], ("output",)),
    ],
    ids=["width", "depth", "width, Muon"],
)
def test_what_steps_change_does_not_depend_on_the_size(
    optimizer: str, base: dict[str, int], sizes: list[dict[str, int]], grows: tuple[str, ...]
) -> None:
    """Within a factor of 1.5; without a base model, it grows by more than that."""
    ours, plain = ([changes(optimizer, **size, **keys) for size in sizes] for keys in (base, {}))
    assert ours[0].keys() == {"layers", "output"}
    for place in ours[0]:
        values, others = ([each[place] for each in found] for found in (ours, plain))
        print(f"{optimizer}, {place}: {values} with a base model, {others} without")
        assert max(values) < 1.5 * min(values)
        assert place not in grows or (others == sorted(others) and others[-1] > 2 * others[0])


ROUTERS = ("--optimizer.name=Muon", '--optimizer.groups.0.parameters=["*.router.weight"]')


@pytest.mark.parametrize(
    ("arguments", "key", "words"),
    [
        (
            ("--model.family=qwen3_moe", "--model.base_dim=64", *ROUTERS, "--optimizer.groups.0.optimizer=Muon"),
            "optimizer.groups.0.optimizer",
            'no Muon for "layers.0.feed_forward.router.weight"',
        ),
        (("--model.family=qwen3_5", "--model.base_dim=128"), "model.base_dim", "no rule for layers.0.attention.conv_q"),
        (("--model.base_dim=-1",), "model.base_dim", "0 for no base model"),
    ],
)
def test_what_has_no_rule_is_refused(arguments: tuple[str, ...], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([*arguments], world_size=1, device_type="cpu")
    (problem,) = error.value.problems
    assert problem.key == key
    assert words in f"{problem.rule}; {problem.remedy}"
