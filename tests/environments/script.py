"""A policy whose answers are written by the test, for tests of environments in episodes."""

from contextlib import nullcontext
from itertools import cycle

from posttrain.data.rendering import Renderer
from posttrain.engines.protocol import Completion, EngineCounters
from posttrain.episode import StopReason

from ..conftest import make_tokenizer

TOKENIZER = make_tokenizer()
RENDERER = Renderer(TOKENIZER, frozenset({TOKENIZER.eos_token_id}))


class Script:
    """An engine that gives these answers in turn, again and again."""

    def __init__(self, *answers):
        self.answers, self.requests = cycle(answers), []
        self.counters, self.capacity = EngineCounters(), 1

    async def generate(self, request):
        self.requests.append(request)
        ids = tuple(RENDERER.answer(next(self.answers)))
        return Completion(ids, (-0.5,) * len(ids), (0,) * len(ids), StopReason.END_TOKEN)

    def episode(self, group=0):
        return nullcontext()
