//! Numbers at the limits of a format.

use burn::tensor::Tensor;
use kv_cubecl::{
    CacheShape, KvCache, KvCacheConfig, KvFormat, On, Side, SteGradient, Target,
    fake_quantize_side,
    reference::{self, Numbers},
};

use super::{fits, grouped, has_no_offset};
use crate::common::{Host, Rng, equal_bits, stamp};

stamp!(odd_numbers);

/// Ties between codes, infinities, numbers beyond every scale, and NaN.
fn odd_numbers<T: Target>(on: &On<T>) {
    let mut rng = Rng::new(82);
    for format in KvFormat::ALL.iter().copied().filter(|&format| has_no_offset(format)) {
        let largest = reference::numbers(format).map_or(1.0, Numbers::largest) as f32;
        let mut hosts = vec![];
        // With a scale of 1: eighths up to the largest number.
        let mut host =
            Host::from_fn([1, 1, 64, 64], || rng.below(2 * 8 * 128) as f32 / 8.0 - 128.0);
        host.data.iter_mut().for_each(|x| *x *= largest / 128.0);
        host.data.iter_mut().step_by(32).for_each(|x| *x = largest);
        hosts.push(("ties", host));
        let mut host = Host::normal(&mut rng, [1, 2, 5, 64]);
        host.data.iter_mut().step_by(13).for_each(|x| *x *= 1e30);
        hosts.push(("huge", host.clone()));
        host.data.iter_mut().step_by(29).for_each(|x| *x = f32::INFINITY.copysign(*x));
        hosts.push(("infinite", host.clone()));
        host.data.iter_mut().step_by(7).for_each(|x| *x = f32::NAN);
        host.data[64..128].fill(f32::NAN);
        hosts.push(("NaN", host));
        for size in [1e-3, 1e-5, 2e-6, 1e-7, 1e-9, 1e-20] {
            hosts.push(("tiny", Host::from_fn([1, 1, 4, 64], || size * rng.normal())));
        }
        for (what, host) in hosts {
            let shape = host.shape;
            for side in Side::BOTH.into_iter().filter(|&side| fits(format, side, shape)) {
                let what = format!("{format} {side} {what}");
                let expected =
                    reference::fake_quantize_side(&host.data, shape, side, &grouped(format, 32));
                assert!(expected.iter().all(|x| x.is_finite()), "{what}");
                // Debug builds refuse what is not finite, so that it gets there through a cache.
                let got = match host.data.iter().all(|x| x.is_finite()) {
                    true => {
                        let gradient = SteGradient::Identity;
                        let fake =
                            fake_quantize_side(host.on(on), side, &grouped(format, 32), gradient);
                        fake.unwrap()
                    }
                    false => through_a_cache(on, &host, side, format),
                };
                equal_bits(&what, &Host::of(got).data, &expected);
            }
        }
    }
}

/// Stores these rows in a cache and restores the side.
fn through_a_cache<T: Target>(on: &On<T>, host: &Host, side: Side, format: KvFormat) -> Tensor<4> {
    let [batch, heads, tokens, head_dim] = host.shape;
    let name = match side {
        Side::Keys => format!("k{format}v16"),
        Side::Values => format!("k16v{format}"),
    };
    let config: KvCacheConfig = name.parse().unwrap();
    let shape = CacheShape::new(batch, heads, head_dim);
    // As many tokens as a window has come after them.
    let window = if format.is_grouped() { 32 } else { 0 };
    let config = config.with_residual_length(window).with_capacity(tokens + window);
    let mut cache = KvCache::new(&config, shape, on).unwrap();
    cache.append(host.on(on), host.on(on)).unwrap();
    if window > 0 {
        let after = || Tensor::zeros([batch, heads, window, head_dim], &**on);
        cache.append(after(), after()).unwrap();
    }
    cache.packed(side).unwrap().dequantize()
}
