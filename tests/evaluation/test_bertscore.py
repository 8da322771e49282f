"""BERTScore: its formula on vectors made by hand, and a small random encoder."""

import pytest
import torch

from posttrain.errors import InputError
from posttrain.evaluation.model_metrics import Encoder, _batches, _bert_score, bert_scores
from posttrain.evaluation.predictions import read_predictions
from posttrain.evaluation.workers import ModelOptions, ModelWorkers
from tests.evaluation.made import write


@pytest.fixture(scope="module")
def encoder_path(tmp_path_factory):
    """A random BERT over letters, for 24 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz"]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
    )
    path = tmp_path_factory.mktemp("encoder")
    BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_formula():
    root = 0.5**0.5
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([[root, root], [1.0, 0.0], [0.0, -1.0]])
    all_count = torch.tensor([True, True, True])
    p, r, f1 = _bert_score((x, all_count[:2]), (y, all_count))
    assert p == pytest.approx((1 + root) / 2)
    assert r == pytest.approx((root + 1 + 0) / 3)
    assert f1 == pytest.approx(2 * p * r / (p + r))
    # A special token may be matched, and is not averaged over.
    p, r, _ = _bert_score((x, torch.tensor([False, True])), (y, torch.tensor([True, True, False])))
    assert p == pytest.approx(root)
    assert r == pytest.approx((root + 1) / 2)
    assert _bert_score(None, (y, all_count)) == (0.0, 0.0, 0.0)


def test_the_score_of_a_text_does_not_depend_on_its_batch(encoder_path):
    encoder = Encoder(str(encoder_path))
    pairs = [("a b c", "a b c"), ("a b", "a b c d e f g h"), ("", "a")]
    together = encoder.score(pairs)
    assert together[0] == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
    assert together[2] == (0.0, 0.0, 0.0)
    assert 0 < together[1][1] < 1
    for pair, found in zip(pairs, together, strict=True):
        assert encoder.score([pair])[0] == pytest.approx(found, abs=1e-5)
    swapped = encoder.score([pairs[1][::-1]])[0]
    assert (swapped[0], swapped[1], swapped[2]) == pytest.approx(
        (together[1][1], together[1][0], together[1][2]), abs=1e-5
    )


def test_the_layer_is_that_of_the_encoder_and_can_be_chosen(encoder_path):
    from transformers import AutoModel

    encoder = Encoder(str(encoder_path))
    assert (encoder.layer, encoder.limit) == (3, 24)
    first = Encoder(str(encoder_path), 1)
    model = AutoModel.from_pretrained(encoder_path).eval()
    with torch.no_grad():
        batch = encoder.tokenizer(["a b", "c d e"], return_tensors="pt", padding=True)
        states = model(**batch, output_hidden_states=True).hidden_states
    for own, layer in ((encoder, 3), (first, 1)):
        x, y = (torch.nn.functional.normalize(states[layer][i][: 4 + i], dim=-1) for i in range(2))
        similarity = x @ y.T
        expected = similarity.max(1).values[1:-1].mean(), similarity.max(0).values[1:-1].mean()
        assert own.score([("a b", "c d e")])[0][:2] == pytest.approx([float(v) for v in expected], abs=1e-5)
    with pytest.raises(InputError, match="has 4 layers; choose one from 1 to 4"):
        Encoder(str(encoder_path), 5)


def test_results_report_truncated_rows_and_missing_columns(encoder_path, tmp_path):
    rows = [
        {"id": 0, "prompt": "p", "prediction": "a b", "reference": "a b"},
        {"id": 1, "prompt": "q", "prediction": "c " * 40, "reference": "c d"},
        {"id": 2, "prompt": "r", "prediction": "c"},
        {"id": 3, "prompt": "s", "prediction": "", "reference": "c"},
    ]
    read = read_predictions(str(write(tmp_path / "p.jsonl", rows))).rows
    encoder = Encoder(str(encoder_path), options=ModelOptions(tokens_per_batch=16))
    precision, recall, f1 = bert_scores(read, ModelWorkers(lambda: encoder))
    assert [one.name for one in (precision, recall, f1)] == ["bertscore_precision", "bertscore_recall", "bertscore_f1"]
    assert f1.scores.values(["0", "3"]).tolist() == pytest.approx([1.0, 0.0], abs=1e-5)
    assert (f1.left_out, f1.texts) == ({"no reference": 1}, 3)
    assert f1.about["share of texts truncated"] == pytest.approx(1 / 6)
    assert f1.about["empty predictions, scored 0"] == 1


def test_groups_contain_every_pair_once_within_the_budget(tmp_path):
    lengths = [5, 1, 9, 200, 3, 3]
    groups = list(_batches(lengths, 20, padded=True))
    assert sorted(place for group in groups for place in group) == list(range(6))
    assert all(len(group) == 1 or 2 * len(group) * max(lengths[i] for i in group) <= 40 for group in groups)
    assert list(_batches([], 10, padded=True)) == []
    with pytest.raises(InputError, match=r"--encoder: .* has no config.json"):
        Encoder(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="could not be loaded"):
        Encoder(str(tmp_path))
