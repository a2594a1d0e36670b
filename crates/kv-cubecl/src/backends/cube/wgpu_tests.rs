use std::io::Write;

use burn::tensor::TensorData;
use burn_cubecl::cubecl::{self, prelude::*};

use super::{
    cache::{decode_attention_as, write},
    *,
};
use crate::{
    KvCacheConfig, Target, Wgpu,
    formats::cube::{Affine, PackedInKernels},
};

/// Affine codes, restored one by one instead of scale and offset taken out of the sums: what attention does for
/// a format that is not linear in its codes.
#[derive(Debug)]
struct Restored;

#[cube]
impl PackedInKernels for Restored {
    const LINEAR: bool = false;

    fn parameters(min: f32, max: f32, #[comptime] n_bits: u32) -> u32 {
        Affine::parameters(min, max, n_bits)
    }

    fn scale(parameters: u32) -> f32 {
        Affine::scale(parameters)
    }

    fn offset(parameters: u32) -> f32 {
        Affine::offset(parameters)
    }

    fn encode(x: f32, scale: f32, offset: f32, #[comptime] n_bits: u32) -> u32 {
        Affine::encode(x, scale, offset, n_bits)
    }

    fn restore(code: u32, scale: f32, offset: f32) -> f32 {
        Affine::restore(code, scale, offset)
    }

    fn add_scale_gradient(
        data: &[f32],
        grad: &mut [f32],
        base: usize,
        stride: usize,
        #[comptime] group_size: usize,
        #[comptime] n_bits: u32,
    ) {
        Affine::add_scale_gradient(data, grad, base, stride, group_size, n_bits);
    }
}

/// Both ways of [`PackedInKernels::LINEAR`] give the same attention, by the kernel for few rows and by that
/// for many.
#[test]
fn codes_that_are_not_linear_are_restored() {
    const TOKENS: usize = 77;
    let device = match Wgpu::open() {
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
    let wave = |shape: [usize; 4], pitch: f32| {
        let data = (0..shape.iter().product()).map(|i| (i as f32 * pitch).sin() + 0.3);
        let data = TensorData::new(data.collect::<Vec<f32>>(), shape);
        CubeBackend::float_from_data(data, device)
    };
    for name in ["k4v4-g16-r16", "k2v8-g16-r32-s3"] {
        let config: KvCacheConfig = name.parse().unwrap();
        let shape = CacheShape::new(1, 2, 32);
        let layout = CacheLayout::new(&config.with_capacity(TOKENS), shape).unwrap();
        let (key, value) = (wave([1, 2, TOKENS, 32], 0.37), wave([1, 2, TOKENS, 32], 0.61));
        let like = &key;
        let zeros = |n: usize| empty_like(like, [n], DType::U32);
        let words = layout.sides().map(|side| zeros(side.words(layout.slices())));
        let state = CacheState {
            keys: words.keys,
            values: words.values,
            floats: empty_like(like, layout.float_shape(), DType::F32),
        };
        let state = write(state, key, value, layout, 0, Place::default());
        for tokens in [1, 6] {
            let query = wave([1, 4, tokens, 32], 0.7);
            let options = AttentionOptions::default();
            let host = |(output, lse): (CubeTensor, CubeTensor)| -> Vec<f32> {
                let read = |tensor| {
                    let data = CubeBackend::float_into_data(tensor);
                    cubecl::future::block_on(data).unwrap().iter::<f32>().collect::<Vec<_>>()
                };
                [read(output), read(lse)].concat()
            };
            let (len, at) = (TOKENS, Place::default());
            let folded = decode_attention_as::<Affine, Affine>(
                query.clone(),
                &state,
                layout,
                len,
                len,
                options,
                at,
            );
            let restored = decode_attention_as::<Restored, Restored>(
                query, &state, layout, len, len, options, at,
            );
            let (folded, restored) = (host(folded), host(restored));
            for (i, (a, b)) in folded.iter().zip(&restored).enumerate() {
                // Sums of about a hundred products of order one in another order, each rounded to 6e-8.
                assert!((a - b).abs() < 1e-5, "{name}, {tokens} rows: {i} is {b}, not {a}");
            }
            // The kernel for many rows restores either way.
            assert_eq!(folded == restored, tokens > 1, "{name}, {tokens} rows");
        }
    }
}
