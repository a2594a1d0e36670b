//! The gated delta rule over whole sequences: products of matrices within chunks of tokens, and a
//! loop over chunks.

use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

use crate::{Error, Result};

/// Tokens per chunk. Work within a chunk grows with its square; the loop has a turn for each chunk.
const CHUNK: usize = 64;

/// The inputs of the gated delta rule. All are computed in f32.
#[derive(Clone, Debug)]
pub struct DeltaInputs {
    /// Queries, `[batch, heads, tokens, key_dim]`.
    pub query: Tensor<4>,
    /// Keys, of the same shape. Their lengths are at most 1.
    pub key: Tensor<4>,
    /// Values, `[batch, heads, tokens, value_dim]`.
    pub value: Tensor<4>,
    /// Logarithms of the decays, `[batch, heads, tokens]`, 0 or less.
    pub log_decay: Tensor<3>,
    /// The part of the prediction for a key that is replaced, 0 to 1, `[batch, heads, tokens]`.
    pub strength: Tensor<3>,
}

impl DeltaInputs {
    /// Checks the shapes, and returns batch, heads, tokens and the channels of keys and of values.
    fn check(&self, state: Option<&Tensor<4>>) -> Result<[usize; 5]> {
        let op = "gated_delta_rule";
        let [batch, heads, tokens, key_dim] = self.key.dims();
        let value_dim = self.value.dims()[3];
        let wrong = |tensor, shape: &[usize], rule: String| {
            Err(Error::Shape { op, tensor, shape: shape.to_vec(), rule })
        };
        if tokens == 0 {
            return wrong("key", &self.key.dims(), "must have at least 1 token".into());
        }
        for (name, tensor, width) in
            [("query", &self.query, key_dim), ("value", &self.value, value_dim)]
        {
            if tensor.dims() != [batch, heads, tokens, width] {
                let rule = format!("must be [{batch}, {heads}, {tokens}, {width}]");
                return wrong(name, &tensor.dims(), rule);
            }
        }
        for (name, tensor) in [("log_decay", &self.log_decay), ("strength", &self.strength)] {
            if tensor.dims() != [batch, heads, tokens] {
                let rule = format!("must be [{batch}, {heads}, {tokens}]");
                return wrong(name, &tensor.dims(), rule);
            }
        }
        match state.map(Tensor::dims) {
            Some(dims) if dims != [batch, heads, key_dim, value_dim] => {
                let rule = format!("must be [{batch}, {heads}, {key_dim}, {value_dim}]");
                wrong("state", &dims, rule)
            }
            _ => Ok([batch, heads, tokens, key_dim, value_dim]),
        }
    }
}

