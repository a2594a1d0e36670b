//! From [`Gpt2`] to tensors under their Hugging Face names.

use super::{Gpt2, names::NAMES};
use crate::checkpoint::Exports;

impl Gpt2 {
    /// The tensors of a checkpoint.
    pub(super) fn exports(&self) -> Exports {
        let mut exports = Exports::new(&NAMES);
        exports.embedding("wte", &self.embedding);
        exports.floats("wpe", &self.positions.weight, None);
        if let Some(head) = &self.head {
            exports.linear(&[("lm_head".into(), self.config.vocab_size)], head);
        }
        exports.layer_norm("ln_f", &self.norm);
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("h.{i}.{part}");
            exports.layer_norm(&name("ln_1"), &layer.attention_norm);
            exports.layer_norm(&name("ln_2"), &layer.mlp_norm);
            for (part, projection) in [
                ("attn.c_attn", &layer.qkv),
                ("attn.c_proj", &layer.output),
                ("mlp.c_fc", &layer.up),
                ("mlp.c_proj", &layer.down),
            ] {
                exports.conv1d(&name(part), projection);
            }
        }
        exports
    }
}
