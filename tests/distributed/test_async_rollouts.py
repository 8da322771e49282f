"""Sampling ahead of several learners: the first process samples, and all learn what one process alone would learn."""

import pytest

from tests.training import async_runs

from . import together
from .test_parity import models, same_weights  # noqa: F401


@pytest.mark.slow
def test_two_learners_match_one_and_resume_to_the_same_bits(models, tmp_path):  # noqa: F811
    def values(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        return (
            async_runs.values(
                models,
                folder,
                "small",
                {"async_rollouts": 1, "filter": {"type": "none"}},
                checkpoint={"every": 1, "keep": 2},
            )
            | changes
        )

    for processes in (1, 2):
        together.succeed(processes, [{"values": values(f"{processes}")}], tmp_path)
    killed = values("killed")
    dies = (1, "posttrain.training.updater:Optimizer.step", 5)
    together.run(2, [{"values": killed, "die": dies}], tmp_path)
    together.succeed(2, [{"values": killed, "resume": True}], tmp_path)
    one, two, resumed = (tmp_path / name / "small" / "model" / "model.safetensors" for name in ("1", "2", "killed"))
    same_weights(one, two, 1e-5)
    assert two.read_bytes() == resumed.read_bytes()
