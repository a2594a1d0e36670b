//! Benchmark of one layer of sparse attention over compressed entries.

use std::{fmt, str::FromStr, time::Instant};

use burn::tensor::{DType, Distribution, Int, Tensor};
use kv_cubecl::{
    CacheFloat, KvFormat, On, RopeTable, Target,
    sparse::{
        Compression, EntryCompressor, Gated, IndexConfig, IndexQuery, KeyCompressor, RowFormat,
        RowLayout, SparseCache, SparseConfig, SparseMemory, SparsePart, SparseTensor, Visible,
    },
};
use kv_models::spans::PHASE;
use serde::Serialize;
use tracing::trace_span;

use super::{Timing, WARM_UP, copier, size, wait};
use crate::{Error, Result, memory::Tracking};

/// The shape of a layer of sparse attention, and the settings of its benchmark.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SparsePlan {
    /// Query heads.
    pub n_heads: usize,
    /// Channels of a token's row and of an entry.
    pub head_dim: usize,
    /// Channels with rope at the end of a row and of a key. Entries with codes keep them in bf16.
    pub rope_dim: usize,
    /// Recent tokens that a query sees.
    pub sliding_window: usize,
    /// The compression of tokens to entries.
    pub compression: Compression,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Channels of an indexer's key.
    pub index_head_dim: usize,
    /// Entries that a token attends to.
    pub top_k: usize,
    /// Number of samples; the median is reported.
    pub samples: usize,
}

/// The format of entries or of keys, by its short name: `f32`, `f16`, `bf16`, or the name of a
/// format of codes, such as `k4` or `e4m3b`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowCodes {
    /// All channels in a float type.
    Float(CacheFloat),
    /// Codes.
    Codes(KvFormat),
}

impl FromStr for RowCodes {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if let Some(&float) = CacheFloat::ALL.iter().find(|float| float.name() == name) {
            return Ok(Self::Float(float));
        }
        let codes = KvFormat::named(name.strip_prefix('k').unwrap_or(name));
        match codes.filter(|codes| codes.is_quantized()) {
            Some(codes) => Ok(Self::Codes(codes)),
            None => Err(format!("must be f32, f16, bf16 or one of {}", Self::code_names())),
        }
    }
}

impl RowCodes {
    fn code_names() -> String {
        let codes = KvFormat::ALL.iter().filter(|codes| codes.is_quantized());
        codes.map(|&codes| Self::Codes(codes).to_string()).collect::<Vec<_>>().join(", ")
    }

    fn format(self) -> RowFormat {
        match self {
            Self::Float(float) => RowFormat::float(float),
            Self::Codes(codes) => RowFormat::codes(codes),
        }
    }
}

impl fmt::Display for RowCodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(float) => f.write_str(float.name()),
            Self::Codes(codes) if codes.affine_bits().is_some() => write!(f, "k{codes}"),
            Self::Codes(codes) => codes.fmt(f),
        }
    }
}

/// The formats of a layer.
#[derive(Clone, Copy, Debug)]
pub struct SparseFormats {
    /// The format of entries.
    pub entries: RowCodes,
    /// The format of the indexer's keys.
    pub keys: RowCodes,
}

/// The longest context that can be timed. Sizes stay far below the range of usize.
const MOST_CONTEXT: usize = 1 << 30;

/// Steps whose memory is measured, at most. They follow the timed ones.
const MEASURED: usize = 8;

/// Entries that are computed at once to fill a cache.
const FILL: usize = 512;

