"""The tokenizer of the packaged model."""

import pytest

from posttrain.models.load import load_tokenizer
from posttrain.recipe.model import ModelRecipe


@pytest.fixture(scope="session")
def smollm():
    return load_tokenizer(ModelRecipe(path="packaged:smollm2-135m"))
