//! [`DecodeGraph`]: a decode step, captured once and replayed.

use std::{cell::RefCell, collections::BTreeSet, fmt, marker::PhantomData, mem, rc::Rc};

use burn::tensor::{Device, Graph, Tensor, capture};
use kv_sampling::{Cursor, Draw};
use tracing::{Level, enabled, trace_span};

use super::{ids_to_tensor, picker::read_ids};
use crate::{
    cache::ModelCache,
    error::{Error, Result},
    model::LanguageModel,
    spans::{LAUNCHED, OPERATION, PHASE, REPLAY},
};

/// A decode step of a model over its cache, captured with [`capture`] and replayed for every token.
/// The graph holds the layers of the cache; dropping it returns them with the appended tokens.
///
/// A step is some hundred launches of small kernels. Graph capture sends them to the device at
/// once: on CUDA and ROCm as a graph of the driver, on WGPU as one prepared list. Without support
/// for capture (see [`is_captured`](Self::is_captured)), every replay launches the kernels again.
/// With a subscriber to [spans](crate::spans), the first step is launched and not replayed, so that
/// its operations can be told apart.
///
/// The step picks its next token itself, and token and position stay on the device. So
/// [`continued`](Self::continued) waits for the device once per call rather than once per token,
/// and reads no logits.
///
/// ```no_run
/// # fn main() -> kv_models::Result<()> {
/// # use kv_models::{DecodeGraph, kv_cubecl::KvCacheConfig, kv_sampling::Draw};
/// # let device = burn::tensor::Device::default();
/// # let model = kv_models::load("model.gguf", &device)?.model;
/// let mut cache = model.new_cache("k4v4".parse::<KvCacheConfig>()?, 1, &device)?;
/// let mut graph = DecodeGraph::new(&model, &mut cache, &[2].into(), Draw::GREEDY, &device)?;
/// let first = 1;
/// let ids = graph.continued(first, 16)?; // 16 tokens, fewer if one of them is 2
/// drop(graph);
/// assert_eq!(cache.len(), ids.len()); // `first` and all of `ids` but the last
/// # Ok(())
/// # }
/// ```
///
/// A graph is neither `Send` nor `Sync`, because a replay is ordered only with the work of the
/// thread that captured it.
pub struct DecodeGraph<'a> {
    /// Gets its layers back when the graph is dropped.
    cache: &'a mut ModelCache,
    graph: Graph<Tensor<2>, Box<dyn FnMut() -> Tensor<2>>>,
    bound: Rc<RefCell<Bound>>,
    /// True if the next step is launched, see [`LAUNCHED`].
    launches: bool,
    /// The logits of the last step, if it was launched.
    launched: Option<Tensor<2>>,
    /// The position on the device; `None` when the host does not know it.
    position: Option<usize>,
    /// The token on the device, if the host has read it.
    id: Option<u32>,
    eos: BTreeSet<u32>,
    device: Device,
    /// Makes the type neither `Send` nor `Sync`.
    one_thread: PhantomData<*const ()>,
}

/// The buffers that the captured step reads and writes. They must stay the same.
struct Bound {
    model: LanguageModel,
    cache: ModelCache,
    /// The tokens to append and their position; after a step, the picked tokens and the next
    /// position.
    cursor: Cursor,
    draw: Draw,
}

impl Bound {
    /// Appends the cursor's tokens and moves the cursor to the picked ones. After an end-of-text id
    /// its position is past the capacity, where further steps write nothing.
    fn step(&mut self) -> Result<Tensor<2>> {
        let Self { model, cache, cursor, draw } = self;
        let logits = model.step_at(cursor.ids().clone(), cache, cursor.position())?;
        let logits = logits.squeeze_dim::<2>(1); // [batch, vocab]
        cursor.advance(logits.clone(), draw)?;
        Ok(logits)
    }
}

