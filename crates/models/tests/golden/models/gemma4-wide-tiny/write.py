#!/usr/bin/env python3
"""Writes a random Gemma 4 of five layers, and its logits by the transformers library.

It has what gemma4-tiny lacks: keys that are also the values in layers that see all tokens, MLPs of twice the width in
layers that share a cache, and bounded logits. Inputs of layers are wide enough for packed weights. The logits are of whole sequences in f32 with eager
attention, and of the last 40 tokens one by one.

usage: write.py FOLDER      (needs torch 2.15, transformers 5.24 and safetensors 0.8)
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig

folder = pathlib.Path(sys.argv[1])
BATCH, TOKENS, DECODED = 2, 200, 40

torch.manual_seed(4)
FULL, SLIDING = "full_attention", "sliding_attention"
config = Gemma4TextConfig(
    vocab_size=256, hidden_size=64, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, num_global_key_value_heads=1, head_dim=32, global_head_dim=64, sliding_window=24,
    layer_types=[SLIDING, SLIDING, FULL, SLIDING, FULL], num_kv_shared_layers=2, hidden_size_per_layer_input=32,
    attention_k_eq_v=True, use_double_wide_mlp=True, final_logit_softcapping=3.0, max_position_embeddings=512,
    vocab_size_per_layer_input=256, bos_token_id=None, eos_token_id=None, pad_token_id=None, attn_implementation="eager",
)
model = Gemma4ForCausalLM(config).float().eval()
with torch.no_grad():
    for name, values in list(model.named_parameters()) + list(model.named_buffers()):
        noise = torch.randn_like(values)
        if name.endswith("layer_scalar"):
            values.copy_(0.5 + 0.1 * noise.abs())
        elif values.dim() == 1 and name.endswith("weight"):
            # Scores are not scaled, so that norms of 1 would make attention so sharp that rounding matters.
            gain = 0.4 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            values.copy_(gain * (1.0 + 0.1 * noise))
        elif values.dim() == 2:
            values.copy_(0.5 * values.shape[-1] ** -0.5 * noise)
    ids = torch.randint(0, config.vocab_size, (BATCH, TOKENS))
    logits = model(ids).logits
    cache = DynamicCache(config=config)
    model(ids[:, :-DECODED], cache=cache)
    decoded = [model(ids[:, token : token + 1], cache=cache).logits for token in range(TOKENS - DECODED, TOKENS)]
    decoded = torch.cat(decoded, 1)
difference = (decoded - logits[:, -DECODED:]).abs().max().item()
assert difference < 3e-5, difference
assert logits.abs().max() > 1.5, "the bound of the logits matters"

model.save_pretrained(folder)
(folder / "generation_config.json").unlink()
expected = {"input_ids": ids.int(), "logits": logits.contiguous(), "decode_logits": decoded}
save_file(expected, folder / "expected.safetensors")
