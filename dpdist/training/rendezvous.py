"""Connect the training workers on one interface, and on loopback in a local session.

Ray's own set-up would open torch's store on every interface, and gloo would take the address that
the host's name resolves to.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from dpdist.training.collectives import Reducer, let_go_of_the_group

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_TIMEOUT = timedelta(seconds=60)  # until a network cut or a dead worker is noticed


class ManualProcessGroupConfig(TorchConfig):
    """Tell Ray Train to leave the process group to `init_process_group`."""

    @property
    def backend_cls(self) -> Any:
        return Backend


def init_process_group(reducer: Reducer) -> None:
    """Create the process group on the address that Ray has for this node."""
    rank, world_size = reducer.rank, reducer.world_size
    if world_size == 1:
        return
    import ray
    from ray.train.collective import broadcast_from_rank_zero

    address = ray.util.get_node_ip_address()
    _choose_interface(address)
    listener = socket.create_server((address, 0)) if rank == 0 else None
    meeting = broadcast_from_rank_zero(listener.getsockname()[:2] if listener else None)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        meeting[0],
        meeting[1],
        world_size,
        is_master=listener is not None,
        timeout=_TIMEOUT,
        master_listen_fd=listener.detach() if listener else None,
    )
    dist.init_process_group(
        reducer.backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT
    )


def destroy_process_group() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        let_go_of_the_group()
        dist.destroy_process_group()


def _choose_interface(address: str) -> None:
    """Tell gloo and NCCL the interface of this node's address.

    On a cluster the user's own choice comes first. A session on loopback stays there: a variable
    that was set for a cluster would have its workers listen on the network.
    """
    if ipaddress.ip_address(address).is_loopback:
        os.environ |= dict.fromkeys(_INTERFACES, _interface_of(address))
        return
    os.environ.setdefault(_INTERFACES[0], _interface_of(address))
    os.environ.setdefault(_INTERFACES[1], os.environ[_INTERFACES[0]])


def _interface_of(address: str) -> str:
    """Return the name of the network interface with this address."""
    import psutil

    name: str
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise RuntimeError(f"no network interface of this host has the address {address}")
