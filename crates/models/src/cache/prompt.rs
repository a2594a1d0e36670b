//! A text in a cache, of which the next text reuses the longest prefix.

use std::{iter, ops::Range, path::Path};

use burn::tensor::{Device, Tensor, TensorData};
use kv_cubecl::{
    CacheParts, KvCache, KvCacheConfig, Side,
    layout::{CacheLayout, Schedule},
};
use tracing::trace_span;

use super::{ModelCache, SavedAs, check_context};
use crate::{
    Error, GenerateOptions, Generated, LanguageModel, Result,
    generate::{decode, finish, ids_to_tensor, last_logits},
    spans::PHASE,
};

/// How far before the end of a prompt its checkpoints are: close to where the next prompt is likely
/// to differ. A text that differs `n` tokens before the end is computed again from at most 16 `n`
/// before it.
const DISTANCES: [usize; 7] = [0, 16, 128, 1024, 8192, 65_536, 524_288];

/// Where a [`PromptCache`] can be cut back to, beside the lengths that [`ModelCache::exact`]
/// allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checkpoints {
    /// Nowhere else.
    None,
    /// At the end of each prompt.
    Ends,
    /// At the end of each prompt, and at growing distances before it, as many as take no more
    /// memory than the cache.
    All,
}

impl Checkpoints {
    /// How far before the end of a prompt they are, ascending.
    fn distances(self) -> &'static [usize] {
        match self {
            Self::None => &[],
            Self::Ends => &DISTANCES[..1],
            Self::All => &DISTANCES,
        }
    }
}

/// A [`ModelCache`] of one sequence with its tokens, which is cut back to what the next prompt
/// shares with them.
///
/// A cache that quantizes loses the recent tokens in float as it grows, and one with a sliding
/// window the tokens before it. So [checkpoints](Checkpoints) keep them as they were at some
/// lengths: a cache that goes on from one gives the logits of a cache that was never longer.
#[derive(Clone, Debug)]
pub struct PromptCache {
    cache: ModelCache,
    tokens: Vec<u32>,
    /// Ascending by their lengths.
    checkpoints: Vec<Checkpoint>,
    taken: Checkpoints,
}

impl PromptCache {
    /// No tokens yet.
    ///
    /// # Errors
    ///
    /// A cache that holds tokens, or of another batch than 1.
    pub fn new(cache: ModelCache, taken: Checkpoints) -> Result<Self> {
        if cache.batch() != 1 {
            return Err(Error::argument("batch", cache.batch(), "must be 1 for a prompt cache"));
        }
        if !cache.is_empty() {
            let held = format!("{} tokens", cache.len());
            return Err(Error::argument("cache", held, "must be empty for a new prompt cache"));
        }
        Ok(Self { cache, tokens: vec![], checkpoints: vec![], taken })
    }

    /// A cache that holds `tokens`.
    pub(super) fn of_saved(
        cache: ModelCache,
        tokens: Vec<u32>,
        checkpoints: Vec<Checkpoint>,
        taken: Checkpoints,
    ) -> Self {
        Self { cache, tokens, checkpoints, taken }
    }

    /// The tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The cache.
    pub fn cache(&self) -> &ModelCache {
        &self.cache
    }

    /// Cuts the cache back to the longest prefix of `prompt` that it can go on from exactly, and
    /// returns how many tokens that are. At least the last token of `prompt` is left to compute.
    ///
    /// # Errors
    ///
    /// A prompt that exceeds the cache or the model, or a checkpoint that the device cannot hold.
    /// The cache is then unchanged.
    pub fn reuse(&mut self, prompt: &[u32]) -> Result<usize> {
        let pairs = self.tokens.iter().zip(prompt);
        let common = pairs.take_while(|(held, asked)| held == asked).count();
        let shared = common.min(prompt.len().saturating_sub(1));
        let (cache, added) = (&self.cache, prompt.len() - shared);
        check_context(shared, added, "max_positions", cache.max_positions)?;
        check_context(shared, added, "capacity", cache.capacity)?;
        self.cut_back(shared)
    }

    /// Cuts the cache back to its first `len` tokens, or to as many of them as it can exactly;
    /// returns how many these are.
    ///
    /// # Errors
    ///
    /// A checkpoint that the device cannot hold. The cache is then unchanged.
    pub fn cut_back(&mut self, len: usize) -> Result<usize> {
        let len = len.min(self.tokens.len());
        let exact = self.cache.exact(0, len)?;
        let better = |checkpoint: &&Checkpoint| (exact + 1..=len).contains(&checkpoint.len);
        let exact = match self.checkpoints.iter().rfind(better) {
            Some(checkpoint) => {
                checkpoint.restore(&mut self.cache)?;
                checkpoint.len
            }
            None => self.cache.cut_back(0, exact)?,
        };
        self.tokens.truncate(exact);
        self.checkpoints.retain(|checkpoint| checkpoint.len <= exact);
        Ok(exact)
    }

