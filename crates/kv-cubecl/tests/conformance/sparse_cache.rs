//! A streaming cache of sparse attention against the closed form: any partition of a sequence into
//! calls gives the same outputs.

use burn::tensor::{Int, Tensor, TensorData};
use kv_cubecl::{
    CacheFloat, KvFormat, On, RopeTable, Target,
    sparse::{
        Compression, EntryCompressor, Gated, IndexConfig, IndexQuery, KeyCompressor, RowFormat,
        SparseCache, SparseConfig, SparseMemory, SparseTensor, Visible,
    },
};

use crate::common::{Host, Rng, chunk_sizes, close, stamp};

mod formats;

stamp!(
    any_partition_gives_the_same_outputs,
    ragged_batches_equal_sequences_alone,
    truncated_forked_and_restored_caches_continue,
    positions_on_the_device_equal_calls,
    bytes_are_those_of_the_plan,
    unused_memory_is_not_read,
);

/// f32 sums of some hundreds of products in another order, and weights of a softmax by another
/// exponential.
const TOLERANCE: f64 = 2e-5;

/// A layer, and all that it computes of a sequence before attention.
#[derive(Clone)]
pub(crate) struct Layer {
    config: SparseConfig,
    entry: Option<EntryCompressor>,
    key: Option<KeyCompressor>,
    sinks: Tensor<1>,
    /// The inputs of all tokens.
    inputs: Inputs,
}

#[derive(Clone)]
struct Inputs {
    query: Tensor<4>,
    rows: Tensor<4>,
    entries: Option<Gated>,
    keys: Option<(Gated, IndexQuery)>,
}

impl Parts for Gated {
    fn part(&self, first: usize, n: usize) -> Self {
        let [content, gate] = [&self.content, &self.gate].map(|x| x.clone().narrow(1, first, n));
        Self { content, gate }
    }

    fn sequence(&self, i: usize) -> Self {
        let [content, gate] = [&self.content, &self.gate].map(|x| x.clone().narrow(0, i, 1));
        Self { content, gate }
    }
}

/// Parts of what has a token axis.
trait Parts {
    fn part(&self, first: usize, n: usize) -> Self;
    fn sequence(&self, i: usize) -> Self;
}

impl Inputs {
    /// The tokens `first..first + n`.
    fn part(&self, first: usize, n: usize) -> Self {
        Self {
            query: self.query.clone().narrow(2, first, n),
            rows: self.rows.clone().narrow(2, first, n),
            entries: self.entries.as_ref().map(|gated| gated.part(first, n)),
            keys: self.keys.as_ref().map(|(gated, index)| {
                let query = index.query.clone().narrow(2, first, n);
                let weights = index.weights.clone().narrow(1, first, n);
                (gated.part(first, n), IndexQuery { query, weights })
            }),
        }
    }

    fn sequence(&self, i: usize) -> Self {
        Self {
            query: self.query.clone().narrow(0, i, 1),
            rows: self.rows.clone().narrow(0, i, 1),
            entries: self.entries.as_ref().map(|gated| gated.sequence(i)),
            keys: self.keys.as_ref().map(|(gated, index)| {
                let query = index.query.clone().narrow(0, i, 1);
                let weights = index.weights.clone().narrow(0, i, 1);
                (gated.sequence(i), IndexQuery { query, weights })
            }),
        }
    }
}

fn tensor<const D: usize>(
    on: &burn::tensor::Device,
    rng: &mut Rng,
    shape: [usize; D],
) -> Tensor<D> {
    let numbers = (0..shape.iter().product()).map(|_| rng.normal()).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(numbers, shape), on)
}

