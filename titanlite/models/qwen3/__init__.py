"""The qwen3 family."""

from functools import partial

from titanlite.models.decoder.activations import activation_bytes
from titanlite.models.decoder.flops import flops_per_token, unit_flops_per_token
from titanlite.models.decoder.model import init
from titanlite.models.family import Family
from titanlite.models.qwen3.config import FLAVORS, Qwen3Config, check, shrink
from titanlite.models.qwen3.hf import HUGGING_FACE
from titanlite.models.qwen3.model import Qwen3
from titanlite.models.qwen3.plan import plan

QWEN3 = Family(
    name="qwen3",
    config_type=Qwen3Config,
    flavors=FLAVORS,
    check=check,
    build=Qwen3,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    unit_flops_per_token=unit_flops_per_token,
    activation_bytes=partial(activation_bytes, head_norms=True),
    shrink=shrink,
    hugging_face=HUGGING_FACE,
)
