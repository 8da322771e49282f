"""Tiny models of families beside those of `tests.conftest`, with weights large enough that wrong ones show, and scores."""

from pathlib import Path

from tests.conftest import make_tokenizer

SHARED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
EXPERTS = {
    "qwen3_moe": ("Qwen3MoeConfig", QWEN | {"head_dim": 8}),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN | {"mlp_only_layers": [], "shared_expert_intermediate_size": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4}),
    "jetmoe": ("JetMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}),
    "glm4_moe": ("Glm4MoeConfig", DEEPSEEK | {"head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        DEEPSEEK
        | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"num_key_value_heads": 4},
    ),
}
"""Families with experts -> their class of configuration and its keys. Deepseek, GLM and Qwen2 have shared experts too, and
Deepseek, GLM and Qwen3 one layer without experts."""
DENSE = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}


def save_family(directory: Path, family: str, tokenizer=None, **keys) -> Path:
    """Write a random model of the family, with its tokenizer, to `directory`."""
    import torch
    import transformers

    tokenizer = tokenizer or make_tokenizer()
    name, of_family = (EXPERTS | DENSE)[family]
    shared = SHARED if family != "gpt2" else {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(shared | of_family | {"vocab_size": len(tokenizer)} | keys))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 4
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def moved(model, scale=0.1, seed=1):
    """`model`, a `TrainedModel`, with other trained weights, so that adapters and heads have an effect."""
    import torch

    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.trainable():
            parameter += scale * torch.randn_like(parameter)
    return model


def files(directory: Path):
    """The tensors of a directory of a model by their names."""
    from safetensors.torch import load_file

    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logprobs(policy, streams, masks):
    """Log-probabilities [N] of the sampled tokens of streams in one packed row."""
    import torch

    with torch.no_grad():
        return policy.score(streams, masks, 1.0, 64).logprobs


def transformers_logprobs(model, streams, masks):
    """As `logprobs`, of a model of transformers, stream by stream."""
    import torch

    parts = []
    for ids, sampled in zip(streams, masks, strict=True):
        with torch.no_grad():
            scores = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        parts.append(scores.gather(1, torch.from_numpy(ids)[1:, None])[sampled[1:], 0])
    return torch.cat(parts)
