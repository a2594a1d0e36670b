//! Memory of a benchmark, computed before it is allocated.

use kv_cubecl::{CacheShape, KvCacheConfig, layout::CacheLayout};

use super::WARM_UP;
use crate::{Error, Result};

const MOST_SAMPLES: usize = 1_000_000;

/// Upper limit of the elements of a buffer.
const MOST_ELEMENTS: u128 = 1 << 32;

pub(super) fn check_samples(field: &'static str, samples: usize) -> Result<()> {
    match samples {
        0 => Err(Error::plan(field, 0, "must be at least 1")),
        1..=MOST_SAMPLES => Ok(()),
        _ => Err(Error::plan(field, samples, format!("must be at most {MOST_SAMPLES}"))),
    }
}

/// Returns the number of steps for `samples`, warm-up included.
pub(super) fn rounds(samples: usize) -> usize {
    samples.saturating_add(WARM_UP)
}

pub(super) fn tensor_bytes(shape: [usize; 4]) -> Result<u64> {
    let elements = shape.iter().try_fold(1u128, |n, &dim| n.checked_mul(dim as u128));
    match elements.filter(|&elements| elements < MOST_ELEMENTS) {
        Some(elements) => Ok(elements as u64 * size_of::<f32>() as u64),
        None => {
            let [batch, heads, tokens, channels] = shape;
            let value = format!("{batch} x {heads} x {tokens} x {channels}");
            let rule = "batch x heads x tokens x channels must be below 2^32 elements";
            Err(Error::plan("shape", value, rule))
        }
    }
}

pub(super) fn layout(
    config: &KvCacheConfig,
    tokens: usize,
    shape: CacheShape,
) -> Result<CacheLayout> {
    Ok(CacheLayout::new(&config.with_capacity(tokens), shape)?)
}