impl<'a> DecodeGraph<'a> {
    /// Returns whether `device` supports graph capture.
    pub fn is_supported(device: &Device) -> bool {
        let one = Tensor::<1>::ones([1], device);
        capture(device, move || one.clone() + 1.0).is_hardware()
    }

    /// Captures a step of `model` on `device` over `cache`, which may hold tokens. `draw` picks
    /// tokens, and [`continued`](Self::continued) stops after any id in `eos`.
    ///
    /// # Errors
    /// Fails for a non-empty `eos` with another batch than 1, for sequences of different lengths,
    /// for an id outside the vocabulary, for an invalid `draw`, and for a cache that does not fit
    /// the model.
    pub fn new(
        model: &LanguageModel,
        cache: &'a mut ModelCache,
        eos: &BTreeSet<u32>,
        draw: Draw,
        device: &Device,
    ) -> Result<Self> {
        let _phase = trace_span!(target: PHASE, "capture").entered();
        let batch = cache.batch();
        if !eos.is_empty() && batch != 1 {
            return Err(Error::argument("batch", batch, "must be 1 with end-of-text ids"));
        }
        if !cache.is_even() {
            let lens = format!("{:?} tokens", cache.lens());
            let rule = "sequences must have equal lengths for graph capture";
            return Err(Error::argument("cache", lens, rule));
        }
        let ends: Vec<u32> = eos.iter().copied().collect();
        check_ids(model, &ends)?;
        // Capture runs the step a few times. At a position past the capacity, the step writes
        // nothing.
        let cursor = Cursor::idle(batch, &ends, device)?.with_past(cache.capacity());
        let mut bound = Bound { model: model.clone(), cursor, draw, cache: cache.take() };
        if let Err(error) = bound.step() {
            *cache = bound.cache;
            return Err(error);
        }
        let bound = Rc::new(RefCell::new(bound));
        let held = bound.clone();
        let step = move || held.borrow_mut().step().expect("the same step succeeded before");
        let graph = capture(device, Box::new(step) as Box<dyn FnMut() -> _>);
        let launches = graph.is_hardware() && enabled!(target: OPERATION, Level::TRACE);
        Ok(Self {
            cache,
            graph,
            bound,
            launches,
            launched: None,
            position: None,
            id: None,
            eos: eos.clone(),
            device: device.clone(),
            one_thread: PhantomData,
        })
    }

    /// Returns whether a replay sends a captured graph to the device. Otherwise it runs the step
    /// again.
    pub fn is_captured(&self) -> bool {
        self.graph.is_hardware()
    }

