"""Weights on their way to the engines: what training changes, in pieces of bounded size, through Ray's object store."""

from collections.abc import Iterator
from typing import Any

from posttrain.models.policy import Policy

PIECE_BYTES = 256 * 2**20
"""Most bytes of a piece, unless one tensor has more."""

Packed = list[tuple[str, str, tuple[int, ...], Any]]
"""Name, type, shape and bytes of tensors; the bytes are numpy arrays, which readers on one machine share."""


def pieces_of(policy: Policy, keep: bool) -> list[Any]:
    """References to the pieces in the object store; of weights that are divided among processes, gathered by all of them.

    Only what is trained is sent: an engine starts from the same files. Not `keep`: the process helps to gather and keeps
    nothing.
    """
    import ray

    return [ray.put(piece) for piece in _packed(policy, keep)]


def _packed(policy: Policy, keep: bool) -> Iterator[Packed]:
    import torch

    piece: Packed = []
    size = 0
    for name, parameter in policy.trainable():
        tensor = parameter.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if not keep:
            continue
        # numpy has no bfloat16; bytes are the same to all.
        raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if piece and size + raw.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw))
        size += raw.nbytes
    if piece:
        yield piece


def take_piece(policy: Policy, piece: Packed) -> None:
    """Copy the tensors of a piece into a policy of the same recipe."""
    import torch

    own = dict(policy.trainable())
    with torch.no_grad():
        for name, dtype, shape, raw in piece:
            # The store's memory is read-only, which torch would warn about.
            tensor = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).reshape(shape)
            own[name].copy_(tensor)
