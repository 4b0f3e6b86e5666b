"""The rendezvous of a launch on one node: within the launcher, and with the ranks' store on the loopback address.

torch's own rendezvous (c10d, as with --standalone) listens on all addresses and unpickles what a client writes.
"""

from argparse import Namespace
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import parse_min_max_nnodes

from titanlite.ranks.network import LOOPBACK_ADDRESS, loopback_store
from titanlite.runtime.errors import UserError

BACKEND = "titanlite-one-node"
OF_TORCH = ("c10d", "static")
"""The backends of torchrun that connect nodes by torch's store."""


def stay_on_node(arguments: Namespace) -> None:
    """Replace the rendezvous of torchrun's options if they are for one node: it needs no port.

    arguments: torchrun's. The id of the run remains, and is new where torchrun would choose one.
    """
    if parse_min_max_nnodes(arguments.nnodes)[1] > 1 or not (
        arguments.standalone or arguments.rdzv_backend in OF_TORCH
    ):
        return
    is_static = arguments.rdzv_backend == "static"
    if arguments.standalone or (is_static and not arguments.rdzv_endpoint and arguments.master_port is None):
        arguments.rdzv_id = str(uuid4())
    arguments.standalone, arguments.node_rank = False, 0
    arguments.rdzv_backend, arguments.rdzv_endpoint = BACKEND, f"{LOOPBACK_ADDRESS}:0"


class OneNode(RendezvousHandler):
    """The only node of a launch."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        try:
            self._ranks_store = loopback_store(LOOPBACK_ADDRESS, 0)
        except OSError as error:
            remedy = "is the loopback interface up (ip link set lo up)?"
            raise UserError(f"the ranks cannot connect at {LOOPBACK_ADDRESS}: {error.strerror}; {remedy}") from None

    def next_rendezvous(self) -> RendezvousInfo:
        """A store of the launcher, rank and number of nodes, and the address of the ranks' store, which
        is the same after a restart."""
        address = RendezvousStoreInfo(LOOPBACK_ADDRESS, self._ranks_store.port)
        return RendezvousInfo(dist.HashStore(), 0, 1, address)

    @property
    def use_agent_store(self) -> bool:
        """Whether the launcher hosts the ranks' store."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node has to learn of it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(BACKEND, OneNode)
