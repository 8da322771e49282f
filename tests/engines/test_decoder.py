"""The streamlined decoder, compiled and not, against the model's own modules."""

import copy
import ctypes
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.cpu import layers
from posttrain.engines.local.cpu.kernel import decoding_kernel
from posttrain.engines.local.decoder import ModuleDecoder, StreamlinedDecoder, decoder_of
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.models.cpu import attention as attention_cpu
from posttrain.models.cpu.backend import onednn_multiplies
from posttrain.models.cpu.compiler import TYPES, compiled
from posttrain.models.forward import ForwardPath, use_float32_head
from posttrain.models.gate import use_path
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.model import ModelRecipe
from tests.vllm.asking import GREEDY, answers

SHAPE = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3, "head_dim": 64}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
MODELS = {"llama": {"attention_bias": True}, "mistral": {"sliding_window": 9}, "qwen2": {"head_dim": 32}, "qwen3": {}}


def made(name, dtype=torch.float32, **shape):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | MODELS[name] | shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases that are not 1 and 0, so that leaving one out shows.
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model = model.to(dtype).eval()
    use_path(model, ForwardPath())
    return model


def passes(decoder, dtype):
    """Hidden states of four passes: two prompts, one token each, a prompt beside decoding, a prompt in two pieces."""
    cache = KeyValuePages(4)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for segments in (
        [Segment(0, 0, 12), Segment(2, 0, 7)],
        [Segment(0, 12, 1), Segment(2, 7, 1)],
        [Segment(0, 13, 1), Segment(1, 0, 150), Segment(2, 8, 1)],
        [Segment(0, 14, 1), Segment(1, 150, 20)],
    ):
        layout = CachedLayout(cache, segments, torch.device("cpu"))
        count = sum(s.count for s in segments)
        ids = torch.randint(3, 300, (count,), generator=generator)
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in layout.segments])
        with torch.no_grad():
            hidden = decoder.hidden(ids, positions, layout)
            outputs.append(torch.cat([hidden.float().flatten(), decoder.logits(hidden).flatten()]))
    return outputs


