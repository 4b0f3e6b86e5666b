"""The split of a profile by region, cause and operation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from titanlite.profiling.breakdown import cause_of, host_events, time_by_cause, time_by_region, top_operations
from titanlite.profiling.regions import region


def event(name: str, start: float, end: float, host: float = 0.0, kernels: float = 0.0, **more: Any) -> Any:
    """An event with its self times. All times are in microseconds."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        cpu_time_total=end - start,
        self_cpu_time_total=host,
        self_device_time_total=kernels,
        is_user_annotation=name in ("forward", "backward", "clip"),
        **{"device_type": DeviceType.CPU, "is_async": False} | more,
    )


EVENTS = [
    event("forward", 0, 100, host=20),
    event("aten::mm", 10, 50, host=40, kernels=200),
    event("aten::mul", 50, 90, host=40, kernels=10),
    event("backward", 110, 300, host=50),
    event("aten::mm", 120, 260, host=140, kernels=400),  # of another thread on a device
    event("aten::_fused_adamw_", 310, 330, host=20, kernels=30),  # in no region
]


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("aten::mm", "matrix products"),
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("aten::addmm_", "matrix products"),
        ("aten::bmm", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "attention"),
        ("aten::_flash_attention_forward", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("c10d::allreduce_", "communication"),
        ("record_param_comms", "communication"),
        ("triton_poi_fused_mul_0", "compiled code"),
        ("## Call CompiledFxGraph abc ##", "compiled code"),
        ("aten::view", "rest"),
        ("autograd::engine::evaluate_function: MmBackward0", "rest"),
        ("aten::copy_", "copies"),
        ("aten::sum", "reductions"),
        ("aten::silu", "pointwise"),
    ],
)
def test_cause(name: str, cause: str) -> None:
    assert cause_of(name) == cause


def test_causes_add_up_to_the_elapsed_time() -> None:
    found = time_by_cause(EVENTS, 400e-6, 50e-6)
    assert sum(found.values()) == pytest.approx(400e-6)
    assert found["matrix products"] == pytest.approx(180e-6)
    assert found["optimizer"] == pytest.approx(20e-6)
    assert found["communication"] == pytest.approx(50e-6)  # the thread did not run
    assert found["rest"] == pytest.approx(110e-6)


def test_waiting_is_at_most_the_time_without_operations() -> None:
    found = time_by_cause(EVENTS, 250e-6, 50e-6)
    assert found["communication"] == pytest.approx(10e-6)
    assert found["rest"] == 0


def test_on_a_device_the_kernels_count() -> None:
    found = time_by_cause(EVENTS, 1000e-6, 0.0, on_device=True)
    assert found["matrix products"] == pytest.approx(600e-6)
    assert found["rest"] == pytest.approx(360e-6)


def test_regions() -> None:
    found = time_by_region(EVENTS)
    assert (found["forward"], found["backward"], found["update"]) == pytest.approx((100e-6, 190e-6, 0))
    found = time_by_region(EVENTS, on_device=True)
    assert (found["forward"], found["backward"], found["update"]) == pytest.approx((210e-6, 400e-6, 0))


def test_top_operations_are_no_regions() -> None:
    assert top_operations(EVENTS, 2) == [("aten::mm", pytest.approx(180e-6), 2), ("aten::mul", pytest.approx(40e-6), 1)]
    (first,) = top_operations(EVENTS, 1, on_device=True)
    assert first == ("aten::mm", pytest.approx(600e-6), 2)


def test_events_of_a_device_are_left_out() -> None:
    """Their time is that of the host's events that launched them."""
    kernel, collective = (
        event("sgemm", 0, 9, device_type=DeviceType.CUDA),
        event("gloo:all_reduce", 0, 9, is_async=True),
    )
    assert host_events([*EVENTS, kernel, collective]) == EVENTS


def test_events_of_torch() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        with region("forward"):
            loss = (weight @ weight).sum()
        with region("backward"):
            loss.backward()
    events = host_events(profiler.events() or ())
    regions = time_by_region(events)
    assert regions["forward"] > 0 < regions["backward"]
    causes = time_by_cause(events, 10.0, 0.0)
    assert 0 < causes["matrix products"] < regions["forward"] + regions["backward"] < 1
    assert {name for name, *_ in top_operations(events, 100)} >= {"aten::mm", "aten::sum"}
    assert "forward" not in {name for name, *_ in top_operations(events, 100)}
