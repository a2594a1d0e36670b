#!/usr/bin/env python3
"""Writes a random Mixtral of two layers, and its logits by the transformers library.

The logits are of whole sequences in f32 with eager attention, and of the last 40 tokens one by one.

usage: write.py FOLDER      (needs torch 2.15, transformers 5.24 and safetensors 0.8)
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

folder = pathlib.Path(sys.argv[1])
BATCH, TOKENS, DECODED = 2, 200, 40

# With this seed, the scores of the second and the third expert differ by more than 0.006 for every token of these
# ids and of ../llama-tiny, so rounding to f16 selects the same experts.
torch.manual_seed(316)
config = MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, sliding_window=48,
    max_position_embeddings=512, bos_token_id=None, eos_token_id=None, attn_implementation="eager",
)
model = MixtralForCausalLM(config).float().eval()
with torch.no_grad():
    for name, values in model.named_parameters():
        noise = torch.randn_like(values)
        if values.dim() == 1:
            values.copy_(1.0 + 0.1 * noise)
        else:
            # A router whose probabilities differ clearly.
            scale = 2.0 if name.endswith("gate.weight") else 0.5
            values.copy_(scale * values.shape[-1] ** -0.5 * noise)
    ids = torch.randint(0, config.vocab_size, (BATCH, TOKENS))
    logits = model(ids).logits
    cache = DynamicCache(config=config)
    model(ids[:, :-DECODED], cache=cache)
    decoded = [model(ids[:, token : token + 1], cache=cache).logits for token in range(TOKENS - DECODED, TOKENS)]
    decoded = torch.cat(decoded, 1)
difference = (decoded - logits[:, -DECODED:]).abs().max().item()
assert difference < 3e-5, difference

model.save_pretrained(folder)
(folder / "generation_config.json").unlink()
expected = {"input_ids": ids.int(), "logits": logits.contiguous(), "decode_logits": decoded}
save_file(expected, folder / "expected.safetensors")
