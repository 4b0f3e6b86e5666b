"""Checks of the code that a family brings, before parallelism is applied: what parallelism would replace or drop is
refused, since the run would silently train another model than one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titanlite.models.attention import Kernel, additive_mask, attend, attention_mask
from titanlite.models.decoder import Decoder, FurtherBlock
from titanlite.models.experts import Experts, feed_forward, mixtures_of
from titanlite.models.family import FAMILIES, DecoderConfig, Family, LanguageModel, Structure, has_own
from titanlite.models.head import OutputLayer, output_layers_of
from titanlite.models.layers import WholeRows
from titanlite.models.mixer import Mixer, mixers_of, own_values
from titanlite.models.parts import gathers
from titanlite.models.shrink import shrink_model
from titanlite.parallel.context import enough_heads
from titanlite.parallel.mesh import ContextParallel, ParallelismConfig
from titanlite.parallel.tensor import form_problems
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.plugins import is_registered

TITANLITE = ("titanlite", "torch")
"""Packages whose modules are tested on all layouts."""


def require_layout(
    family: Family, config: Any, model: LanguageModel, section: ParallelismConfig, stages: Sequence[range]
) -> None:
    """Raise ConfigError if a layout would replace or drop code of the family, or compute another model with it.

    config: the hyper-parameters. model: the full one as the family builds it, on the meta device. stages: the units of
    each pipeline stage.
    """
    found: dict[str, str | None] = {}
    structure, form = family.structure(config), section.context_parallel
    is_own = is_registered(FAMILIES, family.name) or has_own_code(model)
    if section.tp > 1:
        found["tp"] = (
            next(iter(form_problems(model, section.tp)), None)
            or transform_problem(model, 1)
            or (own_tensor_problem(family, config, model, section) if is_own else None)
        )
    if section.ep > 1:
        found["ep"] = experts_problem(model)
    if section.cp > 1:
        found["cp"] = context_problem(model, structure, form)
        if is_own and found["cp"] is None:
            found["cp"] = (
                uncut_heads(model, section)
                or core_problem(family, config, section.cp, form)
                or uncalled_core(model)
                or position_problem(family, config, of_core=True)
            )
    if section.pp > 1 and family.boundary is None and is_own:
        found["pp"] = boundary_problem(model, structure, stages)
    name = family.name
    remedy = "fix the family, or use another axis, such as dp_shard"
    problems = [
        Problem(f"parallelism.{key}", getattr(section, key), f'1 with model.family = "{name}": {rule}', remedy)
        for key, rule in found.items()
        if rule is not None
    ]
    if problems:
        raise ConfigError(problems)


def own_tensor_problem(family: Family, config: Any, model: LanguageModel, section: ParallelismConfig) -> str | None:
    """Why tensor parallelism would compute another model than one process; None if nothing is found."""
    return (
        uncut_heads(model, section)
        or core_problem(family, config, section.tp)
        or position_problem(family, config, of_core=False)
    )


def has_own_code(model: nn.Module) -> bool:
    """Whether any module is of a class that is neither titanlite's nor torch's."""
    return any(type(module).__module__.partition(".")[0] not in TITANLITE for module in model.modules())


def transform_problem(model: nn.Module, dim: Literal[0, 1]) -> str | None:
    """Why the transform of the logits does not fit a part of the tokens (0) or vocabulary (1); None if it does."""
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for head in output_layers_of([model]):
        parts = torch.cat([head.transform(part) for part in logits.chunk(2, dim=dim)], dim=dim)
        if not torch.allclose(head.transform(logits), parts):
            where = ("chunk of the loss has a part of the tokens", "rank has a part of the vocabulary")[dim]
            return f"{type(head).__name__}.transform is not elementwise, and each {where}"
    return None


def position_problem(family: Family, config: Any, *, of_core: bool) -> str | None:
    """Where positions interact that a rank does not have together; None: nowhere. Tested with a tiny model of the
    family, by gradients: of the output of a position with respect to the embeddings of the others.

    of_core: whether they may interact in the core of mixers only (cp), or anywhere in modules that gather their input
    (tp).
    """
    where = "the core of a Mixer" if of_core else "modules that gather"
    ends: list[Tensor] = []

    def note(_module: nn.Module, args: tuple[Any, ...], out: Tensor | None = None) -> None:
        ends.append(args[0] if out is None else out)

    def detach(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x for x in args)

    def prepare(model: LanguageModel) -> None:
        """Positions do not interact where they may."""
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.register_forward_hook(note)
            elif isinstance(module, OutputLayer):
                module.register_forward_pre_hook(note)
            elif of_core and isinstance(module, Mixer):
                module.core = own_values  # type: ignore[method-assign, assignment]
            elif not of_core and (gathers(module) or isinstance(module, WholeRows)):
                module.register_forward_pre_hook(detach)

    def judge() -> str | None:
        embedded, out = ends
        for position in range(out.shape[1]):
            (gradient,) = torch.autograd.grad(out[0, position].sum(), embedded, retain_graph=True)
            gradient[0, position] = 0
            if gradient.any():
                return f"positions interact outside of {where}, and each rank has some of them"
        return None

    return _tiny_problem(family, config, prepare, judge)


def _tiny_problem(
    family: Family,
    config: Any,
    prepare: Callable[[LanguageModel], None],
    judge: Callable[[], str | None],
    ranks: int = 1,
) -> str | None:
    """What `judge` says after a forward pass of a tiny model of the family with random weights, once prepared. ranks:
    see shrink_model."""
    if not isinstance(config, DecoderConfig):
        return None
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            # a layer may be special
            model = family.build(replace(shrink_model(config, ranks), vocab_size=8, n_layers=config.n_layers))
            model = model.to(torch.float64)
            model.tie_weights()
            model.init_buffers(torch.device("cpu"))
            for parameter in model.parameters():
                nn.init.uniform_(parameter, -0.5, 1.0)
            for mixture in mixtures_of([model]):
                mixture.balance_loss = mixture.z_loss = 0.0  # of all positions, and ranks add up their parts
            prepare(model)
            model(torch.arange(6).unsqueeze(0))
            return judge()
    except Exception as error:
        return f"it cannot be checked with a tiny model: {type(error).__name__}: {error}"


def experts_problem(model: nn.Module) -> str | None:
    """Why expert parallelism cannot be applied; None if it can."""
    for name, module in model.named_modules():
        is_own = isinstance(module, Experts) and (
            has_own(module, "forward", Experts) or module.feed_forward is not feed_forward
        )
        if is_own:
            return f"expert parallelism would replace the forward or feed_forward of {name}"
    return None


def context_problem(model: LanguageModel, structure: Structure, form: ContextParallel) -> str | None:
    """Why context parallelism cannot be applied; None if it can.

    It calls the own `attend` of an Attention with some of the heads ("heads"), or with some of the queries and a mask
    ("gather"). The function must give these the same result as among all: this is tested with random numbers.
    """
    if model.draws:
        return "it draws random numbers by row key, and each rank has a part of the row"
    for name in structure.blocks:
        if not mixers_of([model.get_submodule(name)]):
            return f"{name} has no titanlite.models.mixer.Mixer, such as an Attention, which knows cp"
    if form == "gather" and getattr(model, "attention_mask", None) is not attention_mask:
        return 'context_parallel = "gather" would replace its attention_mask'
    for name, module in model.named_modules():
        if isinstance(module, Mixer) and "core" in vars(module):
            return f"it would replace the core that was assigned to {name}: write it as a method of its class"
        kernel: Any = getattr(module, "attend", attend)
        if kernel is not attend and (fault := kernel_problem(kernel, module.head_dim, form)) is not None:
            return f"{name}.attend {fault}"
    return None


def kernel_problem(kernel: Kernel, head_dim: int, form: ContextParallel) -> str | None:
    """What the function does that context parallelism does not allow; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(1, heads, 8, head_dim, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)
    )
    own = torch.tensor([1, 2, 6, 7])
    try:
        full = kernel(queries, keys, values, None)
        if form == "heads":
            what, halves = "heads", zip(queries.chunk(2, 1), keys.chunk(2, 1), values.chunk(2, 1), strict=True)
            part = torch.cat([kernel(*half, None) for half in halves], dim=1)
        else:
            what, full = "queries, with their mask,", full[:, :, own]
            mask = additive_mask(torch.zeros(1, 8, dtype=torch.int64), torch.float64, own)
            part = kernel(queries[:, :, own], keys, values, mask)
        if part.shape != full.shape or not torch.allclose(full, part, rtol=1e-4, atol=1e-5):
            return f"gives some of the {what} another result than among all"
    except Exception as error:
        return f"cannot be called with random numbers alone: {type(error).__name__}: {error}"
    return None


