"""A reward model's rewards of played episodes: on the tokens that were sampled, scaled as the recipe says."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from posttrain.credit.assign import compute_advantages
from posttrain.data.rendering import Renderer, render_conversation
from posttrain.episode import Episode, Outcome, StopReason
from posttrain.errors import InputError, RunError
from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.recipe.rollout import FailureRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.driver import without_failures
from posttrain.rollout.transcript import TokenTranscript
from posttrain.training.controllers import RAW, RewardShaping, RunningStatistics, scaled
from posttrain.training.reward_scorer import RewardScorer, open_scorer
from posttrain.training.updater import samples_of_episodes
from tests.conftest import CHATML, make_tokenizer

MEAN, STD = 0.05, 0.4
OTHER_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
ANSWERS = ["Goal", "the goal is down there", "You walk on a frozen lake.", "é ü", "Up Up"]


def exported(base, directory, tokenizer=None, statistics=(MEAN, STD)):
    """A reward model at `directory`, of random weights, with another tokenizer where one is given."""
    if tokenizer is not None:
        base = shutil.copytree(base, directory.with_name("base"))
        (base / "generation_config.json").unlink(missing_ok=True)
        tokenizer.save_pretrained(base)
    model = RewardModel(ModelRecipe(path=str(base)), seed=11)
    if statistics is not None:
        model.set_statistics(*statistics)
    model.export(directory)
    return directory


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    return exported(tiny_model, tmp_path_factory.mktemp("reward") / "model")


def scorer(path, policy, **keys) -> RewardScorer:
    return RewardScorer(RewardSource(path=str(path), **keys), policy.tokenizer)


def episode(policy, answers=("Goal",), cut=False, group=0, ids=None, paid=0.0) -> Episode:
    """Played by the driver's own bookkeeping. `ids`: the sampled tokens of the last answer, where they are not what
    the tokenizer would make of its text."""
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    conversation = TokenTranscript(renderer, [{"role": "user", "content": f"Say {group}."}])
    for number, answer in enumerate(answers):
        last = number == len(answers) - 1
        sampled = renderer.encode(answer) if ids is None or not last else list(ids)
        done = not (cut and last)
        sampled = [*sampled, policy.tokenizer.eos_token_id] if done else sampled
        reason = StopReason.END_TOKEN if done else StopReason.TURN_BUDGET
        conversation.answer(sampled, [-0.5] * len(sampled), reason)
        conversation.reward(paid, {"success": True})
        if not last:
            conversation.observe([{"role": "user", "content": "And then?"}])
    outcome = Outcome.TRUNCATED if cut else Outcome.TERMINATED
    return Episode(7, group, 0, 0, conversation.streams(), conversation.turns, outcome, None, conversation.messages)


def of_transformers(path, ids) -> float:
    """Scores of transformers for token ids."""
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    with torch.no_grad():
        return model(torch.tensor([list(map(int, ids))])).logits.item()


# -- which tokens are read ---------------------------------------------------------------------------------------------


def test_with_the_policys_tokenizer_the_sampled_tokens_themselves_are_read(tiny_policy, reward_model):
    made = scorer(reward_model, tiny_policy)
    assert made.same_tokens
    # "Goal" letter by letter, as no tokenizer would write it.
    letters = [tiny_policy.tokenizer.convert_tokens_to_ids(letter) for letter in "Goal"]
    assert letters != tiny_policy.tokenizer("Goal", add_special_tokens=False)["input_ids"]
    episodes = [
        episode(tiny_policy, ["Goal"]),
        episode(tiny_policy, ["Goal"], ids=letters),
        episode(tiny_policy, ["Goal"], cut=True),
        episode(tiny_policy, ["Up", "no, Down", "Left"]),
        episode(tiny_policy, ["Up", "Down"], cut=True),
    ]
    found = made.scores(episodes)
    for played, ours in zip(episodes, found, strict=True):
        assert ours == pytest.approx(of_transformers(reward_model, played.streams[-1].ids), abs=1e-5)
    assert len({round(value, 4) for value in found}) == 5
    end = tiny_policy.tokenizer.eos_token_id
    assert episodes[2].streams[0].ids[-1] != end == episodes[0].streams[0].ids[-1]


def test_scores_do_not_depend_on_the_packing_or_on_tokens_after_the_last_answer(tiny_policy, reward_model):
    made = scorer(reward_model, tiny_policy)
    episodes = [episode(tiny_policy, [ANSWERS[n % 5]], cut=n % 3 == 0, group=n // 2) for n in range(12)]
    alone = [made.scores([e])[0] for e in episodes]
    for budget in (64, 200, 4096):
        packed = scorer(reward_model, tiny_policy, tokens_per_batch=budget).scores(episodes)
        np.testing.assert_allclose(packed, alone, atol=1e-5)
    assert made.scores([]) == []
    stream = episodes[1].streams[0]
    for name, value in (("ids", 9), ("sampled", False), ("rollout_logprobs", 0), ("rewards", 0), ("turn", -1)):
        array = getattr(stream, name)
        setattr(stream, name, np.concatenate([array, np.array([value, value], dtype=array.dtype)]))
    assert made.scores(episodes[1:2]) == pytest.approx(alone[1:2], abs=1e-6)


def other_tokenizer(kind):
    tokenizer = make_tokenizer()
    if kind == "merges":
        bpe = ByteLevelBPETokenizer()
        lines = ["Goal goal Goal is down there", "You you walk"]
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        bpe.train_from_iterator(lines * 4, vocab_size=300, special_tokens=special, show_progress=False)
        names = {name: getattr(tokenizer, name) for name in ("eos_token", "bos_token", "pad_token")}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names)
    elif kind == "end":
        tokenizer.eos_token, tokenizer.pad_token = "<|endoftext|>", "<|im_start|>"
    tokenizer.chat_template = OTHER_TEMPLATE if kind == "template" else CHATML
    return tokenizer


@pytest.mark.parametrize("kind", ["merges", "template", "end"])
def test_another_tokenizer_reads_the_conversation_as_its_training_rows_were(kind, tiny_policy, tmp_path):
    tokenizer = other_tokenizer(kind)
    path = exported(tiny_policy.recipe.path, tmp_path / "model", tokenizer)
    made = scorer(path, tiny_policy)
    assert not made.same_tokens
    renderer = made.renderer
    for answers in (["Goal"], [" the goal is "], ["Up", "Down there"]):
        whole, cut = (episode(tiny_policy, answers, cut=cut) for cut in (False, True))
        (row,) = render_conversation(renderer, whole.messages, "last_assistant")
        assert row.ids[-1] == renderer.end
        ours = made.scores([whole, cut])
        assert ours[0] == pytest.approx(of_transformers(path, row.ids), abs=1e-5)
        assert ours[1] == pytest.approx(of_transformers(path, row.ids[:-1]), abs=1e-5)
        assert abs(ours[0] - ours[1]) > 1e-5
        # The template writes the end token, so another one of the tokenizer changes no token.
        assert (row.ids.tolist() == whole.streams[-1].ids.tolist()) == (kind == "end")


def test_the_same_vocabulary_with_other_merges_is_another_tokenizer(tiny_policy, tmp_path):
    path = exported(tiny_policy.recipe.path, tmp_path / "model")
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["merges"].reverse()
    (path / "tokenizer.json").write_text(json.dumps(content))
    made = scorer(path, tiny_policy)
    assert made.model.tokenizer.get_vocab() == tiny_policy.tokenizer.get_vocab()
    assert not made.same_tokens
    assert math.isfinite(made.scores([episode(tiny_policy, [" \n "], cut=True)])[0])


def test_an_answer_longer_than_the_budget_is_named_and_no_gradient_is_computed(tiny_policy, reward_model, monkeypatch):
    with pytest.raises(RunError, match=r"the episode of seed 7, group 3 has \d+ tokens.*reward\.tokens_per_batch"):
        scorer(reward_model, tiny_policy, tokens_per_batch=16).scores([episode(tiny_policy, ["Goal " * 20], group=3)])
    made, seen, original = scorer(reward_model, tiny_policy), [], RewardModel.rewards
    monkeypatch.setattr(RewardModel, "rewards", lambda self, *a: seen.append(original(self, *a)) or seen[-1].clone())
    made.scores([episode(tiny_policy)])
    assert [rewards.requires_grad for rewards in seen] == [False]


# -- what is paid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "clip"), [("stored", None), ("stored", 0.1), ("none", None), ("none", 0.01), ("running", 0.01)]
)
def test_the_reward_is_added_to_the_last_turn_and_its_last_token(normalize, clip, tiny_policy, reward_model):
    made = scorer(reward_model, tiny_policy, normalize=normalize, clip=clip)
    episodes = [episode(tiny_policy, ["Up", answer], paid=0.25) for answer in ANSWERS]
    raw = np.array(made.scores(episodes))
    made(episodes)
    expected = (raw - MEAN) / STD if normalize == "stored" else raw
    if clip is not None and normalize != "running":
        assert (np.abs(expected) > clip).any()
        expected = expected.clip(-clip, clip)
    for played, value, said in zip(episodes, expected, raw, strict=True):
        last = played.turns[-1]
        assert last.info == {"success": True, RAW: said}
        assert RAW not in played.turns[0].info
        assert last.reward == pytest.approx(0.25 + value, abs=1e-6)
        assert played.total_reward == pytest.approx(0.5 + value, abs=1e-6)
        rewards = played.streams[0].rewards
        assert rewards[last.stop - 1] == pytest.approx(0.25 + value, abs=1e-6)
        assert rewards.sum() == pytest.approx(0.5 + value, abs=1e-6)
        assert np.count_nonzero(rewards) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_a_number_fails_the_episode(value, tiny_policy, reward_model, monkeypatch):
    made = scorer(reward_model, tiny_policy, normalize="none")
    episodes = [episode(tiny_policy, group=n) for n in range(3)]
    failed = episode(tiny_policy, group=3)
    failed.outcome, failed.failure = Outcome.FAILED, "the environment raised"
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(RewardScorer, "scores", lambda self, played: asked.extend(played) or [1.0, value, 2.0])
        made([*episodes, failed])
    assert asked == episodes
    assert [e.outcome for e in episodes] == [Outcome.TERMINATED, Outcome.FAILED, Outcome.TERMINATED]
    assert episodes[1].failure == f"the reward model gave {value}"
    assert RAW not in episodes[1].turns[-1].info
    assert not episodes[1].success
    assert failed.failure == "the environment raised"
    assert [e.total_reward for e in episodes] == [1.0, 0.0, 2.0]
    kept, warning = without_failures([*episodes, failed], FailureRecipe(action="drop", max_share=0.5))
    assert kept == [episodes[0], episodes[2]]
    assert "2 of 4 episodes failed" in warning
    with torch.no_grad():
        made.model.model.score.weight[0, 0] = value
    made(kept)
    assert all(e.outcome is Outcome.FAILED and "the reward model gave" in e.failure for e in kept)


@pytest.mark.parametrize(
    "statistics", [None, (0.1, 0.0), (math.nan, 1.0), (0.0, math.nan), (0.0, math.inf), (0.0, -1.0)]
)
def test_stored_statistics_have_to_be_numbers_that_can_scale(statistics, tiny_policy, tmp_path):
    path = exported(tiny_policy.recipe.path, tmp_path / "model", statistics=statistics)
    reason = ".*model stores no mean and standard deviation" if statistics is None else ""
    with pytest.raises(InputError, match=rf"^reward\.normalize: {reason}"):
        scorer(path, tiny_policy)
    for normalize in ("running", "none"):
        scorer(path, tiny_policy, normalize=normalize)


def test_a_language_model_is_refused_and_rewards_are_scaled_and_clipped(tiny_policy):
    with pytest.raises(InputError, match="is not a reward model"):
        scorer(tiny_policy.recipe.path, tiny_policy)
    assert open_scorer(None, tiny_policy) is None
    assert scaled(3.0, 1.0, 2.0, None) == 1.0
    assert [scaled(raw, 1.0, 2.0, 5.0) for raw in (30.0, -30.0)] == [5.0, -5.0]


# -- on the way to credit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["stored", "running", "none"])
@pytest.mark.parametrize("penalty", [0.0, 0.75])
def test_the_penalty_for_a_missing_end_reaches_credit_once(normalize, penalty, tiny_policy, reward_model):
    made = scorer(reward_model, tiny_policy, normalize=normalize, clip=None)
    episodes = [episode(tiny_policy, [ANSWERS[n]], cut=n % 2 == 1, group=0) for n in range(4)]
    raw = np.array(made.scores(episodes))
    made(episodes)
    reward = {"path": str(reward_model), "normalize": normalize, "clip": None}
    recipe = RlRecipe(credit={"type": "reinforce"}, rollout={"missing_eos_penalty": penalty}, reward=reward)
    running = RunningStatistics(recipe.reward)
    running.include(episodes)
    shaping = RewardShaping(recipe.rollout, recipe.kl, running)
    rewards = shaping.shape(episodes, samples_of_episodes(episodes, 1), 0.0)
    paid = {"stored": (raw - MEAN) / STD, "running": (raw - raw.mean()) / raw.std(ddof=1), "none": raw}[normalize]
    expected = paid - penalty * np.array([0, 1, 0, 1])
    for (stream,), played, value in zip(rewards.values, episodes, expected, strict=True):
        assert np.flatnonzero(stream).tolist() == [played.turns[-1].stop - 1]
        assert stream.sum() == pytest.approx(value, abs=1e-5)
    # What is shown and stored of the episode stays as it was paid.
    assert [e.streams[0].rewards.sum() for e in episodes] == pytest.approx([e.total_reward for e in episodes], abs=1e-6)
    credit = compute_advantages(episodes, recipe.credit, rewards, {})
    for (stream,), played in zip(credit.values, episodes, strict=True):
        assert np.isfinite(stream[played.streams[0].sampled]).all()
