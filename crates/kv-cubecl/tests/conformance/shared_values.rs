//! Caches whose values are the first channels of their keys, against an oracle that attends in f64
//! to the keys as each query sees them and to their first channels.

use burn::tensor::{DType, Tensor, TensorData};
use kv_cubecl::{
    AttentionOptions, CacheShape, FakeQuantOptions, FrameCache, FrameConfig, Frames, KvCache,
    KvCacheConfig, KvFormat, KvMemory, On, Side, Sides, Target,
    reference::{self, RowOptions, StreamOracle, attend_row_with},
    streaming_attention_latent,
};

use crate::common::{CLOSE, Host, Rng, chunk_sizes, close, sampled, snapshot, stamp, wide};

stamp!(
    outputs_equal_the_oracle,
    scores_are_capped,
    steps_at_positions_on_the_device,
    sequences_of_different_lengths,
    a_prefix_continues_in_every_copy,
    restored_tokens_return_to_float,
    bytes_are_those_of_keys,
    only_the_format_of_keys_counts,
    given_values_are_ignored,
    numbers_near_the_largest_stay_finite,
    what_does_not_fit_is_an_error,
);

/// Caches in float, by groups, token by token, with sinks, windows and all orders of flushes.
const NAMES: [&str; 11] = [
    "float",
    "float-f16",
    "float-s2-w13",
    "k4v4-g16-r32",
    "k3v3-g32-r64-s4-gflush",
    "k2v2-g16-r32-s3-after",
    "k8v8-g16-r16-w40",
    "k4v4-g32-r32-gflush-w64-f16",
    "kint8vint8",
    "ke4m3ve4m3-r7-s1",
    "kmxfp4vmxfp4-r5",
];

/// Channels of keys and of values: an odd number of runs of units, DeepSeek-V3's, and all channels.
const HEAD_DIMS: [(usize, usize); 3] = [(96, 64), (576, 512), (64, 64)];

/// A text whose values are channels of its keys.
#[derive(Debug)]
struct Text {
    config: KvCacheConfig,
    query: Host,
    key: Host,
    value_dim: usize,
}

impl Text {
    /// `sizes` are batch, query heads and tokens. There is one key head, or one for two heads.
    fn new(name: &str, sizes: [usize; 3], (key_dim, value_dim): (usize, usize), seed: u64) -> Self {
        let [batch, n_heads, tokens] = sizes;
        let config: KvCacheConfig = name.parse().unwrap();
        let rng = &mut Rng::new(seed);
        let n_kv_heads = 1 + usize::from(n_heads.is_multiple_of(2)) * (seed as usize % 2);
        Self {
            config: config.with_capacity(tokens),
            query: Host::normal(rng, [batch, n_heads, tokens, key_dim]),
            key: Host::keys(rng, [batch, n_kv_heads, tokens, key_dim]),
            value_dim,
        }
    }

    fn len(&self) -> usize {
        self.key.shape[2]
    }

    fn shape(&self) -> CacheShape {
        let [batch, n_kv_heads, _, keys] = self.key.shape;
        let head_dim = Sides { keys, values: self.value_dim };
        CacheShape::new(batch, n_kv_heads, head_dim).with_shared_values()
    }

    fn cache<T: Target>(&self, on: &On<T>) -> KvCache {
        KvCache::new(&self.config, self.shape(), on).unwrap()
    }

    fn tokens(&self, tokens: core::ops::Range<usize>) -> Self {
        let (query, key) = (self.query.tokens(tokens.clone()), self.key.tokens(tokens));
        Self { query, key, ..*self }
    }

    /// Attends to the text through `cache` in chunks of these sizes.
    fn attend<T: Target>(&self, cache: &mut KvCache, sizes: &[usize], on: &On<T>) -> Host {
        let mut start = 0;
        let outputs = sizes.iter().map(|&size| {
            let part = self.tokens(start..start + size);
            start += size;
            let (query, key) = (part.query.on(on), part.key.on(on));
            let memory = KvMemory::Cached(cache);
            Host::of(memory.attend_latent(query, key, self.value_dim).unwrap().output)
        });
        Host::cat(&outputs.collect::<Vec<_>>())
    }

