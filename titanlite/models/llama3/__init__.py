"""The llama3 family."""

from titanlite.models.decoder.activations import activation_bytes
from titanlite.models.decoder.flops import flops_per_token, unit_flops_per_token
from titanlite.models.decoder.model import init
from titanlite.models.family import Family
from titanlite.models.llama3.config import FLAVORS, Llama3Config, check, shrink
from titanlite.models.llama3.hf import HUGGING_FACE
from titanlite.models.llama3.model import Llama3
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
