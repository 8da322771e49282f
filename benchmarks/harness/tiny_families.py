"""Tiny random models of every causal language model of the installed transformers."""

import dataclasses
import re
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS, HIDDEN, HEADS, WINDOW, RANK, EXPERTS = 4, 64, 4, 16, 16, 4
SPREAD = 1.5
"""Standard deviation of the log-probabilities, in nats."""
REACH = 0.3
"""Change of the last five log-probabilities, in nats, by another id before them that is large enough for a test."""
STRUCTURED = r"A_log|norm|time_|decay"
"""Names of matrices whose first values have a meaning, so they are only perturbed."""
SPECIAL_IDS = 10
"""Ids below this are pads, ends, images and the like."""
SIZES: list[tuple[str, float]] = [
    (r"attn_logit_softcapping", 2.0),
    (r"\w*soft_?cap(ping)?", 5.0),
    (r"query_pre_attn_scalar", HIDDEN // HEADS),
    (r"use_qk_norm|qk_layernorm|scale_embedding", True),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"eos_token_id|sep_token_id|decoder_start_token_id|forced_eos_token_id", 2),
    (r".*_token_(id|index)", 3),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", 512),
    (r"max_target_positions|max_source_positions|original_max_position_embeddings", 512),
    (r"hidden_size|d_model|n_embd|emb_dim|embedding_size|lru_width|hidden_size_per_layer_input", HIDDEN),
    (
        r"hidden_size_global|adapter_\w+_dim|adapter_input_size|(input|output)_embedding_size|(pronunciation|shape)_embed_dim|router_hidden_size",
        HIDDEN,
    ),
    (r"intermediate_size\w*|\w*intermediate_size|ffn_dim|\w+_ffn_dim|dff|dim_ff|feed_forward_size", HIDDEN),
    (r"ffn_hidden_size|\w+_ffn_hidden_size|moe_latent_size|mamba_d_ssm|d_inner", HIDDEN),
    (r"\w+_out_channel|nemo_conv_channels|mlp_dim", HIDDEN),
    (r"num_hidden_layers|num_blocks|n_layers?|num_layers|(num_)?(en|de)coder_layers", LAYERS),
    (r"(swa_)?num_attention_heads|n_heads?|num_heads|(num_)?(en|de)coder_attention_heads|attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads", 2),
    (r"(swa_)?head_dim|dim_head|attention_head_dim|attention_head_size|kv_channels|d_head", HIDDEN // HEADS),
    (r"qk_nope_head_dim|v_head_dim", 16),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"\w+_rank", RANK),
    (r"(index|indexer)_head_dim", 16),
    # Fewer heads would leave scores of exactly zero, whose order among the chosen keys is arbitrary.
    (r"index_n_heads", 16),
    (r"linear_num_value_heads|linear_num_heads", HEADS),
    (r"linear_num_key_heads|num_shared_experts", 2),
    (r"linear_(key_|value_)?head_dim", 16),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"floor_scale|log_scaling_n_floor", 8),
    (r"sliding_window(_size)?|attention_window_size|window_size|local_attention|attention_chunk_size", WINDOW),
    (r"local_attention_window_len|keep_window_size|index_topk|rel_extent", WINDOW),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_state|state_size|ssm_state_size", 8),
    (r"mamba_n_groups|mamba_ngroups|n_groups", 2),
    (r"mamba_chunk_size|chunk_size|block_size", 16),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (r"(type|task_type)_vocab_size", 2),
    (r"\w*vocab_size\w*", -1),
]
"""Pattern of a config's key -> its value; -1 is the vocabulary. Keys that are None by default stay as they are."""
MIXED = ["sliding_attention", "full_attention"] * 2
DENSE_FIRST = ["dense", *["sparse"] * 3]
HYBRID = ["linear_attention", "full_attention"] * 2
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
GRANITE = {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
GEMMA4 = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 2}
SWA_HEADS = {"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 32, "swa_qk_nope_head_dim": 24}
FAMILIES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "cohere2_moe": {"mlp_layer_types": DENSE_FIRST, "num_shared_experts": 1},
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {
        "layer_types": [f"{kind}_attention" for kind in ("sliding", *["heavily_compressed", "compressed_sparse"] * 2)][
            :4
        ],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "layer_types": MIXED},
    "dots3_note_text": SWA_HEADS | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_v_head_dim": 16},
    "falcon": {"alibi": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {
        "intermediate_size": 64,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0],
    },
    "gemma4_text": GEMMA4
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": GEMMA4,
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE | {"shared_intermediate_size": 32},
    "granitemoehybrid": GRANITE | {"layer_types": HYBRID, "position_embedding_type": "rope"},
    "granitemoeshared": GRANITE | {"shared_intermediate_size": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling_text": {"mlp_layer_types": DENSE_FIRST},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3, "expert_layer_offset": 0},
    "laguna": {"layer_types": MIXED, "num_attention_heads_per_layer": [8, 4] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 0] * 2, "interleave_moe_layer_step": 2},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2, "num_key_value_heads": HEADS},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": MIXED, "mlp_layer_types": DENSE_FIRST},
    "mimo_v2_flash": {"v_head_dim": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": DENSE_FIRST,
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16, "layer_types": MIXED},
    "minicpm3": {"num_key_value_heads": HEADS, "v_head_dim": 16},
    "moshi": {"sliding_window": 512},
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"sliding_window": WINDOW},
    "qwen4_exp_text": INDEXER
    | {"indexer_compress_ratio": 4, "ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 64},
    "reformer": {
        "axial_pos_shape": (16, 32),
        "axial_pos_embds_dim": (16, 48),
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "starcoder2": {"sliding_window": WINDOW},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_mem_blocks": 2, "use_mem_rope": True},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window": WINDOW},
}
"""Model type -> keys that the sizes above get wrong; also of parts of composite configs."""
DRAFTER = "It drafts for another model, whose hidden states and keys it reads in place of ids."
MUSIC = "Its decoder reads and writes codes of audio, and AutoModelForCausalLM gives it the config of the whole model."
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "Its vision tower needs the package timm; its text model is gemma3n_text.",
    "gemma4_assistant": DRAFTER,
    "gemma4_unified_assistant": DRAFTER,
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
}
"""Model type -> why no model of it can be built or run here."""


