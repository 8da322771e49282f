"""On-policy distillation: the policy approaches its teacher, gradients do not depend on the split, wrong settings are refused."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.data.rendering import Renderer
from posttrain.errors import InputError
from posttrain.losses.distillation import candidate_logprobs
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.distill import DistillRecipe
from posttrain.recipe.loss import KlRecipe
from posttrain.recipe.model import LearnerRecipe, ModelRecipe, OptimizerRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.recipe.teacher import TeacherRecipe
from posttrain.rollout.driver import rollout
from posttrain.seeds import random_stream
from posttrain.training.controllers import RewardShaping, RunningStatistics
from posttrain.training.distill import DistillationObjective, distillation_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.teacher import WHOLE, open_teacher
from posttrain.training.updater import Updater, samples_of_episodes

from ..conftest import make_tokenizer, save_tiny_model
from . import small
from .letters import Letters
from .preferences import write_jsonl

LOSSES = {
    "sampled": {"type": "reverse_kl"},
    "sequence": {"type": "reverse_kl", "discount": 0.9, "aggregation": "sequence_mean"},
    "top_k": {"type": "jsd", "beta": 1.0, "top_k": 7},
    "whole": {"type": "jsd", "beta": 0.3, "top_k": None, "aggregation": "constant", "constant": 11.0},
}


def values_of(tiny, runs, teacher, **changes):
    """A small run of the stage; see `small.recipe_values`."""
    values = small.recipe_values(tiny, runs)
    for key in ("kl", "entropy"):
        values.pop(key)
    values["rollout"] = {key: value for key, value in values["rollout"].items() if key != "filter"}
    return values | {"stage": "distill", "teacher": teacher} | changes


def loss_of(name):
    return DistillRecipe(teacher={"path": "x"}, loss=LOSSES[name]).loss


@pytest.fixture(scope="module")
def played(tiny_model):
    """A policy and some of its episodes, of different lengths."""
    policy = Policy(ModelRecipe(path=str(tiny_model), threads=1))
    engine = posttrain.LocalEngine(policy)
    env = posttrain.make_env(Letters, max_turns=2)
    return policy, rollout(engine, env, seeds=range(3), episodes_per_group=2, max_tokens=5, tokens_per_episode=300)


def teacher_for(recipe, policy, top_k=None, environment="bandit", seed=0):
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    settings = environment_recipe({"type": environment}) if isinstance(environment, str) else environment
    rollout, learner = {"failures": {"max_share": 0.5}}, {"logits_per_chunk": 4}
    stage = DistillRecipe(teacher=recipe, environment=settings, rollout=rollout, learner=learner)
    return open_teacher(stage, policy, renderer, seed, top_k)[0]


def scored(played, teacher_model, name):
    policy, episodes = played
    samples = samples_of_episodes(episodes, 1)
    loss = loss_of(name)
    top_k = (loss.top_k or WHOLE) if loss.type == "jsd" else None
    teacher = teacher_for(TeacherRecipe(path=str(teacher_model)), policy, top_k)
    kept, samples, warnings, metrics = teacher.score_episodes(episodes, samples)
    assert (len(kept), warnings, metrics) == (len(episodes), [], {})
    return samples


def whole_logprobs(directory, sample):
    """[n, V] of the model at `directory` at the sampled tokens of `sample`, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.stream.ids)[None]).logits[0]
    return torch.log_softmax(logits.float(), 1)[np.flatnonzero(sample.stream.sampled) - 1]


@pytest.mark.parametrize("name", ["sampled", "top_k", "whole"])
def test_the_teacher_scores_the_tokens_that_the_policy_sampled(played, teacher_model, name):
    for sample in scored(played, teacher_model, name)[:3]:
        expected = whole_logprobs(teacher_model, sample)
        ids = torch.from_numpy(sample.stream.ids[sample.stream.sampled])
        np.testing.assert_allclose(sample.teacher.logprobs, expected.gather(1, ids[:, None])[:, 0], atol=2e-5)
        if name == "sampled":
            assert sample.teacher.distribution is None
        elif name == "whole":
            np.testing.assert_allclose(sample.teacher.distribution, expected, atol=2e-5)
        else:
            best = expected.topk(7, 1).indices
            np.testing.assert_array_equal(sample.teacher.candidates, best)
            np.testing.assert_allclose(sample.teacher.distribution, candidate_logprobs(expected, best), atol=2e-5)


def gradient(monkeypatch, policy, samples, name, budget, chunk=512):
    policy.model.zero_grad(set_to_none=True)
    settings, loss = LearnerRecipe(tokens_per_batch=budget, logits_per_chunk=chunk), loss_of(name)
    optimizer = Optimizer(policy.trainable(), OptimizerRecipe(max_gradient_norm=1e9), 1)
    learner = Updater(policy, optimizer, settings, distillation_forward(policy, settings, 1.0, loss))
    found = small.kept_gradients(monkeypatch)
    totals = learner.update(samples, DistillationObjective(loss))
    return torch.cat([value.flatten() for value in found.values()]), totals


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_the_split(played, teacher_model, name, monkeypatch):
    samples = scored(played, teacher_model, name)
    longest = max(len(sample.stream) for sample in samples)
    whole, totals = gradient(monkeypatch, played[0], samples, name, 8 * longest)
    apart, parts = gradient(monkeypatch, played[0], samples, name, longest, chunk=3)
    assert float((whole - apart).abs().max()) < 1e-5 * float(whole.abs().max())
    assert set(parts) == set(totals)
    for key, (value, count) in totals.items():
        assert parts[key] == (pytest.approx(value, rel=1e-4, abs=1e-4), pytest.approx(count))


