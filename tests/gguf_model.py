"""A tiny Llama as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from serving import tiny_tokenizer


def write_gguf(path: Path, folder: Path) -> None:
    """Write the Llama of a transformers folder as llama.cpp's converter lays it out."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = [word for word, _ in sorted(tiny_tokenizer().get_vocab().items(), key=lambda pair: pair[1])]
    words[-1] = "ab"  # a merge needs its token
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)

    def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
        return weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{old}": f"blk.{layer}.{new}" for old, new in parts.items()}
    for old, new in names.items():
        weight = state[f"{old}.weight"]
        if old.endswith(("q_proj", "k_proj")):
            weight = permuted(weight, config.num_attention_heads if old.endswith("q_proj") else config.num_key_value_heads)
        writer.add_tensor(f"{new}.weight", np.ascontiguousarray(weight.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
