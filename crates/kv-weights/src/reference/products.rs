/// Computes `x W^T`, `[rows of x, rows of weights]`, in f64, for rows of `columns` numbers.
pub fn project(x: &[f32], weights: &[f32], columns: usize) -> Vec<f64> {
    let product = |x: &[f32], row: &[f32]| {
        x.iter().zip(row).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()
    };
    x.chunks_exact(columns)
        .flat_map(|x| weights.chunks_exact(columns).map(move |row| product(x, row)))
        .collect()
}

/// Rounds activations in blocks of 32, and returns them with the step of each block.
///
/// `to` is 127 for [`Activations::Int8`](crate::Activations::Int8) and 32639 for
/// [`Activations::Int16`](crate::Activations::Int16). The returned numbers are multiples of the
/// step, up to the rounding of f32.
pub fn round_activations(x: &[f32], to: f32) -> (Vec<f32>, Vec<f32>) {
    let steps: Vec<f32> = x
        .chunks(32)
        .map(|x| x.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) / to)
        .collect();
    let rounded = x.iter().enumerate().map(|(i, x)| match steps[i / 32] {
        0.0 => 0.0,
        step => (x * (1.0 / step)).round_ties_even() * step,
    });
    (rounded.collect(), steps)
}