def called_cores(model: LanguageModel) -> dict[str, dict[str, int]] | str:
    """The heads of each input and each tensor by head, of each mixer whose forward calls `core`; or why that is not
    known."""
    called: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if isinstance(module, Mixer):
                stack.enter_context(replaced(module, "core", _noting(name, called)))
        return _try(model) or called


def uncalled_core(model: LanguageModel) -> str | None:
    """The mixers whose forward does not call `core`; None: all do."""
    if isinstance(called := called_cores(model), str):
        return called
    mixers = (name for name, module in model.named_modules() if isinstance(module, Mixer))
    return next((f"{name} does not call self.core" for name in mixers if name not in called), None)


def uncut_heads(model: LanguageModel, section: ParallelismConfig) -> str | None:
    """The mixers with heads that tp and cp do not divide; None: none, or their forward cannot be called here."""
    called = called_cores(model)
    for name, counts in called.items() if isinstance(called, dict) else ():
        gathers_keys = section.context_parallel == "gather" and bool(model.get_submodule(name).gathered)
        degrees = {"tp": section.tp, "cp": 1 if gathers_keys else section.cp}
        for what, count in counts.items():
            of_rank, left = divmod(count, section.tp)
            if left or (of_rank % degrees["cp"] and degrees["cp"] % of_rank):
                ranks = " x ".join(f"{key} = {size}" for key, size in degrees.items() if size > 1)
                return f"{what} of {name}.core has {count} heads, which {ranks} does not divide"
    return None


