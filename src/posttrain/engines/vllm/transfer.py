"""Weights from the learner's GPU to vLLM's workers without a copy in CPU memory (`engine.weight_transfer`).

`ipc`: the workers open the memory of a bucket, on the same GPU. `nccl`: the learner broadcasts each bucket in a process
group with all workers; between CPUs, through gloo. Two interpreters import this module, so it imports only torch.
"""

import base64
import math
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

ALIGNMENT = 16
"""Each tensor in a buffer begins at a multiple of this number of bytes."""
Entry = list[Any]
"""Name, dtype, shape, and byte offset of a tensor in a buffer."""


def packed(bucket: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[Entry]]:
    """The bytes of all tensors as one uint8 tensor on their common device, and the entry of each tensor."""
    entries: list[Entry] = []
    size = 0
    for name, tensor in bucket.items():
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    device = next(iter(bucket.values())).device
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    for (*_, start), tensor in zip(entries, bucket.values(), strict=True):
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        buffer[start : start + len(raw)].copy_(raw)
    return buffer, entries


def unpacked(buffer: torch.Tensor, entries: list[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors in a buffer, which they share memory with."""
    for name, kind, shape, start in entries:
        dtype = getattr(torch, kind)
        count = dtype.itemsize * math.prod(shape)
        yield name, buffer[start : start + count].view(dtype).reshape(shape)


_FIELDS = (
    *("handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad"),
    *("ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync_required"),
)
"""Arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor` from the eighth on."""


def shared_memory(buffer: torch.Tensor) -> dict[str, Any]:
    """A handle, as plain JSON, with which another process opens a uint8 buffer on the same GPU. Keep the buffer until
    then."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(buffer)
    values = dict(zip(_FIELDS, arguments[7:], strict=True))
    encoded = {key: base64.b64encode(v).decode() if isinstance(v, bytes) else v for key, v in values.items()}
    return {"size": buffer.numel(), **encoded}


def opened_memory(shared: dict[str, Any], device: int) -> torch.Tensor:
    """The buffer of `shared_memory` in this process, on its GPU `device`."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    values = [base64.b64decode(shared[key]) if key.endswith("handle") else shared[key] for key in _FIELDS]
    storage: Any = torch.UntypedStorage
    size = torch.Size([shared["size"]])
    return rebuild_cuda_tensor(torch.Tensor, size, (1,), 0, storage, torch.uint8, device, *values)


def address_for(url: str | None) -> tuple[str, int]:
    """An address of this machine that the server at `url` reaches, None for servers on this machine; and a free port."""
    address = "127.0.0.1"
    if url is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(url).hostname, 1))  # sends nothing
            address = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def joined_group(address: str, port: int, rank: int, size: int, on_gpu: bool) -> Any:
    """The process group of the learner, which is rank 0, and all workers. Returns once every rank has called it."""
    limit = timedelta(seconds=300)
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    shared = dist.PrefixStore("weights", store)
    if on_gpu:
        return dist.ProcessGroupNCCL(shared, rank, size, dist.ProcessGroupNCCL.Options())
    return dist.ProcessGroupGloo(shared, rank, size, limit)


def broadcast(group: Any, buffer: torch.Tensor, still_wanted: Callable[[], None] = lambda: None) -> None:
    """Send the learner's `buffer` to every worker, or receive it into `buffer`. `still_wanted` is called while it waits, and
    raises to stop waiting."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    work = group.broadcast([buffer], options)
    while not work.is_completed():
        still_wanted()
        time.sleep(0.0002)
    work.wait()
