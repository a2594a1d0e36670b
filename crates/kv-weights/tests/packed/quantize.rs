//! Quantized floats and the numbers restored from them.

use kv_weights::{GroupSize, Quantize, Range, WeightFormat, quantize, reference};

use crate::common::Rng;

const GROUPS: [GroupSize; 3] = [GroupSize::G32, GroupSize::G64, GroupSize::G128];

fn restored(x: &[f32], columns: usize, format: WeightFormat, options: Quantize) -> Vec<f32> {
    let blocks = quantize(x, [x.len() / columns, columns], format, options).unwrap();
    assert_eq!(blocks.len(), x.len() / format.block_numbers() * format.block_bytes());
    reference::restore(format, &blocks)
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// Returns weights as in a model: groups of different sizes and means, one of zeros, one of a
/// single sign.
fn weights(seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..40usize)
        .flat_map(|group| {
            let (scale, mean) = (2f32.powi(group as i32 % 9 - 6), (group % 3) as f32 - 1.0);
            let scale = if group == 7 { 0.0 } else { scale };
            rng.normals(128).into_iter().map(move |x| scale * (x + mean))
        })
        .collect()
}

#[test]
fn errors_are_at_most_half_a_step() {
    let x = weights(1);
    for group in GROUPS {
        for (format, steps) in
            [(WeightFormat::Int4(group), 15.0), (WeightFormat::Int8(group), 255.0)]
        {
            for symmetric in [false, true] {
                let y = restored(&x, 128, format, Quantize::default().with_symmetric(symmetric));
                for (x, y) in x.chunks(group.numbers()).zip(y.chunks(group.numbers())) {
                    let (least, largest) =
                        x.iter().fold((0.0f32, 0.0f32), |(l, h), &x| (l.min(x), h.max(x)));
                    let step = match symmetric {
                        false => (largest - least) / steps,
                        true => largest.max(-least) / ((steps - 1.0) / 2.0),
                    };
                    // The scale is rounded to 11 bits and the zero code to an integer.
                    let bound =
                        step * if symmetric { 0.51 } else { 1.01 } + largest.max(-least) / 1024.0;
                    for (x, y) in x.iter().zip(y) {
                        assert!((x - y).abs() <= bound, "{format} {symmetric}: {x}, {y}, {step}");
                    }
                }
            }
        }
    }
}

#[test]
fn least_error_lowers_the_squared_error() {
    let x = weights(2);
    let formats = GROUPS.map(WeightFormat::Int4).into_iter().chain([WeightFormat::Mxfp4]);
    for format in formats {
        for symmetric in [false, true] {
            let whole = Quantize::default().with_symmetric(symmetric);
            let least = whole.with_range(Range::LeastError);
            let [whole, least] =
                [whole, least].map(|o| squared_error(&x, &restored(&x, 128, format, o)));
            assert!(least < 0.99 * whole, "{format} {symmetric}: {least}, {whole}");
        }
    }
}

/// Compares with the blocks that `gguf.quants.quantize` of the Python package gguf 0.19 makes of
/// the same numbers.
#[test]
fn mxfp4_matches_the_gguf_package() {
    let x: Vec<f32> =
        (0..64).map(|i| ((i * 37 % 64) as f32 - 31.0) / if i < 32 { 7.0 } else { 640.0 }).collect();
    let blocks = quantize(&x, [2, 32], WeightFormat::Mxfp4, Quantize::default()).unwrap();
    let expected: [u8; 34] = [
        127, 206, 82, 157, 100, 27, 214, 64, 190, 99, 157, 229, 42, 214, 81, 190, 99, 120, 80, 207,
        116, 13, 246, 74, 215, 98, 190, 117, 29, 230, 89, 223, 99, 174,
    ];
    assert_eq!(blocks, expected);
}

#[test]
fn invalid_weights_are_rejected() {
    let quantize = |x: &[f32], shape, format| {
        quantize(x, shape, format, Quantize::default()).unwrap_err().to_string()
    };
    let int4 = WeightFormat::Int4(GroupSize::G64);
    assert_eq!(
        quantize(&[0.0; 96], [1, 96], int4),
        "columns 96: must be a positive multiple of 64, the numbers of a int4-g64 block"
    );
    assert_eq!(quantize(&[0.0; 64], [2, 64], int4), "weights 64: must be 2 rows of 64 columns");
    let mut x = [0.5; 128];
    x[67] = f32::NAN;
    assert_eq!(
        quantize(&x, [2, 64], int4),
        "weight NaN: must be finite, with a scale within f16 (row 1, column 3)"
    );
    x[67] = -3e38;
    assert_eq!(
        quantize(&x, [2, 64], int4),
        "weight -300000000000000000000000000000000000000: must be finite, with a scale within f16 \
         (row 1, column 3)"
    );
    assert_eq!(
        quantize(&x, [2, 64], WeightFormat::Q4_0),
        "quantizing to q4_0 is not supported: only int4, int8 and mxfp4 can be created; \
         other formats are read from files"
    );
}
