//! A pre-norm transformer with rope, grouped-query attention and a gated MLP.

use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

use super::{Config, config::Dialect, names::fused};
use crate::{
    checkpoint::Names,
    decoder::Role,
    error::Result,
    nn::{GatedMlp, Gating, Linear, QkNorms, RmsNorm, by_rows},
    stack::{DecoderLayer, DecoderStack, LLAMA_NAMES, LayerContext, LayerSource, LayerVisitor},
};

/// A model of the Llama family, <https://arxiv.org/abs/2302.13971>.
pub type Llama = DecoderStack<Layer>;

/// One layer of [`Llama`].
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Query, key and value rows in one matrix.
    pub qkv: Linear,
    /// The output projection of attention.
    pub output: Linear,
    /// Norm before the MLP.
    pub mlp_norm: RmsNorm,
    /// The MLP.
    pub mlp: GatedMlp,
    /// Norms of the heads of queries and keys, if the model has them.
    pub qk_norms: Option<QkNorms>,
}

impl Llama {
    /// Creates a model with random weights, as [`DecoderStack::random`] does.
    ///
    /// # Panics
    /// Panics when [`Config::validate`] refuses `config`.
    pub fn init(config: Config, device: &Device) -> Self {
        let model = config.validate().and_then(|()| Self::random(config, device));
        model.unwrap_or_else(|error| panic!("{error}"))
    }
}

pub(crate) const QK_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

impl DecoderLayer for Layer {
    type Config = Config;
    type Norm = RmsNorm;

    const NAME: &'static str = "Llama";
    const NAMES: &'static Names = &LLAMA_NAMES;

    fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let Config { hidden_size: width, intermediate_size: wide, mlp_bias, .. } = *config;
        let [qkv, gate_up] = fused(config, |module| source.contains(module));
        let heads = config.attention.n_heads * config.attention.head_dim.values;
        Ok(Self {
            attention_norm: source.norm("input_layernorm", width)?,
            qkv: source.fused(&qkv, width, config.qkv_bias)?,
            output: source.residual("self_attn.o_proj", [width, heads], config.output_bias)?,
            mlp_norm: source.norm("post_attention_layernorm", width)?,
            mlp: GatedMlp {
                gate_up: source.fused(&gate_up, width, mlp_bias)?,
                down: source.residual("mlp.down_proj", [width, wide], mlp_bias)?,
                gating: Gating::Silu,
            },
            qk_norms: match config.qk_norms {
                true => Some(source.qk_norms(QK_NORMS, config.head_dim())?),
                false => None,
            },
        })
    }

    fn visit_parts(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        let is_fused = config.dialect() == Some(Dialect::Phi3);
        let [qkv, gate_up] = fused(config, |_| is_fused);
        visitor.fused(Role::Qkv, &qkv, &self.qkv);
        visitor.linear(Role::AttentionOutput, "self_attn.o_proj", &self.output);
        visitor.fused(Role::Mlp, &gate_up, &self.mlp.gate_up);
        visitor.linear(Role::Mlp, "mlp.down_proj", &self.mlp.down);
        visitor.norm(Role::AttentionNorm, "input_layernorm", &self.attention_norm);
        visitor.norm(Role::MlpNorm, "post_attention_layernorm", &self.mlp_norm);
        if let Some(norms) = &self.qk_norms {
            visitor.qk_norms(Role::AttentionNorm, QK_NORMS, norms);
        }
    }

    fn forward(&self, x: Tensor<3>, context: LayerContext<'_>) -> Result<Tensor<3>> {
        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, &self.attention_norm));
        let heads = context.attend(qkv, self.qk_norms.as_ref())?;
        let x = self.output.forward_added(heads, x);
        Ok(by_rows(x, |x| self.mlp.forward_added(x, &self.mlp_norm)))
    }

    fn projections(&mut self) -> Vec<&mut Linear> {
        vec![&mut self.qkv, &mut self.output, &mut self.mlp.gate_up, &mut self.mlp.down]
    }

    fn final_norm(_: &Config, width: usize, source: &mut LayerSource<'_>) -> Result<RmsNorm> {
        source.norm(Self::NORM, width)
    }
}
