"""Models with drawn adapters, tying and padding: refused in one sentence, or exported as the model that was trained."""

import random
import shutil
from pathlib import Path

import numpy as np


def exported(seed: int, folder: Path) -> None:
    """A model with drawn tying, experts, padding and adapters is refused, or its export is the policy and its scores."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from posttrain.errors import InputError
    from posttrain.models.policy import Policy
    from posttrain.models.reward import RewardModel
    from tests.conftest import make_tokenizer
    from tests.models.families import save_family

    draw = random.Random(seed)
    tokenizer = make_tokenizer()
    family = draw.choice(["llama", "qwen2", "qwen3_moe", "mixtral", "granitemoe", "phimoe"])
    tokenizer.pad_token = draw.choice(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "1", None])
    tokenizer.eos_token = draw.choice(["<|im_end|>", "<|endoftext|>"])
    path = save_family(folder / "model", family, tokenizer, tie_word_embeddings=draw.random() < 0.5)
    names = ["q_proj", "o_proj", "down_proj", "gate_up_proj", "gate_proj", "up_proj", "w2", "gate", "router", "lm_head"]
    names += ["embed_tokens", "layers.1.self_attn.v_proj", "q_prj", "mlp", ""]
    few = draw.sample(names, draw.randrange(1, 4))
    targets = draw.choice([few, few, few, f".*({'|'.join(few)})", "all-linear", few[0]])
    ids = [np.array([draw.randrange(3, 250) for _ in range(length)]) for length in (5, 9, 14)]
    ids += [np.append(row, draw.choice([0, 1, 2])) for row in ids[:2]]
    sampled = [np.arange(len(row)) > 1 for row in ids]
    for kind in (Policy, RewardModel):
        refusal = ""
        try:
            model = kind(str(path), seed=seed, lora=draw.choice([None, {"rank": 2, "targets": targets}]))
        except InputError as error:
            refusal = str(error)
        assert "\n" not in refusal, refusal
        if refusal:
            continue
        with torch.no_grad():
            for _, parameter in model.trainable():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            model.export(folder / "exported")
            if isinstance(model, Policy):
                written = AutoModelForCausalLM.from_pretrained(folder / "exported")
                sent = dict(model.weights())
                files = (folder / "exported").glob("*.safetensors")
                stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
                assert sorted(sent) == sorted(stored), targets
                assert all(torch.equal(sent[name], stored[name]) for name in sent), targets
                logits = written(torch.from_numpy(ids[2])[None]).logits[0, :-1].log_softmax(-1)
                theirs = logits.gather(1, torch.from_numpy(ids[2])[1:, None])[sampled[2][1:], 0]
                ours = model.score([ids[2]], [sampled[2]], 1.0, 64).logprobs
            else:
                written = AutoModelForSequenceClassification.from_pretrained(folder / "exported")
                model.tokenizer.padding_side = draw.choice(["left", "right"])
                ended = [row for row in ids if row[-1] > 2 or row[-1] in {*model.end_tokens, 2}]
                padded = model.tokenizer.pad({"input_ids": [row.tolist() for row in ended]}, return_tensors="pt")
                theirs = written(**padded).logits[:, 0]
                ours = model.rewards(ended, [np.arange(len(row)) > 1 for row in ended])
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
        shutil.rmtree(folder / "exported")
