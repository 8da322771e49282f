"""One-shot tasks: rows of seeds, rewards of answers, and failures that are not zero rewards."""

import random

import numpy as np
import pytest
from pydantic import ValidationError

from posttrain.environments import text_task
from posttrain.environments.game import play
from posttrain.environments.judge import JudgeFailure
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.environments.text_task import RewardFailure, TextTask, TextTaskRecipe, prompt_table
from posttrain.environments.tools import calling
from posttrain.episode import Outcome
from posttrain.errors import InputError
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes

from ..evaluation.made import write
from .script import RENDERER, Script

EXACT = "posttrain.environments.rewards:exact"
NUMBER = "posttrain.environments.rewards:final_number"
SCORED = {"scores": {"score": 1.0}}
ROWS = [{"prompt": "2 + 2?", "label": "4"}, {"prompt": "3 + 3?", "label": "6"}, {"prompt": "Who?"}]


def _recipe(path, rows=ROWS, **keys):
    return TextTaskRecipe.model_validate({"prompts": str(write(path / "rows.jsonl", rows)), **keys})


def _reward(path, body):
    (path / "reward.py").write_text(f"def score(answer, **row):\n    {body}\n")
    return f"{path / 'reward.py'}:score"


def step_of(recipe, answer, seed=0):
    """The only step of a task."""
    (step,) = play(TextTask(recipe), seed, [answer])
    return step


def test_a_seed_is_a_row_counted_over_all_sources_and_its_system_message_can_be_replaced(tmp_path):
    paths = [str(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("a", ROWS[:2]), ("b", ROWS[2:]))]
    recipe = TextTaskRecipe.model_validate({"prompts": paths})
    assert len(TextTask.task_rows(recipe)) == 3
    shown = [TextTask(recipe).reset(seed).messages for seed in range(3)]
    assert shown == [[{"role": "user", "content": row["prompt"]}] for row in ROWS]
    talk = [{"role": "system", "content": "old"}, {"role": "user", "content": "Hi"}]
    recipe = _recipe(tmp_path, [{"prompt": talk}, ROWS[0]], system="new")
    for seed, said in enumerate(["Hi", "2 + 2?"]):
        shown = TextTask(recipe).reset(seed).messages
        assert shown == [{"role": "system", "content": "new"}, {"role": "user", "content": said}]
    assert TextTask(recipe.model_copy(update={"system": None})).reset(0).messages == talk


@pytest.mark.parametrize("seed", [3, 100, -1])
def test_a_seed_beyond_the_rows_names_their_number_and_the_keys(tmp_path, seed):
    with pytest.raises(InputError, match=r"3 usable rows.*`seeds` or `evaluation\.seeds`"):
        TextTask(_recipe(tmp_path)).reset(seed)


def test_unusable_rows_are_skipped_and_reported(tmp_path):
    recipe = _recipe(tmp_path, [{"prompt": None}, ROWS[0], {"question": "?"}, ROWS[1]])
    assert len(TextTask.task_rows(recipe)) == 2
    assert TextTask(recipe).reset(1).messages[0]["content"] == "3 + 3?"
    assert prompt_table(recipe).problems.total == 2
    assert "rows.jsonl row 1" in " ".join(prompt_table(recipe).problems.summary())
    with pytest.raises(InputError, match=r"rows\.jsonl"):
        TextTask(_recipe(tmp_path, [{"question": "?"}]))
    with pytest.raises(InputError, match=r"columns\.tools"):
        TextTask(_recipe(tmp_path, [{"prompt": "Hi", "tools": [{"name": "search"}]}]))


