"""An error of one rank reaches the others at once, wherever they wait for it."""

import errno
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.distributed import tensors
from posttrain.distributed.world import current_world, single_process
from posttrain.errors import InputError, RunError
from posttrain.models import writing
from posttrain.models.policy import Policy
from posttrain.recipe.run import CheckpointRecipe
from posttrain.training import checkpoint
from posttrain.training.checkpoint import Checkpoints
from posttrain.training.trainer import Trainer
from tests.training import small

from . import together


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


def unsendable():
    raise Unsendable("one", "two")


def stop():
    raise KeyboardInterrupt


def errors(model, out):
    """Errors of rank 0 or 1, each of which both ranks get; then the ranks still agree."""
    world = current_world()
    first, second = world.is_rank0, world.rank == 1
    with pytest.raises(OSError) as raised:
        world.on_rank0(full)
    assert raised.value.errno == errno.ENOSPC
    assert ("in full" in "".join(getattr(raised.value, "__notes__", ""))) == second
    with pytest.raises(Unsendable if first else RuntimeError, match="one two"):
        world.on_rank0(unsendable)
    with pytest.raises(OSError, match="No space"):
        world.on_all_ranks(full if second else int)
    with pytest.raises(OSError, match="No space"), single_process():
        full() if first else None
    trainer = SimpleNamespace(_world=world, callbacks=[SimpleNamespace(on_step=stop)])
    with pytest.raises(KeyboardInterrupt):
        Trainer._call(trainer, lambda callback: callback.on_step())

    policy = Policy(str(model), threads=1)
    with pytest.MonkeyPatch.context() as patch:  # rank 0 writes the first of several files while others gather
        patch.setattr(writing, "FILE_BYTES", 20_000)
        patch.setattr(writing, "write_weights", full)
        for write in (policy.save, policy.save_later, policy.export):
            with pytest.raises(OSError, match="No space"):
                write(Path(out) / "files")

    whole = dict(policy.trainable())
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr(tensors, "digests_of_files", full)
        with pytest.raises(OSError, match="No space"):
            tensors.write_tensors(Path(out) / "digests", whole)
    with pytest.MonkeyPatch.context() as patch:
        if second:
            patch.setattr(tensors.dcp.FileSystemWriter, "write_data", full)
        with pytest.raises(OSError, match="No space"):
            tensors.write_tensors(Path(out) / "data", whole)

    saved = Checkpoints(Path(out) / "checkpoints", "run", CheckpointRecipe())
    for failing, place in ((first, "digests_of_files"), (second, "write_tensors")):
        with pytest.MonkeyPatch.context() as patch:
            if failing:
                patch.setattr(checkpoint if first else tensors, "digests_of_files", full)
            saved.save(1, policy, whole, {"step": 1}, None, later=True)
            with pytest.raises(RunError, match="the disk is full"):
                saved.wait()
        assert saved.steps() == [], place
    saved.save(1, policy, whole, {"step": 1}, None)

    read = []
    with pytest.MonkeyPatch.context() as patch:
        digests = checkpoint.digests_of_files
        patch.setattr(checkpoint, "digests_of_files", lambda paths, run: read.extend(paths) or digests(paths, run))
        saved.load(1)
        files = world.gather([{str(path.relative_to(saved.path(1))) for path in read}])
        assert not files[0] & files[1]
        assert files[0] | files[1] == set(json.loads((saved.path(1) / "manifest.json").read_text())["files"])
        assert all(f"tensors/__{rank}_0.distcp" in files[rank] for rank in range(2))
        world.barrier()
        if first:
            (saved.path(1) / "tensors/__1_0.distcp").write_bytes(b"")
        world.barrier()
        with pytest.raises(InputError, match=r"__1_0.distcp is damaged: its checksum differs"):
            saved.load(1)
    assert world.gather([world.rank]) == [0, 1]


def test_both_ranks_get_an_error_of_one(tiny_model, tmp_path):
    together.succeed(2, [{"call": errors, "arguments": (tiny_model, str(tmp_path))}], tmp_path)


PLACES = [
    (0, "posttrain.models.writing:write_weights", 2),
    (0, "posttrain.training.checkpoint:Checkpoints._seal", 2),
    (0, "posttrain.runs.metrics:MetricsLog.write", 4),
    (0, "posttrain.training.trainer:report_results", 1),
    (1, "posttrain.distributed.tensors:digests_of_files", 2),
    (1, "posttrain.training.updater:Updater.without_gradient", 2),
    (1, "posttrain.training.optimizer:Optimizer.step", 3),
    (1, "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 2),
    (0, "torch.distributed.checkpoint.filesystem:FileSystemWriter.write_data", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1].rpartition(':')[2]}")
def test_a_run_ends_with_the_error_of_the_rank_that_failed(place, asynchronous, tiny_model, tmp_path):
    values = small.recipe_values(tiny_model, tmp_path, name="small")
    values["checkpoint"] |= {"asynchronous": asynchronous}
    began = time.monotonic()
    (codes,) = together.run(2, [{"values": values, "full": place}], tmp_path)
    logs = [(tmp_path / f"log-{rank}.txt").read_text() for rank in range(2)]
    assert sorted(code >= 100 for code in codes) == [False, True], (codes, *logs)
    assert min(codes) > 0
    assert any(text in "".join(logs) for text in ("No space left on device", "the disk is full"))
    assert time.monotonic() - began < 120
    together.succeed(2, [{"values": values, "resume": True}], tmp_path)
