"""Tiny random Hugging Face model directories of the supported families."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),  # of a family in a package of its own (own_family.py)
}
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2}
LATENT = EXPERTS | {  # a dense layer in front of one with experts; all widths of attention differ
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {  # its two factors differ, so that cos and sin are scaled as well as the scores
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.8,
    "mscale_all_dim": 1.1,
}
OWN_SIZES = {  # of a family, over SIZES
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 8, "num_hidden_layers": 2},
    "mixtral": EXPERTS | {"num_local_experts": 4, "intermediate_size": 32},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    # Windows are shorter than most of the tests' sequences, and every stage of two has a layer without one.
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        },
        "tie_word_embeddings": True,
    },
    "deepseek_v2": LATENT
    | {
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": False,
    },
    "deepseek_v3": LATENT | {"q_lora_rank": 24, "routed_scaling_factor": 2.5, "rope_parameters": YARN},
    "gpt_oss": EXPERTS
    | {
        "num_local_experts": 4,
        "intermediate_size": 32,
        "head_dim": 16,
        "sliding_window": 6,
        "rope_parameters": {key: YARN[key] for key in YARN if "mscale" not in key} | {"truncate": False},
    },
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FROM_ONE = ("gemma3_text",)  # norms multiply by 1 + weight
LLAMA31_ROPE = {  # as the config.json of Llama 3.1 spells it, for a context that a test can leave
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make_model(directory, family="qwen2", *, seed=0, **overrides):
    """Writes config.json and model.safetensors of a random model into `directory` (made if absent) and returns its
    path.

    Norm weights and biases are random too, so that a model that leaves one out is found out; `overrides` are config
    fields.
    """
    config_class, model_class = FAMILIES[family]
    sizes = {**SIZES, **OWN_SIZES.get(family, {}), **overrides}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**sizes))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5).sub_(1.0 if family in FROM_ONE else 0.0)
                elif name.endswith("bias"):
                    parameter.normal_(std=4.0 if "gate_up" in name else 0.3)  # gpt-oss clamps values above 7
                else:
                    parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("bias"):
                    buffer.normal_(std=0.2)
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(directory)
    return directory


def make_scored(directory, *, seed=1):
    """Writes the model of `directory` with a random head of one output in place of the output layer, as a sequence
    classifier, to the directory NAME_scored beside it. Returns the path."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model.score.weight.normal_(std=0.7 * model.score.weight.shape[-1] ** -0.5)
    target = Path(directory).with_name(f"{Path(directory).name}_scored")
    model.save_pretrained(target)
    return target
