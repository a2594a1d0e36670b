//! Parts of whole sequences that are computed together.

use core::ops::Range;

use burn::tensor::Tensor;

/// Scores that are computed together: 64 MiB.
pub(super) const SCORES: usize = 1 << 24;

/// Concatenates parts. A single part is not copied.
pub(super) fn joined<const D: usize>(mut parts: Vec<Tensor<D>>, axis: usize) -> Tensor<D> {
    if parts.len() == 1 { parts.remove(0) } else { Tensor::cat(parts, axis) }
}

/// Returns `range` of an axis. The whole axis is not copied, and neither is its gradient.
pub(super) fn part<const D: usize>(x: &Tensor<D>, axis: usize, range: Range<usize>) -> Tensor<D> {
    match range.len() == x.dims()[axis] {
        true => x.clone(),
        false => x.clone().narrow(axis, range.start, range.len()),
    }
}

/// Splits `tokens` into parts of at most `most` tokens, but at least one block of `block`.
pub(super) fn parts(
    tokens: usize,
    most: usize,
    block: usize,
) -> impl Iterator<Item = Range<usize>> {
    let step = (most / block).max(1) * block;
    (0..tokens).step_by(step).map(move |first| first..tokens.min(first + step))
}
