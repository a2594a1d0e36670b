//! Exports a [`Layer`] under the Hugging Face names.

use super::{Config, Layer, config::Dialect, names::LayerNames};
use crate::checkpoint::Exports;

impl Layer {
    /// Adds the tensors of layer `i`, in the dialect that `Config::dialect` returns.
    pub(super) fn give(&self, config: &Config, i: usize, exports: &mut Exports) {
        let fused = config.dialect() == Some(Dialect::Phi3);
        let names = LayerNames::new(config, i, |_| fused);
        exports.linear(&names.qkv, &self.qkv);
        exports.linear(&names.output, &self.output);
        exports.linear(&names.gate_up, &self.mlp.gate_up);
        exports.linear(&names.down, &self.mlp.down);
        exports.rms_norm(&names.attention_norm, &self.attention_norm);
        exports.rms_norm(&names.mlp_norm, &self.mlp_norm);
        if let Some(norms) = &self.qk_norms {
            exports.qk_norms(&names.qk_norms, norms);
        }
    }
}
