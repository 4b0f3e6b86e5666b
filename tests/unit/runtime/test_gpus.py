"""The number of GPUs that a run uses, with a stub of torch."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from titanlite.runtime.errors import UserError
from titanlite.runtime.gpus import set_allocator, usable_gpus


class FakeTorch(ModuleType):
    """A torch without a device; `error` is the message if CUDA fails to initialize."""

    def __init__(self, build: str | None, count: int = 0, error: str = "No CUDA GPUs are available") -> None:
        super().__init__("torch")
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=build)
        self.error = error
        self.cuda = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, init=self.init)

    def init(self) -> None:
        raise RuntimeError(f"{self.error}\nmore")


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would be an ImportError
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert usable_gpus("", tmp_path) == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert usable_gpus("cpu", tmp_path) == 0
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("13.0", count=3))
    assert usable_gpus("", tmp_path) == 3
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(None))
    with pytest.raises(UserError, match=r"torch 2\.13\.0 is a build without CUDA"):
        usable_gpus("", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("13.0", error="The driver is too old"))
    with pytest.raises(UserError, match=r"cannot use it: The driver is too old .* DEVICE=cpu to train on the CPU$"):
        usable_gpus("", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus("", tmp_path) == 0
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides all GPUs"):
        usable_gpus("cuda", tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_configured_allocator_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:512"})
    set_allocator()
    assert os.environ == {name: "max_split_size_mb:512"}
