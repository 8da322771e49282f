"""The tokenizer of the packaged model."""

import pytest


@pytest.fixture(scope="session")
def smollm():
    from posttrain.models.load import load_tokenizer
    from posttrain.recipe.model import ModelRecipe

    return load_tokenizer(ModelRecipe(path="packaged:smollm2-135m"))
