"""The public names: light to import, complete, and working with plain arguments."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
import torch
from pydantic import Field

import posttrain
from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.errors import InputError, RunError
from posttrain.recipe import components
from posttrain.recipe.credit import CREDITS
from posttrain.recipe.loss import LOSSES
from posttrain.recipe.stages import RlRecipe
from posttrain.verbs import read_recipe

from .test_plugins import install


class Letters(posttrain.Environment):
    """One turn; the reward is the number of letters `e` in the answer."""

    class Recipe(posttrain.EnvironmentRecipe):
        worth: float = 1.0

    def reset(self, seed):
        return posttrain.Observation([{"role": "user", "content": f"Goal {seed % 3}"}])

    def step(self, action):
        count = action.count("e")
        return posttrain.Step([], self.recipe.worth * count, True, False, {"success": count > 0})


@pytest.fixture(scope="module")
def policy(tiny_model):
    return posttrain.Policy(tiny_model)


@pytest.fixture(scope="module")
def engine(policy):
    return posttrain.LocalEngine(policy, slots=8)


def sampled(engine, **changes):
    values = {"seeds": range(3), "episodes_per_group": 4, "max_tokens": 6} | changes
    return posttrain.rollout(engine, posttrain.make_env(Letters, worth=2.0), **values)


def test_the_import_is_light_and_every_name_exists():
    code = (
        "import sys, posttrain\n"
        "heavy = [m for m in ('torch', 'transformers', 'pydantic', 'numpy', 'pandas') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
        "posttrain.PpoLoss, posttrain.make_env, posttrain.rl, posttrain.register_loss\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(posttrain.__all__) <= set(dir(posttrain))
    assert all(name == "__version__" or getattr(posttrain, name).__doc__ for name in posttrain.__all__)
    source = Path(posttrain.__file__).read_text()
    typed = {name for name in posttrain.__all__ if f" as {name}\n" in source}
    assert typed == set(posttrain.__all__) - {"__version__"}, "type checkers see every name"
    with pytest.raises(AttributeError, match="no attribute 'roll'"):
        posttrain.roll  # noqa: B018


def test_models_take_plain_settings(tiny_model):
    with_adapters = posttrain.Policy(str(tiny_model), seed=1, lora={"rank": 2})
    assert with_adapters.recipe.lora.rank == 2
    for make, model, keys, message in (
        (posttrain.Policy, tiny_model, {"dtyp": "float32"}, "no key dtyp; the nearest is dtype"),
        (posttrain.Policy, tiny_model, {"lora": {"rank": 0}}, r"lora\.rank"),
        (posttrain.Policy, with_adapters.recipe, {"dtype": "float32"}, "complete"),
        (posttrain.LocalEngine, with_adapters, {"slots": 0}, "slots"),
    ):
        with pytest.raises((InputError, TypeError), match=message):
            make(model, **keys)
    assert posttrain.RewardModel(tiny_model, seed=3).rewards([np.arange(4)], [np.arange(4) > 1]).shape == (1,)


def test_rollouts_are_groups_of_seeds_and_repeat(engine):
    episodes = sampled(engine)
    assert [(e.seed, e.group, e.index) for e in episodes] == [(s, s, i) for s in range(3) for i in range(4)]
    assert all(len(e.turns) == 1 and e.sampled_tokens <= 6 for e in episodes)
    again, other = sampled(engine), sampled(engine, step=1)
    assert [e.turns[0].answer for e in again] == [e.turns[0].answer for e in episodes]
    assert [e.turns[0].answer for e in other] != [e.turns[0].answer for e in episodes]
    greedy = sampled(engine, temperature=0.0)
    assert len({e.turns[0].answer for e in greedy if e.group == 0}) == 1
    with pytest.raises(InputError, match="temperature"):
        sampled(engine, temperature=-1.0)

    async def in_a_notebook():
        return sampled(engine)

    assert len(asyncio.run(in_a_notebook())) == 12


def test_failed_episodes_are_left_out_with_a_warning_or_stop(engine):
    class Broken(Letters):
        def step(self, action):
            if self.number == 1:
                raise ZeroDivisionError("broken")
            return super().step(action)

        def reset(self, seed):
            self.number = seed
            return super().reset(seed)

    env = posttrain.make_env(Broken)
    with pytest.warns(UserWarning, match="2 of 6 episodes failed.*ZeroDivisionError: broken"):
        episodes = posttrain.rollout(engine, env, range(3), episodes_per_group=2, max_tokens=2)
    assert [e.seed for e in episodes] == [0, 0, 2, 2]
    with pytest.raises(RunError, match="max_share"):
        posttrain.rollout(engine, env, [1], max_tokens=2)
    with pytest.warns(UserWarning, match="failed"):
        scored = posttrain.rollout(engine, env, range(3), max_tokens=2, failures={"action": "score", "reward": -3.0})
    assert scored[1].total_reward == -3.0


def test_environments_are_made_from_names_files_and_classes(tmp_path, monkeypatch):
    assert posttrain.make_env("bandit")().reset(0).messages
    assert posttrain.make_env(Letters, worth=3.0)().step("ee").reward == 6.0
    (tmp_path / "mine.py").write_text(PLUGIN[: PLUGIN.index("@posttrain")])
    assert posttrain.make_env(f"{tmp_path}/mine.py:Count")().step("e").reward == 1.0
    monkeypatch.setattr(components, "ENVIRONMENTS", dict(components.ENVIRONMENTS))
    posttrain.register_environment("letters")(Letters)
    assert posttrain.make_env("letters", worth=2.0)().step("e").reward == 2.0
    with pytest.raises(InputError, match="built-in environment 'bandit'"):
        posttrain.register_environment("bandit")
    with pytest.raises(InputError, match="there is no environment 'bandid'"):
        posttrain.make_env("bandid")
    with pytest.raises(InputError, match="no key worthy; the nearest is worth"):
        posttrain.make_env(Letters, worthy=1.0)


def test_advantages_by_name(engine):
    episodes = sampled(engine)
    for name in set(CREDITS.names()) - {"gae", "bilevel_gae", "remax", "gdpo", "optimal_token_baseline"}:
        credit = posttrain.advantages(episodes, name)
        for episode, streams in zip(episodes, credit.values, strict=True):
            for stream, values in zip(episode.streams, streams, strict=True):
                assert (values.dtype, values.shape) == (np.float32, stream.ids.shape), name
                assert not values[~stream.sampled].any(), name
    same = compute_advantages(episodes, CREDITS.make("grpo"), reward_streams(episodes)).values
    for credit in ("grpo", CREDITS.make("grpo"), {"type": "grpo"}):
        found = posttrain.advantages(episodes, credit).values
        assert all(np.array_equal(a[0], b[0]) for a, b in zip(found, same, strict=True))


def test_advantages_that_need_more(engine):
    episodes = sampled(engine)
    values = [[np.zeros(len(s), dtype=np.float32) for s in e.streams] for e in episodes]
    for name in ("gae", "bilevel_gae"):
        with pytest.raises(InputError, match="values of a critic"):
            posttrain.advantages(episodes, name)
        assert posttrain.advantages(episodes, name, values=values, whiten=False).values
    with pytest.raises(RunError, match=r"gdpo: no episode reports scores; .* names that it reports \(return\)"):
        posttrain.advantages(episodes, "gdpo")
    for place, episode in enumerate(episodes):
        episode.turns[-1].info["scores"] = {"score": episode.total_reward, "format": float(place % 2), "length": 1.0}
    flat = [streams[-1].sum() for streams in posttrain.advantages(episodes, "gdpo").values]
    assert np.sign(flat).tolist() == [-1.0, 1.0] * (len(episodes) // 2)
    with pytest.raises(RunError, match=r"has the score 'form'; .*\(format, length, return, score\)"):
        posttrain.advantages(episodes, "gdpo", weights={"form": 1.0})
    assert posttrain.advantages(episodes, "gdpo", weights={"return": 1.0, "format": 0.1}).values
    with pytest.raises(RunError, match="greedy"):
        posttrain.advantages(episodes, "remax")
    own = posttrain.advantages(episodes, "remax", greedy_returns={0: 1.0, 1: 1.0, 2: 1.0})
    assert own.values[0][0][episodes[0].streams[0].sampled] == pytest.approx(episodes[0].total_reward - 1)
    with pytest.raises(InputError, match=r"there is no credit 'rlo' \(did you mean rloo\?\)"):
        posttrain.advantages(episodes, "rlo")
    with pytest.raises(InputError, match="no key discont; the nearest is discount"):
        posttrain.advantages(episodes, "reinforce", discont=0.5)


def test_energies_are_the_squared_gradients_of_the_logits(tiny_model):
    policy = posttrain.Policy(str(tiny_model))
    episodes = sampled(posttrain.LocalEngine(policy))
    with pytest.raises(InputError, match=r"pass `learner\.energies\(episodes\)`"):
        posttrain.advantages(episodes, "optimal_token_baseline")
    energies = posttrain.Learner(policy, temperature=0.7).energies(episodes)
    stream, found = episodes[0].streams[0], energies[0][0]
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    logits = plain(input_ids=torch.from_numpy(stream.ids)[None]).logits[0].detach() / 0.7
    for place in np.flatnonzero(stream.sampled):
        row = logits[place - 1].clone().requires_grad_()
        torch.log_softmax(row, -1)[stream.ids[place]].backward()
        assert found[place] == pytest.approx(float(row.grad.square().sum()), rel=1e-4)
    assert not found[~stream.sampled].any()
    credit = posttrain.advantages(episodes, "optimal_token_baseline", energies=energies)
    assert [len(own) for own in credit.values] == [len(e.streams) for e in episodes]


def test_the_learner_moves_the_policy_towards_credit(tiny_model):
    policy = posttrain.Policy(tiny_model)
    engine = posttrain.LocalEngine(policy)
    learner = posttrain.Learner(policy, learning_rate=3e-2, loss="ppo", kl=0.01)
    returns = []
    for step in range(8):
        episodes = sampled(engine, episodes_per_group=16, step=step)
        returns.append(np.mean([e.total_reward for e in episodes]))
        metrics = learner.update(episodes, posttrain.advantages(episodes, "rloo"))
        assert metrics["policy/mismatch"] < 1e-4
        assert metrics["optimizer/skipped"] == 0.0
        assert policy.version == step + 1
    assert np.mean(returns[-2:]) > np.mean(returns[:2]) + 1.0
    assert metrics["policy/kl"] > 0
    with pytest.raises(ValueError, match="other episodes"):
        learner.update(episodes[:1], posttrain.advantages(episodes, "rloo"))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_adapters_with_dropout_take_old_logprobs_from_the_learner(dropout, tiny_model):
    policy = posttrain.Policy(tiny_model, lora={"rank": 2, "dropout": dropout})
    learner = posttrain.Learner(policy)
    episodes = sampled(posttrain.LocalEngine(policy))
    learner.update(episodes, posttrain.advantages(episodes, "rloo"))
    old = [logprobs for _, logprobs in learner._old.values()]
    assert len(old) == len(episodes)
    assert all((logprobs is not None) == (dropout > 0) for logprobs in old)


def test_settings_of_the_learner(policy):
    loss, kl = posttrain.PpoLoss(clip_high=0.28), posttrain.KlRecipe(coefficient=0.1, estimator="k2")
    learner = posttrain.Learner(policy, loss=loss, kl=kl, betas=(0.9, 0.99))
    assert (learner.loss.clip_high, learner.kl.estimator, learner.optimizer.recipe.betas) == (0.28, "k2", (0.9, 0.99))
    assert posttrain.Learner(policy, loss={"type": "gspo", "clip_low": 0.01}).loss.aggregation == "sequence_mean"
    for keys, message in (
        ({"loss": "ppoo"}, r"there is no loss 'ppoo' \(did you mean ppo\?\)"),
        ({"learning_rte": 1.0}, "learning_rte; the nearest is learning_rate"),
        ({"kl": {"coefficient": 0.1, "apply_to": "reward"}}, "apply_to"),
    ):
        with pytest.raises(InputError, match=message):
            posttrain.Learner(policy, **keys)
    assert any(p.requires_grad for p in policy.model.parameters())
    assert torch.is_grad_enabled()


# -- registered losses, credits and environments ---------------------------------------------------------------------


@pytest.fixture
def registered():
    """A loss and a credit that are gone after the test."""

    @posttrain.register_loss("plain")
    def plain(logprobs, batch, *, scale: Annotated[float, Field(gt=0, description="A factor.")] = 1.0):
        """Policy gradient times a factor."""
        return -scale * batch.advantages * logprobs, {"policy/scale": (scale * len(logprobs), len(logprobs))}

    @posttrain.register_credit("shifted")
    def shifted(returns, lengths, *, by: float):
        return [np.full(n, r - by) for r, n in zip(returns, lengths, strict=True)]

    yield
    del LOSSES._kinds["plain"], CREDITS._kinds["shifted"]


def test_a_registered_loss_and_credit_are_used(registered, tiny_model):
    policy = posttrain.Policy(tiny_model)
    episodes = sampled(posttrain.LocalEngine(policy))
    credit = posttrain.advantages(episodes, "shifted", by=0.5)
    assert credit.values[0][0].max() == pytest.approx(max(episodes[0].total_reward - 0.5, 0))
    metrics = posttrain.Learner(policy, loss={"type": "plain", "scale": 3.0}).update(episodes, credit)
    assert metrics["policy/scale"] == 3.0
    twin = posttrain.Policy(tiny_model)
    expected = posttrain.Learner(twin, loss="reinforce").update(episodes, credit)
    assert metrics["optimizer/gradient_norm"] == pytest.approx(3 * expected["optimizer/gradient_norm"], rel=1e-4)


def test_recipes_are_as_strict_with_registered_kinds(registered):
    loss = {"type": "plain", "scale": 2, "aggregation": "sequence_mean"}
    recipe = read_recipe("rl", loss=loss, credit={"type": "shifted", "by": 1})
    assert (recipe.loss.scale, recipe.loss.aggregation, recipe.credit.by) == (2.0, "sequence_mean", 1.0)
    written = recipe.model_dump(mode="json")
    assert (written["loss"]["scale"], written["credit"]["by"]) == (2.0, 1.0)
    assert RlRecipe.model_validate(written) == recipe
    for section, keys, message in [
        ("loss", {"type": "plain", "scal": 2}, "argument loss: there is no key loss.scal; the nearest is loss.scale"),
        ("loss", {"type": "plain", "scale": 0}, "loss.scale is 0; it must be a number above 0"),
        ("loss", {"type": "plain", "scale": "2"}, 'loss.scale is "2"; it must be a number'),
        ("loss", {"type": "plan"}, r'loss.type is "plan" \(did you mean plain\?\); it must be ppo, .* or plain'),
        ("loss", {"clip_low": 0.1, "type": "plain"}, "it belongs to loss.type ppo, .*, not plain"),
        ("credit", {"type": "shifted"}, "credit.by is missing; it must be a number"),
    ]:
        with pytest.raises(InputError, match=message):
            read_recipe("rl", **{section: keys})
    # A later type drops the keys that only the earlier one has.
    changed = read_recipe("rl", {"loss": {"type": "plain", "scale": 2}}, loss={"type": "ppo"})
    assert changed.loss.type == "ppo"


def test_a_registered_function_has_to_fit(registered, policy, engine):
    def clashing(logprobs, batch, *, aggregation: int = 1):
        return logprobs

    for name, loss, message in (
        ("ppo", lambda logprobs, batch: logprobs, "built-in loss 'ppo'"),
        ("untyped", lambda logprobs, batch, *, scale=1.0: logprobs, "no type annotation"),
        ("clashing", clashing, "aggregation"),
    ):
        with pytest.raises(ValueError, match=message):
            posttrain.register_loss(name)(loss)
    posttrain.register_loss("plain")(lambda logprobs, batch: logprobs.sum())
    posttrain.register_credit("shifted")(lambda returns: returns[:-1])
    episodes = sampled(engine)
    with pytest.raises(RunError, match="11 advantages for 12 episodes"):
        posttrain.advantages(episodes, "shifted")
    learner = posttrain.Learner(policy, loss="plain", entropy=0.1)
    credit = posttrain.advantages(episodes, CREDITS.make("arpo"))
    with pytest.raises(RunError, match="one per sampled token"):
        learner.update(episodes, credit)


# -- plug-ins of another wheel ---------------------------------------------------------------------------------------

PLUGIN = '''
import posttrain

class Count(posttrain.Environment):
    """Answer with an e."""
    def reset(self, seed): return posttrain.Observation([{"role": "user", "content": "Goal"}])
    def step(self, action): return posttrain.Step([], float(action.count("e")), True, False, {"success": "e" in action})

@posttrain.register_loss("plain")
def plain(logprobs, batch, *, scale: float = 1.0):
    """Policy gradient."""
    return -scale * batch.advantages * logprobs

def shifted(returns, *, by: float = 0.0):
    """The return minus a number."""
    return returns - by

def count(word: str) -> None:
    """Count the letter e."""
    print(word.count("e"), "e")
'''
POINTS = """
[posttrain.environments]
count = tiny_plugin:Count
[posttrain.losses]
plain = tiny_plugin:plain
[posttrain.credits]
shifted = tiny_plugin:shifted
[posttrain.commands]
count = tiny_plugin:count
"""
USE = """
import sys
import posttrain
from posttrain.cli.main import main
from posttrain.recipe.loss import LOSSES
assert "tiny_plugin" not in sys.modules
posttrain.PpoLoss()
assert "tiny_plugin" not in sys.modules and "plain" in LOSSES.names()
assert main(["count", "eel"]) == 0
result = posttrain.rl(
    model={"path": sys.argv[1]}, steps=1, environment={"type": "count"}, loss={"type": "plain", "scale": 2.0},
    credit={"type": "shifted", "by": 0.5}, rollout={"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 4},
    evaluation={"every": 0, "seeds": {"start": 1000000, "count": 1}, "final_seeds": {"start": 2000000, "count": 2}},
)
assert result.metrics[0]["optimizer/skipped"] == 0, result.metrics
assert "scale: 2.0" in (result.run / "recipe.yaml").read_text()
assert main(["recipe", "loss"]) == 0
assert main(["rl", "loss.type=plain", "loss.scal=1", "--dry-run"]) == 2
"""


@pytest.mark.slow
def test_a_wheel_adds_an_environment_a_loss_a_credit_and_a_command(tmp_path, tiny_model):
    install(tmp_path, "tiny-plugin", POINTS, tiny_plugin=PLUGIN)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", USE, str(tiny_model)]
    done = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 e" in done.stdout
    assert "loss.scale" in done.stdout
    assert "there is no key loss.scal; the nearest is loss.scale" in done.stderr


# -- stages ------------------------------------------------------------------------------------------------------------


def small(tiny_model, folder, **changes):
    """Keyword arguments of a run of two steps."""
    seeds = {"seeds": {"start": 1_000_000, "count": 2}, "final_seeds": {"start": 2_000_000, "count": 3}}
    rollout = {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 4}
    keys = {"runs": folder, "model": {"path": tiny_model}, "rollout": rollout, "evaluation": {"every": 1, **seeds}}
    return keys | changes


def test_arguments_are_overrides_of_recipes(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("stage: rl\nsteps: 5\noptimizer: {learning_rate: 1e-5}\nrollout: {groups_per_step: 4}\n")
    changes = {"steps": 10, "optimizer": {"betas": (0.8, 0.9)}, "rollout.groups_per_step": 2}
    recipe = read_recipe("rl", file, {"seed": 3}, **changes)
    assert (recipe.steps, recipe.seed, recipe.rollout.groups_per_step) == (10, 3, 2)
    assert (recipe.optimizer.learning_rate, recipe.optimizer.betas) == (1e-5, (0.8, 0.9))
    assert read_recipe("rl", recipe, steps=11).seed == 3
    assert read_recipe("rl", loss=posttrain.CispoLoss()).loss.type == "cispo"
    for arguments, message in [
        ({"step": 3}, "argument step: there is no key step; the nearest is steps"),
        ({"optimizer": {"learning_rate": -1.0}}, "argument optimizer: optimizer.learning_rate is -1.0"),
        ({"reward": {"pth": "x"}}, "there is no key reward.pth"),
    ]:
        with pytest.raises(InputError, match=message):
            read_recipe("rl", **arguments)


def test_a_run_with_callbacks_and_a_function_as_reward(tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "Goal {n}", "label": "e"}}\n' for n in range(9)))
    events = []

    class Record(posttrain.Callback):
        def on_step(self, step, metrics):
            events.append(("step", step, metrics["rollout/score/length"] >= 0))

        def on_evaluation(self, step, values):
            events.append(("evaluation", step, values["n"]))

        def on_episodes(self, step, episodes):
            events.append(("episodes", step, len(episodes)))

    async def letters(prompt, answer, label, **row):
        await asyncio.sleep(0)
        assert prompt.startswith("Goal")
        return {"score": answer.count(label), "length": len(answer)}

    seeds = {"seeds": {"start": 0, "count": 4}}
    evaluation = {"every": 1, "seeds": {"start": 4, "count": 2}, "final_seeds": {"start": 6, "count": 3}}
    changes = {"environment": {"prompts": tmp_path / "rows.jsonl"}, "evaluation": evaluation, "steps": 2}
    arguments = small(tiny_model, tmp_path, **changes, reward=letters, **seeds)
    result = posttrain.rl(**arguments, callbacks=[Record()], checkpoint={"keep_state": "always"})
    expected = [("step", 1, True), ("step", 2, True), ("episodes", 1, 4), ("episodes", 2, 4)]
    assert sorted(events) == sorted([*expected, *(("evaluation", n, 2) for n in range(3))])
    assert (result.run, result.stage) == (tmp_path / "run", "rl")
    assert (result.model / "config.json").is_file()
    assert [row["step"] for row in result.metrics] == [1, 2]
    assert [row["step"] for row in result.evaluations] == [0, 1, 2]
    assert [row["n"] for row in result.evaluation] == [3, 3]
    for row in result.evaluation:  # equal returns have no interval
        assert row["return_low"] is None or row["return_low"] <= row["return"] <= row["return_high"]
    assert result.best_step in (0, 1, 2)
    assert posttrain.Result.open(result.run) == result
    assert len(result.episodes()) == 8
    assert len(result.episodes(2, "evaluation")) == 2
    table = result.metrics_table()
    assert list(table.index) == [1, 2]
    assert "rollout/return" in table
    assert set(result.episodes_table().columns) >= {"step", "seed", "return", "answer", "score", "length"}
    # The function is no longer there in another process; here it is found again.
    longer = posttrain.rl(resume=result.run, steps=3)
    assert [row["step"] for row in longer.metrics] == [1, 2, 3]
    for keys, message in (
        ({"resume": result.run, "seed": 4}, "a resumed run keeps its recipe"),
        ({"resume": result.run, "overwrite": True}, "give only one of them"),
        (arguments, "the run .* exists"),
    ):
        with pytest.raises(InputError, match=message):
            posttrain.rl(**keys)


def test_an_exception_of_a_callback_stops_the_run(tiny_model, tmp_path):
    class Stop(posttrain.Callback):
        def on_step(self, step, metrics):
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        posttrain.rl(**small(tiny_model, tmp_path, environment={"type": Letters}), steps=2, callbacks=[Stop()])
    assert len(posttrain.Result.open(tmp_path / "run").metrics) == 1
    with pytest.raises(InputError, match="callbacks"):
        posttrain.rl(hardware={"processes": 2}, callbacks=[Stop()], runs=tmp_path, name="two")


def test_rows_of_a_data_set(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1?", "completion": "2"}\n{"question": "2 + 2?"}\n')
    with pytest.warns(UserWarning, match="1 row dropped"):
        (row,) = posttrain.load_dataset(file, columns={"prompt": "question"})
    assert [message["content"] for message in row.messages] == ["1 + 1?", "2"]
    assert len(posttrain.load_dataset(file, "prompt", columns={"prompt": "question"})) == 2
    for source, keys, message in ((file, {"strict": True}, "row 2"), (tmp_path / "absent.jsonl", {}, r"absent\.jsonl")):
        with pytest.raises(InputError, match=message):
            posttrain.load_dataset(source, columns={"prompt": "question"}, **keys)
