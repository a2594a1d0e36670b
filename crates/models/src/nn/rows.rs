//! Row-wise parts of a model on the CPU, several rows at a time on several threads.

use burn::tensor::Tensor;

/// Tokens per piece: large enough for the matrix products, small enough that a piece's widest
/// activation stays in the processor's cache. With SmolLM2 at 2048 tokens on 2 cores, pieces of 256
/// take 0.9 of the time of the whole (`docs/results/speed.md`).
#[cfg(feature = "flex")]
const PIECE: usize = 256;

/// Tokens per piece of rows of so many channels: fewer of wide ones. With Llama 3.2 1B in 4 bits,
/// pieces of 256 take 40 MB more than pieces of 96, a twentieth of the file, for prompts that are
/// at most a tenth faster. All threads at one piece of 128 after the other would take less memory,
/// but a tenth more time.
#[cfg(feature = "flex")]
fn piece(width: usize) -> usize {
    (PIECE * 768 / width.max(1)).clamp(PIECE / 4, PIECE) / 32 * 32
}

/// Computes `f(x)` for an `f` that treats every token independently of the others.
///
/// Burn's Flex backend runs element-wise operations on one thread; there, a long sequence is cut
/// into pieces that run on all threads. Elsewhere, and where gradients are recorded, `f` runs once.
///
/// # Shapes
///
/// - x: `[batch, seq, d_input]`
/// - output: `[batch, seq, d_output]`
pub fn by_rows(x: Tensor<3>, f: impl Fn(Tensor<3>) -> Tensor<3> + Sync) -> Tensor<3> {
    #[cfg(feature = "flex")]
    {
        use kv_cubecl::{Flex, Target};
        use rayon::prelude::*;

        let [_, seq, width] = x.dims();
        if seq >= 2 * piece(width) && Flex::hosts(&x.device()) {
            // Of equal size and as many for each thread, so that none waits for the last.
            let threads = rayon::current_num_threads();
            let n = seq.div_ceil(seq.div_ceil(piece(width)).next_multiple_of(threads));
            let starts: Vec<usize> = (0..seq).step_by(n).collect();
            // What `f` does on other threads is a part of this.
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
