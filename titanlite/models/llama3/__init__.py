"""The llama3 family."""

from titanlite.models.family import Family
from titanlite.models.llama3.activations import activation_bytes
from titanlite.models.llama3.config import FLAVORS, Llama3Config, check, flops_per_token, shrink, unit_flops_per_token
from titanlite.models.llama3.hf import HUGGING_FACE
from titanlite.models.llama3.model import Llama3, init
from titanlite.models.llama3.plan import plan

LLAMA3 = Family(
    name="llama3",
    config_type=Llama3Config,
    flavors=FLAVORS,
    check=check,
    build=Llama3,
    plan=plan,
    init=init,
    flops_per_token=flops_per_token,
    unit_flops_per_token=unit_flops_per_token,
    activation_bytes=activation_bytes,
    shrink=shrink,
    hugging_face=HUGGING_FACE,
)
