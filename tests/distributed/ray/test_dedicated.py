"""Critic and reference model in processes of their own, on a real local cluster."""

from pathlib import Path

import pytest
import torch

from posttrain.distributed.tensors import read_all
from posttrain.errors import InputError
from posttrain.planning.workers import refuse_placement
from posttrain.recipe.compose import load_recipe
from tests.distributed.ray.conftest import Disturber
from tests.distributed.ray.test_run import run_disturbed, run_placed, values, without_warnings
from tests.training import small

ONE_TURN = {"type": f"{Path(small.__file__).parent / 'letters.py'}", "max_turns": 1}
PPO = {
    "credit": {"type": "gae"},
    "critic": {"updates_before_policy": 1, "optimizer": {"learning_rate": 1e-3}},
    "rollout": {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 6, "tokens_per_episode": 700},
}
"""Both models are used in every step, and nothing is played twice."""


def ppo(tiny, runs, **hardware):
    return values(tiny, runs, **PPO, **({"hardware": {"ray": "auto", **hardware}} if hardware else {}))


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """The run in one process, without Ray."""
    runs = tmp_path_factory.mktemp("alone")
    assert small.run(ppo(tiny_model, runs)) == 0, (runs / "log.txt").read_text()
    return runs / "small"


def checkpoint(run):
    """All tensors of the last checkpoint but random states, those of the critic under the names of a run in one process."""
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    tensors = read_all(last / "tensors")
    if (last / "critic").is_dir():
        assert not any(name.startswith("critic/") for name in tensors)
        tensors |= {f"critic/{name}": tensor for name, tensor in read_all(last / "critic").items()}
    return {name: tensor for name, tensor in sorted(tensors.items()) if not name.startswith("random/")}


def without_counts(run):
    """Metrics without the count of tokens, in which the learner does not count what the reference model computes."""
    return [{k: v for k, v in line.items() if k != "tokens/trained"} for line in without_warnings(run)]


def assert_same(one, other):
    expected, found = checkpoint(one), checkpoint(other)
    assert list(expected) == list(found)
    assert any(name.startswith("critic/optimizer") for name in found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    (weights,), (others,) = ((run / "model").glob("*.safetensors") for run in (one, other))
    assert weights.read_bytes() == others.read_bytes()
    assert small.episodes(one) == small.episodes(other)
    assert without_counts(one) == without_counts(other)


@pytest.mark.slow
def test_a_dedicated_critic_and_reference_learn_the_same_bits_if_any_worker_dies(cluster, tiny_model, alone, tmp_path):
    """The reference model is restarted alone; learner and critic continue from the last checkpoint together."""
    hardware = {"dedicated": {"critic": 1, "reference": 1}, "environments": {"count": 1}}

    def disturb(disturber: Disturber):
        disturber.until(1)
        disturber.signal("reference model 0")
        disturber.until(2)
        disturber.signal("critic 0")

    deaths, shown = run_disturbed(ppo(tiny_model, tmp_path / "runs", **hardware), disturb)
    assert any(death.startswith("reference model 0 died") for death in deaths), deaths
    assert any(death.startswith("critic 0 died") for death in deaths), deaths
    assert "critic 0 died: its process was killed or crashed; all learners continue from the last checkpoint" in shown
    assert_same(alone, tmp_path / "runs" / "small")


@pytest.mark.slow
def test_two_processes_of_the_critic_learn_the_same_to_rounding(cluster, tiny_model, alone, tmp_path):
    run_placed(ppo(tiny_model, tmp_path / "runs", dedicated={"critic": 2, "reference": 2}))
    expected, learned = checkpoint(alone), checkpoint(tmp_path / "runs" / "small")
    assert list(expected) == list(learned)
    for name, tensor in expected.items():
        if name.startswith("critic/weights"):
            torch.testing.assert_close(learned[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("credit", [{"type": "drca_published", "beta": 0.8}, {"type": "prefix", "probe": "one_pass"}])
def test_unit_credit_of_a_reward_model_on_a_worker_is_the_same(cluster, tiny_model, paid, tmp_path, credit):
    """The published placement of DRCA: reward model, critic and reference model in processes of their own."""
    units = {"unit_credit": credit | {"segmenter": {"type": "token"}}}
    kept = PPO | paid | units | {"steps": 2, "environment": ONE_TURN}
    for name in ("alone", "placed"):
        (tmp_path / name).mkdir()
    assert small.run(values(tiny_model, tmp_path / "alone", **kept)) == 0, (tmp_path / "alone" / "log.txt").read_text()
    hardware = {"ray": "auto", "rewards": {"count": 1}, "dedicated": {"critic": 1, "reference": 1}}
    run_placed(values(tiny_model, tmp_path / "placed", hardware=hardware, **kept))
    assert any("units/credit" in line for line in small.metrics(tmp_path / "placed" / "small"))
    assert_same(tmp_path / "alone" / "small", tmp_path / "placed" / "small")


BASE = ["environment.type=bandit", "hardware.ray=auto"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hardware.dedicated.critic=1"], "there is no critic with weights of its own; set credit.type=gae"),
        (["hardware.dedicated.critic=1", "credit.type=gae", "critic.backbone=shared"], "there is no critic with"),
        (["hardware.dedicated.reference=1"], "there is no KL penalty with a fixed reference model"),
        (["engine.type=vllm", "engine.weight_transfer=nccl"], "engine.weight_transfer: nccl does not work with"),
    ],
)
def test_a_placement_that_a_run_does_not_have_is_refused(words, said):
    with pytest.raises(InputError, match=said):
        refuse_placement(load_recipe([], [*BASE, *words], "rl"))