impl SparsePlan {
    fn check(&self, context: usize) -> Result<()> {
        size::check_samples("samples", self.samples)?;
        let Self { n_heads, head_dim, rope_dim, index_heads, index_head_dim, .. } = *self;
        let fields = [
            ("contexts", context),
            ("heads", n_heads),
            ("head_dim", head_dim),
            ("sliding_window", self.sliding_window),
            ("ratio", self.compression.ratio),
            ("index_heads", index_heads),
            ("index_head_dim", index_head_dim),
            ("top_k", self.top_k),
        ];
        if let Some((field, value)) = fields.into_iter().find(|(_, value)| *value == 0) {
            return Err(Error::plan(field, value, "must be at least 1"));
        }
        let narrower = head_dim.min(index_head_dim);
        if rope_dim == 0 || rope_dim % 2 == 1 || rope_dim > narrower {
            let rule = format!("must be even, from 2 to the {narrower} channels of a row");
            return Err(Error::plan("rope_dim", rope_dim, rule));
        }
        if context > MOST_CONTEXT {
            let rule = format!("must be at most {MOST_CONTEXT}");
            return Err(Error::plan("contexts", context, rule));
        }
        if context < self.compression.ratio {
            let rule = format!("must be at least the ratio, {}", self.compression.ratio);
            return Err(Error::plan("contexts", context, rule));
        }
        let entries = self.compression.entries(context);
        size::tensor_bytes([1, 1, entries, head_dim])?;
        size::tensor_bytes([1, 1, entries, index_head_dim])?;
        size::tensor_bytes([1, n_heads, 1, head_dim])?;
        size::tensor_bytes([1, index_heads, 1, index_head_dim])?;
        let row = [1, self.compression.lanes(), self.compression.span(), head_dim];
        size::tensor_bytes(row)?;
        size::tensor_bytes([1, 1, self.sliding_window, head_dim])?;
        Ok(())
    }

    /// Returns the configuration of the layer's cache, with room for all steps after `context`.
    fn config(&self, formats: SparseFormats, context: usize) -> SparseConfig {
        let entries = match formats.entries {
            RowCodes::Float(_) => formats.entries.format(),
            RowCodes::Codes(_) => {
                formats.entries.format().with_float_channels(self.rope_dim, CacheFloat::Bf16)
            }
        };
        let float = match formats.entries {
            RowCodes::Float(float) => float,
            RowCodes::Codes(_) => CacheFloat::Bf16,
        };
        let room = size::rounds(self.samples).saturating_add(MEASURED);
        SparseConfig::new(self.head_dim, self.sliding_window)
            .with_capacity(context.saturating_add(room))
            .with_compression(self.compression)
            .with_formats(float, entries)
            .with_index(IndexConfig {
                head_dim: self.index_head_dim,
                top_k: self.top_k,
                keys: formats.keys.format(),
            })
    }

    /// Returns the bytes that [`time_sparse`] takes at a context.
    ///
    /// # Errors
    /// Returns the errors that [`time_sparse`] finds before it allocates.
    pub fn bytes(&self, formats: SparseFormats, context: usize) -> Result<u64> {
        self.check(context)?;
        let config = self.config(formats, context);
        let bytes = config.memory_bytes(1)?;
        // The cache, the cache without an indexer, and the blocks that they are joined from.
        let caches = 3 * bytes.total() as u64;
        // Angles, their cosines and sines, and both joined.
        let rope = 3 * size::tensor_bytes([1, 1, config.capacity, self.rope_dim])?;
        // Scores, and the numbers that are sorted by them.
        Ok(caches + rope + 3 * size::tensor_bytes([1, 1, 1, config.entry_capacity()])?)
    }
}

/// One layer of sparse attention at one context length.
#[derive(Clone, Debug, Serialize)]
pub struct SparsePoint {
    /// The format of entries.
    pub entries: String,
    /// The format of the indexer's keys.
    pub keys: String,
    /// Tokens in the cache before the first step.
    pub context: usize,
    /// Entries of these tokens.
    pub n_entries: usize,
    /// Seconds of a step: one token is compressed, entries are selected, and it attends to them.
    pub step: Timing,
    /// Seconds of the steps that complete a window, which are also in `step`; `None` if no timed
    /// step does.
    pub step_completing: Option<Timing>,
    /// Seconds of a step that attends to all entries, without an indexer.
    pub dense: Timing,
    /// The median of `dense` divided by the median of `step`.
    pub dense_over_step: f64,
    /// Seconds of the indexer: storing a key, scoring all keys, and selecting.
    pub index: Timing,
    /// Bytes of the keys that a step reads.
    pub key_bytes: usize,
    /// Seconds to copy this many bytes.
    pub copy: Timing,
    /// The rate at which the indexer reads keys, divided by the rate at which they are copied.
    pub index_over_copy: f64,
    /// Bytes of the cache before the first step.
    pub bytes: usize,
    /// Bytes of the cache after the last step.
    pub bytes_after: usize,
    /// The most blocks that a step allocates.
    pub allocations: usize,
    /// The largest peak of bytes that a step allocates.
    pub peak_bytes: usize,
    /// Bytes of a step's scores, one for each entry.
    pub score_bytes: usize,
}

