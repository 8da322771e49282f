"""TRL's supervised training on rows like ours and the same shape, where TRL is installed: the best of its settings."""

import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import Shape, random_model
from accelerator.training import row_lengths, samples_of


def settings_of_trl(batch: int, packed: int) -> dict[str, dict[str, Any]]:
    """Name -> settings of `SFTConfig`. `batch`: rows a pass; `packed`: tokens of a pass without padding."""
    fast = {"gradient_checkpointing": False}
    packing = {"packing": True, "max_length": packed, "per_device_train_batch_size": 1, **fast}
    found = {
        "its defaults": {},
        "without checkpointing": fast,
        "padding-free": {"padding_free": True, **fast},
        "packing": packing,
    }
    if find_spec("liger_kernel") is not None:
        found["packing, Liger's kernels"] = {"use_liger_kernel": True, **packing}
    return {name: {"per_device_train_batch_size": batch, **settings} for name, settings in found.items()}


def attention_of_trl(device: torch.device) -> str:
    """FlashAttention where its package is: without it, rows of a pass are kept apart by a mask of all pairs."""
    return "flash_attention_2" if device.type == "cuda" and find_spec("flash_attn") is not None else "sdpa"


def trl_supervised(shape: Shape, device: torch.device, tokens: int, batch: int, until: float) -> Iterator[Row]:
    """Real tokens per second of `SFTTrainer` with each of its settings; one that fails is named in the last note."""
    from datasets import Dataset
    from transformers.trainer_callback import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    attention = attention_of_trl(device)
    longest = 2048
    packed = 8 * longest if attention != "sdpa" else 2 * longest
    lengths = row_lengths(tokens, longest, 0)
    rows = [
        {"input_ids": s.stream.ids.tolist(), "completion_mask": s.stream.sampled.astype(int).tolist()}
        for s in samples_of(lengths, 0.3, shape.vocabulary, 0)
    ]

    class Clock(TrainerCallback):
        def __init__(self, ends: float) -> None:
            self.times: list[float] = []
            self.ends = ends

        def on_step_end(self, args, state, control, **rest):
            finish(device)
            self.times.append(time.perf_counter())
            control.should_training_stop = len(self.times) > 2 and time.monotonic() > self.ends

    chosen = settings_of_trl(batch, packed)
    found: list[Row] = []
    failed = []
    for number, (name, settings) in enumerate(chosen.items()):
        now = time.monotonic()
        clock = Clock(now + (until - now) / (len(chosen) - number))
        try:
            with tempfile.TemporaryDirectory() as directory:
                trainer = SFTTrainer(
                    model=random_model(shape, device, packed=False, attention=attention),
                    args=SFTConfig(
                        output_dir=directory,
                        num_train_epochs=1,
                        bf16=device.type == "cuda",
                        use_cpu=device.type == "cpu",
                        report_to="none",
                        save_strategy="no",
                        logging_strategy="no",
                        disable_tqdm=True,
                        shuffle_dataset=False,
                        **{"max_length": None, **settings},
                    ),
                    train_dataset=Dataset.from_list(rows),
                    processing_class=word_tokenizer(shape.vocabulary),
                    callbacks=[clock],
                )
                # Packing makes fewer rows; all of them together have the same tokens.
                per_row = sum(lengths) / len(trainer.train_dataset)
                trainer.train()
            # The first step warms up; the others hold, in an order of TRL's, the average number of tokens.
            steps, of_pass = len(clock.times) - 1, settings["per_device_train_batch_size"]
            rate = per_row * of_pass * steps / (clock.times[-1] - clock.times[0])
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}")
            continue
        note = f"{attention}; weights and moments in the model's own precision"
        found.append(Row("TRL SFT", f"{shape.name}, {of_pass} rows a step, {name}", rate, "tokens/s", note=note))
        yield found[-1]
    if not found:
        raise RuntimeError("; ".join(failed))
    if failed:
        yield Row("TRL SFT", "settings that failed", float(len(failed)), "", note="; ".join(failed))


def word_tokenizer(vocabulary: int):
    """A tokenizer of that many words; the rows are tokens already."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