@pytest.mark.parametrize("kernel", ["compiled", "torch"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("name", MODELS)
def test_every_pass_equals_that_of_the_modules(name, dtype, bound, kernel, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_KERNEL", "0" if kernel == "torch" else "1")
    libraries = decoding_kernel, layers.product_library, attention_cpu._library
    for library in libraries:
        library.cache_clear()
    try:
        model = made(name, dtype)
        fast = decoder_of(model)
        assert isinstance(fast, StreamlinedDecoder)
        if kernel == "compiled" and fast._layers[0].kernel is None and name != "qwen2":
            pytest.skip("there is no C++ compiler")
        for mine, theirs in zip(passes(fast, dtype), passes(ModuleDecoder(model), dtype), strict=True):
            assert (mine - theirs).abs().max() < bound
    finally:  # later tests use compiled functions
        for library in libraries:
            library.cache_clear()


def test_without_packed_products_the_modules_own_weights_are_used(monkeypatch):
    monkeypatch.setattr(layers, "product_library", lambda dtype: None)
    monkeypatch.setattr(layers, "onednn_multiplies", lambda dtype: False)
    model = made("llama")
    decoder = decoder_of(model)
    assert all(product._packed is None for layer in decoder._layers for product in layer.linears)
    for mine, theirs in zip(passes(decoder, torch.float32), passes(ModuleDecoder(model), torch.float32), strict=True):
        assert (mine - theirs).abs().max() < 2e-5


def test_joined_weights_stay_parameters(tmp_path):
    """They are one tensor for the engine. Updates, loading, copies, files and adapters are those of separate weights."""
    model, apart = made("llama"), made("llama")
    attention = model.model.layers[0].self_attn
    parts = [module.weight for module in (attention.q_proj, attention.k_proj, attention.v_proj)]
    whole = layers.side_by_side(parts)
    assert torch.equal(whole, torch.cat([part.detach() for part in parts]))
    assert layers.side_by_side(parts).data_ptr() == whole.data_ptr() == parts[0].data_ptr()
    assert layers.side_by_side(parts[:2]).shape == (parts[0].shape[0] + parts[1].shape[0], 128)
    for each in (model, apart):
        optimizer = torch.optim.AdamW(each.parameters())
        each(torch.arange(3, 9)[None]).logits.square().sum().backward()
        optimizer.step()
    updated = apart.model.layers[0].self_attn
    assert torch.equal(whole, torch.cat([getattr(updated, f"{name}_proj").weight.detach() for name in "qkv"]))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        copied = copy.deepcopy(model).model.layers[0].self_attn
        copied.q_proj.weight.zero_()
        assert whole.abs().min(1).values.max() > 0
        whole.zero_()
        assert not any(part.any() for part in parts)
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    assert torch.equal(whole[: len(parts[0])], updated.q_proj.weight)


def compiled_products(dtype, by=layers.VECTORS):
    if by != layers.VECTORS and (dtype != torch.bfloat16 or by > (layers.unit(dtype) or layers.VECTORS)):
        pytest.skip(f"this processor has no such unit for {dtype}")
    library = compiled("products", layers.SOURCE, [f"-DTYPE_BF16={TYPES[dtype]}", f"-DUNIT={by}"])
    if library is None:
        pytest.skip("there is no C++ compiler")
    return ctypes.CDLL(str(library))


def compiled_product(weight, bias, by=layers.VECTORS):
    return layers.CompiledProduct(compiled_products(weight.dtype, by), weight, bias)


product_by_pairs = partial(compiled_product, by=layers.PAIRS)
product_by_tiles = partial(compiled_product, by=layers.TILES)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MODELS)
def test_all_layers_in_one_call_compute_the_same_bits_as_one_by_one(name, dtype, monkeypatch):
    monkeypatch.setattr(layers, "product_library", compiled_products)
    decoder = decoder_of(made(name, dtype))
    if decoder._layers[0].kernel is None:
        assert decoder._compiled is None
        return
    together = passes(decoder, dtype)
    assert decoder._compiled is not None
    decoder._compiled = None
    for mine, theirs in zip(together, passes(decoder, dtype), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_float32_norms_beside_bfloat16_matrices_are_computed_without_the_kernel(name, monkeypatch):
    monkeypatch.setattr(layers, "product_library", compiled_products)
    expected = passes(ModuleDecoder(made(name, torch.bfloat16)), torch.bfloat16)
    model = made(name, torch.bfloat16)
    for path, module in model.named_modules():
        if path.endswith("norm"):
            module.float()
    decoder = decoder_of(model)
    # The kernel and the products read memory by pointers, so all weights of a layer must have one dtype.
    assert decoder._compiled is None
    assert all(layer.kernel is None for layer in decoder._layers)
    for mine, theirs in zip(passes(decoder, torch.bfloat16), expected, strict=True):
        assert (mine - theirs).abs().max() < 0.15


def test_matrices_and_operands_of_another_dtype_are_not_compiled_and_refused(monkeypatch):
    monkeypatch.setattr(layers, "product_library", compiled_products)
    for path in ("embed_tokens", "layers.1.mlp.down_proj", "layers.2.self_attn.q_proj"):
        model = made("llama", torch.bfloat16)
        model.model.get_submodule(path).float()
        assert decoder_of(model)._compiled is None
    product = compiled_product(torch.zeros(16, 32), None)
    x = torch.zeros(2, 32)
    with pytest.raises(TypeError, match=r"the weights are torch.float32, and an operand is torch.bfloat16"):
        product(x.bfloat16(), "none")
    with pytest.raises(TypeError, match=r"the weights are torch.float32, and an operand is torch.bfloat16"):
        product(x, "plus", torch.zeros(2, 16).bfloat16())


def test_compiled_layers_keep_their_norms_when_a_parameter_gets_other_data(monkeypatch):
    monkeypatch.setattr(layers, "product_library", compiled_products)
    model = made("qwen3")
    decoder = decoder_of(model)
    if decoder._layers[0].kernel is None:
        pytest.skip("there is no C++ compiler")
    before = passes(decoder, torch.float32)
    for path, module in model.named_modules():
        if "layers" in path and path.endswith("norm"):
            module.weight.data = torch.full_like(module.weight, 7.0)
    for layer, arguments in zip(decoder._compiled._layers, decoder._compiled._arguments, strict=True):
        query, key = layer.head_norms
        kept = [tensor.data_ptr() for tensor in (layer.before, layer.between, query, key)]
        assert kept == [arguments.before, arguments.between, arguments.query_norm, arguments.key_norm]
    for mine, theirs in zip(passes(decoder, torch.float32), before, strict=True):
        assert torch.equal(mine, theirs)


def onednn_product(weight, bias):
    if not onednn_multiplies(weight.dtype):
        pytest.skip(f"oneDNN does not multiply in {weight.dtype} on this processor")
    return layers.OneDnnProduct(weight, bias)


AFTER = {
    "none": lambda product, other: product,
    "silu": lambda product, other: product / (1 + (-product).exp()),
    "times": lambda product, other: product * other,
    "plus": lambda product, other: product + other,
}


@pytest.mark.parametrize("make", [compiled_product, product_by_pairs, product_by_tiles, onednn_product])
@pytest.mark.parametrize("then", AFTER)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
def test_packed_products_equal_the_formula(dtype, bound, then, make):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 64, 96), (5, 576, 40), (13, 30, 33), (31, 96, 33), (100, 128, 16), (300, 32, 80))
    for rows, inputs, outputs in shapes:
        if make is product_by_tiles and inputs % 32:
            continue
        x, weight, bias, other = (
            torch.randn(*shape, generator=generator).to(dtype)
            for shape in ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
        )
        for given in (None, bias):
            exact = x.double() @ weight.double().T + (0 if given is None else given.double())
            exact = AFTER[then](exact, other.double())
            found = make(weight, given)(x, then, other if then in ("times", "plus") else None)
            assert found.dtype == dtype
            # The size of the terms that are added, not that of their sum, limits the error.
            scale = exact.abs() + inputs**0.5 * (1 + other.double().abs())
            assert ((found.double() - exact).abs() / scale).max() < bound


@pytest.mark.parametrize("make", [compiled_product, product_by_pairs, product_by_tiles])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_a_compiled_product_does_not_depend_on_the_others(dtype, make):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, 96), (48, 96)))
    product = make(weight, None)
    alone = torch.cat([product(row[None], "none") for row in x])
    for count in (2, 7, 12, 13, 16, 17, 33, 70):
        assert torch.equal(product(x[:count], "none"), alone[:count])


