"""The engine and the driver together: many more episodes than slots, without repeated computation."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.rendering import Renderer
from posttrain.engines.local.cache import Segment, longest_prefix, positions_of
from posttrain.engines.local.engine import LocalEngine
from posttrain.environments.make import make_env
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes

from ..training.letters import Letters


def play(policy, slots, episodes=24, per_seed=1):
    engine = LocalEngine(policy, LocalEngineRecipe(slots=slots))
    player = RolloutWorker(
        engine=engine,
        renderer=Renderer(policy.tokenizer, policy.end_tokens),
        environment=make_env(Letters, max_turns=4),
        rollout=RolloutRecipe(tokens_per_turn=5, tokens_per_episode=700),
        sampling=SamplingRecipe(),
        version=0,
    )
    places = [EpisodeRequest(i // per_seed, i // per_seed, i % per_seed, (0, "test", i)) for i in range(episodes)]
    return collect_episodes(player, places), engine.counters


def test_earlier_turns_stay_in_the_cache_with_more_episodes_than_slots(tiny_policy):
    played, counters = play(tiny_policy, 4)
    contexts = sum(len(episode.streams[0]) for episode in played)
    # Every token of a context is computed once, as part of a prompt or of an answer.
    assert counters.prefilled + counters.sampled <= contexts + sum(len(episode.turns) for episode in played)


def test_the_episodes_do_not_depend_on_the_number_of_slots(tiny_policy):
    few, _ = play(tiny_policy, 3)
    many, _ = play(tiny_policy, 64)
    assert [e.streams[0].ids.tolist() for e in few] == [e.streams[0].ids.tolist() for e in many]
    assert [e.seed for e in few] == list(range(24))


def test_a_group_shares_its_prompt_across_episodes_and_turns(tiny_policy):
    played, counters = play(tiny_policy, 8, episodes=8, per_seed=8)
    prompt = played[0].turns[0].start
    continued = sum(len(episode.streams[0]) - prompt for episode in played)
    assert counters.prefilled + counters.sampled <= prompt + 8 + continued + sum(len(e.turns) for e in played)


PIECES = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=8)


@given(sequences=PIECES, prompt=st.lists(st.integers(0, 2), max_size=6).map(tuple))
def test_the_first_of_the_longest_prefixes_is_found(sequences, prompt):
    def as_bytes(ids):
        return np.array(ids, dtype=np.int64).tobytes()

    shared = [max(n for n in range(len(prompt) + 1) if ids[:n] == prompt[:n]) for ids in sequences]
    expected = (shared.index(max(shared)), max(shared)) if any(shared) else (0, 0)
    assert longest_prefix([as_bytes(ids) for ids in sequences], as_bytes(prompt)) == expected


@given(spans=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6))
def test_positions_of_segments_follow_each_other(spans):
    segments = [Segment(slot, start, count) for slot, (start, count) in enumerate(spans)]
    expected = [position for start, count in spans for position in range(start, start + count)]
    assert positions_of(segments).tolist() == expected
