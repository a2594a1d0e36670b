//! Row-wise parts of a model on the CPU, on several threads.

use burn::tensor::Tensor;

/// Tokens per piece. It is large enough for matrix products, and small enough that a piece's widest
/// activation stays in the processor's cache. With SmolLM2 at 2048 tokens on 2 cores, pieces of 256
/// take 0.9x the time of the whole (`docs/results/speed.md`).
#[cfg(feature = "flex")]
const PIECE: usize = 256;

/// Returns the tokens per piece of rows with `width` channels; wide rows have smaller pieces. With
/// Llama 3.2 1B in 4 bits, pieces of 256 take 40 MB more than pieces of 96, a twentieth of the
/// file, and make prompts at most 10% faster. Running all threads on one piece of 128 at a time
/// would take less memory but 10% more time.
#[cfg(feature = "flex")]
fn piece(width: usize) -> usize {
    (PIECE * 768 / width.max(1)).clamp(PIECE / 4, PIECE) / 32 * 32
}

/// Computes `f(x)` for an `f` that treats every token independently of the others.
///
/// Burn's Flex backend runs element-wise operations on one thread. There, a long sequence is
/// divided into pieces that run on all threads. On other backends, and with gradients, `f` runs
/// once.
///
/// # Shapes
/// - x: `[batch, seq, d_input]`
/// - output: `[batch, seq, d_output]`
pub fn by_rows(x: Tensor<3>, f: impl Fn(Tensor<3>) -> Tensor<3> + Sync) -> Tensor<3> {
    #[cfg(feature = "flex")]
    {
        use kv_cubecl::{Flex, Target};
        use rayon::prelude::*;

        let [_, seq, width] = x.dims();
        if seq >= 2 * piece(width) && Flex::hosts(&x.device()) {
            // Each thread gets the same number of equal pieces, so that none waits for the last.
            let threads = kv_device::threads::all_threads();
            let n = seq.div_ceil(seq.div_ceil(piece(width)).next_multiple_of(threads));
            let starts: Vec<usize> = (0..seq).step_by(n).collect();
            // Operations of `f` on other threads belong to this span.
            let span = tracing::trace_span!(target: crate::spans::OPERATION, "rows");
            let _waits = span.enter();
            let piece = |start| f(x.clone().narrow(1, start, n.min(seq - start)));
            let pieces: Vec<Tensor<3>> =
                starts.into_par_iter().map(|start| span.in_scope(|| piece(start))).collect();
            return Tensor::cat(pieces, 1);
        }
    }
    f(x)
}
