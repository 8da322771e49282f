"""TRL's supervised training on the same rows and shape, where TRL is installed."""

import tempfile
import time
from collections.abc import Iterator

import torch

from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import Shape, random_model
from accelerator.training import row_lengths, samples_of


def trl_supervised(shape: Shape, device: torch.device, tokens: int, batch: int) -> Iterator[Row]:
    """`SFTTrainer` at its defaults (gradient checkpointing on) and without checkpointing: real tokens per second."""
    from datasets import Dataset
    from transformers.trainer_callback import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    lengths = row_lengths(tokens, 2048, 0)
    rows = [
        {"input_ids": s.stream.ids.tolist(), "completion_mask": s.stream.sampled.astype(int).tolist()}
        for s in samples_of(lengths, 0.3, shape.vocabulary, 0)
    ]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            finish(device)
            ends.append(time.perf_counter())

    for checkpointing in (True, False):
        ends.clear()
        with tempfile.TemporaryDirectory() as directory:
            settings = SFTConfig(
                output_dir=directory,
                per_device_train_batch_size=batch,
                num_train_epochs=1,
                bf16=device.type == "cuda",
                use_cpu=device.type == "cpu",
                gradient_checkpointing=checkpointing,
                max_length=None,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                shuffle_dataset=False,
            )
            trainer = SFTTrainer(
                model=random_model(shape, device, packed=False),
                args=settings,
                train_dataset=Dataset.from_list(rows),
                processing_class=word_tokenizer(shape.vocabulary),
                callbacks=[Clock()],
            )
            trainer.train()
        # The first step warms up; the others hold, in an order of TRL's, the average number of tokens.
        steps = len(ends) - 1
        real = sum(lengths) * batch * steps / len(lengths)
        rate = real / (ends[-1] - ends[0])
        name = "its defaults" if checkpointing else "without checkpointing"
        yield Row(
            "TRL SFT",
            f"{shape.name}, {batch} rows a step, {name}",
            rate,
            "tokens/s",
            note="weights and moments in the model's own precision",
        )


def word_tokenizer(vocabulary: int):
    """A tokenizer of that many words; the rows are tokens already."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(min(vocabulary, 1000))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