/// Times steps of one token after `context` tokens, in turn with the same steps over all entries,
/// with the indexer alone, and with copying as many bytes as its keys have. The memory of further
/// steps is measured with `memory`, the program's allocator.
///
/// Entries and keys are random; no context is computed. The indexer's queries are rounded as its
/// keys.
///
/// # Errors
/// [`Error::Plan`] naming the field, the errors of the cache, and [`Error::Device`].
pub fn time_sparse<T: Target, A>(
    device: &On<T>,
    plan: &SparsePlan,
    formats: SparseFormats,
    context: usize,
    memory: &Tracking<A>,
) -> Result<SparsePoint> {
    plan.bytes(formats, context)?;
    let config = plan.config(formats, context);
    let layer = Layer::random(device, plan, &config)?;
    let mut cache = filled(device, plan, &config, context)?;
    let mut dense = {
        let (parts, mut config) = (cache.parts(), config);
        config.index = None;
        let part = |name: &str, _: bool| Ok::<_, Error>(part(&parts, name));
        SparseCache::from_parts(&config, vec![context], device, part)?
    };
    let (bytes, n_entries) = (cache.memory_bytes(), plan.compression.entries(context));
    let key_bytes = bytes.keys / config.entry_capacity() * n_entries;
    let mut copy = copier(device, key_bytes);
    let [mut steps, mut completing, mut denses, mut indexes, mut copies] = [(); 5].map(|()| vec![]);
    for round in 0..size::rounds(plan.samples) {
        let _phase = trace_span!(target: PHASE, "sparse", n = round).entered();
        let completes = (cache.len() + 1).is_multiple_of(plan.compression.ratio);
        let index = seconds(|| {
            layer.select(&mut SparseMemory::cached(&mut cache, &[1])?)?;
            wait(device)
        })?;
        let step = seconds(|| layer.step(&mut cache, true).and_then(|()| wait(device)))?;
        let all = seconds(|| layer.step(&mut dense, false).and_then(|()| wait(device)))?;
        let copied = seconds(&mut copy)?;
        if round < WARM_UP {
            continue;
        }
        let kept = [(&mut steps, step), (&mut denses, all), (&mut indexes, index)];
        kept.into_iter().for_each(|(all, seconds)| all.push(seconds));
        copies.push(copied);
        if completes {
            completing.push(step);
        }
    }
    let (mut allocations, mut peak_bytes) = (0, 0);
    for _ in 0..plan.compression.ratio.min(MEASURED) {
        let before = memory.allocations();
        let (done, peak) =
            memory.peak_of(|| layer.step(&mut cache, true).and_then(|()| wait(device)));
        done?;
        allocations = allocations.max(memory.allocations() - before);
        peak_bytes = peak_bytes.max(peak);
    }
    let [step, dense, index, copy] = [steps, denses, indexes, copies].map(Timing::of);
    let (step, dense, index, copy) = (step?, dense?, index?, copy?);
    let step_completing = if completing.is_empty() { None } else { Some(Timing::of(completing)?) };
    Ok(SparsePoint {
        entries: formats.entries.to_string(),
        keys: formats.keys.to_string(),
        context,
        n_entries,
        step,
        step_completing,
        dense,
        dense_over_step: dense.median / step.median,
        index,
        key_bytes,
        copy,
        index_over_copy: copy.median / index.median,
        bytes: bytes.total(),
        bytes_after: cache.memory_bytes().total(),
        allocations,
        peak_bytes,
        score_bytes: size_of::<f32>() * n_entries,
    })
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

fn part(parts: &[SparsePart], name: &str) -> SparseTensor {
    let part = parts.iter().find(|part| part.name == name);
    part.expect("caches of alike configurations have the same parts").tensor.clone()
}

fn normal<T: Target, const D: usize>(device: &On<T>, shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &**device)
}

/// Random parameters of a layer, and random inputs of a token.
struct Layer {
    entry: EntryCompressor,
    key: KeyCompressor,
    gated: Gated,
    key_gated: Gated,
    index: IndexQuery,
    query: Tensor<4>,
    rows: Tensor<4>,
    sinks: Tensor<1>,
}

