//! From [`Gpt2`] to tensors under their Hugging Face names.

use burn::nn::LayerNorm;

use super::Gpt2;
use crate::{nn::Linear, save::Export};

impl Gpt2 {
    /// The tensors of a checkpoint.
    pub(crate) fn export(&self) -> Vec<Export> {
        let mut exports = vec![
            Export::new("transformer.wte.weight", self.embedding.weight.val().detach()),
            Export::new("transformer.wpe.weight", self.positions.weight.val().detach()),
        ];
        if let Some(head) = &self.head {
            exports.push(Export::new("lm_head.weight", head.weight.val().detach()));
        }
        layer_norm(&mut exports, "transformer.ln_f", &self.norm);
        for (i, layer) in self.layers.iter().enumerate() {
            let name = |part: &str| format!("transformer.h.{i}.{part}");
            layer_norm(&mut exports, &name("ln_1"), &layer.attention_norm);
            layer_norm(&mut exports, &name("ln_2"), &layer.mlp_norm);
            for (part, projection) in [
                ("attn.c_attn", &layer.qkv),
                ("attn.c_proj", &layer.output),
                ("mlp.c_fc", &layer.up),
                ("mlp.c_proj", &layer.down),
            ] {
                conv1d(&mut exports, &name(part), projection);
            }
        }
        exports
    }
}

/// GPT-2 checkpoints hold projections as `[d_input, d_output]`, the transpose of [`Linear`].
fn conv1d(exports: &mut Vec<Export>, name: &str, linear: &Linear) {
    let weight = linear.weight.val().detach().transpose();
    exports.push(Export::new(format!("{name}.weight"), weight));
    if let Some(bias) = &linear.bias {
        exports.push(Export::new(format!("{name}.bias"), bias.val().detach()));
    }
}

fn layer_norm(exports: &mut Vec<Export>, name: &str, norm: &LayerNorm) {
    exports.push(Export::new(format!("{name}.weight"), norm.gamma.val().detach()));
    if let Some(beta) = &norm.beta {
        exports.push(Export::new(format!("{name}.bias"), beta.val().detach()));
    }
}
