//! Random sequences of everything a cache can do, against lists of tokens.

use burn::tensor::{DType, Int, Tensor, TensorData};
use kv_cubecl::{CacheShape, Error, Flush, KvCache, KvCacheConfig, On, Side, Target};

use self::sequence::Sequence;
use crate::{
    common::{CLOSE, Host, Rng, close, sample, stamp, windows},
    ragged::poison,
};

mod sequence;

stamp!(any_operations);

const HEAD_DIM: usize = 16;
const N_HEADS: usize = 2;
const N_KV_HEADS: usize = 1;
/// Operations of a run.
const OPERATIONS: usize = 12;

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

    /// Makes all but the first tokens of each sequence NaN: they take no part.
    fn poison_after(&mut self, tokens: &[usize]) {
        for side in [&mut self.queries, &mut self.keys, &mut self.values] {
            for (sequence, &n) in side.iter_mut().zip(tokens) {
                sequence[n..].iter_mut().for_each(|token| token.fill(f32::NAN));
            }
        }
    }

    /// Appends the first `tokens` of each sequence.
    fn append_to(&self, sequences: &mut [Sequence], tokens: &[usize]) {
        for (i, sequence) in sequences.iter_mut().enumerate() {
            sequence.keys.extend_from_slice(&self.keys[i][..tokens[i]]);
            sequence.values.extend_from_slice(&self.values[i][..tokens[i]]);
        }
    }

    /// Returns the expected attention to the first `tokens` of each sequence of this chunk, which
    /// ends `sequences`; zeros for the others.
    fn expected(
        &self,
        config: &KvCacheConfig,
        sequences: &[Sequence],
        tokens: &[usize],
    ) -> Vec<f64> {
        let mut expected = Vec::new();
        for ((sequence, queries), &n) in sequences.iter().zip(&self.queries).zip(tokens) {
            let (output, _) = sequence.attend(config, &queries[..n]);
            for head in 0..N_HEADS {
                for token in output.chunks(N_HEADS * HEAD_DIM) {
                    expected.extend_from_slice(&token[head * HEAD_DIM..][..HEAD_DIM]);
                }
                expected.resize(expected.len() + (queries.len() - n) * HEAD_DIM, 0.0);
            }
        }
        expected
    }
}

/// One sequence of operations. What it did is in the messages.
struct Run<'a, T: Target> {
    on: &'a On<T>,
    rng: Rng,
    config: KvCacheConfig,
    story: String,
}