def test_the_divergence_and_its_gradient_are_those_of_full_logits(played, teacher_model, tiny_model, monkeypatch):
    policy, samples = played[0], scored(played, teacher_model, "whole")
    found, totals = gradient(monkeypatch, policy, samples, "whole", 4096)
    plain, loss = AutoModelForCausalLM.from_pretrained(tiny_model), 0.0
    for sample in samples:
        logits = plain(torch.from_numpy(sample.stream.ids)[None]).logits[0].float()
        student = torch.log_softmax(logits[np.flatnonzero(sample.stream.sampled) - 1], 1)
        teacher = whole_logprobs(teacher_model, sample)
        mixture = (0.3 * teacher.exp() + 0.7 * student.exp()).log()
        part = 0.3 * teacher.exp() * (teacher - mixture) + 0.7 * student.exp() * (student - mixture)
        loss = loss + part.sum()
    (loss / 11.0).backward()
    gradients = dict(plain.named_parameters())
    expected = torch.cat([gradients[name].grad.flatten() for name, _ in policy.trainable()])
    assert totals["loss/distillation"][0] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def approaching(values):
    """The change of the distance to the teacher in twelve steps on one turn, as a factor."""
    values |= {"optimizer": {"learning_rate": 5e-3}, "learner": {"tokens_per_batch": 4096}, "steps": 12}
    values["rollout"] = {"groups_per_step": 4, "episodes_per_group": 8, "tokens_per_turn": 4, "tokens_per_episode": 300}
    values["environment"] = values["environment"] | {"max_turns": 1}
    values["evaluation"] = values["evaluation"] | {"every": 0}
    distances = [line["teacher/reverse_kl"] for line in small.lines(small.train(values)[0], "train")]
    return np.mean(distances[-3:]) / np.mean(distances[:3])


@pytest.mark.parametrize("name", small.cases(["sampled", "top_k"], ["top_k"]))
def test_the_policy_approaches_its_teacher(tiny_model, teacher_model, tmp_path, name):
    values = values_of(tiny_model, tmp_path, {"path": str(teacher_model)}, loss=LOSSES[name])
    assert approaching(values) < 0.75


def test_rl_with_only_a_teacher_approaches_it(tiny_model, teacher_model, tmp_path):
    values = small.recipe_values(tiny_model, tmp_path, kl={}, entropy={})
    values["teacher"] = {"path": str(teacher_model), "coefficient": 100.0}
    assert approaching(values | {"credit": {"type": "reinforce", "discount": 0.01}}) < 0.8