impl Layer {
    /// Random inputs for `tokens` tokens of `batch` sequences.
    pub(crate) fn new<T: Target>(
        on: &On<T>,
        config: SparseConfig,
        batch: usize,
        tokens: usize,
        seed: u64,
    ) -> Self {
        let (rng, heads, index_heads) = (&mut Rng::new(seed), 3, 4);
        let width = config.head_dim;
        let rope = |rng: &mut Rng, pairs: usize| {
            let angles: Vec<f32> = (0..tokens * pairs).map(|_| rng.normal()).collect();
            let row = |row: &[f32]| {
                let (cos, sin): (Vec<_>, Vec<_>) = row.iter().map(|x| (x.cos(), x.sin())).unzip();
                [cos, sin].concat()
            };
            let table: Vec<f32> = angles.chunks(pairs).flat_map(row).collect();
            let table = TensorData::new(table, [tokens, 2 * pairs]);
            RopeTable::new(Tensor::from_data(table, &**on)).unwrap()
        };
        let gated = |rng: &mut Rng, compression: &Compression, width: usize| Gated {
            content: tensor(on, rng, [batch, tokens, compression.lanes() * width]),
            gate: tensor(on, rng, [batch, tokens, compression.lanes() * width]),
        };
        let compressor = |rng: &mut Rng, compression: &Compression, width: usize| {
            let bias = tensor(on, rng, [compression.ratio, compression.lanes() * width]);
            let gain = tensor(on, rng, [width]);
            (bias, gain, rope(rng, width / 4))
        };
        let mut layer = Self {
            config,
            entry: None,
            key: None,
            sinks: tensor(on, rng, [heads]),
            inputs: Inputs {
                query: tensor(on, rng, [batch, heads, tokens, width]),
                rows: tensor(on, rng, [batch, 1, tokens, width]),
                entries: None,
                keys: None,
            },
        };
        if let Some(compression) = config.compression {
            let (bias, gain, rope) = compressor(rng, &compression, width);
            layer.entry = Some(EntryCompressor::new(compression, bias, gain, 1e-6, rope).unwrap());
            layer.inputs.entries = Some(gated(rng, &compression, width));
            if let Some(index) = config.index {
                let (bias, gain, rope) = compressor(rng, &compression, index.head_dim);
                let hadamard = index.keys.codes != KvFormat::Float;
                let key = KeyCompressor::new(compression, bias, gain, 1e-6, rope, hadamard);
                layer.key = Some(key.unwrap());
                let query = tensor(on, rng, [batch, index_heads, tokens, index.head_dim]);
                let weights = tensor(on, rng, [batch, tokens, index_heads]);
                let gated = gated(rng, &compression, index.head_dim);
                layer.inputs.keys = Some((gated, IndexQuery { query, weights }));
            }
        }
        layer
    }

    /// Passes inputs through a memory.
    fn pass(&self, mut memory: SparseMemory<'_>, inputs: Inputs) -> Tensor<4> {
        let entries = self.entry.as_ref().zip(inputs.entries);
        let entries =
            entries.map(|(compressor, gated)| memory.compress(compressor, gated).unwrap());
        let selection = self.key.as_ref().zip(inputs.keys);
        let selection =
            selection.map(|(key, (gated, query))| memory.select(key, gated, &query).unwrap());
        let visible = match (&entries, &selection) {
            (None, _) => Visible::Window,
            (Some(entries), None) => Visible::All(entries),
            (Some(entries), Some(selection)) => Visible::Selected(entries, selection),
        };
        memory.attend(inputs.query, inputs.rows, visible, Some(self.sinks.clone())).unwrap()
    }

    pub(crate) fn parallel(&self) -> Tensor<4> {
        self.pass(SparseMemory::parallel(self.config), self.inputs.clone())
    }

    /// Appends the next `n` tokens to every sequence.
    fn step(&self, cache: &mut SparseCache, n: usize) -> Tensor<4> {
        let first = cache.len();
        let added = vec![n; cache.lens().len()];
        let inputs = self.inputs.part(first, n);
        self.pass(SparseMemory::cached(cache, &added).unwrap(), inputs)
    }

    pub(crate) fn stream(&self, cache: &mut SparseCache, sizes: &[usize]) -> Tensor<4> {
        Tensor::cat(sizes.iter().map(|&n| self.step(cache, n)).collect(), 2)
    }

