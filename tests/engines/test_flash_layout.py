"""The cache of a GPU on a processor: passes over it with a plain kernel against the paged cache."""

import asyncio
import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.engines.local import cuda, gate
from posttrain.engines.local import engine as engine_module
from posttrain.engines.local.cache import CachedLayout, KeyValuePages, Segment
from posttrain.engines.local.cuda import FlashLayout, KeyValueRows
from posttrain.engines.local.decoder import ModuleDecoder, decoder_of, sample_recorded
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.errors import RunError
from posttrain.models.forward import use_float32_head
from posttrain.models.layers import Heads, use_positions_by_length
from posttrain.models.policy import Policy
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from tests.vllm.asking import answers

CPU = torch.device("cpu")
SLOTS, HEADS, KEY_HEADS, SIZE = 4, 4, 2, 8


CALLS = []
"""(max_q, is_causal, window_size_left, window_size_right) of each call of the flash kernel."""


def documented(query, key, value, ends, key_ends, max_q, max_k, dropout, causal, debug, *, scale, seqused_k, **window):
    """What `aten::_flash_attention_forward` is documented to compute, with explicit masks; a negative window is infinite."""
    left, right = window["window_size_left"], 0 if causal else window["window_size_right"]
    CALLS.append((max_q, causal, left, right))
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for span, seen in enumerate(seqused_k.tolist()):
        assert seen <= max_k
        begin, end = key_ends[span : span + 2].tolist()
        assert begin + seen <= end or begin == end, "a span ends before the next one, or that is its copy"
        q = query[ends[span] : ends[span + 1]]
        assert len(q) <= max_q
        k, v = (part[key_ends[span] :][:seen].repeat_interleave(groups, 1) for part in (key, value))
        ahead = torch.arange(seen)[None] - (torch.arange(len(q))[:, None] + seen - len(q))
        hidden = ((ahead > right) & (right >= 0)) | ((ahead < -left) & (left >= 0))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs), *(query.new_empty(0) for _ in range(4))


@pytest.fixture(autouse=True, scope="module")
def kernel():
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", documented, "CPU")
        yield


PASSES = [
    [Segment(2, 0, 40), Segment(0, 0, 5)],
    [Segment(0, 5, 1), Segment(2, 40, 1), Segment(1, 0, 200)],  # grows the cache
    [Segment(3, 30, 4), Segment(2, 41, 1), Segment(1, 200, 1), Segment(0, 6, 3)],  # slot 3 continues a copied prefix
]


