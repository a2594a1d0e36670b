//! Restored numbers and products compared with the Python package gguf.

use std::{fs, path::PathBuf};

use burn::tensor::{Device, Int, Tensor};
use kv_weights::{Activations, PackedLayout, WeightFormat, lookup, project, reference};

use crate::common::{Blocks, Rng, device_blocks, host, magnitudes, matrix, stamp};

stamp!(
    fixtures_are_restored_bit_for_bit,
    every_16_bit_float_widens_exactly,
    products_match_the_numbers_of_the_gguf_package
);

fn fixture(name: &str) -> Vec<u8> {
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "tests/packed/fixtures", name].iter().collect();
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[track_caller]
fn assert_same(name: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        // For some codes of MXFP4, the gguf package returns a negative zero, but GGML does not.
        let same = got.to_bits() == expected.to_bits() || (*got == 0.0 && *expected == 0.0);
        assert!(same, "{name}: {i}: {got}, not {expected}");
    }
}

/// Returns the blocks `NAME.blocks` and the numbers that the gguf package restores from them.
fn blocks_and_numbers(format: WeightFormat, name: &str) -> (Vec<u8>, Vec<f32>) {
    let numbers = fixture(&format!("{name}.f32"));
    let numbers = numbers.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    let (blocks, numbers) = (fixture(&format!("{name}.blocks")), numbers.collect::<Vec<_>>());
    assert_eq!(blocks.len() / format.block_bytes() * format.block_numbers(), numbers.len());
    (blocks, numbers)
}

/// Returns the formats of GGUF files.
fn ggml_formats() -> impl Iterator<Item = WeightFormat> {
    WeightFormat::ALL.iter().copied().filter(|format| format.ggml_type().is_some())
}

fn fixtures_are_restored_bit_for_bit(device: &Device) {
    let files = ggml_formats().flat_map(|format| {
        // All 16-bit floats are compared below.
        let matrix = (!format.is_float()).then(|| format!("{format}-matrix"));
        [format.to_string()].into_iter().chain(matrix).map(move |name| (format, name))
    });
    for (format, name) in files {
        let (bytes, expected) = blocks_and_numbers(format, &name);
        assert_same(&name, &reference::restore(format, &bytes), &expected);
        assert_same(&name, &format.restore(&bytes), &expected);
        let rows = bytes.len() / format.block_bytes();
        let blocks = Blocks { format, shape: [rows, format.block_numbers()], bytes };
        let restored = device_blocks(&blocks, device).restore().unwrap().into_data();
        assert_same(&name, &restored.try_into_vec::<f32>().unwrap(), &expected);
    }
}

/// Compares all 65536 numbers, including subnormal, infinite and NaN, with the `half` crate.
fn every_16_bit_float_widens_exactly(device: &Device) {
    for format in [WeightFormat::F16, WeightFormat::Bf16] {
        let number = |bits| match format {
            WeightFormat::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let expected: Vec<f32> = (0..=u16::MAX).map(number).collect();
        let same = |name: &str, got: &[f32]| {
            assert_eq!(got.len(), expected.len(), "{format}");
            for (bits, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let same =
                    got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan());
                assert!(same, "{format} {name}: {bits:#06x}: {got:e}, not {expected:e}");
            }
        };
        same("by definition", &reference::restore(format, &bytes));
        let packed = device_blocks(&Blocks { format, shape: [512, 128], bytes }, device);
        same("restored", &host(packed.restore().unwrap()));
        let ids = Tensor::<1, Int>::arange(0..512, device).unsqueeze();
        let found = host(lookup(ids, &packed).unwrap());
        same("looked up", &found);
    }
}

/// Finds the block with an infinite or NaN number.
#[test]
fn infinite_and_nan_floats_are_found() {
    for (format, infinite, largest) in
        [(WeightFormat::F16, 0x7c00u16, 0xfbffu16), (WeightFormat::Bf16, 0xff80, 0x7f7f)]
    {
        let layout = PackedLayout::new(format, [3, 64]).unwrap();
        let mut bytes = largest.to_le_bytes().repeat(3 * 64);
        assert_eq!(layout.not_finite(&bytes), None);
        for bits in [infinite, infinite + 1] {
            bytes[2 * (64 + 37)..][..2].copy_from_slice(&bits.to_le_bytes());
            assert_eq!(layout.not_finite(&bytes), Some([1, 32]), "{format} {bits:#06x}");
        }
    }
}

/// Products with the blocks of a matrix are those with the numbers that the gguf package restores.
fn products_match_the_numbers_of_the_gguf_package(device: &Device) {
    for (i, format) in ggml_formats().filter(|format| !format.is_float()).enumerate() {
        let ([rows, columns], n) = ([40, 768], 3);
        let (bytes, numbers) = blocks_and_numbers(format, &format!("{format}-matrix"));
        let copies = rows * columns / numbers.len();
        let (bytes, numbers) = (bytes.repeat(copies), numbers.repeat(copies));
        let blocks = device_blocks(&Blocks { format, shape: [rows, columns], bytes }, device);
        let x = Rng::new(400 + i as u64).normals(n * columns);
        let expected = reference::project(&x, &numbers, columns);
        let sums = reference::project(&magnitudes(&x), &magnitudes(&numbers), columns);
        // Rounding is off by at most half a step. The largest of 32 numbers is at most five times
        // their mean magnitude.
        for (activations, tolerance) in
            [(Activations::Exact, 1e-6), (Activations::Int8, 5.0 * 0.5 / 127.0)]
        {
            let got = host(project(matrix(&x, columns, device), &blocks, activations).unwrap());
            assert_eq!(got.len(), expected.len());
            for ((got, expected), sum) in got.iter().zip(&expected).zip(&sums) {
                let error = (f64::from(*got) - expected).abs();
                assert!(
                    error <= tolerance * sum,
                    "{format}, {activations:?}: {got}, not {expected}"
                );
            }
        }
    }
}