    pub(crate) fn cache<T: Target>(&self, on: &On<T>) -> SparseCache {
        SparseCache::new(&self.config, self.inputs.query.dims()[0], on).unwrap()
    }
}

/// Layers of all kinds, with windows that are shorter and longer than what is compressed.
pub(crate) fn configs(tokens: usize) -> Vec<SparseConfig> {
    let index =
        |top_k| IndexConfig { head_dim: 16, top_k, keys: RowFormat::float(CacheFloat::F32) };
    let window = |window| SparseConfig::new(32, window).with_capacity(tokens);
    vec![
        window(7),
        window(5).with_compression(Compression::new(8)),
        window(3).with_compression(Compression::overlapping(4)).with_index(index(5)),
        window(16).with_compression(Compression::overlapping(3)).with_index(index(40)),
        window(1).with_compression(Compression::new(1)),
        window(6).with_compression(Compression::new(5)).with_index(index(3)),
        window(4)
            .with_compression(Compression::overlapping(4))
            .with_index(index(6))
            .with_rollback(9),
        window(200).with_compression(Compression::new(64)),
    ]
}

pub(crate) fn same(what: impl core::fmt::Display, got: Tensor<4>, want: &Tensor<4>) {
    close(what, &Host::of(got), &Host::of(want.clone()).f64(), TOLERANCE);
}

fn any_partition_gives_the_same_outputs<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(1);
    let rounds = if T::NAME == "flex" { 12 } else { 2 };
    for (seed, config) in configs(90).into_iter().enumerate() {
        let layer = Layer::new(on, config, 2, 90, seed as u64);
        let want = layer.parallel();
        let partitions = [vec![1; 90], vec![90], vec![45, 45]].into_iter();
        let random = (0..rounds).map(|round| chunk_sizes(rng, 90, 1 + 5 * round));
        for sizes in partitions.chain(random.collect::<Vec<_>>()) {
            let mut cache = layer.cache(on);
            let got = layer.stream(&mut cache, &sizes);
            same(format!("{config:?} in {sizes:?}"), got, &want);
            assert_eq!((cache.len(), cache.remaining()), (90, 0));
        }
    }
}

/// Lengths 1 to 9 in one batch, in calls that skip some sequences.
fn ragged_batches_equal_sequences_alone<T: Target>(on: &On<T>) {
    for (seed, config) in configs(40).into_iter().enumerate() {
        let layer = Layer::new(on, config, 9, 40, 20 + seed as u64);
        let want = layer.parallel();
        let mut cache = layer.cache(on);
        let calls: [Vec<usize>; 4] =
            [(1..10).collect(), vec![0, 3, 0, 1, 7, 0, 2, 1, 1], vec![1; 9], vec![5; 9]];
        for added in calls {
            let lens = cache.lens().to_vec();
            let most = *added.iter().max().unwrap();
            // Each sequence has its own tokens at the front; the others are NaN.
            let padded = (0..9).map(|i| {
                let own = layer.inputs.sequence(i).part(lens[i], added[i].max(1));
                pad(own, added[i], most)
            });
            let inputs = join(padded.collect());
            let memory = SparseMemory::cached(&mut cache, &added).unwrap();
            let got = layer.pass(memory, inputs);
            for (i, &n) in added.iter().enumerate().filter(|(_, n)| **n > 0) {
                let got = got.clone().narrow(0, i, 1).narrow(2, 0, n);
                let want = want.clone().narrow(0, i, 1).narrow(2, lens[i], n);
                same(format!("{config:?}, sequence {i}"), got, &want);
            }
        }
    }
}