impl Layer {
    fn random<T: Target>(device: &On<T>, plan: &SparsePlan, config: &SparseConfig) -> Result<Self> {
        let SparsePlan { n_heads, head_dim, index_heads, index_head_dim, compression, .. } = *plan;
        let (entry, key) = compressors(device, plan, config, compression)?;
        let gated = |width: usize| {
            let [content, gate] =
                [(); 2].map(|()| normal(device, [1, 1, compression.lanes() * width]));
            Gated { content, gate }
        };
        // DeepSeek-V4 rounds the indexer's queries as its keys.
        let index_query = normal(device, [1, 1, index_heads, index_head_dim]);
        let index_query = match config.index {
            Some(index) => index.keys.rounded(index_query),
            None => index_query,
        };
        Ok(Self {
            entry,
            key,
            gated: gated(head_dim),
            key_gated: gated(index_head_dim),
            index: IndexQuery {
                query: index_query.swap_dims(1, 2),
                weights: normal(device, [1, 1, index_heads]),
            },
            query: normal(device, [1, n_heads, 1, head_dim]),
            rows: normal(device, [1, 1, 1, head_dim]),
            sinks: normal(device, [n_heads]),
        })
    }

    fn select(&self, memory: &mut SparseMemory<'_>) -> Result<kv_cubecl::sparse::Selection> {
        Ok(memory.select(&self.key, self.key_gated.clone(), &self.index)?)
    }

    /// Appends a token and attends, to selected entries or to all.
    fn step(&self, cache: &mut SparseCache, selects: bool) -> Result<()> {
        let mut memory = SparseMemory::cached(cache, &[1])?;
        let entries = memory.compress(&self.entry, self.gated.clone())?;
        let selection = if selects { Some(self.select(&mut memory)?) } else { None };
        let visible = match &selection {
            Some(selection) => Visible::Selected(&entries, selection),
            None => Visible::All(&entries),
        };
        let (query, rows, sinks) = (self.query.clone(), self.rows.clone(), self.sinks.clone());
        memory.attend(query, rows, visible, Some(sinks))?;
        Ok(())
    }
}

/// Returns compressors with random position biases. Keys with codes have a Hadamard transform.
fn compressors<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
    compression: Compression,
) -> Result<(EntryCompressor, KeyCompressor)> {
    const EPSILON: f64 = 1e-6;
    let bias = |width| normal(device, [compression.ratio, compression.lanes() * width]);
    let gain = |width| Tensor::ones([width], &**device);
    let half = plan.rope_dim / 2;
    let positions = Tensor::<1, Int>::arange(0..config.capacity as i64, (&**device, DType::I32));
    let pairs = Tensor::<1, Int>::arange(0..half as i64, (&**device, DType::I32));
    let frequencies = (pairs.float() * (-(10_000f32.ln()) / half as f32)).exp();
    let angles = positions.float().unsqueeze_dim::<2>(1) * frequencies.unsqueeze_dim::<2>(0);
    let rope = RopeTable::new(Tensor::cat(vec![angles.clone().cos(), angles.sin()], 1))?;
    let (width, key_width) = (plan.head_dim, plan.index_head_dim);
    let entry = EntryCompressor::new(compression, bias(width), gain(width), EPSILON, rope.clone())?;
    let hadamard = config.index.is_some_and(|index| index.keys.codes.is_quantized());
    let (bias, gain) = (bias(key_width), gain(key_width));
    let key = KeyCompressor::new(compression, bias, gain, EPSILON, rope, hadamard)?;
    Ok((entry, key))
}