def test_a_teacher_with_another_vocabulary_is_refused(tiny_policy, tmp_path):
    other = save_tiny_model(tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    wider = AutoModelForCausalLM.from_pretrained(other)
    wider.resize_token_embeddings(config["vocab_size"] + 1)
    wider.save_pretrained(other)
    with pytest.raises(InputError, match=r"teacher\.path.*not have the vocabulary.*'<\|other\|>' is .* the teacher's"):
        teacher_for(TeacherRecipe(path=str(other)), tiny_policy)
    with pytest.raises(InputError, match=r"^teacher\.path: "):
        teacher_for(TeacherRecipe(path=str(tmp_path)), tiny_policy)


# -- fixed rows -----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_steps_trains_on_rows(tiny_model, teacher_model, tmp_path):
    rows = [{"prompt": f"Task {n}", "completion": "row column goal"} for n in range(8)]
    data = {"train": write_jsonl(tmp_path / "rows.jsonl", rows), "cache": str(tmp_path / "cache"), "max_tokens": 200}
    off = {"data": data, "share": 0.5, "rows_per_step": 4}
    teacher = {"path": str(teacher_model)}
    values = values_of(tiny_model, tmp_path, teacher, loss=LOSSES["top_k"], off_policy=off, steps=8)
    values["evaluation"] = values["evaluation"] | {"every": 0}
    lines = small.lines(small.train(values)[0], "train")
    off_policy = [line["step"] for line in lines if "teacher/off_policy" in line]
    assert off_policy == [step for step in range(1, 9) if random_stream(0, "off_policy", step).random() < 0.5]
    assert 0 < len(off_policy) < 8
    for line in lines:
        assert ("rollout/episodes" in line) == ("teacher/reverse_kl" in line) == ("teacher/off_policy" not in line)
        assert math.isfinite(line["loss/distillation"])


# -- privileged context ---------------------------------------------------------------------------------------------------


def test_the_context_is_only_in_the_prompt_of_the_teacher(played, tiny_model):
    policy, _ = played
    env = posttrain.make_env(Letters, max_turns=2)
    episodes = rollout(posttrain.LocalEngine(policy), env, seeds=[4], max_tokens=5, tokens_per_episode=300)
    samples = samples_of_episodes(episodes, 1)
    recipe = TeacherRecipe(policy="initial", context="Say abc.")
    teacher = teacher_for(recipe, policy, environment=env.recipe)
    read = teacher.context.applied(episodes, samples)[0]
    text = policy.tokenizer.decode(read.stream.ids)
    assert "Task 4: say many letters.\n\nSay abc.<|im_end|>" in text
    assert "Say abc" not in policy.tokenizer.decode(samples[0].stream.ids)
    for part in ("ids", "turn", "rollout_logprobs"):
        mine, theirs = getattr(samples[0].stream, part), getattr(read.stream, part)
        np.testing.assert_array_equal(mine[samples[0].stream.sampled], theirs[read.stream.sampled])
    assert len(read.stream) - len(samples[0].stream) == len(policy.tokenizer("\n\nSay abc.")["input_ids"])
    teacher.score_episodes(episodes, samples)
    expected = whole_logprobs(tiny_model, read)
    ids = torch.from_numpy(read.stream.ids[read.stream.sampled])
    np.testing.assert_allclose(samples[0].teacher.logprobs, expected.gather(1, ids[:, None])[:, 0], atol=2e-5)


@pytest.fixture
def prompts(tmp_path):
    """An environment of three prompts, of which the last has no hint."""
    rows = [{"prompt": f"Question {n}", "label": f"answer {n}", "hint": f"hint {n}"} for n in range(3)]
    rows[2].pop("hint")
    return {"type": "text_task", "prompts": write_jsonl(tmp_path / "prompts.jsonl", rows), "reward": "exact"}


def test_fields_come_from_the_row_the_expert_and_the_group(tiny_policy, prompts):
    settings = environment_recipe(prompts)
    env = posttrain.make_env(prompts["type"], prompts=prompts["prompts"], reward="exact")
    episodes = rollout(posttrain.LocalEngine(tiny_policy), env, seeds=[0, 2], episodes_per_group=2, max_tokens=4)
    episodes[1].turns[-1].info["success"] = True
    samples = samples_of_episodes(episodes, 1)

    def contexts(text):
        found = teacher_for(TeacherRecipe(policy="current", context=text), tiny_policy, environment=settings)
        read = found.context.applied(episodes, samples)
        texts = [None if each is None else tiny_policy.tokenizer.decode(each.stream.ids) for each in read]
        return [text and text.split("\n\n")[1].split("<")[0] for text in texts]

    assert contexts("The answer is {reference}.") == ["The answer is answer 0."] * 2 + ["The answer is answer 2."] * 2
    assert contexts("Use {hint} {not a field}") == ["Use hint 0 {not a field}"] * 2 + [None, None]
    good = episodes[1].turns[0].answer
    assert contexts("Others said: {success}")[1:] == [None, None, None]
    assert contexts("Others said: {success}")[0] == f"Others said: {good}".split("\n\n")[0].split("<")[0]
    with pytest.raises(InputError, match=r"teacher\.context: .* has no solution; use one of feedback, hint, label, "):
        contexts("{solution}")


@pytest.mark.parametrize("weights", ["initial", "current"])
def test_self_distillation_trains_on_episodes_that_have_a_context(tiny_model, tmp_path, prompts, weights):
    teacher = {"policy": weights, "context": "A hint: {hint}"}
    values = values_of(tiny_model, tmp_path, teacher, environment=prompts, loss=LOSSES["top_k"], steps=2)
    values |= {"seeds": {"start": 0, "count": 1}, "rollout": values["rollout"] | {"groups_per_step": 1}}
    values |= {"learner": {"tokens_per_batch": 1500}}
    held_out = {"seeds": {"start": 1, "count": 1}, "final_seeds": {"start": 2, "count": 1}}
    values["evaluation"] = values["evaluation"] | held_out
    lines = small.lines(small.train(values)[0], "train")
    assert [line["teacher/without_context"] for line in lines] == [0.0, 0.0]
    assert all(line["loss/distillation"] > 0 for line in lines)


# -- a teacher in the reward of reinforcement learning --------------------------------------------------------------------


def test_the_teacher_is_a_reward_of_each_sampled_token(played, teacher_model):
    policy, episodes = played
    samples = samples_of_episodes(episodes, 1)
    teacher = teacher_for(TeacherRecipe(path=str(teacher_model)), policy)
    teacher.score_episodes(episodes, samples)
    shaping = RewardShaping(RolloutRecipe(), KlRecipe(), RunningStatistics(None), teacher_coefficient=0.5)
    shaped = [stream for streams in shaping.shape(episodes, samples, 0.0).values for stream in streams]
    for rewards, sample in zip(shaped, samples, strict=True):
        sampled = sample.stream.sampled
        gap = sample.teacher.logprobs - sample.stream.rollout_logprobs[sampled]
        np.testing.assert_allclose((rewards - sample.stream.rewards)[sampled], 0.5 * gap, atol=1e-6)
        assert not rewards[~sampled].any()
