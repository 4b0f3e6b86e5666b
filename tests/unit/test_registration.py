"""Tests of the checks of register_...: each refuses what would fail later, and in words."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import titanlite
from tests.configuration import parse_config
from titanlite.config.check import resolve_config
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.data.check import check_data
from titanlite.data.config import DataConfig
from titanlite.data.kinds import KINDS
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.text import Text
from titanlite.metrics.config import PLUGIN_LOGGERS, MetricsConfig
from titanlite.metrics.loggers import build_loggers
from titanlite.metrics.slow_loggers import SlowLogger
from titanlite.models.family import Family, Init, Structure
from titanlite.models.head import OutputLayer
from titanlite.models.llama3 import LLAMA3, Llama3Config
from titanlite.models.parts import WRITING, Role, Row
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import Arguments, OptimizerKind
from titanlite.optim.registry import OPTIMIZERS
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.plugins import RegistrationError

pytestmark = pytest.mark.usefixtures("registries")

TINY = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, vocab_size=64)
FAMILY = replace(LLAMA3, name="mine", flavors={"tiny": TINY})


@dataclass
class Thawed:
    dim: int = 1


@dataclass(frozen=True)
class Odd(Llama3Config):
    """With a hyper-parameter that TOML cannot express."""

    activation: Callable[[Any], Any] = torch.relu


@dataclass(frozen=True)
class Taken(Llama3Config):
    """With the name of a key of [model]."""

    flavor: str = "mine"


def odd(kind: type[Llama3Config]) -> Family:
    return replace(FAMILY, config_type=kind, flavors={"tiny": kind(**vars(TINY))})


def structure_without(unit: int) -> Callable[[Any], Structure]:
    def structure(config: Any) -> Structure:
        full = LLAMA3.structure(config)
        return replace(full, units=full.units[:unit] + full.units[unit + 1 :])

    return structure


class Scaled(Row):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changed(change: Callable[[Any], None]) -> Family:
    def build(config: Any) -> Any:
        model = LLAMA3.build(config)
        change(model)
        return model

    return replace(FAMILY, build=build)


def scale_output(model: Any) -> None:
    model.layers["0"].feed_forward.w2 = Scaled(TINY.ffn_dim, TINY.dim, bias=False)


def begin_with(kind: Any, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.norm.roles = {"weight": Role(Init(kind, value))}

    return change


def plain_linear(model: Any) -> None:
    model.layers["0"].feed_forward.w2 = torch.nn.Linear(TINY.ffn_dim, TINY.dim, bias=False)
    model.layers["0"].feed_forward.w2.roles = {"weight": WRITING}


def without_gather(model: Any) -> None:
    model.layers["0"].feed_forward.gathers = False


def gather_twice(model: Any) -> None:
    model.layers["0"].gathers = True


def add_scalar(model: Any) -> None:
    model.norm.scale = torch.nn.Parameter(torch.empty(()))


def temper(model: Any) -> None:
    model.output.temperature = torch.nn.Parameter(torch.empty(1))


class Centred(OutputLayer):
    def transform(self, logits: Tensor) -> Tensor:
        return logits - logits.mean(0)


def centre(model: Any) -> None:
    model.output = Centred(TINY.dim, TINY.vocab_size)


def add_norm(model: Any) -> None:
    model.norm.other = torch.nn.RMSNorm(8)


def test_a_family_is_a_choice_with_its_hyper_parameters() -> None:
    titanlite.register_family(FAMILY)
    config, problems = parse_config(["--model.family", "mine", "--model.flavor", "tiny", "--model.ffn_dim", "96"])
    assert problems == []
    assert (config.model.family, config.model.overrides) == ("mine", {"ffn_dim": 96})
    _, (problem,) = parse_config(["--model.family", "mime"])
    assert problem.remedy == 'did you mean "mine"?'
    with pytest.raises(RegistrationError, match="the registries are fixed"):
        titanlite.register_family(replace(FAMILY, name="late"))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (TINY, "takes a titanlite.models.family.Family"),
        (replace(FAMILY, name="my family"), "the name must have letters, digits"),
        (replace(FAMILY, name="llama3"), "this name is titanlite's own"),
        (replace(FAMILY, config_type=Thawed), "must be a frozen dataclass"),
        (odd(Odd), "activation: .* is no type of TOML keys"),
        (odd(Taken), "flavor cannot be hyper-parameters"),
        (replace(FAMILY, flavors={}), "flavors must be a mapping, not empty"),
        (replace(FAMILY, flavors={"tiny": 3}), "flavor 'tiny' is no Llama3Config"),
        (replace(FAMILY, build=lambda config: torch.nn.Linear(config.dim, 1)), "build must return a titanlite"),
        (replace(FAMILY, structure=structure_without(1)), "layers.0.attention_norm.weight is in 0"),
        (changed(begin_with("unifrom", 0.1)), r"Init\(kind='unifrom', value=0.1\): the kinds are"),
        (changed(begin_with("normal", math.nan)), "and the value is a finite number"),
        (replace(FAMILY, build=lambda: 0), r"build raises TypeError: .*positional argument"),
        (replace(FAMILY, check=lambda *_: None), "check must return a list of Problem"),
        (replace(FAMILY, boundary=lambda _: "64"), "boundary must return a positive integer, not '64'"),
        (replace(FAMILY, flavors=[TINY]), "flavors must be a mapping"),
        (
            replace(FAMILY, needs={"rope_lo": LLAMA3.needs["rope_low_freq_factor"]}),
            "needs has rope_lo, which the hyper-",
        ),
        (
            replace(FAMILY, structure=lambda config: replace(LLAMA3.structure(config), shared={"norm.wight": ()})),
            "the structure shares norm.wight, which is no parameter",
        ),
        (changed(add_norm), "norm.other.weight has no role: use a layer of titanlite.models.parts, such as Column"),
        (changed(centre), "Centred.transform is not elementwise, and each chunk of the loss has a part of the tokens"),
        (changed(temper), "the loss gives no gradient to temperature of the OutputLayer: scale its input"),
        (changed(add_scalar), "norm.scale has no dimension, and FSDP cannot shard it: use shape"),
        (replace(FAMILY, flops_per_token=lambda *_: 0), "flops_per_token must return a positive"),
        (
            replace(FAMILY, hugging_face=replace(LLAMA3.exported, names=lambda _: {"norm.weight": "norm"})),
            "hugging_face.names differs from the model's parameters: layers.0.attention.wk.weight",
        ),
    ],
)
def test_a_family_that_would_fail_later_is_refused(family: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=rf"register_family\(.*\): .*{reason}"):
        titanlite.register_family(family)
    assert "mine" not in FAMILIES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale_output, "layers.0.feed_forward.w2: tensor parallelism would replace the forward of Scaled"),
        (plain_linear, "layers.0.feed_forward.w2.weight is a parameter of Linear, which tp cannot cut (build it of "),
        (gather_twice, "layers.0.attention gathers its input inside of layers.0, which has gathered it (write gathers"),
        (without_gather, "layers.0.feed_forward.w1 is a Column, and no module around it gathers its input (write "),
    ],
)
def test_what_tensor_parallelism_cannot_cut_is_refused_with_tp_only(change: Callable[[Any], None], reason: str) -> None:
    name = change.__name__  # full models are kept by the name of their family
    titanlite.register_family(replace(changed(change), name=name))
    sizes = (
        f"--model.family={name}",
        "--model.flavor=tiny",
        "--model.vocab_size=512",
        "--training.global_batch_size=8",
    )
    load_config([*sizes], world_size=2, device_type="cpu")
    with pytest.raises(ConfigError) as error:
        load_config([*sizes, "--parallelism.tp=2"], world_size=2, device_type="cpu")
    (problem,) = error.value.problems
    assert (problem.key, reason in problem.rule) == ("parallelism.tp", True), problem


def test_a_source_is_a_choice() -> None:
    class Lines(Text):
        kind = "my-lines"

    titanlite.register_source(Lines)
    assert KINDS["my-lines"] is Lines
    for workers, keys in ((3, ["data.num_workers"]), (0, [])):
        data = DataConfig(sources=(SourceConfig("my-lines", "lines.txt"),), num_workers=workers)
        found = check_data(data, global_batch_size=1, data_degree=1, vocab_size=0, checks_files=False)
        assert [problem.key for problem in found] == keys
    config = JobConfig(data=replace(data, num_workers=-1))
    assert resolve_config(config, world_size=1, device_type="cuda").data.num_workers == 0


class NoKind(Text):
    kind = 3  # type: ignore[assignment]


class OtherKeys(Text):
    kind = "others"
    keys = ("document", "colour")


class Abstract(Text.__base__):  # type: ignore[misc, name-defined]
    kind = "abstract"
    row_name = "line"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Text, "this name is titanlite's own"),
        (object, "takes a subclass of TextSource or StreamedSource"),
        (NoKind, "the class needs an attribute kind"),
        (OtherKeys, "keys has colour"),
        (Abstract, "the class needs read, scan"),
    ],
)
def test_a_source_that_would_fail_later_is_refused(source: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        titanlite.register_source(source)


class RowState(torch.optim.SGD):
    """Keeps a number per row: a part of a checkpoint that no mesh could cut as it cuts the parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.detach().sum(1)


