"""Weights are sent in several buckets, although the models of these tests are small."""

import pytest


@pytest.fixture(autouse=True, scope="package")
def _small_buckets():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("posttrain.engines.vllm.engine.BUCKET_BYTES", 2**20)
        yield