impl<T: Target> Run<'_, T> {
    fn new(on: &On<T>, seed: u64) -> Run<'_, T> {
        let mut rng = Rng::new(seed);
        let names = [
            "float",
            "k2v2-g16-r16",
            "k4v4-g8-r8",
            "k8v2-g16-r32-s3",
            "k4v8-g16-r16-s5",
            "k16v4-g8-r8",
            "k2v16-g16-r16-s1",
            "k8v8-g4-r4",
            "k4v4-g8-r24",
            "k4v4-g8-r8-hadv",
            "k2v4-g16-r32-s3",
            "float-s2-w9",
            "k4v4-g8-r8-w8",
            "k4v4-g8-r16-s1-w21",
            "k2v4-g16-r16-s3-w20",
            "k16v4-g8-r8-w11-hadv",
            "kint8vint8",
            "kint8vint8-r5-s2-w13",
            "kint8v4-g8-r8-w17",
            "ke4m3ve5m2-w9-hadk",
        ];
        let config: KvCacheConfig = names[rng.below(names.len())].parse().unwrap();
        let after = rng.below(2) == 1;
        let by_group = config.keys.is_grouped() && rng.below(2) == 0;
        let config = config.with_flush(Flush::new(after, by_group));
        let windows = windows(&config, HEAD_DIM);
        let config = match rng.below(2) == 0 && !windows.is_empty() {
            true => config.with_sliding_window(Some(windows[rng.below(windows.len())])),
            false => config,
        };
        let config = config.with_capacity(1 + rng.below(70));
        let story = format!("seed {seed}, {config}, capacity {}:", config.capacity);
        Run { on, rng, config, story }
    }

    fn go(&mut self) {
        let batch = 1 + self.rng.below(3);
        let shape = CacheShape::new(batch, N_KV_HEADS, HEAD_DIM);
        let cache = KvCache::new(&self.config, shape, self.on).unwrap();
        let mut pool = vec![Pair { cache, sequences: vec![Sequence::default(); batch] }];
        for _ in 0..OPERATIONS {
            let which = self.rng.below(pool.len());
            let operation = self.rng.below(23);
            let mut pair = pool[which].clone();
            self.story += &format!(" [{which}: op {operation} on {:?}", pair.cache.lens());
            match operation {
                0..=4 => self.grow(&mut pair, operation),
                5 => self.step(&mut pair),
                6 => self.select(&mut pair),
                7 => {
                    let other = &pool[self.rng.below(pool.len())];
                    if pair.sequences.len() + other.sequences.len() <= 4 {
                        let both = [pair.cache, other.cache.clone()];
                        pair.cache = KvCache::join(&both).unwrap();
                        pair.sequences.extend(other.sequences.iter().cloned());
                    }
                }
                8 => {
                    let shape = pair.cache.layout().shape();
                    let parts = pair.cache.into_parts();
                    pair.cache = KvCache::from_parts(&self.config, shape, parts).unwrap();
                }
                9 => {
                    pair.cache.reset();
                    pair.sequences.fill(Sequence::default());
                }
                10..=13 => self.grow_ragged(&mut pair, operation),
                14 => self.remove(&mut pair),
                15 => {
                    let other = &pool[self.rng.below(pool.len())];
                    self.admit(&mut pair, other);
                }
                16 => self.fork(&mut pair),
                17..=19 => {
                    self.truncate(&mut pair);
                    self.grow_ragged(&mut pair, 10);
                }
                _ => self.draft(&mut pair),
            }
            self.story += "]";
            check(&pair, &self.config, &self.story);
            // A clone shares memory with what it came from until either is written.
            match pool.len() < 3 && self.rng.below(3) == 0 {
                true => pool.push(pair),
                false => pool[which] = pair,
            }
        }
        pool.iter().for_each(|pair| check(pair, &self.config, &self.story));
    }

    /// Attends, looks ahead or appends, the same number of tokens to all.
    fn grow(&mut self, Pair { cache, sequences }: &mut Pair, operation: usize) {
        let tokens = 1 + self.rng.below(14);
        self.story += &format!(", {tokens}");
        let chunk = Chunk::random(&mut self.rng, sequences.len(), tokens);
        let [q, k, v] = chunk.on(self.on);
        let result = match operation {
            0..=2 => cache.attend(q, k, v).map(Some),
            3 => cache.peek(q, k, v).map(Some),
            _ => cache.append(k, v).map(|()| None),
        };
        let lens = lens(sequences);
        let (len, capacity) = (lens.iter().copied().max().unwrap(), self.config.capacity);
        if len + tokens > capacity {
            let full = Error::CapacityExceeded { len, added: tokens, capacity };
            assert_eq!(result.unwrap_err(), full, "{}", self.story);
            return;
        }
        if operation == 3 && lens.iter().any(|&n| n != lens[0]) {
            assert!(matches!(result, Err(Error::Unsupported { .. })), "{}", self.story);
            return;
        }
        let mut longer = sequences.clone();
        let tokens = vec![tokens; lens.len()];
        chunk.append_to(&mut longer, &tokens);
        if let Some(attention) = result.unwrap() {
            let expected = chunk.expected(&self.config, &longer, &tokens);
            close(&self.story, &Host::of(attention.output), &expected, CLOSE);
        }
        if operation != 3 {
            *sequences = longer;
        }
    }

    /// A step at positions that the device holds.
    fn step(&mut self, Pair { cache, sequences }: &mut Pair) {
        let lens = lens(sequences);
        if lens.iter().any(|&len| len >= self.config.capacity) {
            return;
        }
        let chunk = Chunk::random(&mut self.rng, lens.len(), 1);
        let [q, k, v] = chunk.on(self.on);
        let positions: Vec<i32> = lens.iter().map(|&len| len as i32).collect();
        let positions = TensorData::new(positions, [lens.len()]);
        let positions = Tensor::<1, Int>::from_data(positions, (&**self.on, DType::I32));
        let output = cache.attend_at(q, k, v, &positions).unwrap().output;
        cache.advance(1).unwrap();
        let tokens = vec![1; lens.len()];
        chunk.append_to(sequences, &tokens);
        let expected = chunk.expected(&self.config, sequences, &tokens);
        close(&self.story, &Host::of(output), &expected, CLOSE);
    }

    /// Selects sequences, possibly the same one several times.
    fn select(&mut self, Pair { cache, sequences }: &mut Pair) {
        let n = 1 + self.rng.below(4);
        let chosen: Vec<usize> = (0..n).map(|_| self.rng.below(sequences.len())).collect();
        *cache = cache.select(&chosen).unwrap();
        *sequences = chosen.iter().map(|&index| sequences[index].clone()).collect();
    }

    /// Attends or appends, another number of tokens to each.
    fn grow_ragged(&mut self, Pair { cache, sequences }: &mut Pair, operation: usize) {
        let capacity = self.config.capacity;
        let longest = [1, 3, 20][self.rng.below(3)];
        let tokens: Vec<usize> =
            sequences.iter().map(|_| self.rng.below(longest + 1).min(capacity)).collect();
        let m = tokens.iter().max().unwrap().max(&1) + self.rng.below(2);
        self.story += &format!(", {tokens:?} of {m}");
        let mut chunk = Chunk::random(&mut self.rng, sequences.len(), m);
        chunk.poison_after(&tokens);
        let [q, k, v] = chunk.on(self.on);
        let result = match operation {
            13 => cache.append_ragged(k, v, &tokens).map(|()| None),
            _ => cache.attend_ragged(q, k, v, &tokens).map(Some),
        };
        let lens = lens(sequences);
        if let Some(sequence) = (0..lens.len()).find(|&i| lens[i] + tokens[i] > capacity) {
            let (len, added) = (lens[sequence], tokens[sequence]);
            let full = Error::SequenceFull { sequence, len, added, capacity };
            assert_eq!(result.unwrap_err(), full, "{}", self.story);
            return;
        }
        chunk.append_to(sequences, &tokens);
        if let Some(attention) = result.unwrap() {
            let expected = chunk.expected(&self.config, sequences, &tokens);
            close(&self.story, &Host::of(attention.output), &expected, CLOSE);
        }
    }

    /// Attends with another number of tokens to each, and keeps some of them.
    fn draft(&mut self, Pair { cache, sequences }: &mut Pair) {
        let longest = [3, 8, 20][self.rng.below(3)];
        let free = |sequence: &Sequence| self.config.capacity - sequence.keys.len();
        let free: Vec<usize> = sequences.iter().map(free).collect();
        let tokens: Vec<usize> =
            free.into_iter().map(|free| self.rng.below(longest + 1).min(free)).collect();
        let m = tokens.iter().max().unwrap().max(&1) + self.rng.below(2);
        let kept: Vec<usize> = tokens.iter().map(|&n| self.rng.below(n + 1)).collect();
        self.story += &format!(", {kept:?} of {tokens:?} of {m}");
        let mut chunk = Chunk::random(&mut self.rng, sequences.len(), m);
        chunk.poison_after(&tokens);
        let [q, k, v] = chunk.on(self.on);
        let (attention, drafted) = cache.draft(q, k, v, &tokens).unwrap();
        let mut longer = sequences.clone();
        chunk.append_to(&mut longer, &tokens);
        let expected = chunk.expected(&self.config, &longer, &tokens);
        close(&self.story, &Host::of(attention.output), &expected, CLOSE);
        cache.keep(drafted, &kept).unwrap();
        chunk.append_to(sequences, &kept);
    }

    /// A sequence removed, and in half of the cases what is left of it overwritten.
    fn remove(&mut self, Pair { cache, sequences }: &mut Pair) {
        let sequence = self.rng.below(sequences.len());
        self.story += &format!(", {sequence}");
        let held = !sequences[sequence].keys.is_empty();
        assert_eq!(cache.remove(sequence).is_ok(), held, "{}", self.story);
        sequences[sequence] = Sequence::default();
        if self.rng.below(2) == 0 {
            *cache = poison(cache, sequence);
        }
    }

    /// A sequence of another cache, where there is room for it.
    fn admit(&mut self, Pair { cache, sequences }: &mut Pair, other: &Pair) {
        let slot = self.rng.below(sequences.len());
        let from = self.rng.below(other.sequences.len());
        self.story += &format!(", {from} to {slot}");
        let new = &other.sequences[from];
        let fits = sequences[slot].keys.is_empty() && !new.keys.is_empty();
        let alone = other.cache.select(&[from]).unwrap();
        assert_eq!(cache.admit(slot, &alone).is_ok(), fits, "{}", self.story);
        if fits {
            sequences[slot] = new.clone();
        }
    }

    fn fork(&mut self, Pair { cache, sequences }: &mut Pair) {
        let [from, to] = [0; 2].map(|_| self.rng.below(sequences.len()));
        self.story += &format!(", {from} to {to}");
        let fits = !sequences[from].keys.is_empty() && sequences[to].keys.is_empty();
        assert_eq!(cache.fork(from, to).is_ok(), fits, "{}", self.story);
        if fits {
            sequences[to] = sequences[from].clone();
        }
    }

    /// A sequence cut back to any length, most often one that is allowed.
    fn truncate(&mut self, Pair { cache, sequences }: &mut Pair) {
        let index = self.rng.below(sequences.len());
        let sequence = &mut sequences[index];
        let now = sequence.keys.len();
        let most = [3, 12][self.rng.below(2)];
        let len = now.saturating_sub(self.rng.below(most));
        self.story += &format!(", {index} to {len}");
        let schedule = cache.layout().schedule();
        let (then, counts) = (schedule.counts(len), schedule.counts(now));
        let truncated = cache.truncate(index, len);
        // A window that has hidden tokens has overwritten them.
        let hides = |window| now > window + self.config.sink_tokens;
        let fits = match self.config.sliding_window.is_some_and(hides) {
            true => len == now,
            // Keys that are quantized one by one are given back.
            false => then.keys == counts.keys || !self.config.keys.is_grouped(),
        };
        assert_eq!(truncated.is_ok(), fits, "{}: {truncated:?}", self.story);
        if fits {
            // What was quantized since stays what it was seen as.
            let seen = sequence.seen(&self.config);
            sequence.keys.truncate(len);
            sequence.values.truncate(len);
            let sinks = self.config.sink_tokens;
            let restored = |side: Side| sinks + then[side]..(sinks + counts[side]).min(len);
            for token in restored(Side::Values) {
                sequence.values[token].clone_from(&seen.values[token]);
            }
            for token in restored(Side::Keys) {
                sequence.keys[token].clone_from(&seen.keys[token]);
            }
        }
    }
}

