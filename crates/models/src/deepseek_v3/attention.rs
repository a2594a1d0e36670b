//! Attention of all heads to one latent row per token.

use std::ops::Range;

use burn::{module::Module, tensor::Tensor};
use kv_cubecl::{Side, Sides};

use super::Config;
use crate::{
    checkpoint::OF_HEADS,
    decoder::Role,
    error::{Error, Result},
    nn::{Linear, RmsNorm, RopeRows, by_rows},
    stack::{LayerContext, LayerSource, LayerVisitor},
};

/// Multi-head latent attention. The latent row of a token is the value of all heads, and with a
/// shared rope key also their key.
///
/// A head's own keys and values would be products of the latent row and rows of
/// [`keys_values`](Self::keys_values). They are never computed. Queries are multiplied by the rows
/// of keys before attention, and outputs by the rows of values after it.
#[derive(Module, Debug)]
pub struct LatentAttention {
    /// The rows of the compressed query, or of the queries of all heads, then of the latent row and
    /// the rope key.
    pub qkv: Linear,
    /// Norm of the compressed query, if queries are compressed.
    pub query_norm: Option<RmsNorm>,
    /// Computes the queries of all heads from the compressed query.
    pub query: Option<Linear>,
    /// Norm of the latent row.
    pub latent_norm: RmsNorm,
    /// For each head the rows of its keys without rope, then of its values, as floats or packed:
    /// `[n_heads * (plain_dim + value_dim), latent_rank]`.
    pub keys_values: Linear,
    /// The output projection, `[hidden, n_heads * value_dim]`.
    pub output: Linear,
    /// True if rope rotates neighboring channels, false if it rotates halves.
    #[module(skip)]
    pub interleaved: bool,
}

const QUERY_NORM: &str = "self_attn.q_a_layernorm";
const QUERY: &str = "self_attn.q_b_proj";
const LATENT_NORM: &str = "self_attn.kv_a_layernorm";
const KEYS_VALUES: &str = "self_attn.kv_b_proj";
const OUTPUT: &str = "self_attn.o_proj";
/// The epsilon of the norms of low rank, whatever the epsilon of the other norms.
const EPSILON: f64 = 1e-6;

