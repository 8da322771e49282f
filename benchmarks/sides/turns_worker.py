"""Episodes of many turns: our driver over the local engine, or a loop in lock-step over transformers' generate."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.timing import peak_memory

from sides.game import LongGame

ANSWER_SIGMA = 0.5
"""Standard deviation of the logarithm of an answer's length."""


def answer_length(job: dict[str, Any], seed: int, index: int, turn: int) -> int:
    """Tokens that an answer has, the same on both sides: lognormal, at most three times the median."""
    from posttrain.seeds import random_stream

    drawn = random_stream("benchmark turns", seed, index, turn).lognormal(0.0, ANSWER_SIGMA)
    return int(min(3 * job["answer"], max(1, round(job["answer"] * drawn))))


def _places(job: dict[str, Any], round_number: int) -> list[Any]:
    from posttrain.rollout.driver import EpisodeRequest

    episodes = range(job["episodes"])
    return [
        EpisodeRequest(
            seed=1000 * (round_number + 1) + number // job["group"],
            group=number // job["group"],
            index=number % job["group"],
            rng_key=(round_number, "benchmark", number),
        )
        for number in episodes
    ]


def _environment(job: dict[str, Any]) -> Any:
    from posttrain.environments.make import make_env

    return make_env(LongGame, max_turns=job["turns"], size=job["size"])


def play_ours(policy: Any, engine: Any, job: dict[str, Any], round_number: int) -> dict[str, Any]:
    """The driver over the local engine, whose answers are cut to their given lengths."""
    from posttrain.data.rendering import Renderer
    from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
    from posttrain.rollout.driver import RolloutWorker, collect_episodes
    from posttrain.seeds import derive_seed

    places = _places(job, round_number)
    lengths = {
        derive_seed(*place.rng_key, 0, turn): answer_length(job, place.seed, place.index, turn)
        for place in places
        for turn in range(job["turns"])
    }

    class Cut:
        """The engine, asked for as many tokens as the answer shall have."""

        counters, capacity, episode = engine.counters, engine.capacity, engine.episode

        async def generate(self, request: Any) -> Any:
            return await engine.generate(replace(request, max_tokens=lengths[request.seed]))

        def load_weights(self, version: int) -> None:
            engine.load_weights(version)

        def sleep(self) -> None:
            engine.sleep()

    renderer = Renderer(policy.tokenizer, frozenset(policy.tokenizer.all_special_ids))
    rollout = RolloutRecipe(tokens_per_turn=3 * job["answer"], tokens_per_episode=job["context"])
    player = RolloutWorker(Cut(), renderer, _environment(job), rollout, SamplingRecipe(), version=0)
    before = replace(engine.counters)
    begun = time.perf_counter()
    episodes = collect_episodes(player, places)
    seconds = time.perf_counter() - begun
    counters = engine.counters
    sampled = counters.sampled - before.sampled
    prefilled = counters.prefilled - before.prefilled
    return {
        "seconds": seconds,
        "answers": sum(len(episode.turns) for episode in episodes),
        "sampled": sampled,
        # The first token of an answer is computed with its prompt; each later one is one further position.
        "computed": prefilled + sampled - sum(len(episode.turns) for episode in episodes),
        "reused": counters.reused - before.reused,
    }


def play_theirs(model: Any, tokenizer: Any, job: dict[str, Any], round_number: int) -> dict[str, Any]:
    """All episodes turn by turn: one padded `generate` over their whole histories, as TRL's trainers do."""
    import torch

    from posttrain.data.rendering import Renderer
    from posttrain.episode import StopReason
    from posttrain.rollout.transcript import TokenTranscript

    torch.manual_seed(round_number + 1)
    environment = _environment(job)
    renderer = Renderer(tokenizer, frozenset(tokenizer.all_special_ids))
    places = _places(job, round_number)
    sampled = computed = answers = 0
    begun = time.perf_counter()
    games = [environment() for _ in places]
    talks = [
        TokenTranscript(renderer, game.reset(place.seed).messages) for game, place in zip(games, places, strict=True)
    ]
    for turn in range(job["turns"]):
        lengths = [answer_length(job, place.seed, place.index, turn) for place in places]
        contexts = [list(talk.context) for talk in talks]
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
        computed += len(places) * (out.shape[1] - 1)
        for row, length, talk, game in zip(out[:, width:].tolist(), lengths, talks, games, strict=True):
            text = talk.answer(row[:length], [0.0] * length, StopReason.TURN_BUDGET)
            step = game.step(text)
            talk.reward(step.reward, dict(step.info))
            if not step.truncated:
                talk.observe(step.messages)
            sampled += length
            answers += 1
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "answers": answers, "sampled": sampled, "computed": computed, "reused": 0}


def main() -> None:
    """Play a warm-up and the job's rounds."""
    job = json.loads(Path(sys.argv[1]).read_text())
    numbers = [-1, job["round"]]
    if job["way"] == "posttrain":
        from posttrain.engines.local.engine import LocalEngine
        from posttrain.models.policy import Policy
        from posttrain.recipe.engines import LocalEngineRecipe
        from posttrain.recipe.model import ModelRecipe

        policy = Policy(ModelRecipe(path=job["model"], dtype=job["dtype"], threads=job["threads"]))
        policy.end_tokens = frozenset()
        engine = LocalEngine(policy, LocalEngineRecipe(slots=job["episodes"]))
        outcomes = [play_ours(policy, engine, job, number) for number in numbers]
    else:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

        torch.set_num_threads(job["threads"])
        model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"]).eval()
        model.generation_config = GenerationConfig()
        tokenizer = AutoTokenizer.from_pretrained(job["model"])
        outcomes = [play_theirs(model, tokenizer, job, number) for number in numbers]
    Path(sys.argv[2]).write_text(json.dumps(outcomes[-1] | {"peak": peak_memory()}))


if __name__ == "__main__":
    main()
