"""A task for agents: name the animal of two words. Seeds from 1,000,000 on have words that lower seeds do not have."""

import random

from posttrain import Environment, EnvironmentRecipe, Observation, Step

ANIMALS = [
    "horse",
    "cat",
    "dog",
    "cow",
    "sheep",
    "goat",
    "lion",
    "tiger",
    "bear",
    "wolf",
    "fox",
    "rabbit",
    "mouse",
    "duck",
    "goose",
    "eagle",
    "owl",
    "frog",
    "snake",
    "shark",
    "whale",
    "camel",
    "monkey",
    "pig",
    "hen",
    "donkey",
    "deer",
    "elephant",
    "giraffe",
    "zebra",
]
THINGS = [
    "lamp",
    "chair",
    "table",
    "spoon",
    "fork",
    "plate",
    "cup",
    "bottle",
    "door",
    "window",
    "book",
    "pencil",
    "hammer",
    "nail",
    "rope",
    "carpet",
    "mirror",
    "clock",
    "basket",
    "bucket",
    "ladder",
    "brick",
    "candle",
    "pillow",
    "blanket",
    "shoe",
    "hat",
    "coat",
    "ring",
    "bell",
]
HELD_OUT = 1_000_000


class Animal(Environment):
    """Reward 1 for the animal, 0 for anything else."""

    class Recipe(EnvironmentRecipe):
        """One answer."""

        max_turns: int = 1

    def reset(self, seed):
        words = slice(20, None) if seed >= HELD_OUT else slice(20)
        draws = random.Random(seed)
        self.animal = draws.choice(ANIMALS[words])
        self.words = [self.animal, draws.choice(THINGS[words])]
        draws.shuffle(self.words)
        self.over = False
        question = f"Which of the two is an animal: {self.words[0]} or {self.words[1]}? Answer with one word."
        return Observation([{"role": "user", "content": question}])

    def step(self, action):
        if self.over:
            raise RuntimeError("the episode is over; call reset")
        self.over = True
        success = action.strip() == self.animal
        return Step([], float(success), True, False, {"success": success})

    def expert(self):
        return self.animal

    def random_answer(self, draw):
        return self.words[int(draw * len(self.words))]