def test_rows_are_read_once_per_process_and_again_if_their_file_changes(tmp_path, monkeypatch):
    calls = []
    original = text_task.read_examples
    monkeypatch.setattr(text_task, "read_examples", lambda *given: calls.append(given) or original(*given))
    recipe = _recipe(tmp_path)
    for seed in range(3):
        TextTask(recipe).reset(seed)
    TextTask(recipe.model_copy(update={"system": "Be brief."})).reset(0)
    assert len(calls) == 1
    # Also where the same relative path is another file.
    for folder, rows in (("a", ROWS), ("b", ROWS[:1])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        write(tmp_path / folder / "rows.jsonl", rows)
        recipe = TextTaskRecipe.model_validate({"prompts": "rows.jsonl"})
        assert len(TextTask.task_rows(recipe)) == len(rows)
    write(tmp_path / "b" / "rows.jsonl", ROWS[:2])
    assert len(TextTask.task_rows(recipe)) == 2


def test_a_reward_function_sets_the_reward_and_success_is_its_threshold(tmp_path):
    task = TextTask(_recipe(tmp_path, reward=EXACT))
    (right,), (wrong,) = play(task, 0, [" 4\n"]), play(task, 0, ["5"])
    assert (right.reward, right.terminated, right.truncated) == (1.0, True, False)
    assert right.info == {"success": True, **SCORED}
    assert (wrong.reward, wrong.terminated, wrong.info) == (0.0, True, {"success": False, "scores": {"score": 0.0}})
    with pytest.raises(RuntimeError, match="over"):
        task.step("4")
    with pytest.raises(RuntimeError, match="over"):
        task.expert()


@pytest.mark.parametrize(("wanted", "info"), [(0.5, {"success": True}), (0.6, {"success": False}), (None, {})])
def test_the_reward_that_counts_as_success_is_a_key(tmp_path, wanted, info):
    recipe = _recipe(tmp_path, reward=_reward(tmp_path, "return 0.5"), success_reward=wanted)
    step = step_of(recipe, "?")
    assert (step.reward, step.info) == (0.5, info | {"scores": {"score": 0.5}})


def test_a_reward_function_may_report_more_numbers_and_the_score_may_have_weight_zero(tmp_path):
    reward = _reward(tmp_path, "return {'score': 0.5, 'length': len(answer)}")
    for weight, paid in ((1.0, 0.5), (0.2, 0.1), (0.0, 0.0)):
        recipe = _recipe(tmp_path, reward=reward, success_reward=0.5, score_weight=weight)
        step = step_of(recipe, "abc")
        assert step.reward == pytest.approx(paid)
        assert step.info == {"success": True, "scores": {"score": 0.5, "length": 3.0}}
        assert TextTask.has_reward(recipe) == (weight > 0)
    alone = _recipe(tmp_path, reward=EXACT, score_weight=0.0)
    step = step_of(alone, "4")
    assert (step.reward, step.info) == (0.0, {"success": True, "scores": {"score": 1.0}})
    TextTask.validate(alone, range(2))


@pytest.mark.parametrize(
    ("body", "complaint"), [("return row['nothing']", "KeyError"), ("return float('nan')", "returned nan")]
)
def test_a_reward_function_without_a_score_fails_the_episode(tmp_path, body, complaint):
    recipe = _recipe(tmp_path, reward=_reward(tmp_path, body))
    task = TextTask(recipe)
    task.reset(1)
    with pytest.raises(RewardFailure, match=r"reward\.py:score") as caught:
        task.step("4")
    assert complaint in str(caught.value)
    assert "rows.jsonl row 2" in str(caught.value)
    with pytest.raises(AssertionError, match=r"seed 0: .*reward"):
        TextTask.validate(recipe, range(2))


def test_a_reward_function_sees_the_whole_row_and_cannot_change_it(tmp_path):
    rows = [{"question": "2 + 2?", "gold": "4", "deep": {"points": 0.25}}]
    columns = {"prompt": "question", "label": "gold"}
    reward = _reward(tmp_path, "return row['deep'].pop('points') + (row['label'] == row['gold'] == answer)")
    recipe = _recipe(tmp_path, rows, columns=columns, reward=reward)
    for _ in range(2):
        assert step_of(recipe, "4").reward == 1.25
    assert play(TextTask(recipe), 0)[0].reward == 1.25
    rows = [
        {"question": "48 + 24?", "answer": "48 + 24 = 72\n#### 72"},
        {"question": "1,000 + 1?", "answer": "A: 1001"},
    ]
    columns = {"prompt": "question", "completion": "answer"}
    recipe = _recipe(tmp_path, rows, columns=columns, reward=NUMBER)
    TextTask.validate(recipe, range(2))
    task = TextTask(recipe)
    task.reset(1)
    assert task.expert() == "A: 1001"
    assert task.step("It is 1,001.").info == {"success": True, **SCORED}


def test_validate_names_the_seed_of_an_unsound_row(tmp_path):
    rows = [ROWS[0], {"prompt": "3 + 3?", "completion": "six", "label": "6"}]
    with pytest.raises(AssertionError, match=r"seed 1: the reference answer 'six' earned 0"):
        TextTask.validate(_recipe(tmp_path, rows, reward=EXACT), range(9))
    with pytest.raises(AssertionError, match=r"seed 0: the wrong answer .* earned 1"):
        TextTask.validate(_recipe(tmp_path, reward=_reward(tmp_path, "return 1")), range(3))
    recipe = _recipe(tmp_path)
    step = step_of(recipe, "4")
    assert (step.reward, step.terminated, step.info) == (0.0, True, {})
    TextTask.validate(recipe, range(100))
    task = TextTask(_recipe(tmp_path))
    task.reset(2)
    with pytest.raises(NotImplementedError, match=r"rows\.jsonl row 3"):
        task.expert()
    assert TextTask.baselines(task.recipe, range(3)) == {}


def test_the_judge_gets_what_the_model_saw_and_its_failure_fails_the_episode(tmp_path, monkeypatch):
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m", "rubric": "right", "retries": 0}
    recipe = _recipe(tmp_path, judge=judge, system="Be brief.", success_reward=0.7)
    TextTask.validate(recipe, range(3))
    task = TextTask(recipe)
    task.reset(0)
    with pytest.raises(JudgeFailure):
        task.step("4")
    seen = []
    monkeypatch.setattr(text_task, "judge_score", lambda *given: seen.append(given) or 0.7)
    (step,) = play(task, 0, ["four"])
    assert (step.reward, step.info) == (0.7, {"success": True})
    (_, messages, answer) = seen[0]
    assert [message["content"] for message in messages] == ["Be brief.", "2 + 2?"]
    assert answer == "four"


def test_missing_rewards_and_keys_are_noticed_before_the_first_episode(tmp_path):
    with pytest.raises(InputError, match="no function"):
        TextTask(_recipe(tmp_path, reward="posttrain.environments.rewards:nothing"))
    judge = {"url": "http://h/v1", "model": "m", "rubric": "right", "api_key_variable": "NO_SUCH_KEY"}
    with pytest.raises(InputError, match="NO_SUCH_KEY"):
        TextTask(_recipe(tmp_path, judge=judge))
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        TextTask(TextTaskRecipe.model_validate({"prompts": str(tmp_path / "absent.jsonl")}))


JUDGE = {"url": "http://h/v1", "model": "m", "rubric": "right"}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prompts": "a.jsonl", "reasoning_gym": {"dataset": "chain_sum"}},
        {"prompts": "a.jsonl", "reward": EXACT, "judge": JUDGE},
        {"prompts": "a.jsonl", "rule": "exact"},
        {"prompts": "a.jsonl", "max_turns": 2},
        {"prompts": {"path": "a.jsonl", "weight": 2}},
        {"prompts": "a.jsonl", "judge": {**JUDGE, "url": "localhost"}},
        {"prompts": "a.jsonl", "judge": {**JUDGE, "scale": 0}},
        {"reasoning_gym": {"dataset": "chain_sum", "config": {"seed": 1}}},
    ],
)
def test_contradictory_keys_are_refused(values):
    with pytest.raises(ValidationError):
        TextTaskRecipe.model_validate(values)


