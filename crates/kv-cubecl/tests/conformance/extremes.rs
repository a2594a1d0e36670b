//! Numbers near the ends of f32's range, where a product or a sum on the way to an output of
//! ordinary size may be beyond it.

use kv_cubecl::{On, Target, streaming_attention};

use crate::common::{CLOSE, Host, Rng, Setup, attend, close, stamp};

stamp!(
    tiny_queries_and_huge_keys,
    sums_of_values_near_the_largest,
    a_part_of_huge_values_and_no_weight,
);

/// Compares all ways to attend with the oracle.
#[track_caller]
fn check<T: Target>(on: &On<T>, text: &Setup) {
    let expected = text.reference().output;
    let n = text.len();
    for sizes in [vec![1; n], vec![n], vec![n / 2, n - n / 2], vec![n - 3, 1, 2]] {
        let output = attend(&mut text.cache(on), text, &sizes, on);
        close(format!("{text:?} in chunks {sizes:?}"), &output, &expected, CLOSE);
    }
    let [q, k, v] = text.on(on);
    let parallel = Host::of(streaming_attention(q, k, v, &text.config).unwrap().output);
    close(format!("{text:?} in parallel"), &parallel, &expected, CLOSE);
}

/// Scores are of order one, but what they are made of is not. Only floats and blocks hold such
/// keys.
fn tiny_queries_and_huge_keys<T: Target>(on: &On<T>) {
    for (seed, name) in ["ke4m3bve4m3b", "kmxfp4vmxfp4-r5", "float"].into_iter().enumerate() {
        for size in [1e20, 1e30] {
            let mut text = Setup::new(name, [1, 4, 2, 45, 64], 800 + seed as u64);
            text.query.data.iter_mut().for_each(|q| *q /= size);
            text.key.data.iter_mut().for_each(|k| *k *= size);
            check(on, &text);
        }
    }
}

/// All values of a channel have one sign, so that the sum of a few is more than an f32 can be, and
/// their mean is not.
fn sums_of_values_near_the_largest<T: Target>(on: &On<T>) {
    for (seed, name) in ["ke4m3bve4m3b", "k4vmxfp4-g16-r16-s2", "float"].into_iter().enumerate() {
        // Blocks end at 2^127.
        let largest = if name == "float" { 3.2e38 } else { 1.6e38 };
        let mut text = Setup::new(name, [1, 4, 2, 45, 64], 810 + seed as u64);
        let mut rng = Rng::new(seed as u64);
        for (at, value) in text.value.data.iter_mut().enumerate() {
            let sign = if at % 64 % 3 == 0 { -1.0 } else { 1.0 };
            *value = sign * largest * (0.5 + 0.5 * rng.uniform());
        }
        check(on, &text);
    }
}

/// The two parts of a chunk's attention, over the cache and over itself, are merged by their
/// weights. One part has huge values whose weight is below `e^-100`, and 0 in f32, so that the
/// output is that of the other.
fn a_part_of_huge_values_and_no_weight<T: Target>(on: &On<T>) {
    for (seed, name) in ["float", "ke4m3bve4m3b"].into_iter().enumerate() {
        for huge_is_old in [true, false] {
            let mut text = Setup::new(name, [1, 4, 2, 45, 64], 820 + seed as u64);
            let is_huge = |at: usize| (at / 64 % 45 < 30) == huge_is_old;
            text.query.data.fill(2.0);
            for (at, key) in text.key.data.iter_mut().enumerate() {
                *key = if is_huge(at) { -4.0 } else { 4.0 + 0.1 * *key };
            }
            for (at, value) in text.value.data.iter_mut().enumerate() {
                *value *= if is_huge(at) { 1e30 } else { 1.0 };
            }
            let whole = text.reference().output;
            let expected: Vec<f64> =
                whole.chunks(45 * 64).flat_map(|head| &head[30 * 64..]).copied().collect();
            let mut cache = text.cache(on);
            attend(&mut cache, &text.tokens(0..30), &[30], on);
            let rest = text.tokens(30..45);
            let [q, k, v] = rest.on(on);
            let peeked = Host::of(cache.peek(q, k, v).unwrap().output);
            close(format!("{text:?}: peek"), &peeked, &expected, CLOSE);
            let output = attend(&mut cache, &rest, &[15], on);
            close(format!("{text:?}: attend"), &output, &expected, CLOSE);
        }
    }
}