/// Keeps `n` tokens and appends NaN up to `most`.
fn pad(inputs: Inputs, n: usize, most: usize) -> Inputs {
    fn fill<const D: usize>(x: Tensor<D>, axis: usize, n: usize, most: usize) -> Tensor<D> {
        let mut shape = x.dims();
        shape[axis] = most - n;
        let nan = Tensor::full(shape, f32::NAN, &x.device());
        match (n, most - n) {
            (0, _) => nan,
            (_, 0) => x.narrow(axis, 0, n),
            _ => Tensor::cat(vec![x.narrow(axis, 0, n), nan], axis),
        }
    }
    let gated = |gated: Gated| Gated {
        content: fill(gated.content, 1, n, most),
        gate: fill(gated.gate, 1, n, most),
    };
    Inputs {
        query: fill(inputs.query, 2, n, most),
        rows: fill(inputs.rows, 2, n, most),
        entries: inputs.entries.map(gated),
        keys: inputs.keys.map(|(keys, IndexQuery { query, weights })| {
            let query = fill(query, 2, n, most);
            (gated(keys), IndexQuery { query, weights: fill(weights, 1, n, most) })
        }),
    }
}

/// Joins sequences to a batch.
fn join(parts: Vec<Inputs>) -> Inputs {
    fn cat<const D: usize>(parts: &[Inputs], f: impl Fn(&Inputs) -> Tensor<D>) -> Tensor<D> {
        Tensor::cat(parts.iter().map(f).collect(), 0)
    }
    Inputs {
        query: cat(&parts, |x| x.query.clone()),
        rows: cat(&parts, |x| x.rows.clone()),
        entries: parts[0].entries.as_ref().map(|_| Gated {
            content: cat(&parts, |x| x.entries.as_ref().unwrap().content.clone()),
            gate: cat(&parts, |x| x.entries.as_ref().unwrap().gate.clone()),
        }),
        keys: parts[0].keys.as_ref().map(|_| {
            let keys = |x: &Inputs| x.keys.clone().unwrap();
            let gated = Gated {
                content: cat(&parts, |x| keys(x).0.content),
                gate: cat(&parts, |x| keys(x).0.gate),
            };
            let query = cat(&parts, |x| keys(x).1.query);
            (gated, IndexQuery { query, weights: cat(&parts, |x| keys(x).1.weights) })
        }),
    }
}

fn truncated_forked_and_restored_caches_continue<T: Target>(on: &On<T>) {
    let rng = &mut Rng::new(2);
    let rounds = if T::NAME == "flex" { 40 } else { 4 };
    for (seed, config) in configs(60).into_iter().enumerate() {
        let layer = Layer::new(on, config, 1, 60, 40 + seed as u64);
        let want = layer.parallel();
        for _ in 0..rounds {
            let len = 1 + rng.below(59);
            let mut cache = layer.cache(on);
            layer.stream(&mut cache, &chunk_sizes(rng, len, 9));
            let at = format!("{config:?} after {len}");
            let rest = |cache: &SparseCache, sizes: &[usize], at: &str| {
                let (mut cache, from) = (cache.clone(), cache.len());
                if from == 60 {
                    return;
                }
                let got = layer.stream(&mut cache, sizes);
                same(at, got, &want.clone().narrow(2, from, 60 - from));
            };
            let sizes = chunk_sizes(rng, 60 - len, 7);
            // Saved with the capacity of its tokens, restored with the whole.
            let stored = cache.resized(len).unwrap();
            let parts = stored.parts();
            let part = |name: &str, _: bool| {
                let part = parts.iter().find(|part| part.name == name).unwrap();
                Ok::<_, kv_cubecl::Error>(part.tensor.clone())
            };
            let restored =
                SparseCache::from_parts(stored.config(), stored.lens().to_vec(), on, part).unwrap();
            rest(&restored.resized(60).unwrap(), &sizes, &format!("{at}, restored"));
            // A clone does not change the cache.
            rest(&cache.clone(), &sizes, &format!("{at}, cloned"));
            // As the second of three slots.
            let mut batch = SparseCache::new(&config, 3, on).unwrap();
            batch.admit(2, &cache).unwrap();
            batch.fork(2, 1).unwrap();
            batch.remove(2).unwrap();
            rest(&batch.select(&[1]).unwrap(), &sizes, &format!("{at}, forked"));
            let joined = SparseCache::join(&[batch, cache.clone()]).unwrap();
            rest(&joined.select(&[3]).unwrap(), &sizes, &format!("{at}, joined"));
            let shortest = cache.shortest(0).unwrap();
            assert!(shortest + config.rollback <= len || shortest == 0 || config.rollback == 0);
            let to = shortest + rng.below(len - shortest + 1);
            if to == 0 {
                continue;
            }
            cache.truncate(0, to).unwrap();
            rest(&cache, &chunk_sizes(rng, 60 - to, 7), &format!("{at}, cut to {to}"));
            if shortest > 1 {
                let mut cache = layer.cache(on);
                layer.stream(&mut cache, &[len]);
                let error = cache.truncate(0, shortest - 1).unwrap_err().to_string();
                assert!(
                    error.contains(&format!("len {}: must be at least", shortest - 1)),
                    "{error}"
                );
                assert_eq!(cache.len(), len);
            }
        }
    }
}

