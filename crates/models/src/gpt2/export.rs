//! Exports a [`Layer`] under the Hugging Face names.

use super::{Config, Layer};
use crate::checkpoint::Exports;

impl Layer {
    /// Adds the tensors of layer `i`.
    pub(super) fn give(&self, _: &Config, i: usize, exports: &mut Exports) {
        let name = |part: &str| format!("h.{i}.{part}");
        exports.layer_norm(&name("ln_1"), &self.attention_norm);
        exports.layer_norm(&name("ln_2"), &self.mlp_norm);
        for (part, projection) in [
            ("attn.c_attn", &self.qkv),
            ("attn.c_proj", &self.output),
            ("mlp.c_fc", &self.up),
            ("mlp.c_proj", &self.down),
        ] {
            exports.conv1d(&name(part), projection);
        }
    }
}
