//! Random sequences of everything a cache can do, against lists of tokens.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{
    CacheShape, Error, KvCache, KvCacheConfig, On, QuantizedCounts, Side, Target,
    reference::StreamOracle,
};

use crate::common::{CLOSE, Host, Rng, close, stamp};

stamp!(any_operations);

const HEAD_DIM: usize = 16;
const N_HEADS: usize = 2;
const N_KV_HEADS: usize = 1;

/// The keys and values of one sequence, token by token, each `[n_kv_heads, head_dim]`.
#[derive(Clone, Debug, Default)]
struct Sequence {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl Sequence {
    /// What the oracle says to the last `queries`, each `[n_heads, head_dim]`, and its counts after the last
    /// token: `[tokens, n_heads, head_dim]`.
    fn attend(&self, config: &KvCacheConfig, queries: &[Vec<f32>]) -> (Vec<f64>, QuantizedCounts) {
        let shape = CacheShape::new(1, N_KV_HEADS, HEAD_DIM);
        let mut oracle = StreamOracle::new(config, shape);
        let first = self.keys.len() - queries.len();
        let (mut output, mut counts) = (Vec::new(), QuantizedCounts::default());
        for (t, (key, value)) in self.keys.iter().zip(&self.values).enumerate() {
            counts = match t.checked_sub(first) {
                Some(row) => {
                    let (rows, counts) = oracle.step(&queries[row], key, value);
                    output.extend(rows);
                    counts
                }
                None => oracle.append(key, value),
            };
        }
        (output, counts)
    }
}

/// A cache and what it should hold.
#[derive(Clone)]
struct Pair {
    cache: KvCache,
    sequences: Vec<Sequence>,
}

/// Tokens for all sequences of a batch.
struct Chunk {
    /// By sequence, then by token.
    queries: Vec<Vec<Vec<f32>>>,
    keys: Vec<Vec<Vec<f32>>>,
    values: Vec<Vec<Vec<f32>>>,
}

impl Chunk {
    fn random(rng: &mut Rng, batch: usize, tokens: usize) -> Self {
        let mut side = |heads: usize| -> Vec<Vec<Vec<f32>>> {
            let mut token = || (0..heads * HEAD_DIM).map(|_| rng.normal()).collect();
            (0..batch).map(|_| (0..tokens).map(|_| token()).collect()).collect()
        };
        Self { queries: side(N_HEADS), keys: side(N_KV_HEADS), values: side(N_KV_HEADS) }
    }

    /// `[batch, heads, tokens, head_dim]`.
    fn on<T: Target>(&self, on: &On<T>) -> [Tensor<4>; 3] {
        [&self.queries, &self.keys, &self.values].map(|side| {
            let (batch, tokens) = (side.len(), side[0].len());
            let heads = side[0][0].len() / HEAD_DIM;
            let mut data = Vec::new();
            for sequence in side {
                for head in 0..heads {
                    for token in sequence {
                        data.extend_from_slice(&token[head * HEAD_DIM..][..HEAD_DIM]);
                    }
                }
            }
            Host { data, shape: [batch, heads, tokens, HEAD_DIM] }.on(on)
        })
    }

    fn append_to(&self, sequences: &mut [Sequence]) {
        for (i, sequence) in sequences.iter_mut().enumerate() {
            sequence.keys.extend_from_slice(&self.keys[i]);
            sequence.values.extend_from_slice(&self.values[i]);
        }
    }

