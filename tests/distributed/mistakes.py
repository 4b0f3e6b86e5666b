"""Table of known mistakes in distributed training: what each changes, and how the comparisons detect it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from tests.distributed import gradients
from tests.distributed.layouts import (
    DEEPSEEK_V3,
    EVERY,
    EXPERTS,
    GATHER,
    GEMMA2,
    GPT_OSS,
    LAST,
    OLMOE,
    PAIRS,
    QWEN2,
    QWEN3,
    QWEN3_5,
    TIED,
    Layout,
    schedule,
)
from titanlite import trainer as trainer_module
from titanlite.assembly import model as build_module
from titanlite.assembly import run as run_module
from titanlite.assembly.job import Job
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.data.loader import Loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.forward import positions_of
from titanlite.models import family
from titanlite.models import linear_attention as linear_module
from titanlite.models.attention import AttentionMask
from titanlite.models.experts import Experts, MixtureOfExperts, Router, router_scores
from titanlite.models.family import Init
from titanlite.models.head import Scoring
from titanlite.models.layers import OfHeads, RMSNorm, Scalar, WideNorm, rms_norm
from titanlite.models.parts import OwnPositions, Row
from titanlite.parallel import clip as clip_module
from titanlite.parallel import context as context_module
from titanlite.parallel import expert as expert_module
from titanlite.parallel import tensor as tensor_module
from titanlite.parallel.clip import GradNorm
from titanlite.parallel.data import set_gradient_sync, wrapped_modules
from titanlite.parallel.mesh import ContextParallel, Mesh
from titanlite.parallel.pipeline import SharedParameters
from titanlite.tools.parity import measure as parity_module
from titanlite.trainer import Trainer

Change = Callable[[Trainer], None]
Planted = AbstractContextManager[object]
Around = Callable[[], Planted]

CP = Layout((1, 1, 1, 1), cp=2)
CP_GATHER = Layout((1, 1, 1, 1), GATHER, cp=2)
PP = Layout((2, 1, 1, 1), PAIRS)
PP_TIED = Layout((2, 1, 1, 1), (*PAIRS, *TIED))
TP = Layout((1, 1, 1, 2))
TP_EXPERTS = Layout((1, 1, 1, 2), EXPERTS)
SHARD_EXPERTS = Layout((1, 1, 2, 1), EXPERTS)
CP_EXPERTS = Layout((1, 1, 1, 1), EXPERTS, cp=2)
EP = Layout((1, 1, 2, 1), (*EXPERTS, "parallelism.ep=2"))
EP_SHARD = Layout((1, 1, 4, 1), (*EXPERTS, "parallelism.ep=2"))
TP_QWEN2 = Layout((1, 1, 1, 2), QWEN2)
TP_QWEN3 = Layout((1, 1, 1, 2), QWEN3)
TP_GEMMA2 = Layout((1, 1, 1, 2), GEMMA2)
TP_GPT_OSS = Layout((1, 1, 1, 2), GPT_OSS)
TP_DEEPSEEK_V3 = Layout((1, 1, 1, 2), DEEPSEEK_V3)
EP_DEEPSEEK_V3 = Layout((1, 1, 2, 1), (*DEEPSEEK_V3, "parallelism.ep=2"))
CP_GPT_OSS = Layout((1, 1, 1, 1), GPT_OSS, cp=2)
TP_QWEN3_5 = Layout((1, 1, 1, 2), QWEN3_5)
CP_QWEN3_5 = Layout((1, 1, 1, 1), QWEN3_5, cp=2)
TP_OLMOE = Layout((1, 1, 1, 2), OLMOE)
REPLICATE = Layout((1, 2, 1, 1), LAST, accumulation=2)
REPLICATE_EVERY = Layout((1, 2, 1, 1), EVERY, accumulation=2)
SHARD = Layout((1, 1, 2, 1), LAST, accumulation=2)
REPLICATED_STAGES = Layout((2, 2, 1, 1))
INTERLEAVED = Layout((2, 1, 1, 1), (*schedule("Interleaved1F1B"), *PAIRS))


@dataclass(frozen=True)
class Mistake:
    """A mistake to plant.

    planted: context in which the mistake is active. seen: all differences that the tests' comparison finds, or its
    exception. first: first difference that `titanlite parity` reports, or its exception. documents: rows hold several
    documents, which `titanlite parity` does not compare.
    """

    name: str
    layout: Layout
    planted: Around
    seen: set[str]
    first: str = ""
    documents: bool = False


def changed(change: Change) -> Around:
    """Context in which `change` is applied to every new trainer."""

    @contextmanager
    def around() -> Iterator[None]:
        def build(*args: object) -> Trainer:
            trainer = build_module.build_trainer(*args)  # type: ignore[arg-type]
            change(trainer)
            return trainer

        with ExitStack() as stack:
            for module in (gradients, parity_module, run_module):
                stack.enter_context(patch.object(module, "build_trainer", build))
            yield

    return around


# Data parallelism -----------------------------------------------------------------------------------------------------


def mean_per_rank(trainer: Trainer) -> None:
    """Each rank divides by its own count, as if all ranks had the same number of valid tokens."""

    def count(batches: Sequence[Batch]) -> Tensor:
        local = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
        return local * dist.get_world_size()

    trainer.count_valid_tokens = count  # type: ignore[method-assign]


def own_count(trainer: Trainer) -> None:
    """Each rank counts its own valid tokens only."""
    trainer.count_valid_tokens = lambda batches: torch.stack(  # type: ignore[method-assign]
        [(batch.labels != IGNORE_INDEX).sum() for batch in batches]
    ).sum()


def averaging_reduction(trainer: Trainer) -> None:
    """The reduction divides by the number of ranks."""
    for module in wrapped_modules(trainer.model_parts[0]):
        module.set_gradient_divide_factor(float(dist.get_world_size()))


def averaged_replicas(trainer: Trainer) -> None:
    """The reduction divides by the number of replicas, which is torch's default."""
    for module in wrapped_modules(trainer.model_parts[0]):
        module.set_force_sum_reduction_for_comms(False)
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups if torch.__version__ >= "2.12" else [state._fsdp_param_group]:
            group.gradient_divide_factor = None


