"""Coefficients that follow a target, and collapse guards: thresholds, patience, state."""

import json
import math
import re

import pytest
import yaml

from posttrain.errors import InputError
from posttrain.recipe.catalogue import recipe_names
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.guards import GUARDS, GuardRecipe
from posttrain.recipe.loss import EntropyRecipe, KlRecipe
from posttrain.recipe.needs import advised, without_effect
from posttrain.recipe.reference import metrics_of
from posttrain.recipe.stages import STAGES
from posttrain.training.controllers import EntropyController, Guards, KlController
from tests.conftest import declared


def guards_with(**keys):
    return Guards(load_recipe([], ["environment.type=bandit", f"guards={json.dumps(keys)}"], "rl"))


def test_the_kl_coefficient_is_steered_to_the_target():
    controller = KlController(KlRecipe(coefficient=0.1, target=2.0, horizon=100))
    controller.update(2.2, 10)
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    controller.update(50.0, 50)
    assert controller.coefficient == pytest.approx(0.101 * (1 + 0.2 * 0.5))
    resumed = KlController(controller.recipe)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(0.0, 100_000)
    assert resumed.coefficient == pytest.approx(0.101 * 1.1 * 0.8)


def test_without_a_target_or_a_measurement_coefficients_stay():
    for target, kl in ((2.0, None), (2.0, math.nan), (None, 50.0)):
        controller = KlController(KlRecipe(coefficient=0.1, target=target))
        controller.update(kl, 10)
        assert controller.coefficient == 0.1
    entropy = EntropyController(EntropyRecipe(coefficient=0.01))
    entropy.update({"policy/entropy": 0.0})
    assert entropy.coefficient == 0.01


def test_the_entropy_coefficient_follows_the_target():
    controller = EntropyController(EntropyRecipe(target=1.0, coefficient=0.01, step=0.005, max_coefficient=0.02))
    assert controller.coefficient == 0.01
    for entropy, expected in [(0.5, 0.015), (0.9, 0.02), (0.9, 0.02), (1.5, 0.0), (None, 0.0), (0.5, 0.02)]:
        controller.update({} if entropy is None else {"policy/entropy": entropy})
        assert controller.coefficient == pytest.approx(expected)
    copy = EntropyController(controller.recipe)
    copy.load_state_dict(controller.state_dict())
    assert copy.coefficient == controller.coefficient
    # It is about the tokens that get the bonus.
    low = {"policy/entropy": 0.2}
    of_answers = {"policy/entropy": 2.0, "policy/bonus_entropy": 0.2}
    for tokens, metrics, expected in (("answer", low, 0.0), ("answer", of_answers, 0.1), ("all", low, 0.1)):
        controller = EntropyController(EntropyRecipe(target=1.0, step=0.1, tokens=tokens))
        controller.update(metrics)
        assert controller.coefficient == pytest.approx(expected)


def alarms(metrics, **keys):
    """Step -> the sentences of guards with these keys, where there are any."""
    guards = guards_with(**keys)
    found = {step: guards.check(values, step) for step, values in enumerate(metrics, 1)}
    return {step: sentences for step, sentences in found.items() if sentences}


def test_a_guard_fires_after_its_patience():
    for key, metric, threshold, bad, good in [
        ("max_zero_groups", "credit/zero_groups", 0.8, 0.9, 0.8),
        ("min_reward_spread", "reward/group_spread", 0.1, 0.05, 0.1),
        ("min_entropy", "policy/entropy", 0.1, 0.05, 0.1),
        ("max_gradient_norm", "optimizer/gradient_norm", 10.0, math.inf, 10.0),
        ("max_same_answers", "rollout/same_answer_share", 0.5, 0.6, 0.5),
    ]:
        values = [{metric: value} for value in (bad, good, bad, bad, bad, bad)]
        found = alarms(values, patience=2, thresholds={key: threshold})
        assert list(found) == [4, 6]
        ((first,), (again,)) = found.values()
        assert first.startswith(f"{metric} = {bad:.4g}")
        assert f"guards.thresholds.{key} = {threshold:g} since step 3" in first
        assert "since step 3" in again


def test_missing_metrics_do_not_count_a_guard_without_threshold_is_off_and_failures_are_per_episode():
    values = [{"policy/entropy": 0.0}, {}, {"policy/entropy": math.nan}, {"policy/entropy": 0.0}]
    assert "since step 1" in alarms(values, patience=2, thresholds={"min_entropy": 0.1})[4][0]
    off = {"max_repeated_share": None, "min_entropy": None}
    assert alarms([{"policy/repeated_share": 1.0, "policy/entropy": 0.0}], patience=1, thresholds=off) == {}
    values = [{"rollout/failed": 3.0, "rollout/episodes": 16.0}, {"rollout/failed": 4.0, "rollout/episodes": 16.0}]
    found = alarms([*values, {"rollout/failed": 4.0}], patience=1, thresholds={"max_failed": 0.2})
    assert list(found) == [2]
    assert "= 0.25 " in found[2][0]