/// Returns the names of the projections of the input, with their numbers of rows.
fn qkv(config: &Config) -> [(&'static str, usize); 2] {
    let query = match config.q_lora_rank {
        Some(rank) => ("self_attn.q_a_proj", rank),
        None => ("self_attn.q_proj", config.num_attention_heads * config.head_dim()),
    };
    [query, ("self_attn.kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim)]
}

/// Builds the rows of keys and values. GGUF files have them in two tensors.
fn keys_values(config: &Config, source: &mut LayerSource<'_>) -> Result<Linear> {
    let rows = Sides { keys: config.qk_nope_head_dim, values: config.v_head_dim };
    let (n_heads, rank) = (config.num_attention_heads, config.kv_lora_rank);
    let parts = OF_HEADS.map(|part| source.name(part));
    match source.gguf().filter(|weights| weights.contains(&parts[0])) {
        Some(weights) => weights.rows_of_heads(&parts, n_heads, rows, rank),
        None => source.linear(KEYS_VALUES, [n_heads * (rows.keys + rows.values), rank], false),
    }
}

impl LatentAttention {
    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let (hidden_size, n_heads) = (config.hidden_size, config.num_attention_heads);
        let keys_values = keys_values(config, source)?;
        let queries = n_heads * config.head_dim();
        let query = config.q_lora_rank.map(|rank| source.linear(QUERY, [queries, rank], false));
        let mut norm = |name, width| -> Result<RmsNorm> {
            Ok(RmsNorm { epsilon: EPSILON, ..source.norm(name, width)? })
        };
        Ok(Self {
            query_norm: config.q_lora_rank.map(|rank| norm(QUERY_NORM, rank)).transpose()?,
            latent_norm: norm(LATENT_NORM, config.kv_lora_rank)?,
            query: query.transpose()?,
            qkv: source.fused(&qkv(config), hidden_size, false)?,
            keys_values,
            output: source.residual(OUTPUT, [hidden_size, n_heads * config.v_head_dim], false)?,
            interleaved: config.rope_interleave,
        })
    }

    pub(super) fn visit(&self, config: &Config, visitor: &mut LayerVisitor<'_>) {
        visitor.fused(Role::Qkv, &qkv(config), &self.qkv);
        if let (Some(norm), Some(query)) = (&self.query_norm, &self.query) {
            visitor.norm(Role::AttentionNorm, QUERY_NORM, norm);
            visitor.linear(Role::Qkv, QUERY, query);
        }
        visitor.norm(Role::AttentionNorm, LATENT_NORM, &self.latent_norm);
        visitor.linear(Role::Qkv, KEYS_VALUES, &self.keys_values);
        visitor.linear(Role::AttentionOutput, OUTPUT, &self.output);
    }

    /// Applies the norm and the layer, and adds the result to its input.
    ///
    /// # Shapes
    /// - x: `[batch, seq, hidden]`
    /// - output: the same
    ///
    /// # Errors
    /// Fails as [`Memory::attend_latent`](crate::nn::Memory::attend_latent) does.
    pub fn forward(
        &self,
        x: Tensor<3>,
        norm: &RmsNorm,
        context: LayerContext<'_>,
    ) -> Result<Tensor<3>> {
        let LayerContext { rope, index, spec, memory, .. } = context;
        let (Some(rope), Some(of_heads)) = (rope, spec.latent) else {
            let why = format!("layer {index} of the spec has no rope, or is not latent");
            return Err(Error::unsupported("latent attention", why));
        };
        let (rank, value) = (spec.head_dim.values, of_heads.values);
        let rotary = spec.head_dim.keys - rank;
        let plain = of_heads.keys - rotary;
        let ([batch, seq, _], n_heads) = (x.dims(), spec.n_heads);

        let qkv = by_rows(x.clone(), |x| self.qkv.forward_normed(x, norm));
        let queries = qkv.dims()[2] - rank - rotary;
        let query = qkv.clone().narrow(2, 0, queries);
        let query = match (&self.query_norm, &self.query) {
            (Some(norm), Some(linear)) => by_rows(query, |x| linear.forward_normed(x, norm)),
            _ => query,
        };
        let query = query.reshape([batch, seq, n_heads, plain + rotary]).swap_dims(1, 2);
        let latent = self.latent_norm.forward(qkv.clone().narrow(2, queries, rank));
        let latent = latent.reshape([batch, 1, seq, rank]);
        let key = qkv.narrow(2, queries + rank, rotary).reshape([batch, 1, seq, rotary]);

        let plain_query = self.by_heads(query.clone().narrow(3, 0, plain), Side::Keys, 0..plain);
        let rotary_query = self.rotated(query.narrow(3, plain, rotary), rope);
        let query = Tensor::cat(vec![plain_query, rotary_query], 3);
        let key = Tensor::cat(vec![latent, self.rotated(key, rope)], 3);
        let rows = memory.attend_latent(query, key, rank)?;
        let heads = self.by_heads(rows, Side::Values, plain..plain + value);
        let heads = heads.swap_dims(1, 2).reshape([batch, seq, n_heads * value]);
        Ok(self.output.forward_added(heads, x))
    }

    /// Multiplies the queries of each head by its rows of keys in
    /// [`keys_values`](Self::keys_values), or its attention outputs by its rows of values. `rows`
    /// are those of the side among the rows of a head.
    ///
    /// # Shapes
    /// - x: `[batch, n_heads, seq, plain]`, or for values `[batch, n_heads, seq, latent]`
    /// - output: `[batch, n_heads, seq, latent]`, or for values `[batch, n_heads, seq, value]`
    fn by_heads(&self, x: Tensor<4>, side: Side, rows: Range<usize>) -> Tensor<4> {
        let [batch, n_heads, seq, d_input] = x.dims();
        let weight = &self.keys_values.weight;
        let _span = weight.read_rows(n_heads * rows.len());
        if let Some(heads) = weight.heads() {
            let x = x.swap_dims(1, 2).reshape([batch * seq, n_heads, d_input]);
            let y = heads.project(x, side);
            let d_output = y.dims()[2];
            return y.reshape([batch, seq, n_heads, d_output]).swap_dims(1, 2);
        }
        let [all_rows, rank] = weight.dims();
        let matrices = weight.val().reshape([n_heads, all_rows / n_heads, rank]);
        let mut matrices = matrices.narrow(1, rows.start, rows.len());
        if side == Side::Values {
            matrices = matrices.swap_dims(1, 2);
        }
        let d_output = matrices.dims()[2];
        let x = x.swap_dims(0, 1).reshape([n_heads, batch * seq, d_input]);
        x.matmul(matrices).reshape([n_heads, batch, seq, d_output]).swap_dims(0, 1)
    }

    fn rotated(&self, x: Tensor<4>, rope: &RopeRows) -> Tensor<4> {
        if self.interleaved { rope.apply_pairs(x) } else { rope.apply(x) }
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Linear> {
        [&mut self.qkv, &mut self.output].into_iter().chain(&mut self.query)
    }
}