def accumulated_sums_reduced_again(trainer: Trainer) -> None:
    """After each microbatch, the accumulated gradient, already reduced, is summed over the ranks again."""
    forward_backward = trainer.forward_backward

    def reduce_again(batch: Batch, num_valid: Tensor) -> Tensor:
        before = [p.grad is not None for p in trainer.model_parts[0].parameters()]
        loss = forward_backward(batch, num_valid)
        for parameter, had_gradient in zip(trainer.model_parts[0].parameters(), before, strict=True):
            if had_gradient and parameter.grad is not None:
                dist.all_reduce(parameter.grad.to_local())
        return loss

    trainer.forward_backward = reduce_again  # type: ignore[method-assign]


def bypassed_wrapper(trainer: Trainer) -> None:
    """Modules lose their hooks, so parameters are not gathered and gradients are not reduced."""
    for module in trainer.model_parts[0].modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


def without_last_sync() -> Planted:
    """No microbatch counts as the last one of its step."""

    def forgetful(parts: Sequence[nn.Module], policy: str, *, is_last: bool) -> None:
        del is_last
        set_gradient_sync(parts, policy, is_last=False)

    return patch.object(trainer_module, "set_gradient_sync", forgetful)


@contextmanager
def rows_of_the_first_rank() -> Iterator[None]:
    """All data ranks read the rows of the first one."""
    rank_batches, build_data = gradients.rank_batches, parity_module.build_data

    def rows_of_rank_0(batch: Batch, rank: int, degree: int, accumulation: int, **division: int) -> list[Batch]:
        del rank
        return rank_batches(batch, 0, degree, accumulation, **division)

    def data_of_rank_0(job: Job, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
        return build_data(job, Mesh(job.config.parallelism, replace(mesh.world, rank=0)), tokenizer)

    with (
        patch.object(gradients, "rank_batches", rows_of_rank_0),
        patch.object(parity_module, "build_data", data_of_rank_0),
    ):
        yield


# Initial weights ------------------------------------------------------------------------------------------------------


def random_by_torch() -> Planted:
    """Initial weights come from torch's normal_ on the distributed parameters, with the same seed on all ranks."""

    def draw(module: nn.Module, seed: int, init: Callable[[str], Init]) -> None:
        torch.manual_seed(seed)
        for name, parameter in module.named_parameters():
            distribution = init(name)
            with torch.no_grad():
                _ = parameter.fill_(1.0) if distribution.kind == "ones" else parameter.normal_(0.0, distribution.value)

    return patch.object(build_module, "init_parameters_", draw)


def random_by_rank() -> Planted:
    """Each rank draws its shards of the matrices from its own generator."""
    init_parameters_ = build_module.init_parameters_

    def draw(module: nn.Module, seed: int, init: Callable[[str], Init]) -> None:
        init_parameters_(module, seed, init)
        torch.manual_seed(dist.get_rank())
        for parameter in module.parameters():
            if parameter.dim() == 2 and isinstance(parameter, DTensor):
                parameter.to_local().detach().normal_(0.0, 0.02)

    return patch.object(build_module, "init_parameters_", draw)


# Tensor parallelism ---------------------------------------------------------------------------------------------------


def of_type(kind: type[nn.Module], forward: Callable[..., Any]) -> Planted:
    """Context in which ranks of tp compute modules of a type by `forward`."""
    forms = tensor_module.FORMS
    return patch.dict(forms, {kind: (forms[kind][0], forward)})


def loss_of_every_rank(trainer: Trainer) -> None:
    """All ranks of the tp axis add the same loss to the sum over the mesh."""
    trainer.counts_loss = True


def norms_not_summed_over_tp(trainer: Trainer) -> None:
    """The gradient of a norm covers only the rank's part of the sequence."""

    def forget(module: nn.RMSNorm) -> None:
        weight = module.weight
        assert isinstance(weight, DTensor)
        local = nn.Parameter(weight.to_local().detach().clone())
        module.forward = lambda x: nn.functional.rms_norm(x, local.shape, local, module.eps)
        local.register_hook(lambda gradient: setattr(weight, "grad", _like(weight, gradient)))

    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, nn.RMSNorm):
                forget(module)