def test_thresholds_that_are_not_given_keep_their_defaults():
    defaults = {guard.key: guard.threshold for guard in GUARDS}
    assert None not in defaults.values()
    assert GuardRecipe(thresholds={"min_entropy": 0.1}).thresholds == defaults | {"min_entropy": 0.1}
    recipe = load_recipe([], ["guards.thresholds.max_zero_groups=null"], "rl")
    assert recipe.guards.thresholds == defaults | {"max_zero_groups": None}
    with pytest.raises(InputError, match=r"guards\.thresholds"):
        load_recipe([], ["guards.thresholds.min_entropie=0.2"], "rl")


@pytest.mark.parametrize(("first", "alarms"), [(0.0, 1), (0.45, 1), (0.875, 0), (0.9375, 0)])
@pytest.mark.parametrize(
    ("key", "metric"), [("max_truncated", "rollout/truncated_share"), ("max_repeated_share", "policy/repeated_share")]
)
def test_shares_that_are_large_from_the_start_have_not_grown(key, metric, first, alarms):
    """Such as of answers at their limit, or of a model that repeats itself before training."""
    guards = guards_with(patience=3)
    shares = [first, 0.9, 1.0, 0.9]
    fired = [one for step, share in enumerate(shares, 1) for one in guards.check({metric: share}, step)]
    assert len(fired) == alarms
    resumed = guards_with(patience=3)
    resumed.load_state_dict(guards.state_dict())
    assert resumed.first[key] == first
    counted, resumed = guards_with(patience=2), guards_with(patience=2)
    counted.check({metric: 0.1}, 6)
    counted.check({metric: 1.0}, 7)
    resumed.load_state_dict(counted.state_dict())
    assert "since step 7" in resumed.check({metric: 1.0}, 8)[0]


HEALTHY = {"credit/zero_groups": 0.3, "reward/group_spread": 0.3, "policy/entropy": 0.5, "policy/kl_rollout_k3": 0.001}
HEALTHY |= {"optimizer/gradient_norm": 0.4, "policy/repeated_share": 0.02, "rollout/same_answer_share": 0.3}
HEALTHY |= {"rollout/truncated_share": 0.1, "rollout/rejected_share": 0.1, "rollout/failed": 0.0}
HEALTHY |= {"rollout/episodes": 24.0, "rollout/return": 0.4}


def test_each_collapse_alarms_by_default():
    assert alarms([HEALTHY] * 29) == {}
    for key, metric, value in [
        ("min_entropy", "policy/entropy", 0.003),
        ("max_same_answers", "rollout/same_answer_share", 1.0),
        ("max_failed", "rollout/failed", 5.0),
        ("max_ratio_kl", "policy/kl_rollout_k3", 0.5),
        ("max_gradient_norm", "optimizer/gradient_norm", 40.0),
        ("min_reward_spread", "reward/group_spread", 0.0),
    ]:
        ((sentence,),) = alarms([HEALTHY] * 2 + [HEALTHY | {metric: value}] * 5).values()
        assert f"guards.thresholds.{key} " in sentence


def test_a_policy_that_training_has_broken_needs_smaller_updates():
    for case, first, now, remedy in [
        ("lost both", 0.2, 0.0, "optimizer.learning_rate"),
        ("lost the signal by success", 0.2, 0.5, "rollout.episodes_per_group"),
        ("never had a signal", 1.0, 0.0, "rollout.episodes_per_group"),
    ]:
        lost = {"credit/zero_groups": 1.0, "rollout/return": now}
        found = alarms([{"credit/zero_groups": first, "rollout/return": 0.3}, lost, lost], patience=2)
        assert remedy in next(iter(found.values()))[0], case


def test_a_solved_task_is_no_collapse():
    guards = guards_with(patience=2)
    agreeing = {"credit/zero_groups": 0.95, "policy/repeated_share": 1.0}
    guards.check({"policy/repeated_share": 0.1}, 0)
    for step in (1, 2, 3):
        fired = guards.check(agreeing | {"rollout/success": 0.97}, step)
        assert not any("zero_groups" in sentence for sentence in fired)
        assert bool(fired) == (step == 2)  # the guard of repeated tokens does not look at success
    failing = agreeing | {"rollout/success": 0.03}
    assert guards.check(failing, 4)  # repeated tokens
    (sentence,) = guards.check(failing, 5)
    assert "zero_groups" in sentence
    assert "since step 4" in sentence