GYM = [{"dataset": name} for name in ("word_sorting", "gcd", "countdown")]
GYM.append({"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 3}})


@pytest.mark.parametrize("gym", GYM, ids=lambda gym: gym["dataset"])
def test_reasoning_gym_rewards_its_reference_and_not_a_wrong_answer(gym):
    recipe = TextTaskRecipe.model_validate({"reasoning_gym": gym})
    assert TextTask.task_rows(recipe) is None
    TextTask.validate(recipe, [*range(10), 10**9])
    task = TextTask(recipe)
    assert len({task.reset(seed).messages[0]["content"] for seed in range(20)}) == 20
    for seed in range(5):
        task.reset(seed)
        answer = task.expert()
        assert play(task, seed, [f"{answer}\n"])[0].reward == 1.0
        assert play(task, seed, ["certainly not"])[0].reward < 0.5


def test_the_parts_of_reasoning_gym_have_no_question_in_common(monkeypatch):
    """Sums of two digits: 200 questions, which 600 seeds ask again and again."""
    gym = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    asked = {}
    for part in ("all", "training", "held_out"):
        task = TextTask(TextTaskRecipe.model_validate({"reasoning_gym": {**gym, "part": part}}))
        asked[part] = [task.reset(seed).messages[0]["content"] for seed in range(600)]
        TextTask.validate(task.recipe, range(5))
    training, held_out = set(asked["training"]), set(asked["held_out"])
    assert not training & held_out
    assert 0.1 < len(held_out) / len(training | held_out) < 0.3
    # A seed whose question is of the part keeps it.
    kept = [one == other for one, other in zip(asked["all"], asked["training"], strict=True)]
    assert kept == [one in training for one in asked["all"]]
    monkeypatch.setattr(text_task, "derive_seed", lambda *words: 1)  # no question is among the fifth that is held out
    with pytest.raises(InputError, match=r"environment\.reasoning_gym\.part: .* no question of the part `held_out`"):
        TextTask(TextTaskRecipe.model_validate({"reasoning_gym": {"dataset": "chain_sum", "part": "held_out"}}))


@pytest.mark.parametrize("name", ["list_functions", "pool_matrix"])
def test_a_seed_is_one_task_and_global_random_state_is_unchanged(name):
    recipe = TextTaskRecipe.model_validate({"reasoning_gym": {"dataset": name}})
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    TextTask.validate(recipe, range(5))
    assert (random.random(), np.random.random()) == expected


def test_a_reward_function_may_score_tasks_of_reasoning_gym_and_a_verifier_that_raises_fails():
    recipe = TextTaskRecipe.model_validate({"reasoning_gym": {"dataset": "chain_sum"}, "reward": NUMBER})
    task = TextTask(recipe)
    task.reset(7)
    answer = task.expert()
    assert play(task, 7, [f"I think it is\nA: {answer}.0"])[0].info == {"success": True, **SCORED}
    TextTask.validate(recipe.model_copy(update={"reward": EXACT}), range(5))
    recipe = TextTaskRecipe.model_validate({"reasoning_gym": {"dataset": "prime_factorization"}})
    with pytest.raises(RewardFailure, match="prime_factorization seed 3"):
        play(TextTask(recipe), 3, ["no idea"])


@pytest.mark.parametrize(
    ("gym", "complaint"),
    [
        ({"dataset": "chain_summ"}, "chain_sum,"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "terms"),
        ({"dataset": "chain_sum", "config": {"min_terms": -3}}, "min_terms"),
        ({"dataset": "chain_sum", "config": {"min_terms": "x"}}, "TypeError"),
    ],
)
def test_wrong_names_and_configurations_of_reasoning_gym_are_input_errors(gym, complaint):
    with pytest.raises(InputError, match=r"environment\.reasoning_gym") as caught:
        TextTask(TextTaskRecipe.model_validate({"reasoning_gym": gym}))
    assert complaint in str(caught.value)


def test_a_failing_reward_fails_its_episode_and_no_other(tmp_path):
    reward = _reward(tmp_path, "return float(answer == row['label'])")
    environment = EnvironmentFactory(_recipe(tmp_path, reward=reward))
    parts = {"rollout": RolloutRecipe(), "sampling": SamplingRecipe(), "version": 0}
    player = RolloutWorker(engine=Script("4"), renderer=RENDERER, environment=environment, **parts)
    requests = [EpisodeRequest(seed, seed, 0, (0, "test", seed)) for seed in range(3)]
    right, wrong, failed = collect_episodes(player, requests)
    assert (right.outcome, right.total_reward, right.success) == (Outcome.TERMINATED, 1.0, True)
    assert (wrong.outcome, wrong.total_reward, wrong.success) == (Outcome.TERMINATED, 0.0, False)
    assert failed.outcome is Outcome.FAILED
    assert "KeyError" in failed.failure
    assert "rows.jsonl row 3" in failed.failure


def test_a_prompt_with_tools_is_answered_after_calls(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Twice 21?", "label": "42"}\n')
    (tmp_path / "my_tools.py").write_text("def double(number: int) -> int:\n    return 2 * number\n")
    keys = {"type": "text_task", "prompts": str(tmp_path / "tasks.jsonl"), "reward": "exact"}
    tools = [f"{tmp_path}/my_tools.py:double"]
    task = TextTask(environment_recipe({**keys, "tools": tools, "max_turns": 2}))
    first = task.reset(0)
    assert first.tools[0]["function"]["name"] == "double"
    step = task.step(calling(("double", {"number": 21})))
    assert ([message["content"] for message in step.messages], step.reward, step.truncated) == (["42"], 0.0, False)
    last = task.step("42")
    assert (last.reward, last.terminated, last.info["success"]) == (1.0, True, True)
    task.reset(0)
    task.step("<tool_call>{</tool_call>")
    last = task.step(calling(("double", {"number": "x"})))
    assert (last.truncated, last.info["success"], last.reward) == (True, False, -0.1)
    with pytest.raises(RuntimeError):
        task.step("42")
    for wrong in ({"tools": tools}, {"max_turns": 2}):
        with pytest.raises(ValueError, match="need each other"):
            environment_recipe({**keys, **wrong})
    for where, problem in (
        ("double", "is not a function"),
        (f"{tmp_path}/my_tools.py:triple", "has no function 'triple'"),
    ):
        with pytest.raises(InputError, match=f"environment.tools.*{problem}"):
            TextTask(environment_recipe({**keys, "tools": [where], "max_turns": 2}))
    with pytest.raises(InputError, match="two tools have the name 'double'"):
        TextTask(environment_recipe({**keys, "tools": tools * 2, "max_turns": 2}))