@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_a_float32_head_computes_float32_logits(target):
    model = made("llama", torch.bfloat16)
    use_float32_head(model)
    weight = model.lm_head.weight.detach()
    hidden = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM")).eval()
    for decoder in (decoder_of(adapted), ModuleDecoder(adapted)):
        with torch.no_grad():
            torch.testing.assert_close(decoder.logits(hidden), hidden.float() @ weight.float().T)


def test_adapters_count():
    model = made("qwen3")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    plain = passes(decoder_of(adapted), torch.float32)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.eval()
    for before, mine, theirs in zip(
        plain, passes(decoder_of(adapted), torch.float32), passes(ModuleDecoder(adapted), torch.float32), strict=True
    ):
        assert (mine - theirs).abs().max() < 2e-5
        assert (mine - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_equals_transformers_generate_token_for_token(name):
    model = made(name)
    stub = SimpleNamespace(model=model, device=torch.device("cpu"), end_tokens=frozenset(), recipe=ModelRecipe())
    stub.tokenizer = stub.sharded = None
    engine = LocalEngine(stub, LocalEngineRecipe(slots=3, tokens_per_forward=64))
    rng = np.random.default_rng(0)
    prompts = [tuple(int(t) for t in rng.integers(3, 300, length)) for length in (5, 90, 30, 140, 17)]

    found = answers(engine, [Request(prompt, GREEDY, 0, 40) for prompt in prompts])
    theirs, greedy = made(name), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs.set_attn_implementation("sdpa")
    for prompt, answer in zip(prompts, found, strict=True):
        expected = theirs.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist()
        assert list(answer.ids) == expected
