//! [`SparseCache`]: the streaming state of a layer of sparse attention.

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor},
};

use super::{
    AttendInputs, AttendPlan, Compression, Gated, IndexQuery, PoolInputs, PoolPlan, RowFormat,
    RowLayout, Selection, SparseConfig, SparseOps, Stride, compressor::Compressor, span::span,
    store::RowStore,
};
use crate::{CacheFloat, Error, Result, sequences::check_room};

/// The streaming state of a layer of sparse attention: recent tokens, compressed entries, the keys
/// of its indexer, and the projections of tokens whose window is not complete. All memory is
/// allocated at once.
///
/// Any partition of a sequence into calls gives the same entries and outputs. Sequences of a batch
/// may have different lengths.
#[derive(Clone, Debug)]
pub struct SparseCache {
    pub(super) config: SparseConfig,
    pub(super) window: RowStore,
    pub(super) entries: Option<Compressing>,
    pub(super) keys: Option<Compressing>,
    pub(super) lens: Vec<usize>,
    pub(super) counters: SparseCounters,
}

/// Compressed rows, and the projections from which the next ones follow.
#[derive(Clone, Debug)]
pub(super) struct Compressing {
    pub(super) compression: Compression,
    pub(super) content: RowStore,
    pub(super) gate: RowStore,
    pub(super) rows: RowStore,
}

/// The calls of a cache that attended to selected entries, and the number of these entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SparseCounters {
    /// Calls of attention that read selected entries only.
    pub sparse_calls: u64,
    /// Calls of attention that read all entries, or the window alone.
    pub dense_calls: u64,
    /// Entries that tokens selected, over all sequences. Replays of a captured graph are not
    /// counted.
    pub selected: u64,
}

/// The bytes of a [`SparseCache`], by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SparseBytes {
    /// Recent tokens.
    pub window: usize,
    /// Compressed entries.
    pub entries: usize,
    /// The keys of the indexer.
    pub keys: usize,
    /// Projections of tokens whose window is not complete.
    pub open: usize,
}

impl SparseBytes {
    /// Returns the sum of all parts.
    pub const fn total(&self) -> usize {
        self.window + self.entries + self.keys + self.open
    }
}

/// The stores of a cache.
pub(super) struct Layouts {
    pub(super) window: RowLayout,
    /// Projections and rows: of entries, and of the indexer's keys.
    pub(super) entries: Option<[RowLayout; 2]>,
    pub(super) keys: Option<[RowLayout; 2]>,
}

impl Layouts {
    pub(super) fn new(config: &SparseConfig, batch: usize) -> Self {
        let float = RowFormat::float(config.float);
        let window = RowLayout {
            batch,
            slots: config.sliding_window.min(config.capacity) + config.rollback,
            width: config.head_dim,
            format: float,
        };
        let compressing = |width: usize, format: RowFormat| {
            let compression = config.compression?;
            let slots = compression.span() + config.rollback;
            let open = RowLayout {
                batch,
                slots,
                width: compression.lanes() * width,
                format: RowFormat::float(CacheFloat::F32),
            };
            let slots = config.entry_capacity().max(1);
            Some([open, RowLayout { batch, slots, width, format }])
        };
        Self {
            window,
            entries: compressing(config.head_dim, config.entries),
            keys: config.index.and_then(|index| compressing(index.head_dim, index.keys)),
        }
    }

    fn bytes(&self) -> SparseBytes {
        let rows = |pair: &Option<[RowLayout; 2]>| pair.map_or(0, |[_, rows]| rows.bytes());
        let open = |pair: &Option<[RowLayout; 2]>| pair.map_or(0, |[open, _]| 2 * open.bytes());
        SparseBytes {
            window: self.window.bytes(),
            entries: rows(&self.entries),
            keys: rows(&self.keys),
            open: open(&self.entries) + open(&self.keys),
        }
    }
}

impl SparseConfig {
    /// Returns the bytes that a cache of `batch` sequences allocates.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first field that breaks a rule, a batch of 0, or a store
    /// that is too large for one buffer.
    pub fn memory_bytes(&self, batch: usize) -> Result<SparseBytes> {
        Ok(self.layouts(batch)?.bytes())
    }
}

/// The tokens of one call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) span: Tensor<2, Int>,
    /// The most tokens of a sequence.
    tokens: usize,
    /// The most tokens of a sequence after the call.
    len: usize,
    /// The tokens of each sequence; `None` if positions are on the device.
    added: Option<Vec<usize>>,
}