    /// What attention to this chunk, which `sequences` end with, should give.
    fn expected(&self, config: &KvCacheConfig, sequences: &[Sequence]) -> Vec<f64> {
        let mut expected = Vec::new();
        for (sequence, queries) in sequences.iter().zip(&self.queries) {
            let (output, _) = sequence.attend(config, queries);
            for head in 0..N_HEADS {
                for token in output.chunks(N_HEADS * HEAD_DIM) {
                    expected.extend_from_slice(&token[head * HEAD_DIM..][..HEAD_DIM]);
                }
            }
        }
        expected
    }
}

/// One sequence of operations. What it did is in the messages.
fn run<T: Target>(on: &On<T>, seed: u64) {
    let rng = &mut Rng::new(seed);
    let names = [
        "float",
        "k2v2-g16-r16",
        "k4v4-g8-r8",
        "k8v2-g16-r32-s3",
        "k4v8-g16-r16-s5-after",
        "k16v4-g8-r8-after",
        "k2v16-g16-r16-s1",
        "k8v8-g4-r4",
        "k4v4-g8-r24-slide",
        "k4v4-g8-r8-hadv",
        "k2v4-g16-r32-s3-after-slide",
        "float-s2-w9",
        "k4v4-g8-r8-w8",
        "k4v4-g8-r16-s1-w21-slide",
        "k2v4-g16-r16-s3-w20-after",
        "k16v4-g8-r8-w11-hadv",
    ];
    let config: KvCacheConfig = names[rng.below(names.len())].parse().unwrap();
    let config = config.with_capacity(1 + rng.below(70));
    let capacity = config.capacity;
    let batch = 1 + rng.below(2);
    let shape = CacheShape::new(batch, N_KV_HEADS, HEAD_DIM);
    let cache = KvCache::new(&config, shape, on).unwrap();
    let mut pool = vec![Pair { cache, sequences: vec![Sequence::default(); batch] }];
    let mut story = format!("seed {seed}, {config}, capacity {capacity}:");
    for _ in 0..12 {
        let which = rng.below(pool.len());
        let operation = rng.below(10);
        let mut pair = pool[which].clone();
        let Pair { cache, sequences } = &mut pair;
        let lens: Vec<usize> = sequences.iter().map(|sequence| sequence.keys.len()).collect();
        let (longest, even) = (*lens.iter().max().unwrap(), lens.iter().all(|&n| n == lens[0]));
        let tokens = if even { 1 + rng.below(14) } else { 1 };
        story += &format!(" [{which}: op {operation}, {tokens} to {lens:?}]");
        match operation {
            // Attend, look ahead, append.
            0..=4 => {
                let chunk = Chunk::random(rng, sequences.len(), tokens);
                let [q, k, v] = chunk.on(on);
                let result = match operation {
                    0..=2 => cache.attend(q, k, v).map(Some),
                    3 => cache.peek(q, k, v).map(Some),
                    _ => cache.append(k, v).map(|()| None),
                };
                if longest + tokens > capacity {
                    let full = Error::CapacityExceeded { len: longest, added: tokens, capacity };
                    assert_eq!(result.unwrap_err(), full, "{story}");
                } else if !even && operation > 2 {
                    assert!(matches!(result, Err(Error::Unsupported { .. })), "{story}");
                } else {
                    let mut longer = sequences.clone();
                    chunk.append_to(&mut longer);
                    if let Some(attention) = result.unwrap() {
                        let expected = chunk.expected(&config, &longer);
                        close(&story, &Host::of(attention.output), &expected, CLOSE);
                    }
                    if operation != 3 {
                        *sequences = longer;
                    }
                }
            }
            // A step at positions that the device holds.
            5 => {
                if longest < capacity {
                    let chunk = Chunk::random(rng, sequences.len(), 1);
                    let [q, k, v] = chunk.on(on);
                    let positions: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
                    let positions = TensorData::new(positions, [lens.len()]);
                    let positions = Tensor::<1, Int>::from_data(positions, (&**on, DType::I32));
                    let output = cache.attend_at(q, k, v, &positions).unwrap().output;
                    cache.advance(1).unwrap();
                    chunk.append_to(sequences);
                    let expected = chunk.expected(&config, sequences);
                    close(&story, &Host::of(output), &expected, CLOSE);
                }
            }
            // Sequences chosen, of which some may be the same.
            6 => {
                let chosen: Vec<usize> =
                    (0..1 + rng.below(3)).map(|_| rng.below(sequences.len())).collect();
                *cache = cache.select(&chosen).unwrap();
                *sequences = chosen.iter().map(|&index| sequences[index].clone()).collect();
            }
            // Two batches in one.
            7 => {
                let other = &pool[rng.below(pool.len())];
                if sequences.len() + other.sequences.len() <= 4 {
                    *cache = KvCache::join(&[cache.clone(), other.cache.clone()]).unwrap();
                    sequences.extend(other.sequences.iter().cloned());
                }
            }
            8 => {
                let shape = cache.layout().shape();
                let parts = cache.clone().into_parts();
                *cache = KvCache::from_parts(&config, shape, parts).unwrap();
            }
            _ => {
                cache.reset();
                sequences.fill(Sequence::default());
            }
        }
        check(&pair, &config, &story);
        // A clone shares memory with what it came from until either is written.
        match pool.len() < 3 && rng.below(3) == 0 {
            true => pool.push(pair),
            false => pool[which] = pair,
        }
    }
    pool.iter().for_each(|pair| check(pair, &config, &story));
}

/// Lengths, counts and codes are those of the sequences.
fn check(Pair { cache, sequences }: &Pair, config: &KvCacheConfig, story: &str) {
    let lens: Vec<usize> = sequences.iter().map(|sequence| sequence.keys.len()).collect();
    assert_eq!(cache.lens(), lens, "{story}");
    for (i, sequence) in sequences.iter().enumerate() {
        let (_, counts) = sequence.attend(config, &[]);
        let one = cache.select(&[i]).unwrap();
        assert_eq!(one.quantized_counts(), counts, "{story}: sequence {i}");
        let sides = one.layout().sides();
        for (side, tokens) in [(Side::Keys, &sequence.keys), (Side::Values, &sequence.values)] {
            let packed = one.packed(side);
            assert_eq!(packed.is_some(), counts[side] > 0, "{story}: {side} of sequence {i}");
            let (Some(packed), Some(spec)) = (packed, sides[side].spec) else { continue };
            let rotates = side == Side::Values && config.rotates_values();
            let tokens = tokens.iter().map(|token| match rotates {
                true => token.chunks(HEAD_DIM).flat_map(kv_cubecl::reference::rotate).collect(),
                false => token.clone(),
            });
            // A window leaves those that it shows, or a few more.
            let seen = config.window.map_or(0, |window| lens[i].saturating_sub(window));
            let first = counts[side] - packed.shape()[2];
            assert!(config.sink_tokens + first <= seen.max(config.sink_tokens), "{story}");
            let quantized: Vec<Vec<f32>> =
                tokens.skip(config.sink_tokens + first).take(counts[side] - first).collect();
            let shape = [1, N_KV_HEADS, quantized.len(), HEAD_DIM];
            let (granularity, n_bits) = (spec.granularity, spec.n_bits);
            let expected = kv_cubecl::reference::quantize(
                &quantized.concat(),
                shape,
                granularity,
                n_bits,
                spec.group_size,
            );
            assert!(packed.to_logical() == expected, "{story}: {side} of sequence {i}");
        }
    }
}

fn any_operations<T: Target>(on: &On<T>) {
    // Where a kernel is compiled for every configuration, a part of them.
    let n = if T::NAME == "flex" { 1500 } else { 40 };
    (0..n).for_each(|seed| run(on, seed));
}
