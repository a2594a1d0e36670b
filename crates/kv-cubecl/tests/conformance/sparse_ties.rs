//! Selections of inputs with norms of several hundred, by keys in bf16, against scores in f64.

use std::collections::HashSet;

use burn::tensor::{Int, Tensor};
use half::bf16;
use kv_cubecl::{
    CacheFloat, On, Target, reference,
    sparse::{
        Compression, IndexConfig, IndexQuery, RowFormat, SparseCache, SparseConfig, SparseMemory,
        Visible,
    },
};

use crate::{
    common::{Host, Rng, stamp},
    sparse_inputs::{Projections, gated, without_heads},
};

stamp!(large_norms_and_bf16_change_selections_only_among_ties);

const COMPRESSION: Compression = Compression::overlapping(4);
const TOKENS: usize = 1024;
/// Tokens at the end that select, each in a call of its own.
const SELECTING: usize = 8;
const WIDTH: usize = 32;
const HEADS: usize = 16;
const TOP_K: usize = 32;

/// Half the distance between neighboring numbers near 1.
const F32: f64 = 1.0 / (1u64 << 24) as f64;
const BF16: f64 = 1.0 / (1u64 << 9) as f64;

/// Inputs of a layer, rounded to bf16 as a model in bf16 has them.
struct Inputs {
    text: Projections,
    query: Host,
    /// `[1, 1, tokens, heads]`.
    weights: Host,
}

impl Inputs {
    /// Content and gates of a token are vectors of this norm.
    fn new(rng: &mut Rng, norm: f32) -> Self {
        let mut text = Projections::new(rng, COMPRESSION, [1, TOKENS, WIDTH, 8]);
        let size = norm / (WIDTH as f32).sqrt();
        text.parts[..2].iter_mut().for_each(|part| part.data.iter_mut().for_each(|x| *x *= size));
        let mut query = Host::normal(rng, [1, HEADS, TOKENS, WIDTH]);
        let mut weights = Host::normal(rng, [1, 1, TOKENS, HEADS]);
        let inputs = text.parts[..2].iter_mut().chain([&mut query, &mut weights]);
        for x in inputs.flat_map(|input| &mut input.data) {
            *x = bf16::from_f32(*x).to_f32();
        }
        Self { text, query, weights }
    }

    /// Returns the heads' queries and the weights of a token.
    fn heads(&self, t: usize) -> (Vec<f64>, Vec<f64>) {
        let query = self.query.tokens(t..t + 1).f64();
        (query, self.weights.tokens(t..t + 1).f64())
    }

    /// Returns how far a channel of each key may be from the exact one before it is stored.
    ///
    /// A gate g with its bias and the largest of its window G is off by at most 4 F32 G in the
    /// exponent, so that its weight is off by that part, and the sum of the weights as well. With
    /// the rounding of the exponential, of the products and of the sums over `slots` tokens, an
    /// average is off by `eta` times the largest content C. The norm divides by the root mean
    /// square R of the averages, which is off as much, and rope adds two channels.
    fn key_errors(&self) -> Vec<f64> {
        let [content, gate, bias, gain] = self.text.parts.clone().map(|part| part.f64());
        let (lanes, ratio) = (COMPRESSION.lanes(), COMPRESSION.ratio);
        let most = |x: &[f64]| x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let error = |entry: usize| {
            let tokens = COMPRESSION.tokens(entry);
            let slots = tokens.len() as f64;
            let rows = tokens.start * lanes * WIDTH..tokens.end * lanes * WIDTH;
            let (g, c) = (most(&gate[rows.clone()]) + most(&bias), most(&content[rows]));
            let average = |channel: usize| {
                let logits = tokens.clone().map(|t| {
                    let lane = if t >= entry * ratio { WIDTH } else { 0 };
                    let at = t * lanes * WIDTH + lane + channel;
                    (gate[at] + bias[t % ratio * lanes * WIDTH + lane + channel], content[at])
                });
                let top = logits.clone().fold(f64::NEG_INFINITY, |top, (g, _)| top.max(g));
                let parts = logits.map(|(g, c)| ((g - top).exp(), (g - top).exp() * c));
                let (sum, dot) = parts.fold((0.0, 0.0), |(s, d), (w, x)| (s + w, d + x));
                dot / sum
            };
            let averages: Vec<f64> = (0..WIDTH).map(average).collect();
            let r = (averages.iter().map(|x| x * x).sum::<f64>() / WIDTH as f64).sqrt();
            let eta = (2.0 * (4.0 * g + 4.0) + 3.0 * slots) * F32;
            let rounded = (WIDTH + 8) as f64 * F32 * most(&averages) / r;
            let normed = eta * c / r * (1.0 + most(&averages) / r) + rounded;
            core::f64::consts::SQRT_2 * most(&gain) * normed
        };
        (0..COMPRESSION.entries(TOKENS)).map(error).collect()
    }
}

/// The exact scores of a token's indexer.
struct Exact {
    /// By entry.
    scores: Vec<f64>,
    /// By how much a score may be off.
    off: Vec<f64>,
}