impl SparseCache {
    /// Allocates a cache of `batch` empty sequences.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the field of `config` that breaks a rule, or a batch of 0;
    /// [`Error::Unsupported`] for a device without the operations or without a float type.
    pub fn new(config: &SparseConfig, batch: usize, device: &Device) -> Result<Self> {
        let layouts = config.layouts(batch)?;
        let device = device.clone().without_autodiff();
        crate::backends::check_device("SparseCache", &device)?;
        let float = |name, layout: &RowLayout| -> Result<()> {
            let dtype = layout.format.float.dtype();
            match layout.floats() == 0 || device.supports_dtype(dtype) {
                true => Ok(()),
                false => Err(Error::Unsupported {
                    what: format!("{name} in {} on {device:?}", layout.format.float.name()),
                    why: "the device does not have the type; use f32".into(),
                }),
            }
        };
        float("the window", &layouts.window)?;
        let zeros = |layout| RowStore::zeros(layout, &device);
        let compressing = |name, pair: Option<[RowLayout; 2]>| -> Result<_> {
            let Some(([open, rows], compression)) = pair.zip(config.compression) else {
                return Ok(None);
            };
            float(name, &rows)?;
            let [content, gate] = [(); 2].map(|()| zeros(open));
            Ok(Some(Compressing { compression, content, gate, rows: zeros(rows) }))
        };
        Ok(Self {
            config: *config,
            entries: compressing("entries", layouts.entries)?,
            keys: compressing("index keys", layouts.keys)?,
            window: zeros(layouts.window),
            lens: vec![0; batch],
            counters: SparseCounters::default(),
        })
    }

    /// Returns the configuration.
    pub const fn config(&self) -> &SparseConfig {
        &self.config
    }

    /// Returns the number of tokens of the longest sequence.
    pub fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of each sequence.
    pub fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Returns how many more tokens fit into every sequence.
    pub fn remaining(&self) -> usize {
        self.config.capacity - self.len()
    }

    /// Removes all tokens; the memory stays allocated.
    pub fn reset(&mut self) {
        self.lens.fill(0);
    }

    /// Returns how often the cache attended to selected entries.
    pub const fn counters(&self) -> SparseCounters {
        self.counters
    }

    /// Returns the bytes allocated, by part. They do not change while the cache fills.
    pub fn memory_bytes(&self) -> SparseBytes {
        let rows = |part: &Option<Compressing>| part.as_ref().map_or(0, |part| part.rows.bytes());
        let open = |part: &Option<Compressing>| {
            part.as_ref().map_or(0, |part| part.content.bytes() + part.gate.bytes())
        };
        SparseBytes {
            window: self.window.bytes(),
            entries: rows(&self.entries),
            keys: rows(&self.keys),
            open: open(&self.entries) + open(&self.keys),
        }
    }

    /// Returns the device of the cache.
    pub fn device(&self) -> Device {
        self.window.floats().device()
    }

    /// Begins a call that appends `added` tokens to each sequence.
    ///
    /// # Errors
    /// [`Error::SequenceFull`] or [`Error::CapacityExceeded`] if they do not fit.
    pub(super) fn call(&self, added: &[usize]) -> Result<Call> {
        check_room(&self.lens, added, self.config.capacity)?;
        let pairs = self.lens.iter().zip(added);
        Ok(Call {
            span: span(&self.lens, added, &self.device()),
            tokens: added.iter().copied().max().unwrap_or(0),
            len: pairs.map(|(len, added)| len + added).max().unwrap_or(0),
            added: Some(added.to_vec()),
        })
    }

    /// Begins a call that appends one token at positions on the device, `[1]` or `[batch]`. A
    /// sequence with a position below 0, or not below the capacity, takes no part.
    pub(super) fn call_at(&self, position: &Tensor<1, Int>) -> Call {
        let batch = self.lens.len();
        let starts = position.clone().cast(DType::I32);
        let past = starts.clone().greater_equal_elem(self.config.capacity as i64);
        let starts = starts.mask_fill(past, -1).expand([batch]).reshape([1, batch]);
        let ones = Tensor::ones([1, batch], (&position.device(), DType::I32));
        let span = Tensor::cat(vec![starts, ones], 0);
        Call { span, tokens: 1, len: self.config.capacity, added: None }
    }

    /// Appends the projections of a call, and stores the entries that it completes.
    pub(super) fn compress(
        &mut self,
        compressor: &Compressor,
        gated: Gated,
        call: &Call,
    ) -> Result<()> {
        let rollback = self.config.rollback;
        let entries = self.entries.as_mut().expect("the caller has checked the configuration");
        entries.append(compressor, gated, call, rollback)
    }

    /// Appends the projections of a call, stores the keys that it completes, and selects entries
    /// for each of its tokens.
    pub(super) fn select_entries(
        &mut self,
        compressor: &Compressor,
        gated: Gated,
        query: &IndexQuery,
        top_k: usize,
        call: &Call,
    ) -> Result<Selection> {
        let rollback = self.config.rollback;
        let keys = self.keys.as_mut().expect("the caller has checked the configuration");
        keys.append(compressor, gated, call, rollback)?;
        let (layout, n) = (keys.rows.layout, keys.compression.entries(call.len).max(1));
        let n = n.min(layout.slots);
        let scores = <Dispatch as SparseOps>::score_keys(
            query.query.clone().cast(DType::F32).into_dispatch(),
            query.weights.clone().cast(DType::F32).into_dispatch(),
            keys.rows.read(),
            layout,
            n,
        );
        let (span, compression) = (call.span.clone().into_dispatch(), keys.compression);
        let selected =
            <Dispatch as SparseOps>::top_entries(scores, span, compression, top_k.min(n));
        if let Some(added) = &call.added {
            let seen = |(&len, &added): (&usize, &usize)| {
                (len..len + added)
                    .map(|t| compression.entries(t + 1).min(top_k) as u64)
                    .sum::<u64>()
            };
            self.counters.selected += self.lens.iter().zip(added).map(seen).sum::<u64>();
        }
        Ok(Selection::new(Tensor::from_dispatch(selected)))
    }