def sgd(arguments: Arguments) -> torch.optim.Optimizer:
    return torch.optim.SGD(arguments.groups, lr=arguments.section.lr)


def without_names(arguments: Arguments) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in arguments.groups[0]["params"]], lr=0.1)


def idle(arguments: Arguments) -> torch.optim.Optimizer:
    optimizer = sgd(arguments)
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    return optimizer


def test_an_optimizer_is_a_choice() -> None:
    titanlite.register_optimizer("Plain", OptimizerKind(sgd, options=()))
    assert OPTIMIZERS["Plain"].options == ()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.SGD, "takes a titanlite.optim.optimizer.OptimizerKind"),
        (OptimizerKind(sgd, options=("rho",)), "options has rho"),
        (OptimizerKind(lambda arguments: arguments, options=()), r"build must return a torch.optim.Optimizer"),  # type: ignore[arg-type, return-value]
        (OptimizerKind(without_names, options=()), "build must pass the groups"),
        (OptimizerKind(idle, options=()), "an update must change weights"),
        (OptimizerKind(lambda arguments: torch.optim.NAdam(arguments.groups), options=()), "the state must be zero"),
        (OptimizerKind(lambda arguments: RowState(arguments.groups), options=()), "state 'rows' must be a tensor of"),
    ],
)
def test_an_optimizer_that_would_fail_later_is_refused(kind: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        titanlite.register_optimizer("Mine", kind)
    assert "Mine" not in OPTIMIZERS


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (lambda progress: 1 / progress if progress else math.inf, r"shape\(0.0\) is inf, and must be a number"),
        (lambda _: "0.5", r"shape\(0.0\) is '0.5'"),
        (lambda _: float("nan"), "is nan"),
        (lambda progress: 1 - progress, r"shape\(0.0\) is 1.0, and must be 0"),
        (lambda: 0.5, r"shape\(0.0\) raises TypeError"),
    ],
)
def test_a_schedule_that_would_fail_later_is_refused(shape: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=reason):
        titanlite.register_schedule("mine", shape)


