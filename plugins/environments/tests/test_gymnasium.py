"""The adapter of gymnasium: named and text actions, the expert by value iteration, limits."""

import gymnasium
import pytest
from gymnasium.spaces import Text

from posttrain.environments.check import check_environment
from posttrain.environments.game import play
from posttrain.environments.make import make_env
from posttrain.errors import InputError

ADAPTER = "posttrain_environments.gymnasium:Gymnasium"
FIRM = {"id": "FrozenLake-v1", "keys": {"is_slippery": False}}


class Greeting(gymnasium.Env):
    """Say the word that is requested."""

    action_space = Text(20, charset="abcdefghijklmnopqrstuvwxyz")
    observation_space = Text(100)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = ("hello", "bye")[int(self.np_random.integers(2))]
        return f"Say {self.word}", {}

    def step(self, action):
        right = action == self.word
        return "thanks" if right else "what?", float(right), right, False, {}


gymnasium.register("Greeting-v0", Greeting)


def test_the_expert_walks_the_shortest_way():
    make = make_env(ADAPTER, **FIRM)
    first = make().reset(0)
    assert "[S]FFF" in first.messages[1]["content"]
    assert "<answer>Left</answer>" in first.messages[0]["content"]
    steps = play(make(), 0)
    assert len(steps) == 6
    assert steps[-1].reward == 1
    assert steps[-1].info["success"] is True


@pytest.mark.parametrize("name", ["Taxi-v4", "CliffWalking-v1"])
def test_the_expert_solves(name):
    last = play(make_env(ADAPTER, id=name)(), 3)[-1]
    assert last.terminated
    assert last.info["success"] is True


def test_the_chance_events_belong_to_the_seed():
    make = make_env(ADAPTER, id="FrozenLake-v1", max_turns=20)
    assert check_environment(make.recipe, range(30)) == []
    shown = {tuple(step.messages[0]["content"] for step in play(make(), seed)) for seed in range(8)}
    assert len(shown) > 4


def test_text_actions_and_rejected_ones():
    make = make_env(ADAPTER, id="Greeting-v0", rules="Be polite.", max_turns=3)
    environment = make()
    word = environment.reset(1).messages[1]["content"].split()[-1]
    assert environment.step("hello").info["rejected"] == "no <answer>"
    last = environment.step(f"<answer>{word}</answer>")
    assert last.terminated
    assert last.info["success"] is True
    assert play(make(), 1, ["<answer>no such word!</answer>"] * 3)[-1].truncated


def test_an_expert_of_one_environment_is_not_used_for_another():
    slippery, firm = make_env(ADAPTER, id="FrozenLake-v1")(), make_env(ADAPTER, **FIRM)()
    slippery.reset(0), firm.reset(0)
    assert (slippery.expert(), firm.expert()) == ("<answer>Left</answer>", "<answer>Down</answer>")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"id": "Pendulum-v1", "observation": "value"}, "use an environment with a Discrete or Text space"),
        ({"id": "NoSuchThing-v0"}, "gymnasium cannot make NoSuchThing-v0"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b"]}, "FrozenLake-v1 has 4 actions, not 2"),
    ],
)
def test_wrong_keys_are_one_sentence(keys, message):
    with pytest.raises(InputError, match=message):
        make_env(ADAPTER, **keys)()
