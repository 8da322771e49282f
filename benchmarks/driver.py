"""Turns per second of the driver on rank 0: an engine that answers at once, and thousands of episodes in flight.

    python benchmarks/driver.py

What is left is everything that one process does for a turn: the environment and its thread, the chat template, tokens, streams
and the event loop. Answers have `--tokens` tokens, a thought and a random action; contexts grow by an observation and an answer
each turn.
"""

import argparse
import cProfile
import pstats
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from harness.models import MODELS, model_directory
from harness.table import show

from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Completion, EngineCounters, Request
from posttrain.environments.make import make_env
from posttrain.episode import StopReason
from posttrain.models.load import load_end_tokens, load_tokenizer
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, collect_episodes

MOVES = ["Left", "Down", "Right", "Up"]
GAMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "bandit": ({}, ["dragon", "phoenix"]),
    "frozen_lake": ({"max_turns": 8}, MOVES),
    "sokoban": ({"max_turns": 8}, MOVES),
}
"""Environment -> its keys and actions."""


class InstantEngine:
    """Answers every request at once, with one of the `answers` that its seed selects."""

    def __init__(self, answers: list[list[int]], capacity: int) -> None:
        self.answers = [(tuple(ids), (-0.5,) * len(ids), (0,) * len(ids)) for ids in answers]
        self.capacity, self.counters = capacity, EngineCounters()

    async def generate(self, request: Request) -> Completion:
        answer = self.answers[request.seed % len(self.answers)]
        self.counters.sampled += len(answer[0])
        return Completion(*answer, StopReason.END_TOKEN)

    def episode(self, group: int = 0) -> Any:
        return nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="whose tokenizer and chat template are used")
    parser.add_argument("--episodes", type=int, default=2048, help="episodes, all in flight")
    parser.add_argument("--group", type=int, default=8, help="episodes of a task")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--only", default="", help="environments, separated by commas")
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    recipe, rows = ModelRecipe(path=str(model_directory(options.model))), []
    tokenizer = load_tokenizer(recipe)
    renderer = Renderer(tokenizer, load_end_tokens(recipe.path, tokenizer))
    for name, (keys, actions) in GAMES.items():
        if options.only and name not in options.only.split(","):
            continue
        environment = make_env(name, format={"thinking": True, "prime": False}, **keys)
        start, end = (tokenizer.encode(text, add_special_tokens=False) for text in ("<think>", "</think>"))
        answers = [[*end, *renderer.answer(f"<answer>{action}</answer>")] for action in actions]
        thought = tokenizer.encode(" thinking" * options.tokens, add_special_tokens=False)
        answers = [[*start, *thought[: options.tokens - len(start) - len(ids)], *ids] for ids in answers]
        worker = RolloutWorker(
            engine=InstantEngine(answers, options.episodes),  # type: ignore[arg-type]
            renderer=renderer,
            environment=environment,
            rollout=RolloutRecipe(tokens_per_turn=max(map(len, answers)), tokens_per_episode=8192),
            sampling=SamplingRecipe(),
            version=0,
        )
        places = [divmod(number, options.group) for number in range(options.episodes)]
        requests = [EpisodeRequest(seed, seed, index, (0, "sampling", 0, seed, index)) for seed, index in places]
        collect_episodes(worker, [replace(one, seed=one.seed + 10**6) for one in requests[:64]])
        profile = cProfile.Profile(time.process_time)
        begun, processor = time.perf_counter(), time.process_time()
        with profile if options.profile else nullcontext():
            episodes = collect_episodes(worker, requests)
        wall, used = time.perf_counter() - begun, time.process_time() - processor
        turns = sum(len(episode.turns) for episode in episodes)
        rows.append(
            {
                "environment": name,
                "episodes": len(episodes),
                "turns": turns,
                "turns/s": turns / wall,
                "turns per processor second": turns / used,
            }
        )
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    show("The driver with an engine that answers at once", rows, json_file=options.json)


if __name__ == "__main__":
    main()