    /// Appends the rows of a call and attends; then the sequences have grown.
    pub(super) fn attend(
        &mut self,
        query: Tensor<4>,
        rows: Tensor<4>,
        entries: Option<&RowStore>,
        selection: Option<&Selection>,
        sink_logits: Option<Tensor<1>>,
        call: &Call,
    ) -> Tensor<4> {
        let SparseConfig { sliding_window, head_dim, rollback, compression, .. } = self.config;
        let ([batch, heads, tokens, _], device) = (query.dims(), query.device());
        let rows: Tensor<3> = rows.cast(DType::F32).reshape([batch, tokens, head_dim]);
        let chunk = call.tokens > 1 + rollback;
        let extended = chunk.then(|| {
            let back = sliding_window - 1;
            self.window.extended(rows.clone(), &call.span, back, back + tokens)
        });
        self.window.put(rows, &call.span, Stride::TOKENS);
        let window = extended.as_ref().unwrap_or(&self.window);
        let entries = entries.or(self.entries.as_ref().map(|entries| &entries.rows));
        let selected = match selection {
            Some(selection) => selection.indices.clone().cast(DType::I32),
            None => Tensor::zeros([1, 1, 1], (&device, DType::I32)),
        };
        let sink_logits = match sink_logits {
            Some(logits) => logits.cast(DType::F32),
            None => Tensor::full([heads], f32::NEG_INFINITY, &device),
        };
        let plan = AttendPlan {
            window: window.layout,
            sliding_window,
            entries: entries.map_or(window.layout, |entries| entries.layout),
            compression,
            selects: selection.is_some(),
            scale: 1.0 / (head_dim as f32).sqrt(),
        };
        let inputs = AttendInputs {
            query: query.cast(DType::F32).into_dispatch(),
            window: window.read(),
            entries: entries.unwrap_or(window).read(),
            selected: selected.into_dispatch(),
            sink_logits: sink_logits.into_dispatch(),
        };
        let output =
            <Dispatch as SparseOps>::attend_rows(inputs, call.span.clone().into_dispatch(), plan);
        if let Some(added) = &call.added {
            self.lens.iter_mut().zip(added).for_each(|(len, added)| *len += added);
        }
        match selection {
            Some(_) => self.counters.sparse_calls += 1,
            None => self.counters.dense_calls += 1,
        }
        Tensor::from_dispatch(output)
    }
}

impl Compressing {
    /// Appends the projections of a call, and stores the rows that it completes.
    fn append(
        &mut self,
        compressor: &Compressor,
        gated: Gated,
        call: &Call,
        rollback: usize,
    ) -> Result<()> {
        let Gated { content, gate } = gated;
        let [content, gate] = [content, gate].map(|part| part.cast(DType::F32));
        let (span, back) = (&call.span, self.compression.span() - 1);
        let chunk = call.tokens > 1 + rollback;
        let extended = |store: &RowStore, part: &Tensor<3>| {
            chunk.then(|| store.extended(part.clone(), span, back, back + call.tokens))
        };
        let extended = [extended(&self.content, &content), extended(&self.gate, &gate)];
        self.content.put(content, span, Stride::TOKENS);
        self.gate.put(gate, span, Stride::TOKENS);
        let stride = Stride::entries(self.compression);
        let most = stride.most(call.tokens);
        let plan = PoolPlan {
            compression: self.compression,
            width: compressor.width(),
            epsilon: compressor.epsilon as f32,
            entries: most,
        };
        let [content, gate] = [(&extended[0], &self.content), (&extended[1], &self.gate)]
            .map(|(extended, own)| extended.as_ref().unwrap_or(own).floats().into_dispatch());
        let inputs = PoolInputs {
            content,
            gate,
            position_bias: compressor.position_bias.clone().into_dispatch(),
            gain: compressor.gain.clone().into_dispatch(),
            rope: compressor.rope.table().clone().into_dispatch(),
        };
        let pooled =
            <Dispatch as SparseOps>::pool_windows(inputs, span.clone().into_dispatch(), plan);
        let pooled: Tensor<3> = Tensor::from_dispatch(pooled);
        let rows = compressor.encode(pooled.unsqueeze_dim::<4>(1))?;
        self.rows.put(rows.squeeze_dim(1), span, stride);
        Ok(())
    }
}
