use std::io::Write;

use burn::tensor::{Device, TensorData};

use super::*;
use crate::{WeightFormat, reference};

/// Sums over the units of a plane, over those of a cube that have no planes, and of each unit alone, and products with
/// restored parts of the matrix: all are within rounding of f64, whichever way this device takes.
#[test]
fn every_way_gives_the_same_products() {
    let device = match Device::wgpu_options().init() {
        Err(error) if std::env::var_os("KV_ALLOW_NO_DEVICE").is_some_and(|value| value == "1") => {
            // Not through `eprintln!`, which the test harness captures.
            let _ = writeln!(std::io::stderr(), "SKIPPED {error}");
            return;
        }
        device => device.unwrap(),
    };
    #[allow(irrefutable_let_patterns, reason = "CubeCL may be the only backend")]
    let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() else {
        panic!("not a CubeCL device")
    };
    let wave = |n: usize, pitch: f32| (0..n).map(move |i| (i as f32 * pitch).sin() + 0.1);
    let (rows, columns) = (75, 768);
    for format in [WeightFormat::Q4_0, WeightFormat::Q5K, WeightFormat::Q6K] {
        let layout = PackedLayout::new(format, [rows, columns]).unwrap();
        let mut blocks: Vec<u8> = (0..4 * layout.words()).map(|i| (i * 89 % 251) as u8).collect();
        for block in blocks[..layout.bytes()].chunks_mut(format.block_bytes()) {
            // Scales of 2^-7, where the formats have them.
            let scales: &[usize] = match format {
                WeightFormat::Q6K => &[208],
                WeightFormat::Q4_0 => &[0],
                _ => &[0, 2],
            };
            scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&[0, 0x20]));
        }
        let weights = reference::restore(format, &blocks[..layout.bytes()]);
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(&blocks);
        let words = TensorData::new(words, [layout.words()]);
        let words = CubeBackend::int_from_data(words, device);
        for n in [1, 3, 8, 9, 33] {
            let x: Vec<f32> = wave(n * columns, 0.37).collect();
            let expected = reference::project(&x, &weights, columns);
            let magnitudes = |x: &[f32]| x.iter().map(|x| x.abs()).collect::<Vec<_>>();
            let sizes = reference::project(&magnitudes(&x), &magnitudes(&weights), columns);
            let x = CubeBackend::float_from_data(TensorData::new(x, [n, columns]), device);
            let plan = plan_of(layout);
            let own = Hardware::of(x.client.properties());
            let plain = Hardware { plane: 1, vector: false };
            let mut ways = vec![
                (
                    "alone",
                    few(
                        Hardware { vector: true, ..plain },
                        x.clone(),
                        vec![words.clone()],
                        [None, None, None],
                        &plan,
                    ),
                ),
                ("cubes", few(plain, x.clone(), vec![words.clone()], [None, None, None], &plan)),
                ("restored", many(x.clone(), &words, layout)),
            ];
            if own.plane > 1 {
                let planes = Hardware { vector: false, ..own };
                ways.push((
                    "planes",
                    few(planes, x, vec![words.clone()], [None, None, None], &plan),
                ));
            }
            for (way, y) in ways {
                let y = burn::tensor::read_sync(CubeBackend::float_into_data(y)).unwrap();
                let y = y.try_into_vec::<f32>().unwrap();
                for (i, y) in y.into_iter().enumerate() {
                    let error = (f64::from(y) - expected[i]).abs();
                    assert!(
                        error <= 1e-6 * sizes[i],
                        "{format} {way} by {n}: {i}: {y}, not {}",
                        expected[i]
                    );
                }
            }
        }
    }
}