    /// Returns the number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.bound.borrow().cache.len()
    }

    /// Returns whether the cache holds no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many tokens can still be appended.
    pub fn remaining(&self) -> usize {
        self.bound.borrow().cache.remaining()
    }

    /// Appends one token to every sequence. Returns the logits after it, `[batch, vocab]`, in a
    /// buffer that the next step may overwrite.
    ///
    /// # Errors
    /// Fails unless there is one id per sequence, for an id outside the vocabulary, and for a full
    /// cache.
    pub fn step(&mut self, ids: &[u32]) -> Result<&Tensor<2>> {
        self.start(ids, 1)?;
        self.replay()?;
        if !self.eos.is_empty() {
            // If the picked token is an end-of-text id, the position on the device is past the
            // capacity. The host cannot know this without waiting.
            self.position = None;
        }
        self.advance(1)?;
        Ok(self.launched.as_ref().unwrap_or_else(|| self.graph.output()))
    }

    /// Returns the token that the last [`step`](Self::step) of a single sequence picked.
    ///
    /// # Errors
    /// Fails if the logits of a step since the last call were not finite.
    pub fn picked(&mut self) -> Result<u32> {
        let bound = &mut *self.bound.borrow_mut();
        self.id = read_ids(core::slice::from_mut(&mut bound.cursor))?.pop();
        self.id.ok_or_else(|| Error::argument("picked", "none", "must be one token"))
    }

    /// Appends `first` and the tokens picked after it, and returns up to `max_tokens` picked
    /// tokens. The last of them is not appended yet: pass it as `first` to the next call. Stops
    /// after an end-of-text id.
    ///
    /// # Errors
    /// Fails for another batch than 1, for an id outside the vocabulary, for `max_tokens` that do
    /// not fit, and for logits that are not finite. In the last case the tokens are in the cache
    /// but not returned.
    pub fn continued(&mut self, first: u32, max_tokens: usize) -> Result<Vec<u32>> {
        if max_tokens == 0 {
            return Ok(vec![]);
        }
        self.start(&[first], max_tokens)?;
        self.bound.borrow_mut().cursor.mend();
        // The picked ids, followed by the number of steps with logits that were not finite.
        let mut chosen = ids_to_tensor(&vec![0; max_tokens + 1], [1, max_tokens + 1], &self.device);
        let mut put = |i, value| chosen.inplace(|to| to.slice_assign([0..1, i..i + 1], value));
        for i in 0..max_tokens {
            self.replay()?;
            put(i, self.bound.borrow().cursor.ids().clone());
        }
        put(max_tokens, self.bound.borrow().cursor.broken().clone().unsqueeze());
        let mut ids: Vec<u32> = chosen.into_data().iter::<u32>().collect();
        if let Some(broken @ 1..) = ids.pop() {
            self.position = None;
            self.advance(max_tokens)?;
            let rule = "must be finite";
            return Err(Error::argument("logits", format!("not finite in {broken} steps"), rule));
        }
        if let Some(end) = ids.iter().position(|id| self.eos.contains(id)) {
            // The steps after it wrote nothing.
            ids.truncate(end + 1);
            self.position = None;
        }
        self.advance(ids.len())?;
        Ok(ids)
    }

    /// Checks that `tokens` more tokens fit, and writes the first ids and their position to the
    /// device.
    fn start(&mut self, ids: &[u32], tokens: usize) -> Result<()> {
        let bound = &mut *self.bound.borrow_mut();
        bound.cache.check(ids.len(), tokens)?;
        check_ids(&bound.model, ids)?;
        if ids != self.id.take().as_slice() {
            bound.cursor.set_ids(ids)?;
        }
        let position = bound.cache.len();
        if self.position != Some(position) {
            bound.cursor.set_position(position);
            self.position = Some(position);
        }
        Ok(())
    }

    fn replay(&mut self) -> Result<()> {
        self.launched = None;
        if mem::take(&mut self.launches) {
            let _span = trace_span!(target: OPERATION, LAUNCHED).entered();
            self.launched = Some(self.bound.borrow_mut().step()?);
            return Ok(());
        }
        let tokens = || self.bound.borrow().cache.batch() as u64;
        let _span = trace_span!(target: OPERATION, REPLAY, tokens = tokens()).entered();
        // SAFETY: all buffers of the step are in `bound` or in the graph and live as long as
        // `self`. As `self` is not `Send`, this is the thread that captured the graph, and all work
        // is in order on one stream.
        unsafe { self.graph.replay() };
        Ok(())
    }

    /// Adds the appended tokens to the lengths on the host.
    fn advance(&mut self, tokens: usize) -> Result<()> {
        self.bound.borrow_mut().cache.advance(tokens)?;
        self.position = self.position.map(|position| position + tokens);
        Ok(())
    }
}

impl Drop for DecodeGraph<'_> {
    fn drop(&mut self) {
        mem::swap(self.cache, &mut self.bound.borrow_mut().cache);
    }
}

fn check_ids(model: &LanguageModel, ids: &[u32]) -> Result<()> {
    let vocab = model.vocab_size();
    match ids.iter().find(|&&id| id as usize >= vocab) {
        Some(id) => {
            Err(Error::argument("id", id, format!("must be below the vocabulary, {vocab}")))
        }
        None => Ok(()),
    }
}

impl fmt::Debug for DecodeGraph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecodeGraph")
            .field("captured", &self.is_captured())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
