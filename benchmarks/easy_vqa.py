"""A vision-language model from scratch on easy-VQA: supervised training, then RL with an exact reward, on real and on blank images.

    pip install --target easy --no-deps easy-vqa   # MIT, 64 x 64 pictures of one shape
    python benchmarks/easy_vqa.py easy/easy_vqa/data --out build/easy_vqa --seed 0 [--blank]

writes rows of its questions, a random Idefics3 of half a million parameters, and the runs `sft-SEED` and `rl-SEED` of it, each with its
accuracy on questions of held-out pictures. With `--blank` all pictures are gray, so that what is learned of questions alone
is measured. `--table` prints the accuracies of all runs of `--out`.
"""

import argparse
import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import posttrain

TRAINED, HELD_OUT = 4_000, 600
"""Questions."""
LIMITS = {"tokens_per_turn": 6, "tokens_per_episode": 128}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_rows(data: Path, out: Path, blank: bool) -> None:
    """Write `train.jsonl` and `test.jsonl` of different pictures, with the pictures beside them."""
    from PIL import Image

    out.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (128, 128, 128)).save(out / "blank.png")
    for split, count in (("train", TRAINED), ("test", HELD_OUT)):
        if not (out / split).exists():
            (out / split).symlink_to((data / split / "images").resolve())
        questions = json.loads((data / split / "questions.json").read_text())
        chosen = np.random.default_rng(0).permutation(len(questions))[:count]
        with (out / f"{split}.jsonl").open("w") as file:
            for question, answer, image in (questions[i] for i in chosen):
                picture = {"type": "image", "bytes": encoded(out / ("blank.png" if blank else f"{split}/{image}.png"))}
                asked = {"role": "user", "content": [picture, {"type": "text", "text": question}]}
                file.write(json.dumps({"prompt": [asked], "completion": answer, "label": answer}) + "\n")


def encoded(file: Path) -> str:
    """The content of a file in base64."""
    return base64.b64encode(file.read_bytes()).decode()


def write_model(directory: Path, texts: list[str], seed: int) -> None:
    """Write a random Idefics3 with a byte-level tokenizer of `texts`; a picture has 16 tokens."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoModelForImageTextToText, Idefics3Config, PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    special.append("<end_of_utterance>")
    bpe.train_from_iterator(texts, vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 3}
    words = {"vocab_size": len(tokenizer), "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0}
    pictures = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = Idefics3Config(
        text_config={"model_type": "llama", **sizes, **words, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**pictures, "image_size": 64, "patch_size": 8},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    edge = {"longest_edge": 64}
    Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 16}))


def train(out: Path, seed: int, sft_steps: int, rl_steps: int) -> None:
    """The runs of one seed."""
    shared: dict[str, Any] = {"seed": seed, "runs": str(out), "overwrite": True}
    rows, test = str(out / "train.jsonl"), {"path": str(out / "test.jsonl"), "use": "test"}
    model = out / f"model-{seed}"
    questions = [json.loads(line) for line in (out / "train.jsonl").open()]
    texts = [f"{row['prompt'][0]['content'][1]['text']} {row['label']} user assistant" for row in questions[:4000]]
    write_model(model, texts, seed)
    task = {"type": "text_task", "reward": "exact"}
    posttrain.sft(
        model={"path": str(model)},
        data={"train": rows, "max_tokens": 128},
        name=f"sft-{seed}",
        steps=sft_steps,
        rows_per_update=64,
        optimizer={"learning_rate": 1e-3, "warmup_updates": min(50, sft_steps - 1), "schedule": "cosine"},
        **shared,
    )
    posttrain.rl(
        model={"path": str(out / f"sft-{seed}" / "model")},
        environment={**task, "prompts": rows},
        rollout={"groups_per_step": 16, "episodes_per_group": 8, **LIMITS},
        evaluation={"every": 0, "held_out": 32},
        optimizer={"learning_rate": 1e-4},
        name=f"rl-{seed}",
        steps=rl_steps,
        **shared,
    )
    for name in ("sft", "rl"):
        posttrain.evaluate(
            model={"path": str(out / f"{name}-{seed}" / "model")},
            environment={**task, "prompts": [test]},
            rollout=LIMITS,
            evaluation={"sampling": {"temperature": 0.0}},
            name=f"{name}-{seed}-held-out",
            **shared,
        )


def table(out: Path) -> str:
    """The accuracies of all runs in the folders of `out`, with 95% intervals over held-out questions."""
    lines = ["| pictures | run | accuracy | 95% interval | questions |", "|---|---|---|---|---|"]
    for folder in sorted(out.glob("*/*-held-out")):
        for row in posttrain.Result.open(folder).evaluation:
            if "success" in row:
                interval = f"{row['success_low']:.3f} to {row['success_high']:.3f}"
                lines.append(
                    f"| {folder.parent.name} | {folder.name} | {row['success']:.3f} | {interval} | {row['n']} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("build/easy_vqa"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blank", action="store_true")
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--rl-steps", type=int, default=40)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    out = options.out / ("blank" if options.blank else "real")
    write_rows(options.data, out, options.blank)
    train(out, options.seed, options.sft_steps, options.rl_steps)


if __name__ == "__main__":
    sys.exit(main())
