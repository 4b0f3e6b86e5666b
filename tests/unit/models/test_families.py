"""Tests of every model family in the registry; a new family is added by its entry there."""

import json
from dataclasses import fields, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.models.shaken import perturbed_model
from titanlite.config.describe import field_texts
from titanlite.config.load import load_config
from titanlite.generation.generate import Sampling, generate
from titanlite.models.decoder import describe_size
from titanlite.models.family import CHOICE_BIAS, Family, Init, LanguageModel, saved_tensors
from titanlite.models.init import init_parameters_
from titanlite.models.layers import adopt_rotary_
from titanlite.models.parts import Row
from titanlite.models.registry import FAMILIES, structure_of
from titanlite.models.shrink import shrink_model
from titanlite.parallel.split import stage_structure
from titanlite.parallel.tensor import form_of, form_problems
from titanlite.planning.activations import features_of
from titanlite.runtime.errors import ConfigError

CPU = torch.device("cpu")
FLAVORS = [(name, flavor) for name, family in FAMILIES.items() for flavor in family.flavors]
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
DIVERSE = ("llama3", "gemma3", "deepseek_v3", "qwen3_5_moe")
"""Windows, norms after a block, latent attention, experts and linear attention are in one of them."""
diverse_in_quick = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=() if name in DIVERSE else pytest.mark.slow)
        for name, family in FAMILIES.items()
    ],
)
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def small(family: Family, **changes: Any) -> Any:
    """A tiny configuration of the family's largest size."""
    config = shrink_model(list(family.flavors.values())[-1], 2)
    experts = {"n_experts": 32} if config.n_experts > 1 else {}  # each of 256 would cost as much as a layer
    return replace(config, **experts | {"vocab_size": 51, "max_seq_len": 64} | changes)


def on_meta(family: Family, config: Any) -> LanguageModel:
    with torch.device("meta"):
        return family.build(config)


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(51, shape, generator=torch.Generator().manual_seed(5))


@every_family
def test_every_hyper_parameter_is_documented(family: Family) -> None:
    """Every field is followed by a string that documents it, there or in the class that it is inherited from."""
    assert field_texts(family.config_type).keys() == {field.name for field in fields(family.config_type)}


def kernel_flops(queries: Any, keys: Any, *_others: Any, backward: int = 1, **_options: Any) -> int:
    """As of plain products, although these kernels skip some scores, and compute them again."""
    rows, heads, n_queries, head_dim = queries
    return backward * 4 * rows * heads * n_queries * keys[2] * head_dim


KERNELS: dict[Any, Any] = {}
for kernel in (torch.ops.titanlite.capped_attention, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu):
    KERNELS[kernel] = kernel_flops
for kernel in (
    torch.ops.titanlite.capped_attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
):
    KERNELS[kernel] = lambda _gradient, *shapes, **options: kernel_flops(*shapes, backward=2, **options)


def delta_rule_flops(_queries: Any, keys: Any, values: Any, *_others: Any, **_options: Any) -> int:
    """Of the recurrence: three products of a vector and a state per position and head of values."""
    return 6 * values[0] * values[1] * values[2] * values[3] * keys[3]


KERNELS[torch.ops.titanlite.gated_delta_rule] = delta_rule_flops
KERNELS[torch.ops.titanlite.gated_delta_rule_backward] = lambda _gradient, *shapes, **_: 2 * delta_rule_flops(*shapes)


