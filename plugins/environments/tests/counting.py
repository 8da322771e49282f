"""An environment of OpenEnv: count to a number that the seed gives. Also the server of the tests."""

import random
import sys

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Count(Action):
    number: int


class Shown(Observation):
    text: str


class Counting(Environment[Count, Shown, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, length: int = 3):
        super().__init__()
        self.length = length

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.start = random.Random(seed).randrange(100)
        self.counted = 0
        return Shown(text=f"Count {self.length} numbers, beginning after {self.start}.")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.number == self.start + self.counted + 1
        self.counted += right
        done = self.counted == self.length or not right
        return Shown(text="right" if right else "wrong", done=done, reward=right / self.length)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    import uvicorn

    app = create_fastapi_app(Counting, Count, Shown, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