@pytest.mark.parametrize("window", [None, 7])
def test_every_token_sees_what_it_sees_in_the_paged_cache(window):
    generator = torch.Generator().manual_seed(0)
    pages, rows = KeyValuePages(SLOTS), KeyValueRows(SLOTS)
    for number, segments in enumerate(PASSES):
        if number == 2:
            for cache in (pages, rows):
                cache.copy_prefix(2, 3, 30)
        new = {
            segment: [
                torch.randn(segment.count, heads, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            for segment in segments
        }
        found = []
        for layout in (CachedLayout(pages, segments, CPU), FlashLayout(rows, segments, CPU)):
            inputs = [torch.cat([new[segment][part] for segment in layout.segments]) for part in range(3)]
            out = layout.attend_tokens(0, Heads(*inputs, 0.3, window))
            counts = [segment.count for segment in layout.segments]
            found.append(dict(zip(layout.segments, out.split(counts), strict=True)))
        for segment in segments:
            torch.testing.assert_close(found[1][segment], found[0][segment])


@pytest.mark.parametrize(
    ("segments", "window", "call"),
    [
        ([Segment(0, 5, 1), Segment(1, 9, 1)], None, (1, False, -1, -1)),  # heads of a group share their keys
        ([Segment(0, 5, 1), Segment(1, 9, 1)], 4, (1, False, 3, 0)),
        ([Segment(0, 5, 3), Segment(1, 9, 1)], None, (3, True, -1, 0)),
        ([Segment(0, 5, 3), Segment(1, 9, 1)], 4, (3, False, 3, 0)),
    ],
)
def test_one_query_per_sequence_is_not_masked(segments, window, call):
    layout = FlashLayout(KeyValueRows(SLOTS), segments, CPU)
    count = sum(segment.count for segment in segments)
    rows = (torch.randn(count, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    layout.attend_tokens(0, Heads(*rows, 0.3, window))
    assert CALLS[-1] == call


def test_a_cache_that_does_not_fit_names_what_to_lower(monkeypatch):
    def full(*sizes, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows, like = KeyValueRows(SLOTS), torch.zeros(1, KEY_HEADS, SIZE)
    rows.reserve(100)
    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    with pytest.raises(RunError, match=r"4 slots with 128 tokens does not fit .*; lower engine.slots"):
        rows.layer(0, like)


def again(run):
    """Records as a CUDA graph: the function runs again, and what it returns is written to the same place."""
    out = run()
    return lambda: out.copy_(run()), out


def flash_engine(policy, record=again, decoder=ModuleDecoder):
    engine = LocalEngine(policy, slots=8)
    engine._parts, engine._flash, engine._cache = gate.Parts("flash"), True, KeyValueRows(8)
    engine._parts.decoder = lambda model: cuda.RecordedDecoder(decoder(model), sample_recorded, lambda: record)
    return engine


def test_recorded_passes_sample_what_passes_of_the_paged_cache_do(tiny_model):
    """Requests of many lengths, so that the number of sequences falls and the cache grows while passes are recorded;
    then new weights, a cache that was freed and made again, and new weights while it is awake."""
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    policy.end_tokens = frozenset({-1})
    recordings, replays = [], []

    def record(run):
        out, place = run(), engine._cache.keys[0].data_ptr()
        recordings.append(out)

        def replay():
            # A graph reads the cache that was there when it was recorded.
            assert engine._cache.keys[0].data_ptr() == place
            replays.append(out.shape[1] if out.dtype == torch.float64 else len(out))
            out.copy_(run())

        return replay, out

    def decoder(model):
        """With copies of the weights, as `StreamlinedDecoder` has."""
        return ModuleDecoder(copy.deepcopy(model))

    ways = [{"top_p": 0.9}, {"temperature": 0.7}, {"temperature": 0.0}, {}, {"temperature": 2.0}, {}, {}]
    prompts = [tuple(range(5, 12 + 9 * i)) for i in range(7)]
    requests = [Request(prompts[i], SamplingRecipe(**way), i, 20 + 10 * i) for i, way in enumerate(ways)]

    def sampled(engine):
        return [(answer.ids, answer.logprobs) for answer in answers(engine, requests)]

    paged, engine = LocalEngine(policy, slots=8), flash_engine(policy, record, decoder)
    for version in range(3):
        paged.load_weights(version)
        engine.load_weights(version)
        expected, found = sampled(paged), sampled(engine)
        if version == 0:
            engine.sleep()
            assert [ids for ids, _ in sampled(engine)] == [ids for ids, _ in found]
        for (ids, logprobs), (their_ids, theirs) in zip(found, expected, strict=True):
            assert ids == their_ids
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(theirs), atol=1e-5, rtol=0)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.02)
    assert {1, 2, 3, 4, 6} <= set(replays), "passes of these sizes are replayed"
    assert len(recordings) < 45 < len(replays), "a pass is recorded once for many replays"


def test_a_size_is_recorded_once_for_each_place_of_the_cache(tiny_model):
    """Five steps with answers of many lengths. New weights are written to the old place, and the cache moves as it sleeps."""
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    policy.end_tokens = frozenset({-1})
    recordings, eager = [], []

    class Plain(ModuleDecoder):
        def hidden(self, ids, positions, layout):
            eager.append(len(ids))
            return super().hidden(ids, positions, layout)

    def record(run):
        out = run()
        eager.pop()
        recordings[-1].append(out.shape[1])

        def replay():
            out.copy_(run())
            eager.pop()

        return replay, out

    def answered(engine, step):
        requests = [Request((5, 6, 7 + i), SamplingRecipe(), 9 * step + i, 12 + 3 * i) for i in range(6)]
        return [answer.ids for answer in answers(engine, requests)]

    engine = flash_engine(policy, record, Plain)
    fresh = LocalEngine(policy, slots=8)
    for step in range(5):
        recordings.append([])
        eager.clear()
        fresh.load_weights(step)
        engine.load_weights(step)
        assert answered(engine, step) == answered(fresh, step)
        sizes = sorted(recordings[step], reverse=True)
        if step == 0:
            assert sizes == [6], "only the size of most passes is recorded, at its fifth"
        if step in (1, 2):
            assert sizes == [6, 4, 3, 2, 1]
        if step == 3:
            assert sizes == [], "the cache has not moved since step 2, and the weights neither"
        if step >= 2:
            assert len(eager) == 1, "the pass of the prompts alone is not replayed"
        if step != 2:
            engine.sleep()
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.02)


def test_passes_start_before_the_tokens_of_the_last_are_read(tiny_model, monkeypatch):
    """Episodes of three turns that end at random tokens, on the paged cache and by recordings, with fewer slots. What is read
    beside a prompt is decoded by a recording as well."""
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    policy.end_tokens = frozenset(range(0, 300, 15))
    events, prompts = [], []
    """Pending passes when a pass is started ahead of reading; segments of passes that are no recordings."""

    class Plain(ModuleDecoder):
        def hidden(self, ids, positions, layout):
            prompts.append(len(layout.segments))
            return super().hidden(ids, positions, layout)

    def record(run):
        out = run()

        def replay():
            out.copy_(run())
            del prompts[-1]

        del prompts[-1]
        return replay, out

    def read_later(numbers, later=engine_module.read_later):
        events.append("start")
        read = later(numbers)
        return lambda: (events.append("read"), read())[1]

    def start_ahead(engine, passes, start=LocalEngine._start_ahead):
        if (started := start(engine, passes)) is not None:
            events[-1] = "ahead"
        return started

    monkeypatch.setattr(engine_module, "read_later", read_later)
    monkeypatch.setattr(LocalEngine, "_start_ahead", start_ahead)

    async def episode(engine, number):
        context, turns = tuple(range(5, 12 + 9 * number)), []
        with engine.episode():
            for turn in range(3):
                answer = await engine.generate(Request(context, SamplingRecipe(), 10 * number + turn, 40))
                context += (*answer.ids, *range(20, 25 + number))
                turns.append(answer.ids)
        return turns

    async def played(engine):
        return await asyncio.gather(*(episode(engine, number) for number in range(9)))

    engine = flash_engine(policy, record, Plain)
    expected = asyncio.run(played(LocalEngine(policy, slots=8)))
    for version in range(4):
        engine.load_weights(version)
        engine.counters.sampled = 0
        events.clear()
        prompts.clear()
        assert asyncio.run(played(engine)) == expected
        assert engine.counters.sampled == sum(len(ids) for turns in expected for ids in turns)
    assert sum(prompts) <= 27, "each prompt is computed once, and no decoding row with them"
    pending = 0
    for event in events:
        pending += -1 if event == "read" else 1
        assert event != "ahead" or pending == 2
    assert pending <= 1, "the last one may have been started for nothing"
    assert 2 * events.count("ahead") > events.count("start")


@pytest.mark.parametrize("call", ["sleep", "load_weights"])
def test_answers_in_flight_go_on_without_the_pass_that_was_started_ahead(call, tiny_model):
    policy = Policy(ModelRecipe(path=str(tiny_model)))
    policy.end_tokens = frozenset({-1})
    requests = [Request(tuple(range(5, 12 + i)), SamplingRecipe(), i, 20) for i in range(3)]

    async def disturbed():
        asked = asyncio.gather(*(engine.generate(request) for request in requests))
        while engine._ahead is None:
            await asyncio.sleep(0)
        engine.sleep() if call == "sleep" else engine.load_weights(1)
        return await asked

    engine = flash_engine(policy)
    expected = answers(LocalEngine(policy, slots=8), requests)
    assert [found.ids for found in asyncio.run(disturbed())] == [answer.ids for answer in expected]


def test_the_token_that_is_read_is_the_next_input_of_a_sequence_with_copies(monkeypatch):
    monkeypatch.setattr(cuda, "RECORDED_AFTER", 0)
    model = SimpleNamespace(hidden=lambda ids, *_: ids[:, None], logits=lambda hidden: hidden, reads=lambda: iter(()))
    rows = KeyValueRows(9)
    rows.reserve(1)
    decoder = cuda.RecordedDecoder(
        model,
        lambda logits, _: torch.stack([torch.arange(1.0, len(logits) + 1)] * 2).double(),
        lambda: lambda run: (lambda: None, run()),
    )
    inputs = np.array([[0.0] * 5, [0] * 5, [0, 2, 3, 4, 7], *[[1.0] * 5] * 3])
    tokens, _ = decoder.replayed(inputs, rows, CPU, samples=True)
    assert decoder._last[[0, 2, 3, 4, 7]].tolist() == tokens.tolist() == [1, 2, 3, 4, 5]


def test_the_gate_compares_recorded_passes(tiny_model):
    model, replays = Policy(ModelRecipe(path=str(tiny_model))).model, []

    def record(run):
        out = run()
        return lambda: replays.append(out.copy_(run())), out

    parts, rows = gate.Parts("flash"), [torch.arange(3, 43), torch.arange(9, 60)]
    parts.decoder = lambda model: cuda.RecordedDecoder(ModuleDecoder(model), sample_recorded, lambda: record)
    with torch.no_grad():
        found, expected = (gate._decoded(model, each, rows) for each in (parts, gate.Parts("modules")))
    assert len(replays) == 14 - cuda.RECORDED_AFTER
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_passes_that_wait_for_the_gpu_are_not_recorded(tiny_model, kind):
    model = Policy(ModelRecipe(path=str(tiny_model))).model
    model.model.rotary_emb.rope_type = kind
    use_positions_by_length(model.model)
    assert isinstance(decoder_of(model, recorded=True), cuda.RecordedDecoder) == (kind == "default")
    assert not isinstance(decoder_of(model), cuda.RecordedDecoder)


@pytest.mark.parametrize("float32_head", [False, True])
def test_recorded_passes_are_those_of_the_output_projection_as_well(tiny_model, float32_head):
    """They sample, so another place of its weights ends them."""
    model = Policy(ModelRecipe(path=str(tiny_model), dtype="bfloat16")).model
    if float32_head:
        use_float32_head(model)
    head = torch.nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    model.get_output_embeddings().weight = head
    assert (head.data_ptr(), head.shape) in cuda.places(decoder_of(model))


def test_nothing_is_recorded_with_deterministic_kernels(tiny_model):
    def record(run):
        raise AssertionError("recorded")

    policy = Policy(ModelRecipe(path=str(tiny_model)))
    engine = flash_engine(policy, record)
    torch.use_deterministic_algorithms(True)
    try:
        answers(engine, [Request((5, 6), SamplingRecipe(), 0, 2 * cuda.RECORDED_AFTER)])
    finally:
        torch.use_deterministic_algorithms(False)