    /// Appends what `prompt` has beyond the tokens in the cache, `chunk` tokens per pass. Returns
    /// the logits after the last token, `[1, vocab]`, or `None` if `proceed`, which is asked before
    /// each pass, returned false.
    ///
    /// # Errors
    ///
    /// A prompt that does not go on after the tokens in the cache, or that exceeds the cache or the
    /// model; nothing is then appended.
    pub fn prefill(
        &mut self,
        model: &LanguageModel,
        prompt: &[u32],
        chunk: usize,
        device: &Device,
        mut proceed: impl FnMut() -> bool,
    ) -> Result<Option<Tensor<2>>> {
        if chunk == 0 {
            return Err(Error::argument("prefill_chunk", 0, "must be at least 1"));
        }
        let held = self.tokens.len();
        if prompt.len() < held || prompt[..held] != self.tokens[..] {
            let rule = format!("must begin with the {held} tokens of the cache");
            return Err(Error::argument("prompt", format!("{} tokens", prompt.len()), rule));
        }
        self.cache.check(1, prompt.len() - held)?;
        let _phase = trace_span!(target: PHASE, "prefill").entered();
        let marks = self.marks(prompt.len())?;
        let mut logits = None;
        while self.tokens.len() < prompt.len() {
            if !proceed() {
                return Ok(None);
            }
            let start = self.tokens.len();
            let next = marks.iter().copied().filter(|&mark| mark > start).min();
            let next = next.unwrap_or(prompt.len());
            let end = next.min(start + chunk);
            let ids = &prompt[start..end];
            if end == prompt.len() {
                logits = Some(last_logits(model, &mut self.cache, ids, device)?);
            } else {
                model.hidden_step(ids_to_tensor(ids, [1, ids.len()], device), &mut self.cache)?;
            }
            self.tokens.extend_from_slice(ids);
            if marks.contains(&end) {
                self.checkpoints.push(Checkpoint::of(&self.cache)?);
            }
        }
        self.thin_out();
        finish(device)?;
        Ok(logits)
    }

    /// Continues the tokens in the cache, whose last one gave `logits`: see
    /// [`generate`](crate::generate()). What was prefilled before is not counted.
    ///
    /// # Errors
    ///
    /// Invalid sampling options, recording on a device that cannot record, or logits that are not
    /// finite.
    pub fn generate(
        &mut self,
        model: &LanguageModel,
        logits: Tensor<2>,
        options: &GenerateOptions,
        device: &Device,
        mut on_token: impl FnMut(u32) -> bool,
    ) -> Result<Generated> {
        let text = self.tokens.clone();
        let tokens = &mut self.tokens;
        let told = |id| {
            tokens.push(id);
            on_token(id)
        };
        let generated = decode(model, &mut self.cache, text, logits, options, device, told);
        // The last token is never appended.
        self.tokens.truncate(self.cache.len());
        generated
    }

    /// Writes the cache to a file, from which [`SavedCache`](super::SavedCache) goes on, with its
    /// checkpoints.
    ///
    /// # Errors
    ///
    /// Those of [`ModelCache::save`].
    pub fn save(
        &self,
        path: impl AsRef<Path>,
        model: &LanguageModel,
        named: &SavedAs<'_>,
    ) -> Result<()> {
        // One at the end is the cache itself.
        let n = self.checkpoints.partition_point(|checkpoint| checkpoint.len < self.tokens.len());
        self.cache.write(path.as_ref(), model, named, &[&self.tokens], &self.checkpoints[..n])
    }

    /// The lengths at which a prompt of `len` tokens gets a checkpoint.
    fn marks(&self, len: usize) -> Result<Vec<usize>> {
        let layouts = |len: usize| {
            let layouts = self.cache.layers.iter().map(KvCache::layout);
            layouts.map(move |it| CacheLayout::new(&it.config().with_capacity(len), it.shape()))
        };
        let mut room = 0;
        for layout in layouts(len) {
            room += layout?.memory_bytes().total();
        }
        let mut marks = vec![];
        for distance in self.taken.distances() {
            let Some(mark) = len.checked_sub(*distance).filter(|mark| *mark > self.tokens.len())
            else {
                break;
            };
            let mut bytes = 0;
            for layout in layouts(mark) {
                bytes += kept_bytes(&layout?);
            }
            // A cache that can be cut back anywhere needs none. The one at the end is dropped by
            // the next prompt.
            if bytes == 0 || *distance > 0 && bytes > room {
                break;
            }
            if *distance > 0 {
                room -= bytes;
            }
            marks.push(mark);
        }
        Ok(marks)
    }

    /// Drops checkpoints that are close to others, the closer the nearer these are to the end, so
    /// that their number grows with the logarithm of the tokens.
    fn thin_out(&mut self) {
        let end = self.tokens.len();
        let mut last: Option<usize> = None;
        let mut keeps: Vec<bool> = self
            .checkpoints
            .iter()
            .rev()
            .map(|checkpoint| {
                let distance = end - checkpoint.len;
                let keep = last.is_none_or(|last| distance > 0 && distance >= 4 * last);
                if keep {
                    last = Some(distance);
                }
                keep
            })
            .collect();
        self.checkpoints.retain(|_| keeps.pop().unwrap_or(true));
    }
}

