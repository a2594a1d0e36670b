#![allow(clippy::unwrap_used, reason = "a failing test may panic")]

use std::{fs, io::Write, path::PathBuf, sync::LazyLock};

use burn::{
    backend::DispatchDevice,
    tensor::{Device, TensorData},
};
use burn_cubecl::CubeDevice;

use super::*;
use crate::{Quantize, WeightFormat, quantize, reference};

/// Returns the device, or `None` if the environment allows it to be missing.
fn device() -> Option<CubeDevice> {
    // A runtime can be initialized only once per process.
    static DEVICE: LazyLock<Result<Device, String>> =
        LazyLock::new(|| Device::wgpu_options().init().map_err(|error| error.to_string()));
    match &*DEVICE {
        Err(error) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            // Not through `eprintln!`, which the test harness captures.
            let _ = writeln!(std::io::stderr(), "SKIPPED {error}");
            None
        }
        device => match device.as_ref().unwrap().as_dispatch() {
            DispatchDevice::Cube(device) => Some(device.clone()),
            #[allow(unreachable_patterns, reason = "CubeCL may be the only backend")]
            _ => panic!("not a CubeCL device"),
        },
    }
}

/// Returns blocks of a format: the test fixtures, in another order in each row, or quantized
/// numbers.
fn blocks(format: WeightFormat, [rows, columns]: [usize; 2]) -> Vec<u8> {
    if format.ggml_type().is_none() {
        let numbers: Vec<f32> = (0..rows * columns).map(|i| (i as f32 * 0.71).sin()).collect();
        return quantize(&numbers, [rows, columns], format, Quantize::default()).unwrap();
    }
    let name = format!("{format}.blocks");
    let path: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "tests/packed/fixtures", &name].iter().collect();
    let fixture = fs::read(path).unwrap();
    let found: Vec<_> = fixture.chunks(format.block_bytes()).collect();
    let n = columns / format.block_numbers();
    let numbers = (0..rows).flat_map(|row| (0..n).map(move |i| i * 5 + row * 3));
    numbers.flat_map(|i| found[i % found.len()].iter().copied()).collect()
}

/// Uploads blocks, filled up to whole words.
fn upload(mut blocks: Vec<u8>, layout: &PackedLayout, device: &CubeDevice) -> CubeTensor {
    blocks.resize(4 * layout.words(), 0xff);
    let words: Vec<u32> = bytemuck::pod_collect_to_vec(&blocks);
    CubeBackend::int_from_data(TensorData::new(words, [layout.words()]), device)
}

/// Returns `n` rows of activations.
fn activations(n: usize, columns: usize) -> Vec<f32> {
    (0..n * columns).map(|i| (i as f32 * 0.37).sin() + 0.1).collect()
}

/// Returns the product of few rows with nothing fused.
fn plain(
    hardware: Hardware,
    x: &CubeTensor,
    words: &CubeTensor,
    layout: PackedLayout,
) -> CubeTensor {
    few(hardware, x.clone(), vec![words.clone()], [None, None, None], &plan_of(layout))
}

/// Asserts that products are within 1e-6 of the sums of the magnitudes `|x w|`.
fn close(name: &str, y: CubeTensor, x: &[f32], weights: &[f32], columns: usize) {
    let expected = reference::project(x, weights, columns);
    let [x, weights] = [x, weights].map(|x| x.iter().map(|x| x.abs()).collect::<Vec<_>>());
    let sizes = reference::project(&x, &weights, columns);
    let y = burn::tensor::read_sync(CubeBackend::float_into_data(y)).unwrap();
    let y = y.try_into_vec::<f32>().unwrap();
    assert_eq!(y.len(), expected.len(), "{name}");
    for (i, y) in y.into_iter().enumerate() {
        let error = (f64::from(y) - expected[i]).abs();
        assert!(error <= 1e-6 * sizes[i], "{name}: {i}: {y}, not {}", expected[i]);
    }
}

