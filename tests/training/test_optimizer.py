"""Where the optimizer keeps its state, and 8-bit AdamW: the same on a CPU as on a GPU."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.distributed import world
from posttrain.models.cuda.copies import copied_to
from posttrain.recipe.hardware import HardwareRecipe
from posttrain.recipe.model import OptimizerRecipe
from posttrain.training.optimizer import Optimizer, _Piece, _regroup, _shard_range, learning_rate_factor


def made(kind="adamw", dtype=torch.float32):
    torch.manual_seed(0)
    names = {"wide.weight": (96, 128), "norm.weight": (128,)}  # the second is too small for 8-bit state
    parameters = [(name, torch.nn.Parameter(torch.randn(shape).to(dtype))) for name, shape in names.items()]
    return Optimizer(parameters, OptimizerRecipe(type=kind, learning_rate=0.01, weight_decay=0.1), 10)


def stepped(optimizer, first=0, last=4):
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for parameter in optimizer.parameters:
            # Two backward passes, whose gradients add up.
            for _ in range(2):
                gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                optimizer.collect()
        optimizer.step()
    return [parameter.detach().clone() for parameter in optimizer.parameters]


def offload(monkeypatch, what):
    monkeypatch.setitem(world._state, "world", world.World(HardwareRecipe(offload=what)))


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_an_offloaded_optimizer_and_one_that_slept_make_the_same_steps(dtype, monkeypatch):
    expected = stepped(made(dtype=dtype))
    offload(monkeypatch, "optimizer")
    offloaded = made(dtype=dtype)
    pairs = zip(offloaded.masters, offloaded.parameters, strict=True)
    assert all(master is not parameter for master, parameter in pairs)
    assert all(map(torch.equal, stepped(offloaded), expected))
    offload(monkeypatch, "rollouts")
    optimizer = made(dtype=dtype)
    stepped(optimizer, 0, 2)
    optimizer.sleep()
    optimizer.wake()
    assert all(map(torch.equal, stepped(optimizer, 2, 4), expected))


def resumed(kind="adamw", dtype=torch.float32):
    """The weights after four steps with a new optimizer after the second one, and the tensors that it was given."""
    first = made(kind, dtype)
    weights = stepped(first, 0, 2)
    state, tensors = first.state_dict(), {name: tensor.clone() for name, tensor in first.tensors().items()}
    again = made(kind, dtype)
    with torch.no_grad():
        for parameter, saved in zip(again.parameters, weights, strict=True):
            parameter.copy_(saved)
        for name, target in again.tensors(state).items():
            target.copy_(tensors[name])
    again.load_state_dict(state)
    return stepped(again, 2, 4), tensors


@pytest.mark.parametrize("where", ["none", "optimizer", "rollouts"])
@DTYPES
def test_a_resumed_optimizer_makes_the_same_steps(dtype, where, monkeypatch):
    offload(monkeypatch, where)
    assert all(map(torch.equal, resumed(dtype=dtype)[0], stepped(made(dtype=dtype))))


def test_8_bit_state_resumes_to_the_same_bits_and_its_steps_are_close_to_those_of_float32():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install posttrain[cuda]")
    found, tensors = resumed("adamw_8bit")
    assert all(map(torch.equal, found, stepped(made("adamw_8bit"))))
    assert tensors["wide.weight/state1"].dtype == torch.uint8
    assert tensors["norm.weight/state1"].dtype == torch.float32
    assert not any("qmap" in name for name in tensors)
    of_8, of_32, start = (
        torch.cat([tensor.flatten() for tensor in weights])
        for weights in (found, stepped(made()), stepped(made(), last=0))
    )
    assert 0 < (of_8 - of_32).norm() / (of_32 - start).norm() < 0.1


@settings(max_examples=150)
@given(st.integers(1, 60), st.sampled_from([1, 3, 64, 200, 256, 512]), st.integers(1, 5), st.integers(1, 5), st.data())
def test_8_bit_moments_of_other_shards_are_copied_by_block_or_rounded_again(rows, columns, saved, shards, data):
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    weight = torch.zeros(rows, columns)
    codes = functional.create_dynamic_map(signed=data.draw(st.booleans()))
    whole = torch.randn(weight.shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    whole = (whole if codes.min() < 0 else whole.abs()).flatten()
    smallest, pieces, exact = data.draw(st.sampled_from([1, 4096])), [], {}
    for shard in range(saved):
        start, stop = _shard_range(weight, shard, saved)
        values, scales = whole[start:stop], None
        if stop - start >= smallest:
            values, state = functional.quantize_blockwise(values, code=codes, blocksize=256)
            scales = state.absmax
            exact |= {(at, min(at + 256, stop)): scales[number] for number, at in enumerate(range(start, stop, 256))}
            whole[start:stop] = codes[values.long()] * scales.repeat_interleave(256)[: len(values)]
        pieces += [_Piece(shard, start, stop, values, scales)] if len(values) else []
    assert len(pieces) == 1 or sum(piece.stop - piece.start for piece in pieces) == weight.numel()
    copied = 0
    for shard in range(shards):
        start, stop = _shard_range(weight, shard, shards)
        overlapping = [piece for piece in pieces if piece.start < stop and start < piece.stop]
        if start == stop:
            continue
        moments, scales = torch.empty(stop - start, dtype=torch.uint8), torch.empty(-(-(stop - start) // 256))
        _regroup(overlapping, start, moments, scales, codes)
        found = codes[moments.long()] * scales.repeat_interleave(256)[: len(moments)]
        step = max(float(codes.diff().max()) / 2, float(1 + codes.min()) if codes.min() < 0 else 0.0)
        for number, at in enumerate(range(start, stop, 256)):
            block = slice(at - start, min(at + 256, stop) - start)
            expected, bound = whole[start:stop][block], 1.02 * step * float(whole[start:stop][block].abs().max())
            if (at, min(at + 256, stop)) in exact:
                copied, bound = copied + 1, 0.0
                assert scales[number] == exact[at, min(at + 256, stop)]
            assert float((found[block] - expected).abs().max()) <= bound
        plain = torch.empty(stop - start)
        _regroup(overlapping, start, plain, None, codes)
        assert torch.equal(plain, whole[start:stop])
    assert copied == len(exact) or saved != shards


def test_bfloat16_weights_and_their_remainders_are_the_masters():
    draws = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=draws, dtype=torch.int64)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000  # halfway between two numbers of bfloat16
    values = bits.to(torch.int32).view(torch.float32)
    values = values[values.isfinite()]
    parameter = torch.nn.Parameter(values.bfloat16())
    optimizer = Optimizer([("weight", parameter)], OptimizerRecipe(learning_rate=1e-30), 10)
    with torch.no_grad():
        optimizer.masters[0].copy_(values)
    optimizer.masters[0].grad = torch.zeros_like(values)
    optimizer.step()
    stored, masters = optimizer.tensors(), optimizer.masters[0].detach()
    assert torch.equal(parameter, values.bfloat16())
    changed = masters != values
    assert 0.1 < changed.float().mean() < 0.3  # of those halfway, the half that is rounded down
    assert (values.view(torch.int32) - masters.view(torch.int32))[changed].eq(1).all()
    assert stored["weight/remainder"].dtype == torch.int16
    again = Optimizer([("weight", torch.nn.Parameter(parameter.detach().clone()))], OptimizerRecipe(), 10)
    for name, target in again.tensors(optimizer.state_dict()).items():
        target.copy_(stored[name])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.masters[0].view(torch.int32), masters.view(torch.int32))


def test_a_copy_on_another_device_keeps_weights_tied():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    model[0].bias = model[1].bias
    copy = copied_to(model, torch.device("meta"))
    assert {tensor.device.type for tensor in copy.state_dict().values()} == {"meta"}
    assert copy[0].bias is copy[1].bias
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_gradients_of_bfloat16_weights_are_freed_within_the_backward_pass():
    def gradients_and_counts(freed):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([torch.nn.Linear(16, 16, bias=False, dtype=torch.bfloat16) for _ in range(3)])
        optimizer = Optimizer(list(layers.named_parameters()), OptimizerRecipe(), 10)
        held = []  # number of gradients in bfloat16 when that of a layer arrives
        for layer in layers:
            layer.weight.register_hook(lambda _: held.append(sum(p.grad is not None for p in layers.parameters())))
        for number in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).bfloat16()
            for layer in layers:
                x = layer(x)
            with optimizer.collecting() if freed else contextlib.nullcontext():
                x.sum().backward()
            optimizer.collect()
            assert all(p.grad is None for p in layers.parameters())
        return [master.grad for master in optimizer.masters], held

    freed, plain = gradients_and_counts(True), gradients_and_counts(False)
    assert freed[1] == [0] * 6
    assert plain[1] == [0, 1, 2] * 2
    assert all(map(torch.equal, freed[0], plain[0]))
    assert all(gradient.dtype == torch.float32 for gradient in freed[0])


@DTYPES
def test_clipping_in_the_kernel_of_adamw_is_clipping_before_it(dtype, monkeypatch):
    """Of gradients whose norm is above the limit, below it, and above it again."""
    optimizer, clip = made(dtype=dtype), torch.nn.utils.clip_grad_norm_
    monkeypatch.delattr(torch.nn.utils, "clip_grads_with_norm_")  # a pass of its own
    masters = [parameter.detach().float().requires_grad_() for parameter in optimizer.parameters]
    groups = [{"params": [master], "weight_decay": rate} for master, rate in zip(masters, (0.1, 0.0), strict=True)]
    plain = torch.optim.AdamW(groups, lr=0.01, betas=optimizer.recipe.betas, eps=optimizer.recipe.epsilon)
    for size in (1.0, 1e-3, 0.1):
        generator = torch.Generator().manual_seed(7)
        for parameter, master in zip(optimizer.parameters, masters, strict=True):
            parameter.grad = (size * torch.randn(parameter.shape, generator=generator)).to(dtype)
            master.grad = parameter.grad.float().clone()
        norm = float(clip(masters, 1.0, foreach=False))
        optimizer.collect()
        assert optimizer.step() == pytest.approx(norm, rel=1e-5)
        assert (norm > 1) == (size > 0.01)
        plain.step()
        for ours, theirs in zip(optimizer.masters, masters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def factors(total, updates, **keys):
    return [learning_rate_factor(OptimizerRecipe(**keys), u, total) for u in updates]


def test_the_learning_rate_at_the_corners_of_its_schedule():
    for schedule in ("constant", "linear", "cosine"):
        rising = factors(10, range(4), schedule=schedule, warmup_updates=3)
        assert rising == pytest.approx([0.25, 0.5, 0.75, 1.0])
    at = [2, 6, 10, 99]
    assert factors(10, at, schedule="constant", warmup_updates=2) == [1, 1, 1, 1]
    for schedule in ("linear", "cosine"):
        falling = factors(10, at, schedule=schedule, warmup_updates=2, final_fraction=0.2)
        assert falling == pytest.approx([1, 0.6, 0.2, 0.2])
    (factor,) = factors(10, [4], schedule="cosine", warmup_updates=2, final_fraction=0.0)
    assert factor == pytest.approx(0.8535533905932737)
    # A warm-up longer than the run never divides by zero.
    assert factors(3, [0, 3, 5], schedule="cosine", warmup_updates=5) == pytest.approx([1 / 6, 4 / 6, 1.0])
