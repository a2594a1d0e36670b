//! Restored numbers and products compared with the Python package gguf and with candle.

use std::{fs, path::PathBuf};

use burn::tensor::{Device, Int, Tensor};
use candle_core::{
    Module as _,
    quantized::{GgmlDType, QMatMul, QStorage, QTensor},
};
use kv_weights::{Activations, PackedLayout, WeightFormat, lookup, project, reference};

use crate::common::{Blocks, Rng, device_blocks, host, magnitudes, matrix, stamp};

stamp!(
    fixtures_are_restored_bit_for_bit,
    every_16_bit_float_widens_exactly,
    numbers_and_products_match_candle
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

fn fixtures_are_restored_bit_for_bit(device: &Device) {
    let formats = WeightFormat::ALL.iter().filter(|format| format.ggml_type().is_some());
    for &format in formats {
        let bytes = fixture(&format!("{format}.blocks"));
        let expected: Vec<f32> = fixture(&format!("{format}.f32"))
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        assert_same(format.name(), &reference::restore(format, &bytes), &expected);
        assert_same(format.name(), &format.restore(&bytes), &expected);
        let rows = bytes.len() / format.block_bytes();
        let blocks = Blocks { format, shape: [rows, format.block_numbers()], bytes };
        let restored = device_blocks(&blocks, device).restore().unwrap().into_data();
        assert_same(format.name(), &restored.try_into_vec::<f32>().unwrap(), &expected);
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

fn numbers_and_products_match_candle(device: &Device) {
    let cpu = candle_core::Device::Cpu;
    for (i, (format, dtype)) in [
        (WeightFormat::Q4_0, GgmlDType::Q4_0),
        (WeightFormat::Q4_1, GgmlDType::Q4_1),
        (WeightFormat::Q5_0, GgmlDType::Q5_0),
        (WeightFormat::Q5_1, GgmlDType::Q5_1),
        (WeightFormat::Q8_0, GgmlDType::Q8_0),
        (WeightFormat::Q4K, GgmlDType::Q4K),
        (WeightFormat::Q5K, GgmlDType::Q5K),
        (WeightFormat::Q6K, GgmlDType::Q6K),
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = Rng::new(400 + i as u64);
        let ([rows, columns], n) = ([40, 768], 3);
        let blocks = Blocks::random(&mut rng, format, [rows, columns]);
        let x = rng.normals(n * columns);
        let storage = QStorage::from_data(blocks.bytes.clone().into(), &cpu, dtype).unwrap();
        let theirs = QTensor::new(storage, (rows, columns)).unwrap();
        let numbers = theirs.dequantize(&cpu).unwrap().flatten_all().unwrap();
        assert_same(format.name(), &blocks.restored(), &numbers.to_vec1::<f32>().unwrap());

        let ours = device_blocks(&blocks, device);
        let ours = project(matrix(&x, columns, device), &ours, Activations::Int8).unwrap();
        let x_theirs = candle_core::Tensor::from_vec(x.clone(), (n, columns), &cpu).unwrap();
        let theirs = QMatMul::from_qtensor(theirs).unwrap().forward(&x_theirs).unwrap();
        let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let sums = reference::project(&magnitudes(&x), &magnitudes(&blocks.restored()), columns);
        let ours = host(ours);
        for ((ours, theirs), sum) in ours.iter().zip(&theirs).zip(sums) {
            // Both round activations, but to different steps.
            let error = f64::from((ours - theirs).abs());
            assert!(error <= 0.02 * sum, "{format}: {ours}, {theirs} of candle");
        }
    }
}