/// Covers complete and incomplete tiles of activations and weights, in every format.
#[test]
fn tiles_match_the_reference_in_all_formats() {
    let Some(device) = device() else { return };
    for &format in WeightFormat::ALL {
        for (rows, spans, n) in [(1, 1, 1), (64, 2, 64), (75, 3, 33), (131, 1, 70), (200, 2, 97)] {
            let columns = spans * format.block_numbers().max(32);
            let layout = PackedLayout::new(format, [rows, columns]).unwrap();
            let blocks = blocks(format, [rows, columns]);
            let weights = reference::restore(format, &blocks);
            let words = upload(blocks, &layout, &device);
            let x = activations(n, columns);
            let on_device = TensorData::new(x.clone(), [n, columns]);
            let y = tiled(CubeBackend::float_from_data(on_device, &device), &words, layout);
            close(&format!("{format} [{rows}, {columns}] by {n}"), y, &x, &weights, columns);
        }
    }
}

/// Prints the median time of seven runs, in milliseconds, of each way to multiply.
#[test]
#[ignore = "measures"]
fn ways_are_timed() {
    let Some(device) = device() else { return };
    let mut stderr = std::io::stderr().lock();
    for (format, shape @ [rows, columns]) in [
        (WeightFormat::Q4_0, [1536, 576]),
        (WeightFormat::Q4K, [2048, 2048]),
        (WeightFormat::F16, [1536, 576]),
    ] {
        let layout = PackedLayout::new(format, shape).unwrap();
        let words = upload(blocks(format, shape), &layout, &device);
        for n in [8, 16, 33, 64, 128, 256, 512] {
            let x = TensorData::new(activations(n, columns), [n, columns]);
            let x = CubeBackend::float_from_data(x, &device);
            let own = Hardware::of(x.client.properties());
            let ways: [&dyn Fn() -> CubeTensor; 3] =
                [&|| plain(own, &x, &words, layout), &|| tiled(x.clone(), &words, layout), &|| {
                    many(x.clone(), &words, layout)
                }];
            let mut times = [const { vec![] }; 3];
            for round in 0..9 {
                for (way, times) in ways.iter().zip(&mut times) {
                    burn_cubecl::cubecl::future::block_on(x.client.sync()).unwrap();
                    let start = std::time::Instant::now();
                    let y = way();
                    burn_cubecl::cubecl::future::block_on(y.client.sync()).unwrap();
                    if round > 1 {
                        times.push(start.elapsed().as_secs_f64() * 1e3);
                    }
                }
            }
            let [few, tiles, restored] = times.map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            });
            let name = format!("{format} [{rows}, {columns}]");
            writeln!(
                stderr,
                "{name:20} by {n:3}: few {few:8.2} tiles {tiles:8.2} restored {restored:8.2}"
            )
            .unwrap();
        }
    }
}

/// Compares all ways with f64: sums over a plane, over a cube without planes and by single units,
/// and products with restored weights.
#[test]
fn every_way_matches_the_reference() {
    let Some(device) = device() else { return };
    let (rows, columns) = (75, 768);
    for format in [WeightFormat::Q4_0, WeightFormat::Q5K, WeightFormat::Q6K] {
        let layout = PackedLayout::new(format, [rows, columns]).unwrap();
        let mut blocks: Vec<u8> = (0..4 * layout.words()).map(|i| (i * 89 % 251) as u8).collect();
        for block in blocks[..layout.bytes()].chunks_mut(format.block_bytes()) {
            // Scales of 2^-7, in formats with f16 scales.
            let scales: &[usize] = match format {
                WeightFormat::Q6K => &[208],
                WeightFormat::Q4_0 => &[0],
                _ => &[0, 2],
            };
            scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&[0, 0x20]));
        }
        let weights = reference::restore(format, &blocks[..layout.bytes()]);
        let words = upload(blocks, &layout, &device);
        for n in [1, 3, 8, 9, 33] {
            let numbers = activations(n, columns);
            let x = TensorData::new(numbers.clone(), [n, columns]);
            let x = CubeBackend::float_from_data(x, &device);
            let own = Hardware::of(x.client.properties());
            let cubes = Hardware { plane: 1, vector: false };
            let alone = Hardware { vector: true, ..cubes };
            let mut ways = vec![
                ("alone", plain(alone, &x, &words, layout)),
                ("cubes", plain(cubes, &x, &words, layout)),
                ("restored", many(x.clone(), &words, layout)),
                ("tiles", tiled(x.clone(), &words, layout)),
            ];
            if own.plane > 1 {
                let planes = Hardware { vector: false, ..own };
                ways.push(("planes", plain(planes, &x, &words, layout)));
            }
            for (way, y) in ways {
                close(&format!("{format} {way} by {n}"), y, &numbers, &weights, columns);
            }
        }
    }
}