def _like(weight: DTensor, gradient: Tensor) -> Tensor:
    return DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False)


def norm_in_single_precision(trainer: Trainer) -> None:
    """A .float() in a norm of a float64 run."""
    norm = next(module for module in trainer.model_parts[0].modules() if isinstance(module, nn.RMSNorm))
    forward = norm.forward
    norm.forward = lambda x: forward(x.float().to(x.dtype))  # type: ignore[method-assign]


def head_norms_not_summed_over_tp() -> Planted:
    """The gradient of the norm of queries and keys covers only the rank's heads. The loss of the step is correct."""

    def forget(norm: RMSNorm, x: Tensor) -> Tensor:
        if x.dim() == 3:  # of the residual stream
            return tensor_module._normalize(norm, x)
        return rms_norm(x, norm.weight.to_local(grad_placements=[Replicate()]), norm.eps)

    return of_type(RMSNorm, forget)


def uncapped_loss() -> Planted:
    """The loss is that of logits without the soft cap, which those without labels have."""
    scores = Scoring.scores

    def of_uncapped(scoring: Scoring, *arguments: Tensor) -> Any:
        return scores(replace(scoring, soft_cap=0.0), *arguments)

    return patch.object(Scoring, "scores", of_uncapped)


def norms_without_offset() -> Planted:
    """Ranks of tp multiply by the stored weights of norms, which are less by 1."""

    def forget(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return rms_norm(x, tensor_module.local_weight(norm.weight, Partial()), norm.eps or 0.0)

    return of_type(RMSNorm, forget)


def biases_of_the_first_rank() -> Planted:
    """Each rank of tp adds the first one's part of the biases of queries, keys and values."""

    def of_first(linear: nn.Linear, gradient: Placement) -> Tensor | None:
        del gradient
        if linear.bias is None:
            return None
        assert isinstance(linear.bias, DTensor)
        return linear.bias.full_tensor().chunk(linear.bias.device_mesh.size())[0]

    return patch.object(tensor_module, "_local_bias", of_first)


def wide_norms_of_own_heads() -> Planted:
    """Queries and keys are divided by the root mean square of the rank's heads instead of all heads."""

    def own_heads(norm: nn.RMSNorm, x: Tensor) -> Tensor:
        return rms_norm(x.flatten(2), norm.weight.to_local(), norm.eps).view_as(x)  # type: ignore[operator]

    return of_type(WideNorm, own_heads)


def wide_norms_not_summed_backward() -> Planted:
    """The gradient of the mean square covers only the rank's heads. The loss of the step is correct."""
    reduce = tensor_module.all_reduce

    def forward_only(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce(x, group) if x.shape[-1] == 1 else x

    return patch.object(tensor_module, "all_reduce", forward_only)


def sinks_of_the_first_rank() -> Planted:
    """Each rank of tp has the sinks of the first one's heads."""

    def first(scalar: Scalar) -> Tensor:
        assert isinstance(scalar.weight, DTensor)
        return scalar.weight.full_tensor().chunk(scalar.weight.device_mesh.size())[0]

    return of_type(OfHeads, first)


def latents_not_summed_over_tp() -> Planted:
    """The gradients of the projections to latent vectors are those of a rank's own positions."""

    def project(linear: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, tensor_module.local_weight(linear.weight))

    return of_type(OwnPositions, project)


def shared_experts_of_each_rank() -> Planted:
    """Each rank of ep adds the results of the shared experts, as if they were dealt out, too."""
    build = MixtureOfExperts.forward

    def forward(self: MixtureOfExperts, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        out = build(self, x, is_token)
        return out if self.shared is None else out + self.shared(x)

    return patch.object(MixtureOfExperts, "forward", forward)


def output_bias_on_each_rank() -> Planted:
    """Each rank of tp adds the bias of wo to its part of the sum."""

    def project(linear: nn.Linear, x: Tensor) -> Tensor:
        bias = tensor_module._local_bias(linear, Partial())
        product = nn.functional.linear(x, tensor_module.local_weight(linear.weight), bias)
        return tensor_module.summed_part(product, tensor_module._group(linear))

    return of_type(Row, project)


def bias_of_experts_on_each_rank() -> Planted:
    """Each rank of tp adds the biases of w2 to its part of the sum."""

    def whole(name: str, weight: DTensor, tp: dist.ProcessGroup | None) -> Tensor:
        del tp
        placements = [Partial()] if expert_module.FEATURES[name] is None else None
        return weight.to_local(grad_placements=placements)

    return patch.object(expert_module, "_own_part", whole)


# Context parallelism --------------------------------------------------------------------------------------------------


def positions_of_the_first_rank(trainer: Trainer) -> None:
    """Every rank numbers its positions from 0."""
    forward_arguments = trainer.forward_arguments

    def from_0(batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
        arguments = forward_arguments(batch, num_valid)
        return arguments | {"positions": positions_of(arguments["labels"])}

    trainer.forward_arguments = from_0  # type: ignore[method-assign]


def loss_times_cp(trainer: Trainer) -> None:
    """Each rank's loss is multiplied by cp, as if gradients were averaged over it."""
    count = trainer.count_valid_tokens
    trainer.count_valid_tokens = lambda batches: count(batches) // trainer.mesh.degrees["cp"]  # type: ignore[method-assign]


def valid_tokens_of_own_positions(trainer: Trainer) -> None:
    """Each rank divides by the valid tokens of its own positions."""
    count = trainer.count_valid_tokens
    trainer.count_valid_tokens = lambda batches: count(  # type: ignore[method-assign]
        [batch._replace(labels=trainer.cp_shard(batch.labels)) for batch in batches]
    )


def loss_of_own_positions(trainer: Trainer) -> None:
    """The loss is not summed over the positions of other ranks. The gradients are correct."""
    trainer.sum_over_cp = lambda losses: losses  # type: ignore[method-assign]


def documents_of_own_positions(trainer: Trainer) -> None:
    """Attention gets the documents of this rank's positions, in place of those of entire rows."""
    forward_arguments = trainer.forward_arguments

    def repeated(batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
        arguments = forward_arguments(batch, num_valid)
        own = trainer.cp_shard(arguments["document_ids"])
        return arguments | {"document_ids": own.repeat(1, trainer.mesh.degrees["cp"])}

    trainer.forward_arguments = repeated  # type: ignore[method-assign]


def sinks_of_other_heads() -> Planted:
    """Each rank has the sinks of the heads of another one."""
    exchange = context_module.over_heads

    def shifted(mixer: Any, inputs: Sequence[Tensor], seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
        sinks = by_head["sinks"]
        return exchange(mixer, inputs, seen, {**by_head, "sinks": sinks.roll(len(sinks) // 2)})

    return patch.object(context_module, "over_heads", shifted)


def convolution_of_own_positions() -> Planted:
    """The convolution before linear attention does not see the positions of the rank before."""
    right = linear_module.convolve

    def cut(x: Tensor, taps: Tensor, starts: Tensor | None) -> Tensor:
        assert starts is None
        starts = torch.zeros(x.shape[:2], dtype=torch.bool)
        starts[:, x.shape[1] // 2] = True
        return right(x, taps, starts)

    return patch.object(linear_module, "convolve", cut)


def decays_of_the_first_rank() -> Planted:
    """Each rank of cp has the decays of the first one's heads."""
    right = context_module.over_heads

    def changed(mixer: Any, inputs: Sequence[Tensor], seen: Any, by_head: Mapping[str, Tensor]) -> Tensor:
        if "a_log" in by_head:
            by_head = {**by_head, "a_log": by_head["a_log"].chunk(2)[0].repeat(2)}
        return right(mixer, inputs, seen, by_head)

    return patch.object(context_module, "over_heads", changed)


def heads_in_another_order() -> Planted:
    """Attention returns the heads of the ranks in reverse order."""
    exchange = context_module._exchange

    def reversed_heads(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        received = exchange(x, group, split, join)
        return received if join != 1 else torch.cat(received.chunk(group.size(), dim=1)[::-1], dim=1)

    return patch.object(context_module, "_exchange", reversed_heads)


def masks_of_adjacent_queries() -> Planted:
    """The mask is that of queries which follow each other. The rank holds an early and a late part of the row."""
    part = context_module.part_of_rows

    def adjacent(rows: Tensor, rank: int, cp: int, form: ContextParallel) -> Tensor:
        del form
        return part(rows, rank, cp, "heads")

    return patch.object(context_module, "part_of_rows", adjacent)


def gradients_of_own_queries() -> Planted:
    """The gradients of keys and values are not summed over the queries of other ranks."""

    def own(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        rank, cp = ctx.group.rank(), ctx.group.size()
        parts = gradient.chunk(2 * cp, dim=2)
        return torch.cat((parts[rank], parts[2 * cp - 1 - rank]), dim=2), None

    return patch.object(context_module._GatherPositions, "backward", staticmethod(own))


# The gradient norm ----------------------------------------------------------------------------------------------------


def norm_of_one_stage() -> Planted:
    """The squared norm is not summed over pp."""
    clip = clip_module.clip_grad_norm_

    def of_this_stage(parts: Sequence[nn.Module], max_norm: float, group: object, squares: None) -> GradNorm:
        del group, squares
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return clip(parts, max_norm, alone)

    return patch.object(trainer_module, "clip_grad_norm_", of_this_stage)


def norm_of_own_shards() -> Planted:
    """The squared norm is not summed over tp."""
    return patch.object(clip_module, "_shard_groups", lambda parameter: ())  # noqa: ARG005


def replicas_counted_twice() -> Planted:
    """The norm sums parameters that are replicated over tp as if they were sharded."""

    def all_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        return tuple(mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)

    return patch.object(clip_module, "_shard_groups", all_groups)


# Pipelines ------------------------------------------------------------------------------------------------------------


def divided_after_backward(trainer: Trainer) -> None:
    """The pipeline's backward pass uses the sum of losses; only the logged loss is divided."""
    assert trainer.pipeline is not None
    forward_backward = trainer.pipeline.forward_backward

    def divided(tokens: Tensor, num_valid: Tensor, **keys: Tensor) -> Tensor:
        return forward_backward(tokens, num_valid=torch.ones_like(num_valid), **keys) / num_valid

    trainer.pipeline.forward_backward = divided  # type: ignore[method-assign]


def scaled_gradients(trainer: Trainer) -> None:
    """scale_grads=True: the schedule also divides gradients by its number of microbatches."""
    assert trainer.pipeline is not None
    trainer.pipeline._schedule.scale_grads = True


def labels_of_another_row(trainer: Trainer) -> None:
    """The last stage compares its logits with the labels of another row."""
    assert trainer.pipeline is not None
    forward_backward = trainer.pipeline.forward_backward

    def shifted(tokens: Tensor, labels: Tensor, **keys: Tensor) -> Tensor:
        return forward_backward(tokens, labels=labels.roll(1, 0), **keys)

    trainer.pipeline.forward_backward = shifted  # type: ignore[method-assign]


def stages_without_sync() -> Planted:
    """The stages of a pipeline never reduce their accumulated gradients."""
    return patch.object(PipelineStage, "perform_reduce_grad", lambda self, grad_scale_factor: None)  # noqa: ARG005


def copies_counted_twice() -> Planted:
    """The norm counts a parameter on each stage that shares it."""
    return patch.object(clip_module, "copies_in", lambda parts, rank: set())  # noqa: ARG005


def copies_not_summed() -> Planted:
    """Each stage keeps its own part of the gradient of a parameter that it shares."""
    return patch.object(SharedParameters, "sum_gradients", lambda self: None)  # noqa: ARG005


def sum_on_one_stage() -> Planted:
    """The first stage gets the sum of the gradients of a shared parameter; the last one keeps its part, and drifts."""
    add = SharedParameters.sum_gradients

    def on_first(shared: SharedParameters) -> None:
        own = [parameter.grad.clone() for parameter, _ in shared._copied if parameter.grad is not None]
        add(shared)
        for (parameter, _), part in zip(shared._copied, own, strict=True):
            if dist.get_rank():
                parameter.grad = part

    return patch.object(SharedParameters, "sum_gradients", on_first)


# Documents ------------------------------------------------------------------------------------------------------------

_attention_mask = family.attention_mask


def masked_by(mask: Callable[[Tensor | None, torch.dtype, int], AttentionMask | None]) -> Around:
    return lambda: patch.object(family, "attention_mask", mask)


def without_mask(ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> None:
    """Attention covers all previous documents of the row."""
    del ids, dtype, head_dim


def one_position_late(ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> AttentionMask | None:
    """A document's first token belongs to the previous document."""
    return _attention_mask(None if ids is None else torch.cat((ids[:, :1], ids[:, :-1]), 1), dtype, head_dim)


def of_the_first_row(ids: Tensor | None, dtype: torch.dtype, head_dim: int) -> AttentionMask | None:
    """All rows of a microbatch have the documents of its first row."""
    return _attention_mask(None if ids is None else ids[:1].expand_as(ids), dtype, head_dim)


def last_part_ignores_documents(trainer: Trainer) -> None:
    """The last model part of each rank treats each row as one document."""
    forward = trainer.model_parts[-1].forward

    def without_documents(tokens: Tensor, **arguments: Tensor) -> Tensor:
        return forward(tokens, **{name: arguments[name] for name in arguments.keys() - {"positions", "document_ids"}})

    trainer.model_parts[-1].forward = without_documents  # type: ignore[method-assign]


def positions_do_not_restart(trainer: Trainer) -> None:
    """Positions count along the row instead of the document; attention is still limited to documents."""
    forward_arguments = trainer.forward_arguments

    def along_the_row(batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
        arguments = forward_arguments(batch, num_valid)
        arguments["positions"] = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        return arguments

    trainer.forward_arguments = along_the_row  # type: ignore[method-assign]


# The table ------------------------------------------------------------------------------------------------------------


def mixtures(trainer: Trainer) -> Iterator[MixtureOfExperts]:
    return (each for part in trainer.model_parts for each in part.modules() if isinstance(each, MixtureOfExperts))


def balance_of_each_rank(trainer: Trainer) -> None:
    for mixture in mixtures(trainer):
        mixture.placement = replace(mixture.placement, own_share=1.0)


def balance_of_own_positions(trainer: Trainer) -> None:
    """Each rank balances its own part of a row."""
    for mixture in mixtures(trainer):
        mixture.placement = replace(mixture.placement, row_group=None)


def balance_of_own_rows(trainer: Trainer) -> None:
    """The mean is over the rows of a rank instead of those of the global batch."""
    count = trainer.count_rows_and_tokens

    def of_this_rank(batches: Sequence[Batch]) -> None:
        count(batches)
        for mixture in trainer.mixtures:
            mixture.num_rows = mixture.num_rows // trainer.mesh.data_degree

    trainer.count_rows_and_tokens = of_this_rank  # type: ignore[method-assign]


def router_not_summed_over_tp() -> Planted:
    def route(router: Router, x: Tensor) -> Tensor:
        return router_scores(x, router.weight.to_local())  # type: ignore[operator]

    return of_type(Router, route)


def results_in_the_order_of_arrival() -> Planted:
    calls = count()

    def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        return right(x, order, inverse) if next(calls) % 2 == 0 else x

    right = expert_module.permuted
    return patch.object(expert_module, "permuted", permuted)


def experts_not_reduced_over_shards(trainer: Trainer) -> None:
    for module in wrapped_modules(trainer.model_parts[0]):
        if isinstance(module, Experts):
            module.set_custom_reduce_scatter(OwnPart())


class OwnPart:
    """A reduce-scatter that adds nothing up."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **_: object) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()].view_as(output_tensor))


GRADIENT = {"gradient", "grad norm"}
NORM = {"grad norm"}
LOSS = {"loss"}
STEP = GRADIENT | LOSS
WEIGHTS = STEP | {"initial weights"}
POSITIONS = {"positions"}
RUNTIME_ERROR = {"RuntimeError"}
TIED_GRADIENT = "gradient of tok_embeddings.weight"


def on_both(name: str, planted: Around, seen: set[str], first: str) -> list[Mistake]:
    """The mistake with replicated and with sharded parameters."""
    return [Mistake(name, layout, planted, seen, first) for layout in (REPLICATE, SHARD)]


OF_DATA = (
    *on_both("each rank divides by its own count", changed(mean_per_rank), STEP, "valid tokens: the ranks disagree"),
    Mistake("token counts of each rank", SHARD, changed(own_count), STEP, "valid tokens: the ranks disagree"),
    *on_both("the reduction averages over the ranks", changed(averaging_reduction), GRADIENT, "gradient of"),
    Mistake(
        "torch's default average over the replicas", REPLICATE, changed(averaged_replicas), GRADIENT, "gradient of"
    ),
    Mistake(
        "reduced gradients are summed again",
        *(REPLICATE_EVERY, changed(accumulated_sums_reduced_again), GRADIENT, "gradient of"),
    ),
    *on_both("the last microbatch is not synchronized", without_last_sync, GRADIENT, "gradient of"),
    *on_both("the forward pass bypasses the wrapper", changed(bypassed_wrapper), RUNTIME_ERROR, "RuntimeError"),
    Mistake("all data ranks read the first one's rows", SHARD, rows_of_the_first_rank, STEP, "tokens: sequence 1 "),
    Mistake(
        "initial weights from a rank's own generator",
        *(REPLICATE, random_by_rank, WEIGHTS, "initial weights: tok_embeddings.weight (the ranks disagree)"),
    ),
    Mistake(
        "initial weights from a rank's own generator",
        *(SHARD, random_by_rank, WEIGHTS, "initial weights: tok_embeddings.weight"),
    ),
)
OF_TENSORS = (
    Mistake("initial weights by torch's random numbers on DTensors", TP, random_by_torch, WEIGHTS, "initial weights"),
    Mistake("loss counted on every tp rank", TP, changed(loss_of_every_rank), LOSS, "step 1, loss: "),
    Mistake("a .float() in a norm", TP, changed(norm_in_single_precision), {"gradient"}, "gradient of"),
    Mistake("gradients of norms not summed over tp", TP, changed(norms_not_summed_over_tp), GRADIENT, "gradient of"),
    Mistake(
        "gradients of the norms of queries and keys not summed over tp (qwen3)",
        *(TP_QWEN3, head_norms_not_summed_over_tp, GRADIENT, "gradient of"),
    ),
    Mistake("loss of logits without their cap (gemma2)", TP_GEMMA2, uncapped_loss, STEP, "step 1, loss: "),
    Mistake("norms without the 1 (gemma2)", TP_GEMMA2, norms_without_offset, STEP, "step 1, loss: "),
    Mistake("biases of the first rank (qwen2)", TP_QWEN2, biases_of_the_first_rank, GRADIENT, "gradient of"),
    Mistake("sinks of the first rank's heads (gpt_oss)", TP_GPT_OSS, sinks_of_the_first_rank, STEP, "step 1, "),
    Mistake("decays of the first rank's heads (qwen3_5)", TP_QWEN3_5, sinks_of_the_first_rank, STEP, "step 1, "),
    Mistake("bias of wo added on each rank (gpt_oss)", TP_GPT_OSS, output_bias_on_each_rank, GRADIENT, "gradient of"),
    Mistake(
        "biases of experts added on each rank (gpt_oss)",
        *(TP_GPT_OSS, bias_of_experts_on_each_rank, GRADIENT, "gradient of"),
    ),
    Mistake(
        "projections to latent vectors not summed over tp (deepseek_v3)",
        *(TP_DEEPSEEK_V3, latents_not_summed_over_tp, GRADIENT, "gradient of"),
    ),
    Mistake("norm of the own heads (olmoe)", TP_OLMOE, wide_norms_of_own_heads, STEP, "choice of experts: "),
    Mistake(
        "gradient of the norm of all heads not summed over tp (olmoe)",
        *(TP_OLMOE, wide_norms_not_summed_backward, GRADIENT, "gradient of"),
    ),
    Mistake("parameters replicated over tp counted twice in the norm", TP, replicas_counted_twice, NORM, "grad norm: "),
    Mistake("gradient norm not reduced over tp", TP, norm_of_own_shards, NORM, "grad norm: the ranks disagree"),
)
OF_CONTEXT = (
    Mistake("positions not shifted", CP, changed(positions_of_the_first_rank), STEP, "step 1, "),
    Mistake("loss multiplied by cp", CP, changed(loss_times_cp), STEP, "step 1, "),
    Mistake("valid tokens of own positions", CP, changed(valid_tokens_of_own_positions), STEP, "valid tokens"),
    Mistake("loss not summed over positions", CP, changed(loss_of_own_positions), LOSS, "step 1, loss"),
    Mistake("sinks of another rank's heads (gpt_oss)", CP_GPT_OSS, sinks_of_other_heads, STEP, "step 1, "),
    Mistake("convolution cut between ranks (qwen3_5)", CP_QWEN3_5, convolution_of_own_positions, STEP, "step 1, "),
    Mistake("decays of the first rank's heads (qwen3_5)", CP_QWEN3_5, decays_of_the_first_rank, STEP, "step 1, "),
    Mistake("heads in another order", CP, heads_in_another_order, STEP, "step 1, "),
    Mistake("gather: masks of adjacent queries", CP_GATHER, masks_of_adjacent_queries, STEP, "step 1, "),
    Mistake("gather: gradients of own queries", CP_GATHER, gradients_of_own_queries, GRADIENT, "gradient of"),
    Mistake("documents of own positions", CP, changed(documents_of_own_positions), STEP, documents=True),
)
OF_EXPERTS = (
    Mistake("balance loss counted on each tp rank", TP_EXPERTS, changed(balance_of_each_rank), GRADIENT, "gradient of"),
    Mistake("router's gradient not summed over tp", TP_EXPERTS, router_not_summed_over_tp, GRADIENT, "gradient of"),
    Mistake("balance of own positions", CP_EXPERTS, changed(balance_of_own_positions), GRADIENT, "gradient of"),
    Mistake("balance over the rows of a rank", SHARD_EXPERTS, changed(balance_of_own_rows), GRADIENT, "gradient of"),
    Mistake("results of experts in the order of arrival", EP, results_in_the_order_of_arrival, STEP, "step 1, "),
    Mistake(
        "shared experts counted on each ep rank (deepseek_v3)",
        *(EP_DEEPSEEK_V3, shared_experts_of_each_rank, STEP, "step 1, "),
    ),
    Mistake(
        "gradients of experts not reduced over the other shards",
        *(EP_SHARD, changed(experts_not_reduced_over_shards), GRADIENT, "gradient of"),
    ),
)
OF_PIPELINES = (
    Mistake("initial weights by torch's random numbers on stages", PP, random_by_torch, WEIGHTS, "initial weights"),
    Mistake("gradient norm not reduced over pp", PP, norm_of_one_stage, NORM, "grad norm: the ranks disagree"),
    Mistake(
        "losses divided after the backward pass only", PP, changed(divided_after_backward), GRADIENT, "gradient of"
    ),
    Mistake("scale_grads=True on top of the division", PP, changed(scaled_gradients), GRADIENT, "gradient of"),
    Mistake("labels of another row", PP, changed(labels_of_another_row), STEP, "step 1, loss: "),
    Mistake("stages that never reduce", REPLICATED_STAGES, stages_without_sync, GRADIENT, "gradient of"),
    Mistake("copies of tied embeddings counted twice in the norm", PP_TIED, copies_counted_twice, NORM, "grad norm: "),
    Mistake("gradients of tied embeddings not added up", PP_TIED, copies_not_summed, GRADIENT, TIED_GRADIENT),
    Mistake("the sum on the first of two tied stages only", PP_TIED, sum_on_one_stage, {"gradient"}, TIED_GRADIENT),
)
OF_DOCUMENTS = tuple(
    Mistake(name, INTERLEAVED, planted, seen, documents=True)
    for name, planted, seen in (
        ("attention to all previous documents", masked_by(without_mask), STEP),
        ("documents begin one position late", masked_by(one_position_late), STEP),
        ("all rows have the documents of the microbatch's first row", masked_by(of_the_first_row), STEP),
        ("a rank's last stage ignores documents", changed(last_part_ignores_documents), STEP | POSITIONS),
        ("positions do not restart between documents", changed(positions_do_not_restart), POSITIONS),
    )
)
MISTAKES = (*OF_DATA, *OF_TENSORS, *OF_CONTEXT, *OF_EXPERTS, *OF_PIPELINES, *OF_DOCUMENTS)
QUICK = ("torch's default average over the replicas", "gradient norm not reduced over pp")
"""Names of the mistakes in the quick suite."""
SOAK = (
    # seen with the other kind of parameters
    ("each rank divides by its own count", SHARD),
    ("the last microbatch is not synchronized", REPLICATE),
    ("the forward pass bypasses the wrapper", SHARD),
    ("initial weights from a rank's own generator", REPLICATE),
    # similar to another one
    ("initial weights by torch's random numbers on DTensors", TP),
    ("a .float() in a norm", TP),
    ("norms without the 1 (gemma2)", TP_GEMMA2),
    ("biases of the first rank (qwen2)", TP_QWEN2),
    ("gradients of the norms of queries and keys not summed over tp (qwen3)", TP_QWEN3),
    ("bias of wo added on each rank (gpt_oss)", TP_GPT_OSS),
    ("sinks of another rank's heads (gpt_oss)", CP_GPT_OSS),
    ("decays of the first rank's heads (qwen3_5)", TP_QWEN3_5),
    ("decays of the first rank's heads (qwen3_5)", CP_QWEN3_5),
    ("shared experts counted on each ep rank (deepseek_v3)", EP_DEEPSEEK_V3),
    ("norm of the own heads (olmoe)", TP_OLMOE),
    ("loss not summed over positions", CP),
    ("gather: masks of adjacent queries", CP_GATHER),
    ("router's gradient not summed over tp", TP_EXPERTS),
    ("balance of own positions", CP_EXPERTS),
    ("losses divided after the backward pass only", PP),
    ("documents begin one position late", INTERLEAVED),
    ("all rows have the documents of the microbatch's first row", INTERLEAVED),
    ("token counts of each rank", SHARD),
    ("the reduction averages over the ranks", REPLICATE),
    ("reduced gradients are summed again", REPLICATE_EVERY),
    ("gradient norm not reduced over tp", TP),
    ("loss multiplied by cp", CP),
    ("balance loss counted on each tp rank", TP_EXPERTS),
    ("initial weights by torch's random numbers on stages", PP),
    ("labels of another row", PP),
    ("gradients of tied embeddings not added up", PP_TIED),
    ("attention to all previous documents", INTERLEAVED),
    # of 4 ranks, compared like those of 2; test_layouts.py and test_bit_equal.py have their layouts
    ("gradients of experts not reduced over the other shards", EP_SHARD),
    ("stages that never reduce", REPLICATED_STAGES),
    # of one family, whose gradients are compared like those of llama3; test_layouts.py has its layout without a mistake
    ("loss of logits without their cap (gemma2)", TP_GEMMA2),
    ("sinks of the first rank's heads (gpt_oss)", TP_GPT_OSS),
    ("biases of experts added on each rank (gpt_oss)", TP_GPT_OSS),
    ("projections to latent vectors not summed over tp (deepseek_v3)", TP_DEEPSEEK_V3),
    ("gradient of the norm of all heads not summed over tp (olmoe)", TP_OLMOE),
    ("convolution cut between ranks (qwen3_5)", CP_QWEN3_5),
)
"""(name, layout) of the mistakes in soak tests only."""