/// Creates a cache of `context` tokens, whose entries and keys are random rows.
fn filled<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
    context: usize,
) -> Result<SparseCache> {
    let mut empty = *config;
    // Windows and projections of this cache have the shapes of the large one's.
    empty.capacity = plan.sliding_window.max(plan.compression.ratio).min(config.capacity);
    let recent = SparseCache::new(&empty, 1, device)?.parts();
    let blocks = random_blocks(device, plan, config)?;
    let slots = config.entry_capacity();
    let index = config.index.as_ref();
    let keys = index.map_or((0, config.entries), |index| (index.head_dim, index.keys));
    let fill = |name: &'static str, _: bool| -> Result<SparseTensor> {
        let (width, format) = match name.starts_with("keys") {
            true => keys,
            false => (config.head_dim, config.entries),
        };
        let layout = RowLayout { batch: 1, slots, width, format };
        let all = || blocks.iter().map(|parts| part(parts, name));
        Ok(match name {
            "entries.codes" | "keys.codes" => SparseTensor::Codes(joined_codes(all(), layout)),
            "entries" | "keys" => {
                let rows = all().filter_map(|rows| match rows {
                    SparseTensor::Floats(rows) => Some(rows),
                    SparseTensor::Codes(_) => None,
                });
                SparseTensor::Floats(Tensor::cat(rows.collect(), 1).narrow(1, 0, slots))
            }
            _ => match part(&recent, name) {
                SparseTensor::Floats(rows) => {
                    let random = normal(device, rows.dims());
                    SparseTensor::Floats(random.cast(rows.dtype()))
                }
                codes @ SparseTensor::Codes(_) => codes,
            },
        })
    };
    SparseCache::from_parts(config, vec![context], device, fill)
}

/// Returns the parts of caches of [`FILL`] random entries, enough for all entries of `config`.
fn random_blocks<T: Target>(
    device: &On<T>,
    plan: &SparsePlan,
    config: &SparseConfig,
) -> Result<Vec<Vec<SparsePart>>> {
    // Each token is an entry, and there is one head, so scores take little time.
    let each = Compression::new(1);
    let mut block = SparseConfig::new(config.head_dim, 1)
        .with_capacity(FILL)
        .with_compression(each)
        .with_formats(CacheFloat::F32, config.entries);
    block.index = config.index.map(|index| IndexConfig { top_k: 1, ..index });
    let (entry, key) = compressors(device, plan, &block, each)?;
    let gated = |width: usize| Gated {
        content: normal(device, [1, FILL, width]),
        gate: Tensor::zeros([1, FILL, width], &**device),
    };
    let width = plan.index_head_dim;
    let query = IndexQuery {
        query: normal(device, [1, 1, FILL, width]),
        weights: normal(device, [1, FILL, 1]),
    };
    let blocks = config.entry_capacity().div_ceil(FILL);
    let fill = |_| -> Result<_> {
        let mut cache = SparseCache::new(&block, 1, device)?;
        let mut memory = SparseMemory::cached(&mut cache, &[FILL])?;
        memory.compress(&entry, gated(plan.head_dim))?;
        memory.select(&key, gated(width), &query)?;
        let mut parts = cache.parts();
        parts.retain(|part| ["entries", "keys"].contains(&part.name.trim_end_matches(".codes")));
        Ok(parts)
    };
    (0..blocks).map(fill).collect()
}

/// Joins the code words of blocks of [`FILL`] rows to the words of a sequence.
fn joined_codes(blocks: impl Iterator<Item = SparseTensor>, layout: RowLayout) -> Tensor<1, Int> {
    let blocks: Vec<_> = blocks
        .filter_map(|words| match words {
            SparseTensor::Codes(words) => Some(words),
            SparseTensor::Floats(_) => None,
        })
        .collect();
    // Codes of all rows come first, then parameters that share words.
    let regions = |layout: RowLayout| {
        let packed = layout.packed().expect("rows have codes");
        let codes = match packed.spec.packs_parameters() {
            true => packed.parameters(),
            false => packed.words(),
        };
        [0..codes, codes..packed.words()]
    };
    let from = regions(RowLayout { slots: FILL, ..layout });
    let mut parts = vec![];
    for (from, to) in from.into_iter().zip(regions(layout)) {
        if to.is_empty() {
            continue;
        }
        let words = blocks.iter().map(|words| words.clone().narrow(0, from.start, from.len()));
        parts.push(Tensor::cat(words.collect(), 0).narrow(0, 0, to.len()));
    }
    let len: usize = parts.iter().map(|part| part.dims()[0]).sum();
    if layout.words() > len {
        let options = (&blocks[0].device(), DType::U32);
        parts.push(Tensor::zeros([layout.words() - len], options));
    }
    Tensor::cat(parts, 0)
}