    /// The outputs that the definition gives, `[batch, n_heads, tokens, value_dim]`.
    fn expected(&self, options: RowOptions) -> Vec<f64> {
        let [batch, n_heads, tokens, key_dim] = self.query.shape;
        let n_kv_heads = self.key.shape[1];
        // The oracle's values stay in float and are not read.
        let config = self.config.with_formats(self.config.keys, KvFormat::Float);
        let mut oracle = StreamOracle::new(&config, CacheShape::new(batch, n_kv_heads, key_dim));
        let mut outputs = vec![0.0; batch * n_heads * tokens * self.value_dim];
        for t in 0..tokens {
            let keys = self.key.tokens(t..t + 1).data;
            let queries = self.query.tokens(t..t + 1).data;
            oracle.step_with(&keys, &keys, |lanes| {
                for (head, query) in queries.chunks(key_dim).enumerate() {
                    let lane = &lanes[head / (n_heads / n_kv_heads)];
                    let rows = lane.keys(&lane.seen(&config));
                    let values: Vec<&[f64]> =
                        rows.iter().map(|row| &row[..self.value_dim]).collect();
                    let output = attend_row_with(&wide(query), &rows, &values, options).output;
                    outputs[(head * tokens + t) * self.value_dim..][..self.value_dim]
                        .copy_from_slice(&output);
                }
            });
        }
        outputs
    }
}

fn outputs_equal_the_oracle<T: Target>(on: &On<T>) {
    let cases = NAMES.into_iter().zip(HEAD_DIMS.into_iter().cycle());
    for (seed, (name, head_dim)) in sampled::<T, _>(cases.enumerate()) {
        let (rng, seed) = (&mut Rng::new(seed as u64), seed as u64);
        let n_heads = [4, 3, 20][seed as usize % 3];
        let text = Text::new(name, [1 + seed as usize % 2, n_heads, 131], head_dim, seed);
        let want = text.expected(RowOptions::default());
        let sizes = [vec![1; text.len()], vec![text.len()], chunk_sizes(rng, text.len(), 50)];
        let codes = sizes.map(|sizes| {
            let mut cache = text.cache(on);
            let got = text.attend(&mut cache, &sizes, on);
            close(format!("{name} {head_dim:?} in chunks of {sizes:?}"), &got, &want, CLOSE);
            cache.packed(Side::Keys).map(|packed| Host::of(packed.dequantize()))
        });
        assert!(codes.iter().all(|it| *it == codes[0]), "{name}: codes depend on the chunks");

        let (query, key) = (text.query.on(on), text.key.on(on));
        let memory = KvMemory::parallel(text.config);
        let parallel = memory.attend_latent(query, key, text.value_dim).unwrap().output;
        close(format!("{name} {head_dim:?} in parallel"), &Host::of(parallel), &want, CLOSE);
    }
}

fn scores_are_capped<T: Target>(on: &On<T>) {
    let text = Text::new("k4v4-g16-r32", [1, 4, 70], (96, 64), 31);
    let options = AttentionOptions::default().with_scale(0.3).with_softcap(2.0);
    let row_options = RowOptions { scale: Some(0.3), softcap: Some(2.0), ..Default::default() };
    let mut cache = text.cache(on).with_options(options).unwrap();
    let got = text.attend(&mut cache, &[40, 1, 29], on);
    close("capped", &got, &text.expected(row_options), CLOSE);
}

fn steps_at_positions_on_the_device<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>(NAMES) {
        let text = Text::new(name, [2, 4, 90], (96, 64), 41);
        let (prefix, mut cache) = (37, text.cache(on));
        text.tokens(0..prefix).attend(&mut cache, &[prefix], on);
        let mut outputs = Vec::new();
        for t in prefix..text.len() {
            let part = text.tokens(t..t + 1);
            let position = TensorData::new(vec![t as i32], [1]);
            let position = Tensor::from_data(position, (&**on, DType::I32));
            let memory = KvMemory::At(&mut cache, &position);
            let attention = memory.attend_latent(part.query.on(on), part.key.on(on), 64).unwrap();
            outputs.push(Host::of(attention.output));
        }
        let all = Host { data: vec![], shape: text.query.shape };
        let [batch, heads, tokens, _] = all.shape;
        let want: Vec<f64> = text
            .expected(RowOptions::default())
            .chunks(tokens * text.value_dim)
            .take(batch * heads)
            .flat_map(|slice| slice[prefix * text.value_dim..].to_vec())
            .collect();
        close(name, &Host::cat(&outputs), &want, CLOSE);
    }
}

