//! The transformer of Gemma 3: norms before and after attention and MLP, and of queries and keys.
//! Layers with a sliding window and their own rope base alternate with layers that see all tokens.

use burn::{module::Module, tensor::Tensor};

use super::{Config, names::NAMES};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating, Linear, QkNorms, RmsNorm, by_rows},
    stack::{DecoderLayer, DecoderStack, LayerContext, LayerSource, LayerVisitor, MLP},
};

/// Gemma 3, <https://arxiv.org/abs/2503.19786>.
pub type Gemma3 = DecoderStack<Layer>;

/// One layer of [`Gemma3`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm of the input of attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// Norms of the heads of queries and keys.
    pub qk_norms: QkNorms,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm of the output of attention.
    pub post_attention_norm: RmsNorm,
    /// Norm of the input of the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norm of the output of the MLP.
    pub post_mlp_norm: RmsNorm,
}

const POST_ATTENTION: &str = "post_attention_layernorm";
const MLP_NORM: &str = "pre_feedforward_layernorm";
const POST_MLP: &str = "post_feedforward_layernorm";

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Gemma3";
    const NAMES: &'static Names = &NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let shared = &config.shared;
        let (width, wide, bias) =
            (shared.hidden_size, shared.intermediate_size, shared.attention_bias);
        let head_dim = shared.head_dim;
        let heads = shared.n_heads * head_dim;
        Ok(Self {
            attention_norm: source.norm_plus_one("input_layernorm", width)?,
            qk_norms: QkNorms {
                query: source.norm_plus_one("self_attn.q_norm", head_dim)?,
                key: source.norm_plus_one("self_attn.k_norm", head_dim)?,
            },
            post_attention_norm: source.norm_plus_one(POST_ATTENTION, width)?,
            mlp_norm: source.norm_plus_one(MLP_NORM, width)?,
            post_mlp_norm: source.norm_plus_one(POST_MLP, width)?,
            qkv: source.fused(&shared.qkv(), width, bias)?,
            output: source.residual("self_attn.o_proj", [width, heads], bias)?,
            mlp: source.mlp(&MLP, [width, wide], Gating::GeluTanh)?,
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &config.shared.qkv(), &self.qkv);
        visitor.linear(Role::AttentionOutput, "self_attn.o_proj", &self.output);
        visitor.mlp(&MLP, &self.mlp);
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        let names = ["self_attn.q_norm", "self_attn.k_norm"];
        visitor.qk_norms(Role::AttentionNorm, names, &self.qk_norms);
        visitor.norm(Role::AttentionNorm, POST_ATTENTION, &self.post_attention_norm);
        visitor.norm(Role::MlpNorm, MLP_NORM, &self.mlp_norm);
        visitor.norm(Role::MlpNorm, POST_MLP, &self.post_mlp_norm);
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let heads = context.attend(qkv, Some(&self.qk_norms))?;
        let x = x + by_rows(heads, |x| self.post_attention_norm.forward(self.output.forward(x)));
        Ok(by_rows(x, |x| {
            let added = self.mlp.forward_normed(x.clone(), &self.mlp_norm);
            x + self.post_mlp_norm.forward(added)
        }))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.mlp.gate_up, &mut self.mlp.down]
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm_plus_one(Self::NORM, width)
    }
}
