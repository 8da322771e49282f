"""Fixtures of the checks, which run in the process that `child.py` starts."""

import gc

import pytest


@pytest.fixture(scope="session")
def fake_gpu():
    from posttrain.engines.local import decoder, engine, gate
    from posttrain.models import forward, load
    from posttrain.models.gate import use_path
    from posttrain.training import adamw
    from tests.cuda_fake.device import AdamwKernels, DecodingKernels, VocabularyKernels, fake_cuda

    # Fake tensors have no numbers, so what the exactness gates would measure is set.
    with fake_cuda() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "vocabulary_kernels", lambda logits: VocabularyKernels(fake))
        patch.setattr(decoder, "decoding_kernels", lambda: DecodingKernels(fake))
        patch.setattr(adamw, "adamw_kernels", lambda weight: AdamwKernels(fake) if weight.is_cuda else None)
        patch.setattr(load, "choose_path", lambda model, cache: use_path(model, forward.ForwardPath()))
        patch.setattr(engine, "choose_decoding", lambda model, flash, cache: gate.Parts("fused" if flash else "paged"))
        gc.freeze()  # checks of memory collect garbage often, and need not search modules
        yield fake


@pytest.fixture
def device(fake_gpu):
    """The fake GPU, with counts from zero."""
    fake_gpu.reset()
    return fake_gpu


@pytest.fixture(scope="session")
def thin_model(tmp_path_factory, tiny_model):
    """Directory of the tiny model with one layer: what is checked here does not depend on their number."""
    from tests.cuda_fake import made

    return made.deeper(tiny_model, tmp_path_factory.mktemp("models") / "thin", 1)


@pytest.fixture(scope="session")
def policy(fake_gpu, thin_model):
    """A policy on the fake GPU. Updates change nothing that a check reads."""
    from posttrain.models.policy import Policy
    from tests.cuda_fake import made

    return Policy(made.recipe(thin_model))