fn sequences_of_different_lengths<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>(NAMES) {
        let text = Text::new(name, [3, 4, 80], (96, 64), 50);
        let mut cache = text.cache(on);
        // Steps for few tokens, chunks for many, and a sequence that takes no part.
        let calls = [[30, 12, 0], [3, 8, 5], [0, 1, 1], [20, 59, 40]];
        let mut outputs = vec![Vec::new(); 3];
        let mut lens = [0; 3];
        for counts in calls {
            let most = counts.into_iter().max().unwrap();
            let rows = |host: &Host| {
                let [_, heads, tokens, width] = host.shape;
                let mut rows = Vec::new();
                for (sequence, slices) in host.data.chunks(heads * tokens * width).enumerate() {
                    for slice in slices.chunks(tokens * width) {
                        let part = &slice[lens[sequence] * width..];
                        let n = most.min(tokens - lens[sequence]) * width;
                        rows.extend_from_slice(&part[..n]);
                        // Padding may hold anything.
                        rows.resize(rows.len() + most * width - n, 1e30);
                    }
                }
                Host { data: rows, shape: [3, heads, most, width] }
            };
            let (query, key) = (rows(&text.query).on(on), rows(&text.key).on(on));
            let memory = KvMemory::Ragged(&mut cache, &counts);
            let got = Host::of(memory.attend_latent(query, key, 64).unwrap().output);
            for (sequence, n) in counts.into_iter().enumerate() {
                let [_, heads, _, _] = got.shape;
                let slice = heads * most * 64;
                let data = got.data[sequence * slice..][..slice].to_vec();
                let one = Host { data, shape: [1, heads, most, 64] };
                if n > 0 {
                    outputs[sequence].push(one.tokens(0..n));
                }
                lens[sequence] += n;
            }
        }
        let want = text.expected(RowOptions::default());
        let slices: Vec<_> = want.chunks(80 * 64).collect();
        for (sequence, parts) in outputs.iter().enumerate() {
            let got = Host::cat(parts);
            let [_, heads, tokens, _] = got.shape;
            let want = slices[sequence * heads..][..heads].iter();
            let want: Vec<f64> = want.flat_map(|slice| slice[..tokens * 64].to_vec()).collect();
            close(format!("{name}, sequence {sequence}"), &got, &want, CLOSE);
        }
    }
}

/// A resized, saved, selected, joined, admitted or forked cache gives what the original gives.
fn a_prefix_continues_in_every_copy<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>(NAMES) {
        let text = Text::new(name, [1, 4, 100], (96, 64), 60);
        let (start, rest) = (text.tokens(0..57), text.tokens(57..100));
        let mut cache = text.cache(on);
        start.attend(&mut cache, &[57], on);
        let mut original = cache.clone();
        let want = wide(&rest.attend(&mut original, &[3, 40], on).data);
        let short = cache.resized(57).unwrap();
        let parts = short.clone().into_parts();
        let config = text.config.with_capacity(57);
        let saved = KvCache::from_parts(&config, text.shape(), parts).unwrap();
        let joined = KvCache::join(&[cache.clone(), cache.clone()]).unwrap();
        let mut batch = joined.clone();
        batch.remove(0).unwrap();
        batch.fork(1, 0).unwrap();
        let mut admitted = joined.clone();
        admitted.remove(1).unwrap();
        admitted.admit(1, &cache).unwrap();
        let copies = [
            ("resized", short.resized(100).unwrap()),
            ("saved", saved.resized(100).unwrap()),
            ("selected", joined.select(&[1]).unwrap()),
            ("forked", batch.select(&[0]).unwrap()),
            ("admitted", admitted.select(&[1]).unwrap()),
        ];
        for (what, mut copy) in copies {
            let got = rest.attend(&mut copy, &[3, 40], on);
            close(format!("{name} {what}"), &got, &want, CLOSE);
            assert!(snapshot(&copy) == snapshot(&original), "{name}: {what}");
        }
    }
}

fn restored_tokens_return_to_float<T: Target>(on: &On<T>) {
    let text = Text::new("kint8vint8-r8", [1, 4, 60], (96, 64), 70);
    let mut cache = text.cache(on);
    text.attend(&mut cache, &[60], on);
    cache.truncate(0, 50).unwrap();
    assert_eq!((cache.len(), cache.quantized_counts().keys), (50, 42));
    // What was appended again is as before, but for the rounding of restored tokens.
    let rest = text.tokens(50..60);
    let got = rest.attend(&mut cache, &[10], on);
    let want = text.expected(RowOptions::default());
    let want: Vec<f64> = want.chunks(60 * 64).flat_map(|slice| slice[50 * 64..].to_vec()).collect();
    // A restored token is off by half a step of int8, 1/254 of its largest channel.
    close("truncated", &got, &want, 0.05);
}