@every_family
def test_a_family_is_registered_by_its_name(family: Family) -> None:
    assert FAMILIES[family.name] is family
    assert "debug" in family.flavors
    for config in family.flavors.values():
        assert type(config) is family.config_type
        assert min(config.dim, config.head_dim, config.vocab_size) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, id=f"{name}-{tied}", marks=[pytest.mark.soak] * (tied and name != "llama3"))
        for name, family in FAMILIES.items()
        for tied in (False, True)
    ],
)
def test_flops_match_the_counter_of_torch(family: Family, tied: bool) -> None:
    """Exactly the count of torch's FLOP counter, with attention as plain matrix products."""
    heads = {"n_heads": 4, "n_kv_heads": 4}  # with shared heads, the counter would miss their copies
    config = small(family, tie_embeddings=tied, **heads)
    if config.value_dim < config.head_dim:  # they are padded, and count
        config = replace(config, v_head_dim=config.head_dim)
    model, tokens = perturbed_model(family, config), some_tokens(2, 16)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).sum().backward()
    assert counter.get_total_flops() == family.flops_per_token(config, 16) * tokens.numel()


@every_family
def test_every_module_has_a_form_and_every_parameter_a_role(family: Family) -> None:
    config = small(family)
    model = on_meta(family, config)
    assert form_problems(model, 1) == []
    assert form_of(model.get_submodule("layers.1.attention.wo")) is Row
    assert structure_of(family, config, model).roles.keys() == dict(model.named_parameters()).keys()


@every_family
def test_initial_distributions_by_role(family: Family) -> None:
    config = family.flavors["debug"]
    assert config.init_by_depth == (family.name not in ("olmo2", "olmo3", "olmoe"))
    config = replace(config, init_std=0.03)
    residual = 0.03 / (2 * config.n_layers) ** 0.5 if config.init_by_depth else 0.03
    model = on_meta(family, config)
    structure = structure_of(family, config, model)
    for name, _ in model.named_parameters():
        init = structure.init(name)
        if name.endswith(("a_log.weight", "dt_bias.weight", "out_norm.weight")):
            assert init == (Init("log_uniform", 16.0) if "a_log" in name else Init("ones"))
        elif "norm" in name:
            value = 1.0 if init.kind == "ones" else init.value
            assert (init.kind, value + config.norm_offset) in (("ones", 1.0), ("constant", 1.0))
        elif name.endswith((".bias", "_bias")):
            assert (init.kind, init.value) == ("constant", 0.0)
        else:
            std = residual if name.removesuffix(".weight").endswith(("wo", "w2")) else 0.03
            assert (init.kind, init.value) == ("normal", pytest.approx(std))


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_the_plan_covers_each_parameter_once(name: str, flavor: str) -> None:
    family = FAMILIES[name]
    config = replace(family.flavors[flavor], n_layers=3)
    model = on_meta(family, config)
    structure = family.structure(config)
    units = stage_structure(structure, range(len(structure.units))).units  # those that share a parameter are one
    owners: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for part in unit:
            for parameter in model.get_submodule(part).parameters():
                owners.setdefault(id(parameter), set()).add(index)
    assert owners.keys() == {id(parameter) for parameter in model.parameters()}
    assert all(len(units_of_parameter) == 1 for units_of_parameter in owners.values())


@tied_or_not
@every_family
def test_the_output_is_in_the_last_unit(family: Family, tied: bool) -> None:
    """Tied or not: the reshard policy `default` does not reshard the last unit, and backward starts at the output."""
    assert "output" in family.structure(small(family, tie_embeddings=tied)).units[-1]


@tied_or_not
@diverse_in_quick
def test_a_model_from_the_meta_device_is_the_same(family: Family, tied: bool) -> None:
    """In the order of training: meta device, memory, ties, buffers, weights."""
    config = small(family, tie_embeddings=tied)
    model = on_meta(family, config)
    model.to_empty(device=CPU)
    model.tie_weights()
    direct = family.build(config)
    for one in (model, direct):
        one.init_buffers(CPU)
        init_parameters_(one, 1, structure_of(family, config, model).init)
    assert ("output.weight" in dict(model.named_parameters())) != tied
    assert torch.equal(model(some_tokens(1, 8)), direct(some_tokens(1, 8)))
    others = {name for name in saved_tensors(model) if name.endswith(CHOICE_BIAS)}
    assert model.state_dict().keys() == dict(model.named_parameters(remove_duplicate=False)).keys() | others