fn lens(sequences: &[Sequence]) -> Vec<usize> {
    sequences.iter().map(|sequence| sequence.keys.len()).collect()
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
            let (packed, Some(spec)) = (one.packed(side), sides[side].spec) else { continue };
            // A sliding window keeps the tokens that the next token sees, and tokens that share a
            // word with them.
            let begin =
                config.sliding_window.map_or(0, |window| (lens[i] + 1).saturating_sub(window));
            let hidden = begin.saturating_sub(config.sink_tokens);
            let hidden = hidden / spec.block_tokens() * spec.block_tokens();
            let Some(packed) = packed else {
                assert!(counts[side] <= hidden, "{story}: no {side} of sequence {i}");
                continue;
            };
            let tokens = tokens.iter().map(|token| match config.uses_hadamard(side) {
                true => token.chunks(HEAD_DIM).flat_map(kv_cubecl::reference::hadamard).collect(),
                false => token.clone(),
            });
            let first = counts[side] - packed.shape()[2];
            assert!(first <= hidden, "{story}");
            let quantized: Vec<Vec<f32>> =
                tokens.skip(config.sink_tokens + first).take(counts[side] - first).collect();
            let shape = [1, N_KV_HEADS, quantized.len(), HEAD_DIM];
            let expected =
                kv_cubecl::reference::quantize_side(&quantized.concat(), shape, side, config);
            assert!(packed.to_logical() == expected, "{story}: {side} of sequence {i}");
        }
    }
}

fn any_operations<T: Target>(on: &On<T>) {
    // Together 10,000 operations and more; where a kernel is compiled for every configuration, a
    // part of them.
    let (n, first) = sample(if T::NAME == "flex" { 1000 } else { 24 });
    (first..first + u64::from(n)).for_each(|seed| Run::new(on, seed).go());
}
