//! Attention of all heads to one latent row per token.

use burn::{module::Module, tensor::Tensor};
use kv_cubecl::Sides;

use super::Config;
use crate::{
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
    /// For each head the rows of its keys without rope, then of its values:
    /// `[n_heads * (plain_dim + value_dim), latent_rank]`, as floats.
    pub keys_values: Linear,
    /// The output projection, `[hidden, n_heads * value_dim]`.
    pub output: Linear,
    /// The channels of a row and of a head.
    #[module(skip)]
    pub channels: Channels,
}

/// The channels of a row and of a head in [`LatentAttention`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channels {
    /// The latent row.
    pub latent: usize,
    /// A query without rope.
    pub plain: usize,
    /// A query or key with rope.
    pub rotary: usize,
    /// A value.
    pub value: usize,
    /// True if rope rotates neighboring channels.
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
    let query = match config.query_rank {
        Some(rank) => ("self_attn.q_a_proj", rank),
        None => ("self_attn.q_proj", config.n_heads * config.head_dim()),
    };
    [query, ("self_attn.kv_a_proj_with_mqa", config.latent_rank + config.rotary_dim)]
}

/// Builds the rows of keys and values. GGUF files have them in two tensors.
fn keys_values(config: &Config, source: &mut LayerSource<'_>) -> Result<Linear> {
    let Config { n_heads, latent_rank, plain_dim, value_dim, .. } = *config;
    let parts =
        ["k_b_proj", "v_b_proj"].map(|part| source.name(&format!("self_attn.{part}.weight")));
    match source.gguf().filter(|weights| weights.contains(&parts[0])) {
        Some(weights) => {
            let rows = Sides { keys: plain_dim, values: value_dim };
            weights.rows_of_heads(&parts, n_heads, rows, latent_rank)
        }
        None => source.linear(KEYS_VALUES, [n_heads * (plain_dim + value_dim), latent_rank], false),
    }
}

impl LatentAttention {
    pub(super) fn build(config: &Config, source: &mut LayerSource<'_>) -> Result<Self> {
        let Config { hidden_size, n_heads, latent_rank, plain_dim, value_dim, .. } = *config;
        let keys_values = keys_values(config, source)?;
        let queries = n_heads * config.head_dim();
        let query = config.query_rank.map(|rank| source.linear(QUERY, [queries, rank], false));
        let mut norm = |name, width| -> Result<RmsNorm> {
            Ok(RmsNorm { epsilon: EPSILON, ..source.norm(name, width)? })
        };
        Ok(Self {
            query_norm: config.query_rank.map(|rank| norm(QUERY_NORM, rank)).transpose()?,
            latent_norm: norm(LATENT_NORM, latent_rank)?,
            query: query.transpose()?,
            qkv: source.fused(&qkv(config), hidden_size, false)?,
            keys_values,
            output: source.residual(OUTPUT, [hidden_size, n_heads * value_dim], false)?,
            channels: Channels {
                latent: latent_rank,
                plain: plain_dim,
                rotary: config.rotary_dim,
                value: value_dim,
                interleaved: config.interleaved,
            },
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
        let Channels { latent: rank, plain, rotary, value, .. } = self.channels;
        let LayerContext { rope, index, spec, memory, .. } = context;
        let Some(rope) = rope else {
            let why = format!("layer {index} of the spec has no rope");
            return Err(Error::unsupported("latent attention", why));
        };
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

        let plain_query = self.latent_queries(query.clone().narrow(3, 0, plain));
        let rotary_query = self.rotated(query.narrow(3, plain, rotary), rope);
        let query = Tensor::cat(vec![plain_query, rotary_query], 3);
        let key = Tensor::cat(vec![latent, self.rotated(key, rope)], 3);
        let heads = self.head_values(memory.attend_latent(query, key, rank)?).swap_dims(1, 2);
        Ok(self.output.forward_added(heads.reshape([batch, seq, n_heads * value]), x))
    }

    /// Multiplies queries without rope, `[batch, n_heads, seq, plain]`, by the rows of the keys of
    /// their heads. The products with latent rows are then scores.
    fn latent_queries(&self, query: Tensor<4>) -> Tensor<4> {
        let (n_heads, plain) = (query.dims()[1], self.channels.plain);
        let _span = self.keys_values.weight.read_rows(n_heads * plain);
        by_heads(query, self.rows_of_heads(n_heads).narrow(1, 0, plain))
    }

    /// Multiplies sums of latent rows, `[batch, n_heads, seq, latent]`, by the rows of the values
    /// of each head.
    fn head_values(&self, heads: Tensor<4>) -> Tensor<4> {
        let (n_heads, Channels { plain, value, .. }) = (heads.dims()[1], self.channels);
        let _span = self.keys_values.weight.read_rows(n_heads * value);
        by_heads(heads, self.rows_of_heads(n_heads).narrow(1, plain, value).swap_dims(1, 2))
    }

    /// Returns the rows of keys, then of values, `[n_heads, plain + value, latent]`.
    fn rows_of_heads(&self, n_heads: usize) -> Tensor<3> {
        let Channels { plain, value, latent, .. } = self.channels;
        self.keys_values.weight.val().reshape([n_heads, plain + value, latent])
    }

    fn rotated(&self, x: Tensor<4>, rope: &RopeRows) -> Tensor<4> {
        match self.channels.interleaved {
            true => rope.apply_pairs(x),
            false => rope.apply(x),
        }
    }

    pub(super) fn projections(&mut self) -> impl Iterator<Item = &mut Linear> {
        [&mut self.qkv, &mut self.output].into_iter().chain(&mut self.query)
    }
}

/// Multiplies each head by its own matrix.
///
/// # Shapes
/// - x: `[batch, n_heads, seq, d_input]`
/// - matrices: `[n_heads, d_input, d_output]`
/// - output: `[batch, n_heads, seq, d_output]`
fn by_heads(x: Tensor<4>, matrices: Tensor<3>) -> Tensor<4> {
    let [batch, n_heads, seq, d_input] = x.dims();
    let d_output = matrices.dims()[2];
    let x = x.swap_dims(0, 1).reshape([n_heads, batch * seq, d_input]);
    x.matmul(matrices).reshape([n_heads, batch, seq, d_output]).swap_dims(0, 1)
}
