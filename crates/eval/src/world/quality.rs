//! Similarity of frames: PSNR and SSIM.

use kv_world::Frame;

/// Maximum PSNR in decibels; smaller differences are below the rounding to bytes.
pub const MOST_DB: f64 = 60.0;

/// Returns the mean squared difference of all bytes of two frames.
pub fn squared_error(a: &Frame, b: &Frame) -> f64 {
    let squares = a.rgb().iter().zip(b.rgb()).map(|(&a, &b)| {
        let difference = f64::from(a) - f64::from(b);
        difference * difference
    });
    squares.sum::<f64>() / a.rgb().len() as f64
}

/// Returns the peak signal-to-noise ratio of a mean squared difference of bytes in decibels, at
/// most [`MOST_DB`].
pub fn decibels(squared_error: f64) -> f64 {
    (10.0 * (255.0 * 255.0 / squared_error).log10()).min(MOST_DB)
}

/// Returns the peak signal-to-noise ratio of a frame in [`decibels`].
pub fn psnr(a: &Frame, b: &Frame) -> f64 {
    decibels(squared_error(a, b))
}

/// Pixels of the window of [`ssim`] along a side.
const WINDOW: usize = 11;

/// Returns the structural similarity of the brightness of two frames, at most 1 (Wang et al., 2004,
/// <https://doi.org/10.1109/TIP.2003.819861>). Gaussian windows of 11 by 11 pixels have a deviation
/// of 1.5 and lie within the frame.
pub fn ssim(a: &Frame, b: &Frame) -> f64 {
    const C1: f64 = (0.01 * 255.0) * (0.01 * 255.0);
    const C2: f64 = (0.03 * 255.0) * (0.03 * 255.0);
    let [a, b] = [a, b].map(brightness);
    let products = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).collect::<Vec<_>>();
    let [mean_a, mean_b, aa, bb, ab] =
        [a.clone(), b.clone(), products(&a, &a), products(&b, &b), products(&a, &b)]
            .map(|image| blurred(&image));
    let n = mean_a.len();
    let of = |i: usize| {
        let (x, y) = (mean_a[i], mean_b[i]);
        let (var_x, var_y, covariance) = (aa[i] - x * x, bb[i] - y * y, ab[i] - x * y);
        (2.0 * x * y + C1) * (2.0 * covariance + C2) / ((x * x + y * y + C1) * (var_x + var_y + C2))
    };
    (0..n).map(of).sum::<f64>() / n as f64
}

/// Returns the brightness by Rec. 601, row by row.
fn brightness(frame: &Frame) -> Vec<f64> {
    let pixels = frame.rgb().chunks(3).map(|rgb| [0, 1, 2].map(|i| f64::from(rgb[i])));
    pixels.map(|[r, g, b]| 0.299 * r + 0.587 * g + 0.114 * b).collect()
}

/// Returns the means of all windows within an image, row by row.
fn blurred(image: &[f64]) -> Vec<f64> {
    let (size, inner) = (Frame::SIZE, Frame::SIZE - WINDOW + 1);
    let weights: [f64; WINDOW] = core::array::from_fn(|i| {
        let x = i as f64 - (WINDOW / 2) as f64;
        (-x * x / (2.0 * 1.5 * 1.5)).exp()
    });
    let sum = weights.iter().sum::<f64>();
    let weighted = |of: &dyn Fn(usize) -> f64| -> f64 {
        weights.iter().enumerate().map(|(i, weight)| weight / sum * of(i)).sum()
    };
    let mut across = vec![0.0; size * inner];
    for (at, mean) in across.iter_mut().enumerate() {
        let start = at / inner * size + at % inner;
        *mean = weighted(&|i| image[start + i]);
    }
    let down = |at: usize| weighted(&|i| across[at + i * inner]);
    (0..inner * inner).map(down).collect()
}