@diverse_in_quick
def test_packed_documents_equal_separate_documents(family: Family) -> None:
    config = small(family)
    if config.n_experts > 1:  # the balance loss depends on what a row is
        config = replace(config, balance_loss=0.0)
    model = perturbed_model(family, config)
    lengths = [3, 10, 1, 6]
    tokens = some_tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    packed = model(tokens, positions, ids)
    alone = torch.cat([model(part) for part in tokens.split(lengths, 1)], 1)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    parameters = list(model.parameters())
    found, expected = ([out, *torch.autograd.grad((out * weights).sum(), parameters)] for out in (packed, alone))
    for left, right in zip(found, expected, strict=True):
        assert ((left - right).norm() / right.norm()).item() < 1e-12


@diverse_in_quick
def test_cached_generation_equals_a_full_forward_pass(family: Family) -> None:
    """Cached keys and values equal those of the full text, without caching code in any family."""
    model = perturbed_model(family, small(family, tie_embeddings=False)).eval()
    prompt = some_tokens(1, 5)[0].tolist()
    steps = generate(model, [prompt], Sampling(), max_new_tokens=12, eos_ids=())
    text = torch.tensor([[*prompt, *(token for (token,) in steps)]])
    assert torch.equal(model(text)[0, len(prompt) - 1 : -1].argmax(-1), text[0, len(prompt) :])
    assert len(set(text[0].tolist())) > 5


@diverse_in_quick
def test_a_bfloat16_model_computes_in_bfloat16_outside_float32_islands(family: Family) -> None:
    config = small(family)
    if config.n_experts > 1:  # no near ties
        groups = {"n_active_groups": config.n_groups} if config.n_groups > 1 else {}
        config = replace(config, n_active_experts=config.n_experts, **groups)
    exact, rounded = perturbed_model(family, config), perturbed_model(family, config).bfloat16()
    rounded.init_buffers(CPU)
    with torch.no_grad():
        for left, right in zip(exact.parameters(), rounded.parameters(), strict=True):
            left.copy_(right)
        logits, expected = rounded(some_tokens(2, 33)), exact(some_tokens(2, 33))
    assert logits.dtype == torch.bfloat16
    # transformers' own are off by 0.084 and 0.24
    bound = {"gpt_oss": 0.1, "qwen3_5_moe": 0.3, "qwen3_next": 0.3}.get(family.name, 0.05)
    assert ((logits - expected).norm() / expected.norm()).item() < bound


@pytest.mark.parametrize(("name", "flavor"), FLAVORS)
def test_config_json_round_trips(name: str, flavor: str) -> None:
    family = FAMILIES[name]
    written = json.loads(json.dumps(family.hugging_face.config_json(family.flavors[flavor]), allow_nan=False))
    found = family.hugging_face.config_from_json(written)
    initial = {"init_std": family.flavors[flavor].init_std, "init_by_depth": family.flavors[flavor].init_by_depth}
    assert replace(found, **initial) == family.flavors[flavor]  # the format has no initial distributions


PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()


def table(first: str) -> list[list[str]]:
    """The cells of the rows of the table in docs/models.md whose first column is called `first`."""
    _, _, rest = PAGE.partition(f"| {first} |")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.partition("\n\n")[0].split("\n")[2:]]


