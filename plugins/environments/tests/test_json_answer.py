"""`json_answer`: what counts as the form, what is paid, and that held-out topics share no key with the others."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.environments.make import make_env
from posttrain_environments.json_answer import TOPICS, JsonAnswer, JsonAnswerRecipe

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "age", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def played(seed, answer, **keys):
    environment = make_env("json_answer", **keys)()
    environment.reset(seed)
    return environment.step(answer(environment) if callable(answer) else answer)


def changed(**values):
    """The right answer with one value replaced by another of the same type."""

    def answer(environment):
        right = json.loads(environment.expert())
        key = next(key for key, value in right.items() if isinstance(value, str))
        return json.dumps({**right, key: "something else"})

    return answer


@given(st.integers(0, 10_000))
def test_the_prompt_states_every_value_of_the_right_answer(seed):
    environment = make_env("json_answer", topics=list(TOPICS))()
    (message,) = environment.reset(seed).messages
    right = json.loads(environment.expert())
    for key, value in right.items():
        assert f'"{key}": ' in message["content"]
        for word in value if isinstance(value, list) else [value]:
            assert isinstance(word, bool) or str(word) in message["content"].splitlines()[0]


def test_wrong_facts_in_the_right_form_are_success_and_paid_less():
    seed = next(s for s in range(50) if '": string' in make_env("json_answer")().reset(s).messages[0]["content"])
    step = played(seed, changed(), facts_weight=0.5)
    assert step.info["success"]
    assert step.info["scores"]["form"] == 1
    assert step.info["scores"]["facts"] < 1
    assert step.reward == pytest.approx(0.5 + 0.5 * step.info["scores"]["facts"])
    assert played(seed, changed(), facts_weight=0).reward == 1


@given(JSON | st.text(max_size=20), st.integers(0, 20))
def test_any_other_answer_is_no_success_and_earns_less_than_the_form(answer, seed):
    text = answer if isinstance(answer, str) else json.dumps(answer)
    step = played(seed, text, topics=["film"])
    assert step.terminated
    assert not step.info["success"]
    assert step.info["rejected"]
    assert 0 <= step.reward <= 0.25


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"title": NaN}', "\ud800", ""])
def test_malformed_answers_are_no_errors(text):
    assert not played(0, text).info["success"]


def test_one_is_not_true_and_true_is_not_one():
    environment = JsonAnswer(JsonAnswerRecipe(keys=(6, 6)))
    environment.reset(0)
    right = environment._right
    for key, value in right.items():
        if isinstance(value, bool | int):
            swapped = int(value) if isinstance(value, bool) else True
            assert not played(0, json.dumps({**right, key: swapped}), keys=[6, 6]).info["success"]


def test_film_and_machine_share_no_key_with_the_other_topics():
    seen = {attribute.key for name in JsonAnswerRecipe().topics for attribute in TOPICS[name]}
    assert not seen & {attribute.key for name in ("film", "machine") for attribute in TOPICS[name]}
