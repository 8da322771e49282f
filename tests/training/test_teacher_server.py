"""Teachers behind servers: a real process that serves a real small model's log-probabilities."""

import numpy as np
import pytest

import posttrain
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.teacher import TeacherRecipe
from posttrain.rollout.driver import rollout
from posttrain.training.updater import samples_of_episodes

from ..conftest import make_tokenizer, save_tiny_model
from . import small
from .letters import Letters
from .teacher_server import serving
from .test_distill import teacher_for, values_of

pytest.importorskip("openai", reason="the package openai is in the extra `remote`")


@pytest.fixture(scope="module")
def server(tiny_model):
    with serving(tiny_model) as url:
        yield url


@pytest.fixture(scope="module")
def played(tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model), threads=1))
    env = posttrain.make_env(Letters, max_turns=2)
    return policy, rollout(posttrain.LocalEngine(policy), env, seeds=range(3), max_tokens=5, tokens_per_episode=300)


@pytest.mark.parametrize("protocol", ["prompt_logprobs", "echo"])
@pytest.mark.parametrize("top_k", [None, 6])
def test_a_server_scores_as_the_same_model_here(played, server, tiny_model, protocol, top_k):
    policy, episodes = played
    remote, local = samples_of_episodes(episodes, 1), samples_of_episodes(episodes, 1)
    teacher = teacher_for(TeacherRecipe(urls=[server], protocol=protocol), policy, top_k)
    _, _, warnings, metrics = teacher.score_episodes(episodes, remote)
    assert (warnings, metrics) == ([], {"teacher/failed": 0.0})
    teacher_for(TeacherRecipe(path=str(tiny_model)), policy, top_k).score_episodes(episodes, local)
    for one, other in zip(remote, local, strict=True):
        np.testing.assert_allclose(one.teacher.logprobs, other.teacher.logprobs, atol=2e-5)
        if top_k is not None:
            np.testing.assert_array_equal(one.teacher.candidates, other.teacher.candidates)
            np.testing.assert_allclose(one.teacher.distribution, other.teacher.distribution, atol=2e-5)


def test_requests_to_a_busy_server_are_retried(tiny_model, played):
    with serving(tiny_model, fails=1) as url:
        policy, episodes = played
        samples = samples_of_episodes(episodes, 1)
        assert teacher_for(TeacherRecipe(urls=[url]), policy).score_episodes(episodes, samples)[2] == []


def test_episodes_whose_scores_fail_are_left_out_and_too_many_stop_the_run(tiny_model, played):
    policy, episodes = played
    with serving(tiny_model, broken_task="Task 1:") as url:
        teacher = teacher_for(TeacherRecipe(urls=[url], retries=0), policy)
        kept, samples, warnings, metrics = teacher.score_episodes(episodes, samples_of_episodes(episodes, 1))
        assert [episode.seed for episode in kept] == [0, 2]
        assert len(samples) == 2
        assert metrics == {"teacher/failed": 1.0}
        assert "1 of 3 episodes have no scores" in warnings[0]
        assert "responded with status 400" in warnings[0]
        teacher.max_failed_share = 0.2
        with pytest.raises(RunError, match=r"rollout\.failures\.max_share = 0\.2"):
            teacher.score_episodes(episodes, samples_of_episodes(episodes, 1))


def test_a_server_with_another_tokenizer_or_none_at_all_is_refused(played, tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    other = save_tiny_model(tmp_path / "other")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["completely different words entirely"] * 9, vocab_size=380, show_progress=False)
    tokenizer = make_tokenizer()
    changed = type(tokenizer)(tokenizer_object=bpe._tokenizer, eos_token="a", bos_token="b", pad_token="c")
    changed.chat_template = tokenizer.chat_template
    changed.save_pretrained(other)
    with serving(other) as url, pytest.raises(InputError, match=r"teacher\.urls: .* does not have the tokenizer"):
        teacher_for(TeacherRecipe(urls=[url]), played[0])
    with pytest.raises(InputError, match=r"teacher\.urls: .* cannot be reached"):
        teacher_for(TeacherRecipe(urls=["http://127.0.0.1:9/v1"], retries=0), played[0])


def test_a_stage_runs_with_a_server(server, tiny_model, tmp_path):
    teacher = {"urls": [server], "max_concurrent": 2}
    values = values_of(tiny_model, tmp_path, teacher, loss={"type": "jsd", "top_k": 5}, steps=1)
    values["evaluation"] = values["evaluation"] | {"every": 0}
    (line,) = small.lines(small.train(values)[0], "train")
    assert line["teacher/failed"] == 0
    assert abs(line["loss/distillation"]) < 1e-6  # the teacher is the policy's own start; 0 up to rounding