fn positions_on_the_device_equal_calls<T: Target>(on: &On<T>) {
    for (seed, config) in configs(30).into_iter().enumerate() {
        let layer = Layer::new(on, config, 2, 30, 60 + seed as u64);
        let want = layer.parallel();
        let mut cache = layer.cache(on);
        layer.stream(&mut cache, &[11]);
        for t in 11..30 {
            let position = TensorData::new(vec![t as i32], [1]);
            let position = Tensor::<1, Int>::from_data(position, &**on);
            let memory = SparseMemory::at(&mut cache, &position);
            let got = layer.pass(memory, layer.inputs.part(t, 1));
            same(format!("{config:?} at {t}"), got, &want.clone().narrow(2, t, 1));
            cache.advance(1).unwrap();
        }
        // A sequence that takes no part keeps what it has, and its output is 0.
        let mut cache = layer.cache(on);
        layer.stream(&mut cache, &[11]);
        let position = Tensor::<1, Int>::from_data(TensorData::new(vec![-1, 11], [2]), &**on);
        let got = layer.pass(SparseMemory::at(&mut cache, &position), layer.inputs.part(11, 1));
        same(
            "taking part",
            got.clone().narrow(0, 1, 1),
            &want.clone().narrow(0, 1, 1).narrow(2, 11, 1),
        );
        assert_eq!(got.narrow(0, 0, 1).abs().max().into_scalar::<f32>(), 0.0);
        let got = layer.stream(&mut cache, &[19]).narrow(0, 0, 1);
        same("later", got, &want.narrow(0, 0, 1).narrow(2, 11, 19));
    }
}

fn bytes_are_those_of_the_plan<T: Target>(on: &On<T>) {
    for config in configs(100) {
        for batch in [1, 3] {
            let cache = SparseCache::new(&config, batch, on).unwrap();
            assert_eq!(cache.memory_bytes(), config.memory_bytes(batch).unwrap());
        }
    }
}

/// All memory is NaN, or all bits, before the first token.
fn unused_memory_is_not_read<T: Target>(on: &On<T>) {
    for (seed, config) in configs(50).into_iter().enumerate() {
        let layer = Layer::new(on, config, 2, 50, 90 + seed as u64);
        let want = layer.parallel();
        let empty = layer.cache(on);
        let parts = empty.parts();
        let part = |name: &str, _: bool| {
            let part = parts.iter().find(|part| part.name == name).unwrap();
            Ok::<_, kv_cubecl::Error>(match &part.tensor {
                SparseTensor::Codes(words) => SparseTensor::Codes(words.clone()),
                SparseTensor::Floats(rows) => {
                    SparseTensor::Floats(rows.clone().mul_scalar(0.0).add_scalar(f32::NAN))
                }
            })
        };
        for sizes in [vec![1; 50], vec![17, 1, 32]] {
            let mut cache = SparseCache::from_parts(&config, vec![0; 2], on, part).unwrap();
            same(format!("{config:?}"), layer.stream(&mut cache, &sizes), &want);
        }
    }
}
