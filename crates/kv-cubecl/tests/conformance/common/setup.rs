//! A configuration, a shape and a random text to run through a cache.

use core::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use burn::tensor::{Device, Tensor};
use kv_cubecl::{CacheShape, Flush, KvCache, KvCacheConfig, Sides, Target, reference};
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner},
};

use super::{Host, Rng};

/// A configuration and a random text for it; `Debug` prints what is needed to repeat it.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) config: KvCacheConfig,
    pub(crate) seed: u64,
    pub(crate) query: Host,
    pub(crate) key: Host,
    pub(crate) value: Host,
}

impl fmt::Debug for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, seed, query, key, value } = self;
        let (query, key, value) = (query.shape, key.shape, value.shape);
        write!(f, "{config} query {query:?} key {key:?} value {value:?} seed {seed}")
    }
}

impl Setup {
    /// A text of `[batch, n_heads, n_kv_heads, tokens, head_dim]`; the capacity fits it exactly.
    pub(crate) fn new(config: &str, sizes: [usize; 5], seed: u64) -> Self {
        Self::with(config.parse().unwrap(), sizes, seed)
    }

    pub(crate) fn with(config: KvCacheConfig, sizes: [usize; 5], seed: u64) -> Self {
        let [batch, n_heads, n_kv_heads, tokens, head_dim] = sizes;
        let mut rng = Rng::new(seed);
        let shape = [batch, n_kv_heads, tokens, head_dim];
        Self {
            config: config.with_capacity(tokens),
            seed,
            query: Host::normal(&mut rng, [batch, n_heads, tokens, head_dim]),
            key: Host::keys(&mut rng, shape),
            value: Host::normal(&mut rng, shape),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.key.shape[2]
    }

    pub(crate) fn shape(&self) -> CacheShape {
        let [batch, n_kv_heads, _, keys] = self.key.shape;
        CacheShape::new(batch, n_kv_heads, Sides { keys, values: self.value.shape[3] })
    }

    /// Returns the text with values of another number of channels.
    pub(crate) fn with_value_dim(self, value_dim: usize) -> Self {
        let [batch, n_kv_heads, tokens, _] = self.key.shape;
        let mut rng = Rng::new(self.seed + 500);
        let value = Host::normal(&mut rng, [batch, n_kv_heads, tokens, value_dim]);
        Self { value, ..self }
    }

    /// Shape of what attention of the whole text returns.
    pub(crate) fn output_shape(&self) -> [usize; 4] {
        let [batch, n_heads, tokens, _] = self.query.shape;
        [batch, n_heads, tokens, self.value.shape[3]]
    }

    pub(crate) fn cache(&self, device: &Device) -> KvCache {
        KvCache::new(&self.config, self.shape(), device).unwrap()
    }

    pub(crate) fn on(&self, device: &Device) -> [Tensor<4>; 3] {
        [&self.query, &self.key, &self.value].map(|host| host.on(device))
    }

    /// Returns the setup with only these tokens.
    pub(crate) fn tokens(&self, tokens: core::ops::Range<usize>) -> Self {
        Self {
            query: self.query.tokens(tokens.clone()),
            key: self.key.tokens(tokens.clone()),
            value: self.value.tokens(tokens),
            ..self.clone()
        }
    }

    /// The oracle's outputs and counts for the text.
    pub(crate) fn reference(&self) -> reference::Streamed {
        reference::stream(
            (&self.query.data, self.query.shape),
            (&self.key.data, self.key.shape),
            &self.value.data,
            &self.config,
        )
    }
}

/// Attends to the whole text in chunks of the given sizes.
pub(crate) fn attend(cache: &mut KvCache, text: &Setup, sizes: &[usize], device: &Device) -> Host {
    let mut outputs = Vec::new();
    let mut start = 0;
    for &size in sizes {
        let [q, k, v] = text.tokens(start..start + size).on(device);
        let attention = cache.attend(q, k, v).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        outputs.push(Host::of(attention.output));
        start += size;
    }
    Host::cat(&outputs)
}

/// Random sizes from 1 to `largest` that add up to `total`.
pub(crate) fn chunk_sizes(rng: &mut Rng, total: usize, largest: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut left = total;
    while left > 0 {
        let size = 1 + rng.below(largest.min(left));
        sizes.push(size);
        left -= size;
    }
    sizes
}

/// Sliding windows at the boundaries of a configuration: around its residual, and multiples of that
/// and of its groups. A quantized cache refuses those below the residual.
pub(crate) fn windows(config: &KvCacheConfig, head_dim: usize) -> Vec<usize> {
    let (residual, group) = (config.residual_length, config.group_size);
    let around = [residual.saturating_sub(1), residual, residual + 1];
    let multiples = [2, 3].map(|n| n * residual).into_iter().chain([1, 2, 3, 5].map(|n| n * group));
    let fits =
        |&window: &usize| config.with_sliding_window(Some(window)).validate(head_dim).is_ok();
    around.into_iter().chain(multiples).filter(fits).collect()
}

/// Any valid configuration with a text that fills its residual up to three times, in every other
/// case with a window.
pub(crate) fn setups() -> impl Strategy<Value = Setup> {
    // Only a few kinds of configuration, as compiling the kernels of each takes a software driver
    // long; the cases in `attention` have them all.
    let kivi = ["2 2", "3 3", "4 4", "8 8", "4 2", "16 4", "2 16", "16 16"];
    let bits = [&kivi[..], &["int8 int8", "16 int8", "int8 4", "e4m3 mxfp4"]].concat();
    let bits = prop::sample::select(bits);
    let sizes = vec![(16, 64), (32, 64), (16, 80)];
    let sizes = (prop::sample::select(sizes), 1..=2usize);
    let sinks = prop::sample::select(vec![0, 0, 1, 4, 19]);
    let heads = (1..=2usize, 1..=2usize, 1..=4usize);
    let order = (any::<bool>(), any::<bool>(), any::<bool>(), any::<prop::sample::Index>());
    (bits, sizes, sinks, order, heads, (0.0..1.0, any::<u32>())).prop_map(
        |(formats, ((group, head_dim), groups), sinks, order, heads, (length, seed))| {
            let (after, by_group, windowed, window) = order;
            let (batch, n_kv_heads, per_kv) = heads;
            // Blocks are of 32 channels, and 32 codes of 3 bits fill whole words.
            let head_dim = if formats.contains(['m', '3']) { 64 } else { head_dim };
            let group = if formats.contains("3 3") { 32 } else { group };
            let residual = group * groups;
            let (k, v) = formats.split_once(' ').unwrap();
            let config: KvCacheConfig = format!("k{k}v{v}").parse().unwrap();
            let config = config.with_sink_tokens(sinks);
            let config = match config.is_grouped() || !config.is_quantized() {
                true => config.with_group_size(group).with_residual_length(residual),
                // Any window, or none.
                false => config.with_residual_length((residual - 16) / 16 * 7),
            };
            let by_group = by_group && (k == "16" || config.keys.is_grouped());
            let config = config.with_flush(Flush::new(after, by_group));
            // Groups that leave one at a time allow any residual from a group on.
            let more = if by_group && config.is_grouped() { seed as usize % 5 } else { 0 };
            let config = config.with_residual_length(config.residual_length + more);
            let windows = windows(&config, head_dim);
            let config = match windowed && !windows.is_empty() {
                true => config.with_sliding_window(Some(*window.get(&windows))),
                false => config,
            };
            let longest = (3 * residual + sinks).min(150) as f64;
            let tokens = 1 + (longest * length) as usize;
            let sizes = [batch, n_kv_heads * per_kv, n_kv_heads, tokens, head_dim];
            Setup::with(config, sizes, seed.into())
        },
    )
}

/// Returns the number of cases of a random suite and its first seed: `KV_CASES` and `KV_SEED`, or
/// `cases` and 0.
pub(crate) fn sample(cases: u32) -> (u32, u64) {
    let number = |name: &str| {
        let value = std::env::var(name).ok()?;
        Some(value.parse().unwrap_or_else(|_| panic!("{name} {value:?}: must be a whole number")))
    };
    (
        number("KV_CASES").map_or(cases, |n: u64| n.try_into().unwrap()),
        number("KV_SEED").unwrap_or(0),
    )
}

/// Where kernels are compiled for each case, one in this many cases is run.
pub(crate) const SAMPLED: usize = 3;

/// Returns `None` where all cases are run, otherwise the seed that picks some of them.
///
/// Compiling kernels takes most of the time on a GPU without hardware, and most cases have their
/// own. There a third of them is run; the seed `KV_SEED`, by default the day, picks another third.
/// `KV_ALL_CASES=1` runs everything.
pub(crate) fn sampling<T: Target>() -> Option<usize> {
    let all = std::env::var_os("KV_ALL_CASES").is_some_and(|all| all == "1");
    if T::NAME == "flex" || all {
        return None;
    }
    let today = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 86400;
    let seed = if std::env::var_os("KV_SEED").is_some() { sample(0).1 } else { today() } as usize;
    #[allow(clippy::print_stdout, reason = "a failure is repeated by it")]
    {
        println!("{}: KV_SEED={seed}", T::NAME);
    }
    Some(seed)
}

/// Returns the cases that are run on this target, at least one: see [`sampling`].
pub(crate) fn sampled<T: Target, C>(cases: impl IntoIterator<Item = C>) -> Vec<C> {
    let seed = sampling::<T>();
    let cases: Vec<C> = cases.into_iter().collect();
    let few = cases.len() < SAMPLED;
    let runs = |i: usize| few || seed.is_none_or(|seed| (i + seed).is_multiple_of(SAMPLED));
    cases.into_iter().enumerate().filter(|(i, _)| runs(*i)).map(|(_, case)| case).collect()
}

/// Returns how many of `cases` random cases are run on this target: see [`sampling`].
pub(crate) fn sampled_count<T: Target>(cases: u32) -> u32 {
    sampling::<T>().map_or(cases, |_| cases.div_ceil(SAMPLED as u32))
}

/// Checks a property of `cases` random values, the same ones for the same seed: see [`sample`]. A
/// failure prints the seed and the value, made as small as possible.
pub(crate) fn check_properties<S: Strategy>(cases: u32, values: S, property: impl Fn(S::Value)) {
    let (cases, seed) = sample(cases);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let result = TestRunner::new_with_rng(config, rng).run(&values, |value| {
        property(value);
        Ok::<(), TestCaseError>(())
    });
    if let Err(error) = result {
        panic!("KV_SEED={seed}: {error}");
    }
}