def test_every_guard_watches_a_declared_metric():
    metrics = metrics_of(STAGES["rl"])
    for guard in GUARDS:
        assert all(declared(key, metrics) for key in (guard.metric, guard.per) if key), guard.key


ENVIRONMENTS = ["environment.type=bandit"]
TEXTS = ["environment.type=text_task", "environment.prompts=a.jsonl", "environment.reward=exact"]
CASES = {
    "rl": ENVIRONMENTS,
    "rl at temperature 0": [*ENVIRONMENTS, "rollout.sampling.temperature=0"],
    "rl with a critic": [*ENVIRONMENTS, "credit.type=gae", "learner.epochs_per_step=4"],
    "rl with several updates": [*ENVIRONMENTS, "learner.updates_per_step=4", "rollout.failures.action=retry"],
    "rl with KL in the reward": [*TEXTS, "kl.coefficient=0.1", "kl.apply_to=reward", "rollout.missing_eos_penalty=1"],
    "rl with adapters": [*TEXTS, "model.lora.rank=4", "loss.type=gspo", "credit.type=rloo"],
    "distill": [*TEXTS, "teacher.path=teacher"],
    "distill jsd": [*TEXTS, "teacher.path=teacher", "loss.type=jsd", "learner.epochs_per_step=2"],
}
SHIPPED = {
    name: stage
    for name, file in recipe_names().items()
    if (stage := yaml.safe_load(file.read_text()).get("stage")) in ("rl", "distill")
}


@pytest.mark.parametrize("case", [*CASES, *SHIPPED])
def test_the_advised_key_is_accepted_by_the_recipe_and_has_an_effect(case):
    """Of each guard that is on, also for a policy that training has broken."""
    names, words = (
        ([], CASES[case]) if case in CASES else ([case], ["environment.prompts=a.jsonl"] * (case == "distill/self"))
    )
    stage = SHIPPED.get(case, case.split()[0])
    recipe = load_recipe(names, words, stage)
    warned = set(without_effect(recipe))
    for guard in GUARDS:
        if recipe.guards.thresholds[guard.key] is None:
            continue
        for fell in (False, True):
            first = 1.0 if guard.below else 0.0
            sentence = guard.sentence(recipe, 0.5, guard.threshold, "since step 1", first, fell)
            advice = sentence.split(": ", 1)[1]
            changes = re.findall(r"([a-z_.]+)=(\S+?)(?=,|$)", advice)
            assert len(changes) <= 1, sentence
            assert changes or guard.key == "max_rejected", sentence
            for key, value in changes:
                changed = load_recipe(names, [*words, f"{key}={value}"], stage)
                assert changed != recipe, sentence
                assert not set(without_effect(changed)) - warned, sentence
                if recipe.rollout.sampling.temperature == 0 and guard.key in ("max_same_answers", "max_zero_groups"):
                    assert fell or key == "rollout.sampling.temperature", sentence


def test_a_key_without_effect_is_not_advised():
    distill = load_recipe([], CASES["distill"], "distill")
    assert advised(distill, "kl.coefficient") == advised(distill, "rollout.missing_eos_penalty") == ""
    assert advised(distill, "rollout.missing_eos_penalty", "rollout.tokens_per_turn") == "rollout.tokens_per_turn=128"
    once = load_recipe([], ENVIRONMENTS, "rl")
    assert advised(once, "learner.epochs_per_step", "optimizer.learning_rate").startswith("optimizer.learning_rate=")
    rows = load_recipe([], ["data.train=a.jsonl", "epochs=3"], "sft")
    assert advised(rows, "steps", "epochs") == "epochs=6"
    assert advised(load_recipe([], ["data.train=a.jsonl", "steps=3"], "sft"), "steps", "epochs") == "steps=6"


def test_where_a_teacher_trains_the_returns_do_not_alarm():
    """A threshold that is given leaves the others as they are in this stage."""
    for words in ([], ["guards.thresholds.max_failed=0.2"]):
        recipe = load_recipe([], [*CASES["distill"], *words], "distill")
        off = {key for key, value in recipe.guards.thresholds.items() if value is None}
        assert off == {"min_reward_spread", "min_entropy", "max_same_answers"}
    guards = Guards(recipe)
    assert not [line for step in range(1, 9) for line in guards.check({"reward/group_spread": 0.0}, step)]
    on = load_recipe([], [*CASES["distill"], "guards.thresholds.min_entropy=0.1"], "distill")
    assert on.guards.thresholds["min_entropy"] == 0.1
