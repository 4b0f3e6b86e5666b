"""Blocks that recompute, and combinations that are refused."""

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from titanlite.config.load import load_config
from titanlite.models.llama3 import Llama3, Llama3Config, plan
from titanlite.parallel.compile import CompileConfig, apply_compile
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.parallel.recompute import ActivationCheckpointConfig, apply_recompute, recomputes
from titanlite.runtime.errors import ConfigError

SOURCE = ["--data.sources.0.kind", "tokens", "--data.sources.0.path", "tokens.npy", "--model.vocab_size", "128"]


def chosen(section: ActivationCheckpointConfig) -> list[int]:
    return [index for index in range(7) if recomputes(section, index)]


def test_blocks_are_chosen_by_index() -> None:
    assert chosen(ActivationCheckpointConfig()) == []
    assert chosen(ActivationCheckpointConfig("full")) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "op")) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "layer")) == [0, 2, 4, 6]


def refused(*settings: str) -> set[str]:
    """Keys of the problems of a configuration with two pipeline ranks."""
    shape = ["--parallelism.pp", "2", "--training.local_batch_size", "8", "--model.n_layers", "4"]
    try:
        load_config([*SOURCE, *shape, *settings], world_size=2, device_type="cpu")
    except ConfigError as error:
        return {problem.key for problem in error.problems} - {"data.sources.0.path"}
    return set()


BY_OP = ["--activation_checkpoint.mode", "selective"]
DOCUMENTS = ["--data.document_mask", "true"]
SPLIT: list[PipelineSchedule] = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13 or newer")
@pytest.mark.parametrize("schedule", SPLIT)
def test_schedules_with_split_backward_refuse_policy_op(schedule: str) -> None:
    pipeline = ["--parallelism.pp_schedule", schedule]
    key = "activation_checkpoint.selective_policy"
    assert refused(*pipeline, *BY_OP) == {key}
    experts = ["--model.family", "qwen3_moe", "--compile.enable", "true"]  # whose blocks are not compiled
    assert refused(*pipeline, *BY_OP, *experts) == {key}
    assert refused(*pipeline, *BY_OP, "--compile.enable", "true") == set()
    assert refused(*pipeline, *BY_OP, "--activation_checkpoint.selective_policy", "layer") == set()
    assert refused(*pipeline, "--activation_checkpoint.mode", "full") == set()


def test_other_schedules_accept_policy_op() -> None:
    for schedule in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"):
        assert refused("--parallelism.pp_schedule", schedule, *BY_OP) == set()


@pytest.mark.parametrize(
    ("version", "settings", "keys"),
    [
        ("2.11.0", ["--parallelism.pp_schedule", "DualPipeV"], {"parallelism.pp_schedule"}),
        ("2.12.0", ["--parallelism.pp_schedule", "DualPipeV"], set()),
        (
            "2.12.0",
            ["--parallelism.pp_schedule", "InterleavedZeroBubble", "--compile.enable", "true"],
            {"compile.enable"},
        ),
        ("2.13.0", ["--parallelism.pp_schedule", "InterleavedZeroBubble", "--compile.enable", "true"], set()),
        ("2.11.0", ["--parallelism.pp_schedule", "Interleaved1F1B", "--compile.enable", "true"], set()),
        ("2.12.0", ["--parallelism.pp_schedule", "InterleavedZeroBubble", *DOCUMENTS], {"parallelism.pp_schedule"}),
        ("2.13.0", ["--parallelism.pp_schedule", "InterleavedZeroBubble", *DOCUMENTS], set()),
        ("2.11.0", ["--parallelism.pp_schedule", "Interleaved1F1B", *DOCUMENTS], set()),
    ],
)
def test_features_that_older_torch_lacks_are_refused(
    version: str, settings: list[str], keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert refused(*settings) == keys


BUDGET = ["--activation_checkpoint.mode", "memory_budget"]
COMPILE = ["--compile.enable", "true"]


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        (COMPILE, set()),
        ([], {"activation_checkpoint.mode"}),
        ([*COMPILE, "--model.family", "qwen3_moe"], {"activation_checkpoint.mode"}),
        ([*COMPILE, "--compile.backend", "eager"], {"activation_checkpoint.mode"}),
        ([*COMPILE, "--parallelism.tp", "2"], {"activation_checkpoint.mode", "parallelism.pp"}),  # there are 2 ranks
        ([*COMPILE, "--activation_checkpoint.memory_budget", "1.1"], {"activation_checkpoint.memory_budget"}),
    ],
)
def test_a_memory_budget_needs_a_compiler_that_follows_it(settings: list[str], keys: set[str]) -> None:
    assert refused(*BUDGET, *settings) == keys


CONFIG = Llama3Config(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=80, vocab_size=50, max_seq_len=32)


def saved_and_gradients(section: ActivationCheckpointConfig) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a compiled block saves for its backward pass beside parameters and tables, and its gradients."""
    torch._dynamo.reset()
    model = Llama3(CONFIG)
    model.init_buffers(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    apply_compile(model, plan(CONFIG), CompileConfig(enable=True, backend="aot_eager"))
    apply_recompute(model, plan(CONFIG), section)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(2, 32, CONFIG.dim, generator=generator, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model.layers["0"](x, model.rope(None), None)
    out.square().sum().backward()
    block = model.layers["0"].named_parameters()
    return sum(saved.values()), {name: parameter.grad for name, parameter in block if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does so
def test_compiled_blocks_save_their_share_of_the_memory_budget() -> None:
    try:
        unlimited, expected = saved_and_gradients(ActivationCheckpointConfig())
        half, of_half = saved_and_gradients(ActivationCheckpointConfig("memory_budget", memory_budget=0.5))
        least, of_least = saved_and_gradients(ActivationCheckpointConfig("memory_budget", memory_budget=0.0))
        again, _ = saved_and_gradients(ActivationCheckpointConfig())  # the budget of another model does not stay
    finally:
        functorch_config.activation_memory_budget = 1.0
    block_input = 2 * 32 * CONFIG.dim * 4
    assert least == block_input
    assert 0.4 * unlimited <= half <= 0.6 * unlimited
    assert again == unlimited > 8 * block_input
    for gradients in (of_half, of_least):
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)
