//! The layer of the gated delta rule.

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use kv_cubecl::delta::{DeltaConfig, DeltaTokens, DeltaWeights};
use tracing::trace_span;

use crate::{
    decoder::Role,
    error::Result,
    nn::{Linear, Matrix, Memory, RmsNorm, by_rows},
    spans::OPERATION,
    stack::{LayerSource, LayerVisitor},
};

/// Linear attention: a state for each value head instead of keys and values.
#[derive(Module, Debug)]
pub struct LinearAttention {
    /// Queries, keys and values, then the gates of the output, in one matrix.
    pub mixed: Linear,
    /// Logits of the strengths, then time steps, `[2 * n_value_heads, hidden]`.
    pub rates: Linear,
    /// The convolution over recent tokens, `[conv_channels, conv_tokens]`.
    pub conv: Matrix,
    /// Logarithms of the rates of decay, `[n_value_heads]`.
    pub log_rate: Param<Tensor<1>>,
    /// Added to time steps, `[n_value_heads]`.
    pub time_bias: Param<Tensor<1>>,
    /// The norm of the output of each head.
    pub norm: RmsNorm,
    /// The output projection.
    pub output: Linear,
}

/// The time bias of random weights, with which a state keeps 95% of its numbers at each token.
const TIME: f32 = -3.0;
const CONV: &str = "linear_attn.conv1d.weight";
const LOG_RATE: &str = "linear_attn.A_log";
const TIME_BIAS: &str = "linear_attn.dt_bias";
const NORM: &str = "linear_attn.norm";
const OUTPUT: &str = "linear_attn.out_proj";

fn mixed(config: &DeltaConfig) -> [(&'static str, usize); 2] {
    let [qkv, gate] = ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"];
    [(qkv, config.conv_channels()), (gate, config.value_channels())]
}

fn rates(config: &DeltaConfig) -> [(&'static str, usize); 2] {
    ["linear_attn.in_proj_b", "linear_attn.in_proj_a"].map(|name| (name, config.n_value_heads))
}

impl LinearAttention {
    pub(super) fn build(
        config: &DeltaConfig,
        hidden: usize,
        source: &mut LayerSource<'_>,
    ) -> Result<Self> {
        let (heads, values) = (config.n_value_heads, config.value_channels());
        let rate_of_gguf = source.name("ssm_a");
        let (log_rate, time_bias) = match source.gguf() {
            // GGUF files have the negated rates, not their logarithms.
            Some(weights) => (
                weights.negated_exponentials(&rate_of_gguf, heads)?,
                source.vector("linear_attn.dt.bias", heads, TIME)?,
            ),
            None => (source.vector(LOG_RATE, heads, 0.0)?, source.vector(TIME_BIAS, heads, TIME)?),
        };
        Ok(Self {
            mixed: source.fused(&mixed(config), hidden, false)?,
            rates: source.fused(&rates(config), hidden, false)?,
            conv: source.depthwise(CONV, [config.conv_channels(), config.conv_tokens])?,
            log_rate,
            time_bias,
            norm: source.norm(NORM, config.head_dim.values)?,
            output: source.residual(OUTPUT, [hidden, values], false)?,
        })
    }

    pub(super) fn visit(&self, config: &DeltaConfig, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &mixed(config), &self.mixed);
        visitor.fused(Role::Qkv, &rates(config), &self.rates);
        visitor.depthwise(Role::Qkv, CONV, &self.conv);
        visitor.vector(Role::Qkv, LOG_RATE, &self.log_rate);
        visitor.vector(Role::Qkv, TIME_BIAS, &self.time_bias);
        visitor.norm(Role::AttentionNorm, NORM, &self.norm);
        visitor.linear(Role::AttentionOutput, OUTPUT, &self.output);
    }

    /// Applies the layer and adds the result to its input.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: the same
    ///
    /// # Errors
    /// Fails for a memory that is not the state of such a layer.
    pub fn forward(&self, x: Tensor<3>, norm: &RmsNorm, memory: Memory<'_>) -> Result<Tensor<3>> {
        let project = |linear: &Linear| by_rows(x.clone(), |x| linear.forward_normed(x, norm));
        let tokens = DeltaTokens { mixed: project(&self.mixed), rates: project(&self.rates) };
        let weights = DeltaWeights {
            conv: self.conv.val(),
            log_rate: self.log_rate.val(),
            time_bias: self.time_bias.val(),
            gain: self.norm.gamma.val(),
            epsilon: self.norm.epsilon,
        };
        let memory = memory.delta()?;
        let bytes = memory.bytes_read() as u64;
        let span = trace_span!(target: OPERATION, "delta", bytes).entered();
        let heads = memory.mix(tokens, &weights)?;
        drop(span);
        Ok(self.output.forward_added(heads, x))
    }
}
