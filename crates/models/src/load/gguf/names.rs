//! GGUF tensor names and their Hugging Face counterparts, without the model's prefix.

/// Pairs of `(GGUF, Hugging Face)`: the prefix of layers, and the names outside and inside of them.
struct Names {
    layer: (&'static str, &'static str),
    outer: &'static [(&'static str, &'static str)],
    inner: &'static [(&'static str, &'static str)],
}

const LLAMA: Names = Names {
    layer: ("blk.", "layers."),
    outer: &[("token_embd", "embed_tokens"), ("output_norm", "norm"), ("output", "lm_head")],
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_k", "self_attn.k_proj"),
        ("attn_v", "self_attn.v_proj"),
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
};

/// Phi-3 keeps its gate in the rows of `ffn_up`.
const PHI3: Names = Names {
    inner: &[
        ("attn_norm", "input_layernorm"),
        ("attn_qkv", "self_attn.qkv_proj"),
        ("attn_q", "self_attn.q_proj"),
        ("attn_output", "self_attn.o_proj"),
        ("ffn_norm", "post_attention_layernorm"),
        ("ffn_up", "mlp.gate_up_proj"),
        ("ffn_down", "mlp.down_proj"),
    ],
    ..LLAMA
};

const GPT2: Names = Names {
    layer: ("blk.", "h."),
    outer: &[
        ("token_embd", "wte"),
        ("position_embd", "wpe"),
        ("output_norm", "ln_f"),
        ("output", "lm_head"),
    ],
    inner: &[
        ("attn_norm", "ln_1"),
        ("attn_qkv", "attn.c_attn"),
        ("attn_output", "attn.c_proj"),
        ("ffn_norm", "ln_2"),
        ("ffn_up", "mlp.c_fc"),
        ("ffn_down", "mlp.c_proj"),
    ],
};

impl Names {
    /// Translates `name`; what the table does not know stays as it is.
    fn translate(&self, name: &str, to_hugging_face: bool) -> String {
        let pick = |&(gguf, hf): &(&'static str, &'static str)| {
            if to_hugging_face { (gguf, hf) } else { (hf, gguf) }
        };
        let (from, to) = pick(&self.layer);
        let (head, name, table) = match name.strip_prefix(from).and_then(|n| n.split_once('.')) {
            Some((layer, rest)) => (format!("{to}{layer}."), rest, self.inner),
            None => (String::new(), name, self.outer),
        };
        let Some((stem, suffix)) = name.rsplit_once('.') else { return format!("{head}{name}") };
        match table.iter().map(pick).find(|(from, _)| *from == stem) {
            Some((_, to)) => format!("{head}{to}.{suffix}"),
            None => format!("{head}{stem}.{suffix}"),
        }
    }
}

/// The Hugging Face name of a GGUF tensor.
pub(super) fn to_hugging_face(arch: &str, name: &str) -> String {
    names(arch).translate(name, true)
}

/// The GGUF name of a tensor of `arch`, as a function for messages.
pub(super) fn speller(arch: &str) -> fn(&str) -> String {
    match arch {
        "gpt2" => |name| GPT2.translate(name, false),
        "phi3" => |name| PHI3.translate(name, false),
        _ => |name| LLAMA.translate(name, false),
    }
}

fn names(arch: &str) -> &'static Names {
    match arch {
        "gpt2" => &GPT2,
        "phi3" => &PHI3,
        _ => &LLAMA,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        for (arch, gguf, hf) in [
            ("llama", "token_embd.weight", "embed_tokens.weight"),
            ("llama", "blk.11.attn_q.bias", "layers.11.self_attn.q_proj.bias"),
            ("phi3", "blk.0.ffn_up.weight", "layers.0.mlp.gate_up_proj.weight"),
            ("gpt2", "blk.3.ffn_up.weight", "h.3.mlp.c_fc.weight"),
        ] {
            assert_eq!(to_hugging_face(arch, gguf), hf);
            assert_eq!(speller(arch)(hf), gguf);
        }
        assert_eq!(to_hugging_face("llama", "rope_freqs.weight"), "rope_freqs.weight");
    }
}