/// Applies the gated delta rule to whole sequences, with gradients. Without a `state`, it starts at
/// zero.
///
/// Within a chunk of tokens, the updates are a triangular system of equations (Yang et al., 2024,
/// <https://arxiv.org/abs/2406.06484>), which is solved for all chunks at once. Then each chunk
/// reads the state before it.
///
/// # Shapes
/// - state: `[batch, heads, key_dim, value_dim]`
/// - output: `[batch, heads, tokens, value_dim]`, and the state after the last token
///
/// # Errors
/// [`Error::Shape`] for a tensor of another shape.
pub fn gated_delta_rule(
    inputs: DeltaInputs,
    state: Option<Tensor<4>>,
) -> Result<(Tensor<4>, Tensor<4>)> {
    let [batch, heads, tokens, key_dim, value_dim] = inputs.check(state.as_ref())?;
    let device = inputs.key.device();
    let size = CHUNK.min(tokens);
    let n = tokens.div_ceil(size);
    // Tokens that fill the last chunk have a decay of 1 and a strength of 0, and change nothing.
    let chunks = |x: Tensor<4>| {
        let width = x.dims()[3];
        let (x, rest) = (x.cast(DType::F32), n * size - tokens);
        let x = match rest {
            0 => x,
            _ => {
                let zeros = Tensor::zeros([batch, heads, rest, width], (&device, DType::F32));
                Tensor::cat(vec![x, zeros], 2)
            }
        };
        x.reshape([batch, heads, n, size, width])
    };
    let DeltaInputs { query, key, value, log_decay, strength } = inputs;
    let [query, key, value] = [query, key, value].map(&chunks);
    let [log_decay, strength] = [log_decay, strength].map(|x| chunks(x.unsqueeze_dim(3)));

    // From the start of a chunk up to each token, and between pairs of tokens.
    let since_start = log_decay.cumsum(3); // [batch, heads, n, size, 1]
    let between = since_start.clone() - since_start.clone().swap_dims(3, 4);
    let later: Tensor<2, Bool> = Tensor::tril_mask([size, size], 0, &device);
    let between = between.mask_fill(later.unsqueeze(), f32::NEG_INFINITY).exp();
    let from_start = since_start.clone().exp();
    let last = since_start.clone().narrow(3, size - 1, 1);
    let to_end = (last.clone() - since_start).exp();
    let whole = last.exp(); // [batch, heads, n, 1, 1]

    let scaled = key.clone() * strength.clone();
    let transposed = key.clone().swap_dims(3, 4);
    let system = scaled.clone().matmul(transposed.clone()) * between.clone();
    let solved = inverse(system, size, &device);
    // The values that tokens write if the state before their chunk is 0, and the keys by which they
    // read that state and write less.
    let written = solved.clone().matmul(value * strength);
    let seen = solved.matmul(scaled * from_start.clone());
    let within = query.clone().matmul(transposed) * between;
    let query = query * from_start;
    let key = (key * to_end).swap_dims(3, 4);

    let zeros = || Tensor::zeros([batch, heads, key_dim, value_dim], (&device, DType::F32));
    let mut state = state.map_or_else(zeros, |state| state.cast(DType::F32));
    let mut outputs = Vec::with_capacity(n);
    for i in 0..n {
        let of = |x: &Tensor<5>| x.clone().narrow(2, i, 1).squeeze_dim::<4>(2);
        let new = of(&written) - of(&seen).matmul(state.clone());
        outputs.push(of(&query).matmul(state.clone()) + of(&within).matmul(new.clone()));
        state = state * of(&whole) + of(&key).matmul(new);
    }
    let output = match n {
        1 => outputs.remove(0),
        _ => Tensor::cat(outputs, 2).narrow(2, 0, tokens),
    };
    Ok((output, state))
}

/// Returns the inverse of `I + L`, where L is the part of `system` below the diagonal.
///
/// The inverse of `[[A, 0], [B, C]]` is `[[A', 0], [-C' B A', C']]`, with the inverses of A and C.
/// So from the inverses of blocks on the diagonal follow the inverses of blocks of twice the size.
/// A sum of powers of L is the inverse, too, but in f32 its terms would cancel each other.
fn inverse(system: Tensor<5>, size: usize, device: &Device) -> Tensor<5> {
    // The blocks B in pairs of blocks of `half` rows.
    let lower_left = |half: usize| {
        let inside = |i: usize, j: usize| i / (2 * half) == j / (2 * half) && i / half > j / half;
        let numbers = (0..size * size).map(|at| f32::from(u8::from(inside(at / size, at % size))));
        let data = TensorData::new(numbers.collect::<Vec<_>>(), [1, 1, 1, size, size]);
        Tensor::<5>::from_data(data, (device, DType::F32))
    };
    let identity: Tensor<2> = Tensor::eye(size, device);
    let mut solved = identity.cast(DType::F32).unsqueeze::<5>() - system.clone() * lower_left(1);
    let mut half = 2;
    while half < size {
        let below = system.clone() * lower_left(half);
        solved = solved.clone() - solved.clone().matmul(below).matmul(solved);
        half *= 2;
    }
    solved
}
