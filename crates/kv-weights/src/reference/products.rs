/// `x W^T` in f64 for `x` in rows of `columns` and restored weights in rows of it, `[rows of x, rows of weights]`.
pub fn project(x: &[f32], weights: &[f32], columns: usize) -> Vec<f64> {
    let product = |x: &[f32], row: &[f32]| {
        x.iter().zip(row).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum::<f64>()
    };
    x.chunks_exact(columns)
        .flat_map(|x| weights.chunks_exact(columns).map(move |row| product(x, row)))
        .collect()
}

/// `x` as [`Activations::Int8`](crate::Activations::Int8) takes it if `to` is 127, or as
/// [`Activations::Int16`](crate::Activations::Int16) if it is 32639, and the step of each 32 numbers: the numbers are
/// multiples of it, to the rounding of f32.
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