@contextmanager
def of_the_output(parameters: Any) -> Iterator[None]:
    """A pipeline stage may not have it."""
    titanlite.watch("output", parameters["output.weight"])
    yield


@contextmanager
def badly_named(parameters: Any) -> Iterator[None]:
    for name, parameter in parameters.items():
        titanlite.watch(f"norm of {name}", parameter)
    yield


@pytest.mark.parametrize(
    ("statistic", "reason"),
    [
        (of_the_output, "raises KeyError: 'output.weight'"),
        (badly_named, "a name has letters, digits"),
        (lambda _: iter(()), "must return a context manager"),
    ],
)
def test_a_statistic_that_would_fail_later_is_refused(statistic: Any, reason: str) -> None:
    with pytest.raises(RegistrationError, match=rf"register_statistic\('mine'\): .*{reason}"):
        titanlite.register_statistic("mine", statistic)


def test_a_term_is_of_the_logits_or_their_logsumexp() -> None:
    with pytest.raises(RegistrationError, match='of must be "logits" or "logsumexp", not \'logit\''):
        titanlite.register_term("mine", lambda logits, _: logits.square(), of="logit")  # type: ignore[arg-type]


def test_a_logger_is_a_choice(caplog: pytest.LogCaptureFixture) -> None:
    def build(section: Any, folder: Any, about: Any) -> SlowLogger:
        raise NotImplementedError

    titanlite.register_logger("mine", build)
    assert PLUGIN_LOGGERS["mine"] is build
    section = MetricsConfig(loggers=("mine",))
    options = {"resume_step": 0, "resume_tokens": 0, "about": None, "has_samples": False, "has_experts": False}
    build_loggers(section, ".", 0, 1, "memory", **options).close()  # type: ignore[arg-type]
    assert "mine: NotImplementedError:; the run continues without this logger" in caplog.text
    for name in ("console", "mine"):
        with pytest.raises(RegistrationError, match="name"):
            titanlite.register_logger(name, build)
    assert parse_config(["--metrics.loggers", '["jsonl", "mine"]'])[1] == []
