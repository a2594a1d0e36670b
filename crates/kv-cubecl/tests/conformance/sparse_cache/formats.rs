//! A cache rounds in every format as the closed form does.

use kv_cubecl::{
    CacheFloat, KvFormat, On, Target,
    sparse::{Compression, IndexConfig, RowFormat, SparseConfig},
};

use super::{Layer, same};
use crate::common::stamp;

stamp!(formats_round_as_the_closed_form);

/// Codes may differ where rounding puts a number on the other side of a boundary, so that single
/// outputs differ by up to a step; means do not.
fn formats_round_as_the_closed_form<T: Target>(on: &On<T>) {
    let formats = [
        RowFormat::float(CacheFloat::F32),
        RowFormat::float(CacheFloat::Bf16),
        RowFormat::float(CacheFloat::F16),
        RowFormat::codes(KvFormat::Affine4),
        RowFormat::codes(KvFormat::Affine3),
        RowFormat::codes(KvFormat::Affine2),
        RowFormat::codes(KvFormat::E4m3Blocks),
        RowFormat::codes(KvFormat::E4m3Blocks).with_float_channels(32, CacheFloat::Bf16),
        RowFormat::codes(KvFormat::E4m3Blocks64),
        RowFormat::codes(KvFormat::E4m3Blocks64).with_float_channels(64, CacheFloat::Bf16),
        RowFormat::codes(KvFormat::Affine4).with_float_channels(32, CacheFloat::F32),
        RowFormat::codes(KvFormat::E2m1Blocks),
        RowFormat::codes(KvFormat::Int8),
    ];
    let mut differences = vec![];
    for (i, format) in formats.into_iter().enumerate() {
        let float = format.float;
        if !on.supports_dtype(float.dtype()) {
            continue;
        }
        let mut keys = format;
        keys.float_channels = 0;
        let index = IndexConfig { head_dim: 64, top_k: 8, keys };
        let plain = SparseConfig::new(128, 6)
            .with_capacity(80)
            .with_compression(Compression::overlapping(4));
        let config = plain.with_formats(float, format).with_index(index);
        let layer = Layer::new(on, config, 2, 80, 70 + i as u64);
        let want = layer.parallel();
        let keys = RowFormat::float(CacheFloat::F32);
        let config = plain.with_index(IndexConfig { keys, ..index });
        let float = Layer { config, ..layer.clone() };
        let noise = (float.parallel() - want.clone()).abs().mean().into_scalar::<f32>();
        let mut one_by_one = None;
        for sizes in [vec![1; 80], vec![13, 1, 30, 36]] {
            let got = layer.stream(&mut layer.cache(on), &sizes);
            let off = (got.clone() - want.clone()).abs().mean().into_scalar::<f32>();
            assert!(off <= 0.02 * noise.max(1e-4), "{format:?}: {off} of {noise}");
            // Any partition of the same cache has the same codes.
            if let Some(first) = &one_by_one {
                same(format!("{format:?} in {sizes:?}"), got.clone(), first);
            }
            one_by_one = Some(got);
        }
        differences.push((format, noise));
    }
    let noise = |codes| differences.iter().find(|(format, _)| format.codes == codes).unwrap().1;
    let [two, three, four] = [KvFormat::Affine2, KvFormat::Affine3, KvFormat::Affine4].map(noise);
    assert!(four > 1e-3 && three > 1.2 * four && two > 1.2 * three, "{two} {three} {four}");
}
