//! From [`Llama`] to tensors under their Hugging Face names.

use burn::tensor::Tensor;

use super::{Layer, Llama, config::Family};
use crate::{
    nn::{AttentionShape, Linear},
    save::Export,
};

impl Llama {
    /// The tensors of a checkpoint of the family that [`Config::family`](super::Config::family)
    /// returns.
    pub(crate) fn export(&self) -> Vec<Export> {
        let mut exports = vec![
            Export::new("model.embed_tokens.weight", self.embedding.weight.val().detach()),
            Export::new("model.norm.weight", self.norm.gamma.val().detach()),
        ];
        if let Some(head) = &self.head {
            linear(&mut exports, head, &[("lm_head".into(), self.config.vocab_size)]);
        }
        let fused = self.config.family() == Some(Family::Phi3);
        for (i, layer) in self.layers.iter().enumerate() {
            layer.export(&format!("model.layers.{i}"), &self.config, fused, &mut exports);
        }
        exports
    }
}

impl Layer {
    fn export(&self, name: &str, config: &super::Config, fused: bool, exports: &mut Vec<Export>) {
        let AttentionShape { n_heads, n_kv_heads, head_dim } = config.attention;
        let (q_rows, kv_rows) = (n_heads * head_dim, n_kv_heads * head_dim);
        let part = |part: &str, rows| (format!("{name}.{part}"), rows);
        let (qkv, gate_up) = if fused {
            (
                vec![part("self_attn.qkv_proj", q_rows + 2 * kv_rows)],
                vec![part("mlp.gate_up_proj", 2 * config.intermediate_size)],
            )
        } else {
            (
                vec![
                    part("self_attn.q_proj", q_rows),
                    part("self_attn.k_proj", kv_rows),
                    part("self_attn.v_proj", kv_rows),
                ],
                vec![
                    part("mlp.gate_proj", config.intermediate_size),
                    part("mlp.up_proj", config.intermediate_size),
                ],
            )
        };
        linear(exports, &self.qkv, &qkv);
        linear(exports, &self.output, &[part("self_attn.o_proj", config.hidden_size)]);
        linear(exports, &self.mlp.gate_up, &gate_up);
        linear(exports, &self.mlp.down, &[part("mlp.down_proj", config.hidden_size)]);
        for (part, norm) in [
            ("input_layernorm", &self.attention_norm),
            ("post_attention_layernorm", &self.mlp_norm),
        ] {
            exports.push(Export::new(format!("{name}.{part}.weight"), norm.gamma.val().detach()));
        }
    }
}

/// Cuts a projection into `parts`, each a name and a number of rows.
fn linear(exports: &mut Vec<Export>, linear: &Linear, parts: &[(String, usize)]) {
    let weight: Tensor<2> = linear.weight.val().detach();
    let bias: Option<Tensor<1>> = linear.bias.as_ref().map(|bias| bias.val().detach());
    let mut start = 0;
    for (name, rows) in parts {
        let values = weight.clone().narrow(0, start, *rows);
        exports.push(Export::new(format!("{name}.weight"), values));
        if let Some(bias) = &bias {
            let values = bias.clone().narrow(0, start, *rows);
            exports.push(Export::new(format!("{name}.bias"), values));
        }
        start += rows;
    }
}