def features(family: Family) -> list[str]:
    config = family.flavors["debug"]
    model = on_meta(family, config)
    parameters = [name for name, _ in model.named_parameters()]
    parts = features_of(model, family.structure(config))
    windows = getattr(config, "windows", ())

    def leaves(ending: str) -> str:
        found = (name.removesuffix(ending).rpartition(".")[2] for name in parameters if name.endswith(ending))
        return ", ".join(dict.fromkeys(found))

    biases = [leaves(".bias"), *(["experts"] if leaves("_bias") else [])]
    caps = {"scores": config.score_cap, "logits": config.logit_cap}
    scaling = {"rope_low_freq_factor": "Llama 3.1", "rope_beta_fast": "YaRN", "rope_scaling_factor": "linear"}
    norms = {"before": "attention_norm", "after": "attention_post_norm"}
    return [
        "all layers" if windows and all(windows) else "some layers" if any(windows) else "",
        "some layers" if any(config.linear_layers) else "",
        next((name for key, name in scaling.items() if hasattr(config, key)), ""),
        "some layers" if hasattr(config, "no_rope_interval") else "",
        ", ".join(each for each in biases if each),
        "latent vectors"
        if parts.is_latent
        else "each head"
        if parts.head_norms
        else "all heads"
        if parts.wide_norms
        else "",
        " and ".join(place for place, norm in norms.items() if f"layers.0.{norm}.weight" in parameters),
        ", ".join(name for name, cap in caps.items() if cap),
        "yes" if any("sinks" in name for name in parameters) else "",
        "all blocks but the first" if config.n_dense_layers else "yes" if config.n_experts > 1 else "",
        ", ".join(name for name, flavor in family.flavors.items() if flavor.tie_embeddings),
    ]


def test_the_table_of_features_is_that_of_the_code() -> None:
    nothing = "\N{EN DASH}"
    shown = {name.strip("`"): cells for name, *cells in table("family | windows")}
    assert shown == {name: [each or nothing for each in features(family)] for name, family in FAMILIES.items()}


@pytest.mark.parametrize(("example", "key", "reason"), [cells[1:4] for cells in table("combination")])
def test_refused_combinations_are_refused(example: str, key: str, reason: str) -> None:
    argv = example.strip("`").split()
    axes = {f"--parallelism.{axis}" for axis in ("pp", "cp", "tp", "ep")}
    degrees = [int(value) for name, value in pairwise(argv) if name in axes]
    with pytest.raises(ConfigError) as error:
        load_config(argv, world_size=prod(degrees), device_type="cpu")
    assert any(each.key == key.strip("`") and reason in each.rule for each in error.value.problems), error.value


@diverse_in_quick
def test_rotary_embeddings_that_change_are_those_of_a_new_model(family: Family) -> None:
    """As at the first step of a training stage."""
    config = small(family)
    if hasattr(config, "full_interval"):
        if hasattr(config, "partial_rotary_factor"):
            config = replace(config, partial_rotary_factor=0.5)  # the base of a single pair has no effect
        config = replace(config, full_interval=2)  # gemma3 has other embeddings in layers with a window
    changes = {"rope_theta": 3e4, "rope_scaling_factor": 8.0, "rope_original_seq_len": 32}
    other = replace(config, **{key: value for key, value in changes.items() if hasattr(config, key)})
    models = []
    for each in (config, other):
        model = family.build(each).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        model.init_buffers(CPU)
        models.append(model.eval())
    tokens = torch.arange(64).unsqueeze(0) % config.vocab_size
    with torch.no_grad():
        before, expected = (model(tokens) for model in models)
        with torch.device("meta"):
            source = family.build(other)
        assert adopt_rotary_(models[0], source)
        after = models[0](tokens)
    assert torch.equal(after, expected)
    assert not torch.equal(before, expected)


@pytest.mark.parametrize(
    ("family", "flavor", "total", "active"),
    [
        ("gpt_oss", "20B", 20_914_757_184, 4_187_440_704),
        ("gpt_oss", "120B", 116_829_156_672, 5_711_982_912),
        ("qwen3_moe", "30B-A3B", 30_532_122_624, 3_353_032_704),
        ("deepseek_v3", "671B-A37B", 671_026_404_352, 37_552_282_624),
    ],
)
def test_active_parameters_are_without_weights_and_biases_of_idle_experts(
    family: str, flavor: str, total: int, active: int
) -> None:
    shown = describe_size(total, FAMILIES[family].flavors[flavor])
    assert shown == f"{total:,} parameters, {active:,} of them active"