/// What a cache held at some length and does not hold any more when it is longer.
#[derive(Clone, Debug)]
pub(super) struct Checkpoint {
    pub(super) len: usize,
    /// For each layer, its [`kept`] parts, as a cache for no more than `len` tokens has them.
    pub(super) layers: Vec<Vec<TensorData>>,
}

/// The parts of a layer's cache that a checkpoint keeps.
pub(super) fn kept(config: &KvCacheConfig) -> &'static [&'static str] {
    let schedule = Schedule::new(config);
    match (schedule.sliding_window, schedule.is_exact_anywhere()) {
        // A window overwrites what it has hidden.
        (Some(_), _) => &["keys", "values", "floats"],
        (None, true) => &[],
        (None, false) => &["floats"],
    }
}

/// The elements of a slice's float rows that a checkpoint keeps: all of a window's, else those of
/// the sides that are quantized, whose rings are short.
fn kept_elements(layout: &CacheLayout) -> Vec<Range<usize>> {
    if layout.schedule().sliding_window.is_some() {
        return iter::once(0..layout.float_elements()).collect();
    }
    // A side that is quantized and never all at once has a ring.
    let sides = Side::BOTH.map(|side| layout.sides()[side]);
    let quantized = sides.into_iter().filter(|side| side.spec.is_some());
    let elements =
        quantized.map(|side| side.first_element..side.first_element + side.rows() * side.head_dim);
    elements.filter(|elements| !elements.is_empty()).collect()
}

/// The shape of the floats that a checkpoint keeps of a layer.
pub(super) fn kept_shape(layout: &CacheLayout) -> [usize; 2] {
    [layout.slices(), kept_elements(layout).iter().map(Range::len).sum()]
}

/// The bytes of what a checkpoint keeps of a layer.
fn kept_bytes(layout: &CacheLayout) -> usize {
    match kept(layout.config()) {
        [] => 0,
        ["floats"] => {
            kept_shape(layout).iter().product::<usize>() * layout.config().float.dtype().size()
        }
        _ => layout.memory_bytes().total(),
    }
}

impl Checkpoint {
    fn of(cache: &ModelCache) -> Result<Self> {
        let len = cache.len();
        let layer = |layer: &KvCache| {
            let kept = kept(layer.layout().config());
            if kept.is_empty() {
                return Ok(vec![]);
            }
            let layer = layer.resized(len)?;
            let layout = *layer.layout();
            let CacheParts { keys, values, floats, .. } = layer.into_parts();
            let rows: Tensor<2> = floats.reshape([layout.slices(), layout.float_elements()]);
            let rows = kept_elements(&layout)
                .into_iter()
                .map(|elements| rows.clone().narrow(1, elements.start, elements.len()));
            let floats = Tensor::cat(rows.collect(), 1);
            let mut data = vec![];
            if kept.contains(&"keys") {
                data.extend([keys.try_into_data(), values.try_into_data()]);
            }
            data.push(floats.try_into_data());
            let data = data.into_iter().collect::<core::result::Result<_, _>>();
            data.map_err(|error| Error::argument("cache", error.to_string(), "must be readable"))
        };
        let layers = cache.layers.iter().map(layer).collect::<Result<_>>()?;
        Ok(Self { len, layers })
    }

    /// Cuts a cache that has grown since back to this.
    fn restore(&self, cache: &mut ModelCache) -> Result<()> {
        let layers = cache.layers.iter().zip(&self.layers);
        cache.layers =
            layers.map(|(layer, kept)| self.layer(layer, kept)).collect::<Result<_>>()?;
        Ok(())
    }

    fn layer(&self, layer: &KvCache, kept: &[TensorData]) -> Result<KvCache> {
        let len = self.len;
        let (config, shape) = (layer.layout().config(), layer.layout().shape());
        let Some((floats, words)) = kept.split_last() else {
            let mut layer = layer.clone();
            layer.cut_back(0, len)?;
            return Ok(layer);
        };
        let device = layer.device();
        // Codes stay, as of the first tokens of the longer cache.
        let now = CacheParts { lens: vec![len], ..layer.clone().into_parts() };
        let now = KvCache::from_parts(config, shape, now)?.resized(len)?;
        let layout = *now.layout();
        let mut parts = now.into_parts();
        if let [keys, values] = words {
            let words =
                |data: &TensorData| Tensor::from_data(data.clone(), (&device, data.dtype()));
            (parts.keys, parts.values) = (words(keys), words(values));
        }
        let float_shape = parts.floats.dims();
        let mut rows: Tensor<2> = parts.floats.reshape([layout.slices(), layout.float_elements()]);
        let floats: Tensor<2> = Tensor::from_data(floats.clone(), (&device, floats.dtype()));
        let mut from = 0;
        for elements in kept_elements(&layout) {
            let n = elements.len();
            let part = floats.clone().narrow(1, from, n);
            rows = rows.slice_assign([0..layout.slices(), elements], part);
            from += n;
        }
        parts.floats = rows.reshape(float_shape);
        let short = KvCache::from_parts(&config.with_capacity(len), shape, parts)?;
        Ok(short.with_options(layer.options())?.resized(config.capacity)?)
    }
}
