//! Attention in f64, one query row at a time.

/// Softmax of the scaled scores of one query row.
fn probabilities(query: &[f64], keys: &[&[f64]]) -> Vec<f64> {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let scores: Vec<f64> = keys.iter().map(|key| dot(query, key) * scale).collect();
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / total).collect()
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
    let mut output = vec![0.0; values.first().map_or(0, |value| value.len())];
    for (p, value) in probabilities(query, keys).into_iter().zip(values) {
        add_scaled(&mut output, p, value);
    }
    output
}

/// Gradients of [`attend_row`] with respect to the query, each key and each value, given the
/// gradient of its output.
pub fn attend_row_backward(
    query: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    grad: &[f64],
) -> (Vec<f64>, Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let scale = 1.0 / (query.len() as f64).sqrt();
    let p = probabilities(query, keys);
    let grad_p: Vec<f64> = values.iter().map(|value| dot(grad, value)).collect();
    let mean = dot(&p, &grad_p);
    let mut grad_query = vec![0.0; query.len()];
    let (mut grad_keys, mut grad_values) = (Vec::new(), Vec::new());
    for ((key, p), grad_p) in keys.iter().zip(p).zip(grad_p) {
        let grad_score = p * (grad_p - mean) * scale;
        add_scaled(&mut grad_query, grad_score, key);
        grad_keys.push(query.iter().map(|q| q * grad_score).collect());
        grad_values.push(grad.iter().map(|g| g * p).collect());
    }
    (grad_query, grad_keys, grad_values)
}

/// Plain causal attention: what a cache that quantizes nothing computes. Query `[batch, n_heads,
/// tokens, head_dim]`, key and value `[batch, n_kv_heads, tokens, head_dim]`, where a value may have another
/// head_dim; query head `h` reads KV head `h / (n_heads / n_kv_heads)`.
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
