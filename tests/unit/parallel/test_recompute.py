"""Blocks that recompute, and combinations that are refused."""

import pytest
import torch
from torch.torch_version import TorchVersion

from titanlite.config.load import load_config
from titanlite.parallel.mesh import PipelineSchedule
from titanlite.parallel.recompute import ActivationCheckpointConfig, recomputes
from titanlite.runtime.errors import ConfigError

SOURCE = ["--data.sources.0.kind", "tokens", "--data.sources.0.path", "tokens.npy", "--model.vocab_size", "128"]


def chosen(section: ActivationCheckpointConfig) -> list[int]:
    return [index for index in range(7) if recomputes(section, index)]


def test_blocks_are_chosen_by_index() -> None:
    assert chosen(ActivationCheckpointConfig()) == []
    assert chosen(ActivationCheckpointConfig("full", selective_every=3)) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "op", 3)) == [0, 1, 2, 3, 4, 5, 6]
    assert chosen(ActivationCheckpointConfig("selective", "layer", 3)) == [0, 3, 6]


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
    assert refused(*pipeline, *BY_OP, "--compile.enable", "true", "--compile.components", '["loss"]') == {key}
    assert refused(*pipeline, *BY_OP, "--compile.enable", "true") == set()
    assert refused(*pipeline, *BY_OP, "--activation_checkpoint.selective_policy", "layer") == set()
    assert refused(*pipeline, "--activation_checkpoint.mode", "full") == set()


def test_other_schedules_accept_policy_op() -> None:
    for schedule in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"):
        assert refused("--parallelism.pp_schedule", schedule, *BY_OP) == set()
    assert refused("--activation_checkpoint.selective_every", "0") == {"activation_checkpoint.selective_every"}


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
