use std::{fs, path::PathBuf};

use super::*;
use crate::{WeightFormat, reference};

/// Returns the products of every way of processors without byte instructions, by name.
fn ways(x: &[f32], matrix: &Stacked<'_>, activations: Activations) -> Vec<(String, Vec<f32>)> {
    let rounded = activations.largest().map(|to| Integers::round(x, to).floats());
    let dense = dense::project(rounded.as_deref().unwrap_or(x), matrix);
    let mut ways = vec![("dense".to_string(), dense)];
    with_blocks!(matrix.layout().format(), F => {
        ways.push(("portable".into(), portable::project::<F>(x, matrix, activations)));
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if Native::available() {
            ways.push(("native".into(), few::project::<Native, F>(x, matrix, activations)));
        }
    }, wide W => for &way in wide::Way::ALL.iter().filter(|way| way.is_available()) {
        ways.push((format!("{way:?}"), wide::project_by::<W>(way, x, matrix)));
    });
    ways
}

/// Asserts that products are within `tolerance` of the sums of the magnitudes `|x w|`.
fn close(name: &str, products: &[f32], expected: &[f64], sums: &[f64], tolerance: f64) {
    assert_eq!(products.len(), expected.len(), "{name}");
    for (i, product) in products.iter().enumerate() {
        let error = (f64::from(*product) - expected[i]).abs();
        assert!(error <= tolerance * sums[i], "{name}: {i}: {error:.1e}");
    }
}

/// Returns the sums of the magnitudes `|x w|`.
fn sums_of(x: &[f32], weights: &[f32], columns: usize) -> Vec<f64> {
    let [x, weights] = [x, weights].map(|x| x.iter().map(|x| x.abs()).collect::<Vec<_>>());
    reference::project(&x, &weights, columns)
}

/// Multiplies shuffled fixture blocks.
#[test]
fn products_match_the_definition() {
    for &format in WeightFormat::ALL.iter().filter(|format| format.ggml_type().is_some()) {
        let mut all = vec![Activations::Exact];
        if !format.is_float() {
            all.extend([Activations::Int16, Activations::Int8]);
        }
        let name = format!("{format}.blocks");
        let path: PathBuf =
            [env!("CARGO_MANIFEST_DIR"), "tests/packed/fixtures", &name].iter().collect();
        let fixture = fs::read(path).unwrap();
        let blocks: Vec<_> = fixture.chunks(format.block_bytes()).collect();
        let (rows, columns) = (69, blocks.len() * format.block_numbers());
        let matrix: Vec<u8> = (0..rows)
            .flat_map(|row| (0..blocks.len()).map(move |i| i * 5 + row))
            .flat_map(|i| blocks[i % blocks.len()].iter().copied())
            .collect();
        let x: Vec<f32> =
            (0..11 * columns).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
        let restored = reference::restore(format, &matrix);
        let sums = sums_of(&x, &restored, columns);
        // Two pieces, which are divided among threads.
        let layout = |rows| PackedLayout::new(format, [rows, columns]).unwrap();
        let pieces = matrix.split_at(23 * layout(1).row_bytes());
        let pieces = [(pieces.0, layout(23)), (pieces.1, layout(rows - 23))];
        let matrix = Stacked::new(pieces);
        // One row of activations takes different loops than several, which are multiplied in parts:
        // 7 as 4 and 3, 11 as 6 and 5.
        for (activations, n) in all.into_iter().flat_map(|all| [1, 2, 7, 11].map(|n| (all, n))) {
            let x = &x[..n * columns];
            let rounded = activations.largest().map(|to| reference::round_activations(x, to).0);
            let expected = reference::project(rounded.as_deref().unwrap_or(x), &restored, columns);
            for (way, products) in ways(x, &matrix, activations) {
                let name = format!("{format} {activations:?} {way} by {n}");
                close(&name, &products, &expected, &sums, 2e-6);
            }
        }
    }
}

/// Returns blocks with random codes, scales of 1 / 64 and zero codes in the middle.
fn blocks_of(format: WeightFormat, blocks: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut bytes: Vec<u8> = (0..blocks * format.block_bytes())
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        })
        .collect();
    let (scale, min) = (0x2400u16, 0xad00u16);
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        let words: &[(usize, u16)] = match format {
            WeightFormat::Q4_1 | WeightFormat::Q5_1 => &[(0, scale), (2, min)],
            WeightFormat::Q4K | WeightFormat::Q5K => &[(0, scale), (2, scale)],
            WeightFormat::Q6K => &[(208, scale)],
            WeightFormat::Int4(_) => &[(0, scale), (2, 8)],
            WeightFormat::Int8(_) => &[(0, scale), (2, 128)],
            WeightFormat::Mxfp4 => &[(0, 0x7979)],
            _ => &[(0, scale)],
        };
        for &(at, word) in words {
            block[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        if format.is_float() {
            for number in block.as_chunks_mut::<2>().0 {
                // A quarter of the numbers is 0. The others have exponents of about 0.
                number[1] = if number[0] < 64 { 0 } else { number[1] & 0x83 | 0x3c };
                number[0] = if number[0] < 64 { 0 } else { number[0] };
            }
        }
    }
    bytes
}

/// Activations of 1e4 at weights of 0 must not change the sum of the others, of 1e-2, in any way of
/// multiplying.
#[test]
fn exact_products_survive_outliers() {
    for &format in WeightFormat::ALL {
        let (rows, columns) = (69, 1024);
        let matrix = blocks_of(format, rows * columns / format.block_numbers());
        let restored = reference::restore(format, &matrix);
        let layout = PackedLayout::new(format, [rows, columns]).unwrap();
        let stacked = Stacked::one(&matrix, layout);
        for n in [1, 5] {
            // Outliers are at the zeros of one row of weights for each row of activations.
            let x: Vec<f32> = (0..n * columns)
                .map(|i| match restored[i] {
                    0.0 => 1e4 * (1.0 - 2.0 * (i % 2) as f32),
                    _ => ((i * 7919) % 1009) as f32 / 5e4,
                })
                .collect();
            assert!(x.iter().any(|x| x.abs() > 1e3), "{format} has zeros");
            let exact = Activations::Exact;
            let mut ways = ways(&x, &stacked, exact);
            ways.push(("best".into(), project(&x, &stacked, exact, None)));
            let expected = reference::project(&x, &restored, columns);
            let sums = sums_of(&x, &restored, columns);
            // Each of `columns` additions may round to the last digit of the sum.
            let tolerance = columns as f64 * 2f64.powi(-24);
            for (way, products) in ways {
                close(&format!("{format} {way} by {n}"), &products, &expected, &sums, tolerance);
            }
        }
    }
}
