//! From [`Llama`] to tensors under their Hugging Face names.

use super::{
    Llama,
    config::Dialect,
    names::{LayerNames, NAMES},
};
use crate::checkpoint::Exports;

impl Llama {
    /// The tensors of a checkpoint in the dialect that
    /// [`Config::dialect`](super::Config::dialect) returns.
    pub(super) fn exports(&self) -> Exports {
        let mut exports = Exports::new(&NAMES);
        exports.embedding("embed_tokens", &self.embedding);
        exports.rms_norm("norm", &self.norm);
        if let Some(head) = &self.head {
            exports.linear(&[("lm_head".into(), self.config.vocab_size)], head);
        }
        let fused = self.config.dialect() == Some(Dialect::Phi3);
        for (i, layer) in self.layers.iter().enumerate() {
            let names = LayerNames::new(&self.config, i, |_| fused);
            exports.linear(&names.qkv, &layer.qkv);
            exports.linear(&names.output, &layer.output);
            exports.linear(&names.gate_up, &layer.mlp.gate_up);
            exports.linear(&names.down, &layer.mlp.down);
            exports.rms_norm(&names.attention_norm, &layer.attention_norm);
            exports.rms_norm(&names.mlp_norm, &layer.mlp_norm);
            if let Some(norms) = &layer.qk_norms {
                exports.qk_norms(&names.qk_norms, norms);
            }
        }
        exports
    }
}
