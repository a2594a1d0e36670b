//! Attention in f64, one query row at a time.

/// Options of the softmax.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowOptions {
    /// Factor on the products; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Bound on the scores: `softcap * tanh(score / softcap)`.
    pub softcap: Option<f64>,
    /// A score that has a weight and no value.
    pub sink: Option<f64>,
}

/// Attention of one query row.
#[derive(Clone, Debug)]
pub struct Row {
    /// The weighted sum of values.
    pub output: Vec<f64>,
    /// Logarithm of the sum of exponentials of all scores, that of the sink among them.
    pub lse: f64,
}

/// Scores of one query row, their slopes where they are bounded, and the log-sum-exp.
fn scores(query: &[f64], keys: &[&[f64]], options: RowOptions) -> (Vec<f64>, Vec<f64>, f64) {
    let scale = options.scale.unwrap_or(1.0 / (query.len() as f64).sqrt());
    let products = keys.iter().map(|key| dot(query, key) * scale);
    let (scores, slopes): (Vec<f64>, Vec<f64>) = match options.softcap {
        Some(cap) => products
            .map(|score| (cap * (score / cap).tanh(), 1.0 - (score / cap).tanh().powi(2)))
            .unzip(),
        None => products.map(|score| (score, 1.0)).unzip(),
    };
    let all = || scores.iter().copied().chain(options.sink);
    let highest = all().fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = all().map(|score| (score - highest).exp()).sum();
    (scores, slopes, highest + total.ln())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Output of one query row over the keys and values it sees, scores scaled by
/// `1 / sqrt(head_dim)`.
pub fn attend_row(query: &[f64], keys: &[&[f64]], values: &[&[f64]]) -> Vec<f64> {
    attend_row_with(query, keys, values, RowOptions::default()).output
}

/// [`attend_row`] with options.
pub fn attend_row_with(
    query: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    options: RowOptions,
) -> Row {
    let mut output = vec![0.0; values.first().map_or(0, |value| value.len())];
    let (scores, _, lse) = scores(query, keys, options);
    for (score, value) in scores.into_iter().zip(values) {
        add_scaled(&mut output, (score - lse).exp(), value);
    }
    Row { output, lse }
}

/// Gradients of [`attend_row_with`].
#[derive(Clone, Debug)]
pub struct RowGradients {
    /// Gradient of the query.
    pub query: Vec<f64>,
    /// Gradient of each key.
    pub keys: Vec<Vec<f64>>,
    /// Gradient of each value.
    pub values: Vec<Vec<f64>>,
    /// Gradient of the sink's score, 0 without one.
    pub sink: f64,
}

/// Gradients of [`attend_row_with`] with respect to all it takes, given the gradient of its output.
pub fn attend_row_backward(
    query: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    grad: &[f64],
    options: RowOptions,
) -> RowGradients {
    let scale = options.scale.unwrap_or(1.0 / (query.len() as f64).sqrt());
    let (scores, slopes, lse) = scores(query, keys, options);
    let p: Vec<f64> = scores.iter().map(|score| (score - lse).exp()).collect();
    let grad_p: Vec<f64> = values.iter().map(|value| dot(grad, value)).collect();
    let mean = dot(&p, &grad_p);
    let mut grad_query = vec![0.0; query.len()];
    let (mut grad_keys, mut grad_values) = (Vec::new(), Vec::new());
    for (((key, p), grad_p), slope) in keys.iter().zip(p).zip(grad_p).zip(slopes) {
        let grad_score = p * (grad_p - mean) * slope * scale;
        add_scaled(&mut grad_query, grad_score, key);
        grad_keys.push(query.iter().map(|q| q * grad_score).collect());
        grad_values.push(grad.iter().map(|g| g * p).collect());
    }
    let sink = options.sink.map_or(0.0, |sink| -(sink - lse).exp() * mean);
    RowGradients { query: grad_query, keys: grad_keys, values: grad_values, sink }
}

/// Plain causal attention: what a cache that quantizes nothing computes. Query `[batch, n_heads,
/// tokens, head_dim]`, key and value `[batch, n_kv_heads, tokens, head_dim]`, where a value may
/// have another head_dim; query head `h` reads KV head `h / (n_heads / n_kv_heads)`.
pub fn causal_attention(
    (query, query_shape): (&[f64], [usize; 4]),
    (key, key_shape): (&[f64], [usize; 4]),
    value: &[f64],
) -> Vec<f64> {
    let [batch, n_heads, tokens, head_dim] = query_shape;
    let n_kv_heads = key_shape[1];
    let value_dim = value.len() / (batch * n_kv_heads * tokens);
    let mut output = Vec::new();
    for slice in 0..batch * n_heads {
        let (sequence, head) = (slice / n_heads, slice % n_heads);
        let kv_slice = sequence * n_kv_heads + head / (n_heads / n_kv_heads);
        let keys: Vec<&[f64]> = key.chunks(head_dim).skip(kv_slice * tokens).take(tokens).collect();
        let values: Vec<&[f64]> =
            value.chunks(value_dim).skip(kv_slice * tokens).take(tokens).collect();
        for token in 0..tokens {
            let row = &query[(slice * tokens + token) * head_dim..][..head_dim];
            output.extend(attend_row(row, &keys[..=token], &values[..=token]));
        }
    }
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_average() {
        let (a, b) = ([1.0, 3.0], [3.0, 5.0]);
        assert_eq!(attend_row(&[0.0, 0.0], &[&a, &b], &[&a, &b]), [2.0, 4.0]);
    }
}
