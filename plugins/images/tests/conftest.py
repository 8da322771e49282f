"""A tiny model of each family, made once."""

import base64
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from plugins.images.tests.tiny import save_tiny

from posttrain.models.policy import Policy


@pytest.fixture(scope="session")
def model_of(tmp_path_factory):
    """`model_of(family)`: the directory of its tiny model."""
    made = {}

    def directory(family):
        if family not in made:
            made[family] = save_tiny(tmp_path_factory.mktemp("images") / family, family)
        return made[family]

    return directory


@pytest.fixture(scope="session")
def policy_of(model_of):
    """`policy_of(family)`: a policy over its tiny model."""
    made = {}

    def policy(family):
        if family not in made:
            made[family] = Policy(str(model_of(family)), threads=1)
        return made[family]

    return policy


def picture(height=40, width=64, seed=0):
    """An image of random pixels."""
    pixels = np.random.default_rng((height, width, seed)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image, form="PNG", **settings):
    """The file of an image as bytes."""
    file = BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def part(image):
    """The part of a message with this image."""
    return {"type": "image", "bytes": base64.b64encode(encoded(image)).decode()}


def text(words):
    return {"type": "text", "text": words}
