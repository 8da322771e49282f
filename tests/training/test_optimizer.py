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
from posttrain.training.adamw import dequantized, quantize, tables
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
    assert all(each.weight.data_ptr() != each.parameter.data_ptr() for each in offloaded.trained)
    assert all(each.weight.dtype == torch.float32 for each in offloaded.trained)
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


def test_8_bit_moments_move_weights_without_a_gradient_by_no_more_than_others():
    """Second moments that are small beside others of their block stay above 0: first moments are divided by their roots."""
    (each, _), optimizer = (optimizer := made("adamw_8bit")).trained, optimizer
    for size in (1.0, 0.0, 0.0):
        before = each.master.clone()
        each.gradient = size * torch.logspace(0, -8, 128).repeat(96, 1)
        optimizer.step()
        assert 0 < (each.master - before).abs().max() < 2 * optimizer.recipe.learning_rate


@settings(max_examples=150)
@given(st.integers(1, 60), st.sampled_from([1, 3, 64, 200, 256, 512]), st.integers(1, 5), st.integers(1, 5), st.data())
def test_8_bit_moments_of_other_shards_are_copied_by_block_or_rounded_again(rows, columns, saved, shards, data):
    weight, kind = torch.zeros(rows, columns), data.draw(st.integers(0, 1))
    codes = tables(weight.device)[0][kind]
    whole = torch.randn(weight.shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    whole = (whole if codes.min() < 0 else whole.abs()).flatten()
    smallest, pieces, exact = data.draw(st.sampled_from([1, 4096])), [], {}
    for shard in range(saved):
        start, stop = _shard_range(weight, shard, saved)
        values, scales = whole[start:stop], None
        if stop - start >= smallest:
            values, scales = torch.empty(stop - start, dtype=torch.uint8), torch.empty(-(-(stop - start) // 256))
            quantize(whole[start:stop].clone(), values, scales, kind)
            exact |= {(at, min(at + 256, stop)): scales[number] for number, at in enumerate(range(start, stop, 256))}
            whole[start:stop] = dequantized(values, scales, kind)
        pieces += [_Piece(shard, start, stop, values, scales)] if len(values) else []
    assert len(pieces) == 1 or sum(piece.stop - piece.start for piece in pieces) == weight.numel()
    copied = 0
    for shard in range(shards):
        start, stop = _shard_range(weight, shard, shards)
        overlapping = [piece for piece in pieces if piece.start < stop and start < piece.stop]
        if start == stop:
            continue
        moments, scales = torch.empty(stop - start, dtype=torch.uint8), torch.empty(-(-(stop - start) // 256))
        _regroup(overlapping, start, moments, scales, kind)
        found = dequantized(moments, scales, kind)
        step = max(float(codes.diff().max()) / 2, float(1 + codes.min()) if codes.min() < 0 else 0.0)
        for number, at in enumerate(range(start, stop, 256)):
            block = slice(at - start, min(at + 256, stop) - start)
            expected, bound = whole[start:stop][block], 1.0001 * step * float(whole[start:stop][block].abs().max())
            if (at, min(at + 256, stop)) in exact:
                copied, bound = copied + 1, 0.0
                assert scales[number] == exact[at, min(at + 256, stop)]
            assert float((found[block] - expected).abs().max()) <= bound
        plain = torch.empty(stop - start)
        _regroup(overlapping, start, plain, None, kind)
        assert torch.equal(plain, whole[start:stop])
    assert copied == len(exact) or saved != shards


def random_bits(count=200_000):
    """Float32 numbers of all sizes, a third of them halfway between two numbers of bfloat16."""
    draws = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=draws, dtype=torch.int64)
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    values = bits.to(torch.int32).view(torch.float32)
    return values[values.isfinite()]


def test_a_bfloat16_weight_and_16_bits_are_the_master():
    values = random_bits()
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", parameter)], OptimizerRecipe(learning_rate=1e-30), 10)
    optimizer.trained[0].master = values
    optimizer.trained[0].gradient = torch.zeros_like(values)
    optimizer.step()
    assert torch.equal(optimizer.trained[0].master.view(torch.int32), values.view(torch.int32))
    halfway = values.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(parameter[~halfway], values[~halfway].bfloat16())
    distances = (parameter.float() - values).abs()[halfway], (values.bfloat16().float() - values).abs()[halfway]
    finite = distances[0].isfinite() & distances[1].isfinite()
    assert torch.equal(distances[0][finite], distances[1][finite])
    assert optimizer.tensors()["weight/remainder"].dtype == torch.int16


LAYOUTS = ["whole", "cpu", "shard"]


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("resumed", LAYOUTS)
def test_masters_are_resumed_by_every_layout(saved, resumed, monkeypatch):
    values = random_bits(5000)

    def opened(layout, weights):
        offload(monkeypatch, "optimizer" if layout == "cpu" else "none")
        optimizer = Optimizer([("weight", torch.nn.Parameter(weights.clone()))], OptimizerRecipe(), 10)
        if layout == "shard":
            (each,) = optimizer.trained
            each.sharded, each._held, each.low = True, each.master.clone(), None
        return optimizer

    first = opened(saved, torch.zeros(len(values), dtype=torch.bfloat16))
    (each,) = first.trained
    each.master = values
    each.hand_out()
    stored = {name: tensor.clone() for name, tensor in first.tensors().items()}
    # The model's files have what FSDP gathers, or the weights themselves.
    again = opened(resumed, each.master.bfloat16() if saved == "shard" else each.parameter.detach())
    for name, target in again.tensors(first.state_dict()).items():
        target.copy_(stored[name])
    again.load_state_dict(first.state_dict())
    changed = each.master != values
    assert torch.equal(again.trained[0].master.view(torch.int32), each.master.view(torch.int32))
    assert (0.1 < changed.float().mean() < 0.3) if saved == "shard" else not changed.any()
    assert (values.view(torch.int32) - each.master.view(torch.int32))[changed].eq(1).all()


@pytest.mark.parametrize("resumed", ["none", "optimizer"])
@pytest.mark.parametrize("saved", ["none", "optimizer"])
def test_float32_weights_of_a_critic_are_read_by_every_layout(saved, resumed, monkeypatch):
    """A critic has no files with its weights: its checkpoint has the masters."""

    def state(optimizer, saved=None):
        return optimizer.moments(saved) | {f"weights/{n}": tensor for n, tensor in optimizer.weights(saved).items()}

    offload(monkeypatch, saved)
    first = made(dtype=torch.bfloat16)
    stepped(first, 0, 2)
    stored = {name: tensor.clone() for name, tensor in state(first).items()}
    assert stored["weights/wide.weight"].dtype == torch.float32
    offload(monkeypatch, resumed)
    again = made(dtype=torch.bfloat16)
    for name, target in state(again, first.state_dict()).items():
        target.copy_(stored[name])
    again.load_state_dict(first.state_dict())
    assert all(map(torch.equal, again.parameters, first.parameters))
    assert all(map(torch.equal, stepped(again, 2, 4), stepped(first, 2, 4)))


def test_split_masters_move_as_float32_masters_do():
    """Four steps with clipping and decay, from the same gradients: masters are equal to the bit, and 2 bytes smaller."""
    weights, optimizer = made(dtype=torch.float32), made(dtype=torch.bfloat16)
    for wide, each in zip(weights.trained, optimizer.trained, strict=True):
        each.master = wide.master
    for number in range(4):
        draws = torch.Generator().manual_seed(number)
        for wide, each in zip(weights.trained, optimizer.trained, strict=True):
            gradient = torch.randn(each.weight.shape, generator=draws) * 10.0 ** (number - 2)
            wide.gradient, each.gradient = gradient.clone(), gradient
        assert weights.step() == optimizer.step()
    for wide, each in zip(weights.trained, optimizer.trained, strict=True):
        assert torch.equal(wide.master, each.master)
        assert each.weight.nbytes + each.low.nbytes == wide.weight.nbytes


def test_8_bit_numbers_are_those_of_bitsandbytes():
    functional = pytest.importorskip(
        "bitsandbytes.functional", reason="needs bitsandbytes: pip install posttrain[cuda]"
    )
    numbers = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    for kind, signed in enumerate((True, False)):
        codes = tables(torch.device("cpu"))[0][kind]
        assert torch.equal(codes, functional.create_dynamic_map(signed=signed))
        some = numbers if signed else numbers.abs()
        values, scales = torch.empty(3000, dtype=torch.uint8), torch.empty(12)
        quantize(some.clone(), values, scales, kind)
        theirs, state = functional.quantize_blockwise(some, code=codes, blocksize=256)
        assert torch.equal(scales, state.absmax)
        found, other = (dequantized(each, scales, kind) - some for each in (values, theirs))
        assert found.abs().max() <= other.abs().max()
        assert (values == theirs).float().mean() > 0.98


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
        return [each.gradient for each in optimizer.trained], held

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
        for each, theirs in zip(optimizer.trained, masters, strict=True):
            torch.testing.assert_close(each.master, theirs.detach(), rtol=0, atol=2e-6)


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