def model_types() -> list[str]:
    """The types of causal language models that transformers knows."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunk(config: PreTrainedConfig, vocabulary: int) -> PreTrainedConfig:
    """The config with tiny sizes and with every kind of layer that the given one has."""
    names = [field.name for field in dataclasses.fields(config)]
    keys: dict = {}
    for name in names:
        value = vars(config).get(config.attribute_map.get(name, name))
        size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
        if size is not None and (
            size is True or name.endswith("token_id") or (value and isinstance(value, int | float))
        ):
            keys[name] = vocabulary if size == -1 else size
    if "kv_lora_rank" in keys:
        keys["num_key_value_heads"] = HEADS
    for name in {"layer_types", "mlp_layer_types", "layers_block_type"} & set(names):
        if kinds := list(dict.fromkeys(vars(config).get(name) or [])):
            keys[name] = (kinds * LAYERS if name != "mlp_layer_types" else kinds + kinds[-1:] * LAYERS)[:LAYERS]
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            keys[name] = shrunk(part, vocabulary)
    if "is_decoder" in names:
        keys["is_decoder"] = True
    return type(config)(**keys | FAMILIES.get(config.model_type, {}))


def random_ids(vocabulary: int, length: int = 45) -> torch.Tensor:
    """One row of ids that are neither pads nor ends."""
    return torch.randint(SPECIAL_IDS, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def log_probs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every id at every position, from one pass without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def reach(model: torch.nn.Module, ids: torch.Tensor, place: int) -> torch.Tensor:
    """How far another id at a place moves the log-probabilities of each position, in nats."""
    changed = ids.clone()
    changed[0, place] = ids[0, place - 1]
    return (log_probs(model, changed) - log_probs(model, ids)).abs().amax(-1)[0]


def randomize(model: torch.nn.Module, gain: float) -> None:
    """Random matrices whose outputs are `gain` times as large as their inputs; vectors are perturbed by a fifth."""
    for name, tensor in model.named_parameters():
        if tensor.dim() < 2 or re.search(STRUCTURED, ".".join(name.split(".")[-2:])):
            tensor.add_(torch.randn_like(tensor), alpha=0.2 * (tensor.abs().mean().item() or 1.0))
        elif tensor.requires_grad:
            tensor.normal_(0, gain * tensor.shape[-1] ** -0.5)


def tiny_model(model_type: str, vocabulary: int = 320, seed: int = 0) -> torch.nn.Module:
    """A random model of the type with about four layers, in float32, whose log-probabilities spread by about 1.5 nats."""
    if model_type in UNBUILDABLE:
        raise ValueError(f"{model_type}: {UNBUILDABLE[model_type]}")
    config = shrunk(CONFIG_MAPPING[model_type](), vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        model.tie_weights()
        ids = random_ids(vocabulary)
        with torch.no_grad():
            for gain in (1.0, 1.4, 2.0, 0.7):
                randomize(model, gain)
                # The scale of a tied head also changes the layers' input, so the spread is approached in steps.
                for _ in range(3):
                    model.get_output_embeddings().weight.mul_(SPREAD / log_probs(model, ids).std())
                if reach(model, ids, -6)[-5:].max() > REACH:
                    break
    return model


def save_tiny(model_type: str, folder: Path, vocabulary: int = 320, seed: int = 0) -> torch.nn.Module:
    """Write the tiny model with the config of its type, as checkpoints have it, and return it.

    `save_pretrained` alone writes the config of the text part, which AutoModelForCausalLM does not know for some types.
    """
    model = tiny_model(model_type, vocabulary, seed)
    model.save_pretrained(folder)
    shrunk(CONFIG_MAPPING[model_type](), vocabulary).save_pretrained(folder)
    return model
