"""Memory of a GPU that the learner shares with an engine in another process."""

import torch


def release_cached_memory(device: torch.device) -> None:
    """Return the freed blocks that torch keeps for reuse, so that an engine on the same GPU can allocate them.

    No effect on a CPU.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