fn bytes_are_those_of_keys<T: Target>(on: &On<T>) {
    // DeepSeek-V3: 576 numbers per token; 4 bits and a word of parameters per 64 tokens.
    let shape = CacheShape::new(1, 1, Sides { keys: 576, values: 512 }).with_shared_values();
    let config: KvCacheConfig = "k4v4-g64-r64-f16".parse().unwrap();
    let bytes = KvCache::new(&config.with_capacity(4096), shape, on).unwrap().memory_bytes();
    // A tensor is not empty: four words stand for the values.
    assert_eq!((bytes.keys, bytes.values), (4096 * 576 / 2 + 4096 / 64 * 576 * 4, 16));
    assert_eq!(bytes.floats, 64 * 576 * 2);
    let float: KvCacheConfig = "float-f16".parse().unwrap();
    let bytes = KvCache::new(&float.with_capacity(4096), shape, on).unwrap().memory_bytes();
    assert_eq!(bytes.floats, 4096 * 576 * 2);
}

fn only_the_format_of_keys_counts<T: Target>(on: &On<T>) {
    let text = Text::new("k4v4-g16-r32", [1, 4, 90], (96, 64), 80);
    let run = |name: &str| {
        let config: KvCacheConfig = name.parse().unwrap();
        let text = Text { config: config.with_capacity(90), ..text.tokens(0..90) };
        let mut cache = text.cache(on);
        text.attend(&mut cache, &[50, 40], on);
        snapshot(&cache)
    };
    let expected = run("k4v4-g16-r32");
    for name in ["k4v2-g16-r32", "k4v16-g16-r32", "k4v4-g16-r32-hadv", "k4vint8-g16-r32"] {
        assert!(run(name) == expected, "{name}");
    }
}

/// [`KvCache::attend`] does not read the values that it is given, whatever they are.
fn given_values_are_ignored<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>(["float", "k4v4-g16-r32", "kint8vint8"]) {
        let text = Text::new(name, [1, 4, 60], (96, 64), 90);
        let want = text.attend(&mut text.cache(on), &[40, 5, 15], on);
        let mut cache = text.cache(on);
        let mut start = 0;
        let outputs = [40, 5, 15].map(|n| {
            let part = text.tokens(start..start + n);
            start += n;
            let [batch, n_kv_heads, tokens, _] = part.key.shape;
            let shape = [batch, n_kv_heads, tokens, 64];
            let value = Host { data: vec![f32::NAN; shape.iter().product()], shape };
            let output = cache.attend(part.query.on(on), part.key.on(on), value.on(on));
            Host::of(output.unwrap().output)
        });
        assert!(Host::cat(&outputs) == want, "{name}");
    }
}

/// A sum of weighted values must not overflow where their mean does not.
fn numbers_near_the_largest_stay_finite<T: Target>(on: &On<T>) {
    for name in sampled::<T, _>(["float", "kint8vint8", "k8v8-g16-r16"]) {
        let mut text = Text::new(name, [1, 4, 90], (96, 64), 95);
        // Queries do not read the large channels, which are the values.
        let query = &mut text.query.data;
        query.chunks_mut(96).for_each(|row| row[..64].fill(0.0));
        for row in text.key.data.chunks_mut(96) {
            // Quantization takes differences, which must not overflow, either.
            row[..64].iter_mut().for_each(|x| *x = (2.0 + x.clamp(-1.0, 1.0)) * 1e37);
        }
        let want = text.expected(RowOptions::default());
        for sizes in [vec![1; text.len()], vec![70, 1, 19]] {
            let got = text.attend(&mut text.cache(on), &sizes, on);
            close(name, &got, &want, CLOSE);
        }
    }
}

