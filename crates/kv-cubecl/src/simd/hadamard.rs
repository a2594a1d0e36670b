//! The Walsh-Hadamard transform.

use macerator::Simd;

/// Computes [`KvCacheOps::hadamard`](crate::KvCacheOps::hadamard) of rows of `head_dim` elements.
#[allow(clippy::extra_unused_type_parameters, reason = "macerator needs one")]
#[macerator::with_simd]
pub(crate) fn hadamard<S: Simd>(rows: &mut [f32], head_dim: usize) {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut stride = 1;
    while stride < head_dim {
        for pairs in rows.chunks_exact_mut(2 * stride) {
            let (sums, differences) = pairs.split_at_mut(stride);
            for (a, b) in sums.iter_mut().zip(differences) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    rows.iter_mut().for_each(|x| *x *= scale);
}