impl Exact {
    /// A score is a sum over heads of a weight times the ReLU of a product, and ReLU does not
    /// enlarge errors. So it is off by at most the sum of weight times query times what the key is
    /// off, before it is stored and by `half_step` when it is, and by the roundings of sums over
    /// channels and heads.
    fn new(inputs: &Inputs, t: usize, keys: &[f64], errors: &[f64], half_step: f64) -> Self {
        let (query, weights) = inputs.heads(t);
        let keys = keys.chunks(WIDTH).take(COMPRESSION.entries(t + 1));
        let score = |key| reference::index_score(&query, &weights, key);
        let scores = keys.clone().map(score).collect();
        let sums = (WIDTH + HEADS + 4) as f64 * F32;
        let off = |(key, error): (&[f64], &f64)| -> f64 {
            let channel = |(q, k): (&f64, &f64)| {
                q.abs() * (error * (1.0 + half_step) + k.abs() * (half_step + sums))
            };
            let head = |query: &[f64]| query.iter().zip(key).map(channel).sum::<f64>();
            query.chunks(WIDTH).zip(&weights).map(|(query, w)| w.abs() * head(query)).sum()
        };
        let off = keys.zip(errors).map(off).collect();
        Self { scores, off }
    }

    /// Checks selections, and returns how many entries may change places with the last one: those
    /// whose scores differ from it by less than both can be off.
    #[track_caller]
    fn check<'a>(&self, what: &str, got: impl Iterator<Item = &'a HashSet<usize>>) -> usize {
        let Self { scores, off } = self;
        let want = reference::highest_scores(scores, TOP_K);
        let least = scores[want[TOP_K - 1]];
        let most_off = off.iter().copied().fold(0.0, f64::max);
        let ties = |entry: &usize| (scores[*entry] - least).abs() <= off[*entry] + most_off;
        let want: HashSet<usize> = want.into_iter().collect();
        for got in got {
            assert_eq!(got.len(), TOP_K, "{what}");
            for entry in got.symmetric_difference(&want) {
                let (score, off) = (scores[*entry], off[*entry]);
                assert!(
                    ties(entry),
                    "{what}: entry {entry} has score {score}, the last one {least}; off by up to \
                     {off} and {most_off}"
                );
            }
        }
        (0..scores.len()).filter(ties).count()
    }
}

fn large_norms_and_bf16_change_selections_only_among_ties<T: Target>(on: &On<T>) {
    for (float, half_step) in [(CacheFloat::F32, 0.0), (CacheFloat::Bf16, BF16)] {
        if !on.supports_dtype(float.dtype()) {
            continue;
        }
        for (seed, norm) in [(1, 200.0), (2, 500.0), (3, 900.0)] {
            let inputs = Inputs::new(&mut Rng::new(seed), norm);
            let keys = inputs.text.expected(&inputs.text.parts.clone().map(|part| part.f64()));
            let errors = inputs.key_errors();
            let selections = [1, TOKENS].map(|size| selected(on, &inputs, float, size));
            let (mut ties, mut seen) = (0, 0);
            for t in TOKENS - SELECTING..TOKENS {
                let exact = Exact::new(&inputs, t, &keys, &errors, half_step);
                let what = format!("{float:?}, norms of {norm}, token {t}");
                let got = selections.iter().map(|all| &all[t + SELECTING - TOKENS]);
                ties += exact.check(&what, got);
                seen += exact.scores.len();
            }
            // The bound decides about most entries.
            assert!(ties * 3 < seen, "{float:?}, norms of {norm}: {ties} of {seen} are ties");
        }
    }
}

/// Returns the entries that the last tokens select from a cache which took all tokens before in
/// calls of `size`, and each of the last in a call of its own.
fn selected<T: Target>(
    on: &On<T>,
    inputs: &Inputs,
    float: CacheFloat,
    size: usize,
) -> Vec<HashSet<usize>> {
    let index = IndexConfig { head_dim: WIDTH, top_k: TOP_K, keys: RowFormat::float(float) };
    let config = SparseConfig::new(WIDTH, 8)
        .with_capacity(TOKENS)
        .with_compression(COMPRESSION)
        .with_index(index);
    let mut cache = SparseCache::new(&config, 1, on).unwrap();
    let [_, _, bias, gain] = inputs.text.on(on);
    let entries = inputs.text.compressor(bias.clone(), gain.clone());
    let keys = inputs.text.key_compressor(bias, gain);
    let mut selections = vec![];
    while cache.len() < TOKENS {
        let (first, last) = (cache.len(), TOKENS - SELECTING);
        let n = if first < last { size.min(last - first) } else { 1 };
        let part = |host: &Host| host.tokens(first..first + n).on(on);
        let projections = || gated(part(&inputs.text.parts[0]), part(&inputs.text.parts[1]));
        let query = IndexQuery {
            query: part(&inputs.query),
            weights: without_heads(part(&inputs.weights)),
        };
        let mut memory = SparseMemory::cached(&mut cache, &[n]).unwrap();
        let compressed = memory.compress(&entries, projections()).unwrap();
        let selection = memory.select(&keys, projections(), &query).unwrap();
        let rows = Tensor::<4>::zeros([1, 1, n, WIDTH], &**on);
        let seen = Visible::Selected(&compressed, &selection);
        memory.attend(rows.clone(), rows, seen, None).unwrap();
        if first >= last {
            let ids: Tensor<3, Int> = selection.indices().clone();
            selections.push(ids.into_data().iter::<i64>().map(|id| id as usize).collect());
        }
    }
    selections
}
