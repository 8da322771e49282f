"""What a failed collective call is reported as."""

import pytest
import torch
import torch.distributed as dist

from posttrain.distributed.world import RankLost, World, communication_error
from posttrain.errors import InputError, RunError
from posttrain.recipe.hardware import HardwareRecipe

SHARED_MEMORY = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
    "2.27.5\nncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
    "Last error:\nError while creating shared memory segment /dev/shm/nccl-DBJM0g (size 33030528)"
)
REMOTE = "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited\nncclRemoteError: A call failed possibly due to a network"


def test_an_error_of_nccl_keeps_its_cause():
    error = communication_error(dist.DistBackendError(SHARED_MEMORY))
    assert type(error) is RunError
    assert "Error while creating shared memory segment /dev/shm/nccl-DBJM0g" in str(error)
    assert "--shm-size" in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError(REMOTE),
        dist.DistNetworkError("recvValue failed on SocketImpl: Connection reset by peer"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
    ],
)
def test_a_process_that_exited_is_named_as_the_cause(error):
    explained = communication_error(error)
    assert isinstance(explained, RankLost)
    assert str(explained).startswith("another process of the run exited early (")
    assert str(error).split("\n")[0][:40] in str(explained)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("shapes"), InputError("a key")])
def test_other_errors_stay_what_they_are(error, monkeypatch):
    assert communication_error(error) is None

    def failing(*args, **kwargs):
        raise error

    monkeypatch.setattr(dist, "all_reduce", failing)
    with pytest.raises(type(error), match=str(error)):
        World(HardwareRecipe(), size=2).sum([torch.zeros(1)])
