"""TRL's GRPO on the shape and the numbers of `reinforcement.learning`, where TRL is installed; with vLLM where that is."""

import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import Shape, random_model
from accelerator.trl_side import word_tokenizer


def trl_grpo(
    shape: Shape, device: torch.device, groups: int, members: int, prompt: int, tokens: int, steps: int
) -> Iterator[Row]:
    """Samples per second of `GRPOTrainer` steps after the first, generation and update together."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from transformers.trainer_callback import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    tokenizer = word_tokenizer(shape.vocabulary)
    words = [f"w{i}" for i in range(3, min(shape.vocabulary, 1000))]
    rows = [{"prompt": " ".join(words[(7 * g + i) % len(words)] for i in range(prompt))} for g in range(groups * steps)]

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            finish(device)
            ends.append(time.perf_counter())

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
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            use_vllm=with_vllm,
            **({"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if with_vllm else {}),
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=score,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    rate = groups * members * (len(ends) - 1) / (ends[-1] - ends[0])
    case = f"{shape.name}, {groups} groups of {members}, {prompt} + {tokens} tokens"
    how = "with vLLM in the same process" if with_vllm else "with transformers' generate"
    yield Row("TRL GRPO", case, rate, "samples/s", note=how)
