//! Rope on the last channels of rows, in neighboring pairs.

use burn::tensor::Tensor;

/// Applies rope to the last channels of rows, where channels `2 i` and `2 i + 1` are a pair. This
/// is DeepSeek's order of channels; [`RopeTable`](crate::RopeTable) describes another. A negated
/// `sin` undoes it.
///
/// # Shapes
/// - `x`: `[batch, heads, rows, width]`
/// - `cos`, `sin`: `[batch or 1, 1, rows, pairs]`, with `2 pairs <= width`
/// - output: the shape of `x`
pub fn rope_pairs(x: Tensor<4>, cos: Tensor<4>, sin: Tensor<4>) -> Tensor<4> {
    let ([batch, heads, rows, width], [n, _, _, pairs]) = (x.dims(), cos.dims());
    let rest = width - 2 * pairs;
    let turned = x.clone().narrow(3, rest, 2 * pairs).reshape([batch, heads, rows * pairs, 2]);
    let (a, b) = (turned.clone().narrow(3, 0, 1), turned.narrow(3, 1, 1));
    let [cos, sin] = [cos, sin].map(|table| table.reshape([n, 1, rows * pairs, 1]));
    let first = a.clone() * cos.clone() - b.clone() * sin.clone();
    let second = b * cos + a * sin;
    let turned = Tensor::cat(vec![first, second], 3).reshape([batch, heads, rows, 2 * pairs]);
    match rest {
        0 => turned,
        _ => Tensor::cat(vec![x.narrow(3, 0, rest), turned], 3),
    }
}