def core_problem(family: Family, config: Any, ranks: int, form: ContextParallel = "heads") -> str | None:
    """The mixers whose own core gives some of the heads, those of one of the ranks, another result than among all.
    Tested with a tiny model."""
    faults: list[str] = []

    def prepare(model: LanguageModel) -> None:
        for name, mixer in model.named_modules():
            if not isinstance(mixer, Mixer):
                continue
            own = [key for key in ("core", "context") if not _is_shipped(getattr(type(mixer), key))]
            if own and mixer.gathered and form == "gather":
                faults.append(f'{name} has a {own[0]} of its own: use context_parallel = "heads"')
            elif "core" in own:
                mixer.core = _in_parts(name, mixer.core, faults)  # type: ignore[method-assign]

    factor = next(number for number in range(2, ranks + 1) if ranks % number == 0)
    return _tiny_problem(family, config, prepare, lambda: next(iter(faults), None), factor)


def _is_shipped(function: Callable[..., Any]) -> bool:
    return function.__module__.partition(".")[0] in TITANLITE


def _in_parts(name: str, core: Callable[..., Tensor], faults: list[str]) -> Callable[..., Tensor]:
    """A core that adds a fault if some of the heads alone get another result."""

    def compare(inputs: Sequence[Tensor], seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
        out, expected = core(inputs, seen, by_head), own_values(inputs)
        if out.shape != expected.shape:
            width = "the third input" if len(inputs) > 2 else "the last input"
            rule = f"{tuple(expected.shape)}: the most heads of an input, and the width of {width}"
            faults.append(f"{name}.core has results {tuple(out.shape)}, not {rule}")
            return out
        counts = [x.shape[2] for x in inputs]
        number = next((n for n in range(2, max(counts) + 1) if all(each in (1, each // n * n) for each in counts)), 1)
        parts = []
        try:
            for index in range(number):
                own = [enough_heads(x, number, dim=2).chunk(number, dim=2)[index] for x in inputs]
                own_by_head = {key: enough_heads(x, number).chunk(number)[index] for key, x in by_head.items()}
                parts.append(core(own, seen, own_by_head))
            is_alike = torch.allclose(torch.cat(parts, dim=2), out)
        except Exception as error:
            faults.append(f"{name}.core cannot be called with some of the heads: {type(error).__name__}: {error}")
            return out
        if not is_alike:
            faults.append(f"{name}.core gives some of the heads another result than among all")
        return out

    return compare


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace a function of a module, of its class or its own, inside the block."""
    own = vars(module).copy()
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if name in own:
            setattr(module, name, own[name])


def _noting(name: str, called: dict[str, dict[str, int]]) -> Callable[..., Tensor]:
    def note(inputs: Sequence[Tensor], _seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
        counts = {f"inputs[{index}]": x.shape[2] for index, x in enumerate(inputs)}
        # one number is that of all heads
        called[name] = counts | {f"by_head[{key!r}]": len(x) for key, x in by_head.items() if len(x) > 1}
        return own_values(inputs)

    return note


def boundary_problem(model: LanguageModel, structure: Structure, stages: Sequence[range]) -> str | None:
    """Why a stage would lack a result of earlier stages; None if it gets all that it uses.

    A stage gets the first argument of its first unit. What else it uses of earlier units is found by its gradient: in a
    forward pass in which these arguments are cut off, a stage must not depend on parameters of other stages.
    """
    names = [structure.units[stage[0]][0] for stage in stages]
    ends: list[Tensor] = []

    def cut(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ends.append(args[0])
        return args[0].detach().requires_grad_(), *args[1:]

    firsts = [model.get_submodule(name) for name in names[1:]]
    # the last norm is called before a block that predicts further tokens
    firsts = [model.get_submodule("norm") if isinstance(first, FurtherBlock) else first for first in firsts]
    hooks = [first.register_forward_pre_hook(cut) for first in firsts]
    try:
        fault = _try(model, ends.append)
    finally:
        for hook in hooks:
            hook.remove()
    if fault is not None or len(ends) != len(stages):
        return fault or "its units are not called in their order, with the residual stream as the first argument"
    units = [[f"{name}." for index in stage for name in structure.units[index]] for stage in stages]
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    for stage, (end, prefixes) in enumerate(zip(ends, units, strict=True)):
        for name in sorted(owners[each] for each in leaves(end) if each in owners):
            own_names = (name, *structure.shared.get(name, ()))
            if not any(each.startswith(tuple(prefixes)) for each in own_names):
                return (
                    f"the stage that begins with {names[stage]} uses a result of {name.rpartition('.')[0]} beside the "
                    "residual stream, and would not get it: pass it, as Family.boundary declares"
                )
    if isinstance(model, Decoder) and has_own(model, "run_blocks", Decoder):
        return "each stage would call its run_blocks: declare Family.boundary if it knows that"
    return None


def leaves(tensor: Tensor) -> Iterator[int]:
    """The ids of the leaves of the autograd graph of `tensor`."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield id(variable)
        nodes += [after for after, _ in node.next_functions]


def _try(model: LanguageModel, use: Callable[[Tensor], object] = id) -> str | None:
    """Run the model on the meta device, without values, and call `use` with its output; returns an error if it has
    one."""
    with ExitStack() as stack, torch.enable_grad():
        for module in model.modules():
            if isinstance(module, Experts):  # their sizes depend on values
                stack.enter_context(replaced(module, "feed_forward", lambda rows, *_, **_options: rows))
        tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
        further = {"next_tokens": tokens} if model.predicts_further else {}
        try:
            use(model(tokens, **further))
        except Exception as error:
            return f"its forward cannot be checked on the meta device: {type(error).__name__}: {error}"
    return None