fn what_does_not_fit_is_an_error<T: Target>(on: &On<T>) {
    let head_dim = Sides { keys: 96, values: 64 };
    let shape = CacheShape::new(1, 1, head_dim);
    let fails = |name: &str, head_dim: (usize, usize), expected: &str| {
        let (keys, values) = head_dim;
        let shape = CacheShape::new(1, 1, Sides { keys, values }).with_shared_values();
        let error = KvCache::new(&name.parse().unwrap(), shape, on).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
        assert!(!error.contains('\n'), "{error}");
    };
    fails("k4v4", (64, 96), "must be 1 to 64");
    fails("k4v4", (64, 0), "must be 1 to 64");
    fails("kint8vint8-hadk", (64, 32), "which a Hadamard transform would mix");
    fails("kvn2vvn2", (64, 64), "which a Hadamard transform would mix");
    fails("ktq4vtq4", (64, 64), "which a Hadamard transform would mix");
    let frames = FrameConfig::new("kint8vint8".parse().unwrap(), 4, Frames(2));
    let error = FrameCache::new(&frames, shape.with_shared_values(), on).unwrap_err();
    assert!(error.to_string().contains("frames store keys and values separately"), "{error}");

    let (q, k) = (Host::normal(&mut Rng::new(1), [1, 2, 1, 96]), [1, 1, 1, 96]);
    let k = Host::normal(&mut Rng::new(2), k);
    let mut apart = KvCache::new(&KvCacheConfig::float(), shape, on).unwrap();
    let error = KvMemory::Cached(&mut apart).attend_latent(q.on(on), k.on(on), 64);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("stores values separately"), "{error}");
    assert_eq!(apart.len(), 0);
    let mut shared = KvCache::new(&KvCacheConfig::float(), shape.with_shared_values(), on).unwrap();
    for value_dim in [0, 97] {
        let error = KvMemory::Cached(&mut shared).attend_latent(q.on(on), k.on(on), value_dim);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("must be 1 to 96"), "{error}");
    }
    let error = KvMemory::Cached(&mut shared).attend_latent(q.on(on), k.on(on), 32);
    assert!(error.unwrap_err().to_string().contains("value"));
    assert!(!KvMemory::Cached(&mut shared).applies_rope());
    assert_eq!(shared.len(), 0);
    assert!(shared.packed(Side::Values).is_none());
}

/// Gradients against those of attention with values of their own, whose gradient is added to that
/// of the first channels of keys.
#[cfg(feature = "autodiff")]
mod gradients {
    use kv_cubecl::SteGradient;

    use super::*;
    use crate::common::stamp_autodiff;

    stamp_autodiff!(gradients_reach_both_uses_of_a_key, quantized_keys_pass_gradients_on);

    fn slopes<T: Target>(on: &On<T>, text: &Text, grad: &Host) -> [Host; 2] {
        let [query, key] = [&text.query, &text.key].map(|host| host.on(on).require_grad());
        let (options, fake_quant) = (AttentionOptions::default(), FakeQuantOptions::default());
        let (q, k, d) = (query.clone(), key.clone(), text.value_dim);
        let out = streaming_attention_latent(q, k, d, &text.config, fake_quant, options).unwrap();
        let grads = (out.output * grad.on(on)).sum().backward();
        [query, key].map(|tensor| Host::of(tensor.grad(&grads).unwrap()))
    }

    fn grad_of(text: &Text, seed: u64) -> Host {
        let [batch, heads, tokens, _] = text.query.shape;
        Host::normal(&mut Rng::new(seed), [batch, heads, tokens, text.value_dim])
    }

    fn gradients_reach_both_uses_of_a_key<T: Target>(on: &On<T>) {
        for head_dim in [(96, 64), (576, 512)] {
            let text = Text::new("float", [1, 4, 40], head_dim, 90);
            let grad = grad_of(&text, 91);
            let [query, key] = slopes(on, &text, &grad);
            let width = head_dim.0;
            let values: Vec<f32> =
                text.key.data.chunks(width).flat_map(|row| row[..head_dim.1].to_vec()).collect();
            let want = reference::stream_gradients(
                (&text.query.data, text.query.shape),
                (&text.key.data, text.key.shape),
                &values,
                &grad.f64(),
                &text.config,
                SteGradient::Identity,
            );
            let mut of_keys = want.key;
            let rows = of_keys.chunks_mut(width).zip(want.value.chunks(head_dim.1));
            for (key, value) in rows {
                key.iter_mut().zip(value).for_each(|(key, value)| *key += value);
            }
            // Sums of several hundred products of order one, as for outputs, twice.
            close("query", &query, &want.query, 2.0 * CLOSE);
            close("key", &key, &of_keys, 2.0 * CLOSE);
        }
    }

    /// Where all rows see the same codes, the gradient is that of float attention over the restored
    /// keys.
    fn quantized_keys_pass_gradients_on<T: Target>(on: &On<T>) {
        let text = Text::new("kint8vint8", [1, 4, 40], (96, 64), 92);
        let grad = grad_of(&text, 93);
        let quantized = slopes(on, &text, &grad);
        let restored =
            reference::fake_quantize_side(&text.key.data, text.key.shape, Side::Keys, &text.config);
        let key = Host { data: restored, shape: text.key.shape };
        let config = KvCacheConfig::float().with_capacity(40);
        let float = Text { config, key, ..text.tokens(0..40) };
        for (got, want) in quantized.iter().zip(slopes(on, &float, &grad)) {
            close("gradient", got, &want.f64(), CLOSE);
        }
    }
}
