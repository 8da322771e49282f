"""TRL's supervised training and GRPO on rows and numbers like ours and the same shapes, where TRL is installed."""

import math
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


def plain_settings(device: torch.device) -> dict[str, Any]:
    """Arguments of every trainer: its device, and no files, logs or progress."""
    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    return {"bf16": device.type == "cuda", "use_cpu": device.type == "cpu", **quiet}


def clock_of(device: torch.device, ends: float = math.inf) -> Any:
    """A callback whose `times` are the ends of the steps. After `ends` of `time.monotonic`, the third step is the last."""
    from transformers.trainer_callback import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_end(self, args, state, control, **rest):
            finish(device)
            self.times.append(time.perf_counter())
            control.should_training_stop = len(self.times) > 2 and time.monotonic() > ends

    return Clock()


def trl_supervised(shape: Shape, device: torch.device, tokens: int, batch: int, until: float) -> Iterator[Row]:
    """Real tokens per second of `SFTTrainer` with each of its settings; one that fails is named in the last note."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    attention = attention_of_trl(device)
    longest = 2048
    packed = 8 * longest if attention != "sdpa" else 2 * longest
    lengths = row_lengths(tokens, longest, 0)
    rows = [
        {"input_ids": s.stream.ids.tolist(), "completion_mask": s.stream.sampled.astype(int).tolist()}
        for s in samples_of(lengths, 0.3, shape.vocabulary, 0)
    ]

    chosen = settings_of_trl(batch, packed)
    found: list[Row] = []
    failed = []
    for number, (name, settings) in enumerate(chosen.items()):
        now = time.monotonic()
        clock = clock_of(device, now + (until - now) / (len(chosen) - number))
        try:
            with tempfile.TemporaryDirectory() as directory:
                trainer = SFTTrainer(
                    model=random_model(shape, device, packed=False, attention=attention),
                    args=SFTConfig(
                        output_dir=directory,
                        num_train_epochs=1,
                        shuffle_dataset=False,
                        **plain_settings(device),
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


def trl_grpo(
    shape: Shape, device: torch.device, groups: int, members: int, prompt: int, tokens: int, steps: int
) -> Iterator[Row]:
    """Samples per second of `GRPOTrainer` steps after the first, generation and update together."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    clock = clock_of(device)
    tokenizer = word_tokenizer(shape.vocabulary)
    words = [f"w{i}" for i in range(3, min(shape.vocabulary, 1000))]
    rows = [{"prompt": " ".join(words[(7 * g + i) % len(words)] for i in range(prompt))} for g in range(groups * steps)]

    def score(completions, **rest):
        """Differs within a group, so that every group has a gradient."""
        return [float(number % members) for number in range(len(completions))]

    with_vllm = device.type == "cuda" and find_spec("vllm") is not None
    with tempfile.TemporaryDirectory() as folder:
        # TRL's vLLM reads model and tokenizer from the directory that the model was loaded from.
        source = f"{folder}/model"
        random_model(shape, device, packed=False).save_pretrained(source)
        tokenizer.save_pretrained(source)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
        # TRL generates until an end token, which random weights would draw early.
        model.generation_config.eos_token_id = None
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=members,
            gradient_accumulation_steps=groups,
            num_generations=members,
            max_completion_length=tokens,
            max_steps=steps,
            use_vllm=with_vllm,
            **({"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if with_vllm else {}),
            **plain_settings(device),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    rate = groups * members * (len(clock.times) - 1) / (clock.times[-1] - clock.times[0])
    case = f"{shape.name}, {groups} groups of {members}, {prompt} + {tokens} tokens"
    how = "with vLLM in the same process" if with_vllm else "with transformers' generate"
    yield Row("TRL GRPO", case, rate, "samples/s", note=how)


def word_tokenizer(vocabulary: int):
    """A tokenizer of that many words; the rows are tokens already."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")
