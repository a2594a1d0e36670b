//! The engine: one thread owns the model and continues all texts together.

mod pick;
mod update;

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use burn::tensor::Device;
use kv_cubecl::{CacheFloat, KvCacheConfig};
use kv_models::{
    Batch, BatchText, GenerateOptions, LanguageModel, ModelCacheConfig, PrefixCache, SavedAs,
    Speculate,
    generate::{Event, Stop},
};
use tokio::sync::{
    mpsc::{UnboundedSender, unbounded_channel},
    watch,
};

use self::pick::Picking;
pub use self::{
    pick::PickOptions,
    update::{End, Scored, Update, Updates},
};
use crate::metrics::{Metrics, Outcome};

/// The limits of an [`Engine`].
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The number of texts that are continued together.
    pub slots: usize,
    /// The number of texts that may wait for a slot. More are refused.
    pub queue: usize,
    /// The most bytes of stored prefixes; 0 stores none.
    pub prefix_bytes: usize,
    /// The folder from which prefixes are loaded at the start, and to which they are saved at the
    /// end.
    pub prefix_folder: Option<PathBuf>,
    /// The tokens of a chunk of a prefill, and of a block of stored prefixes; `None` for those that
    /// [suit](GenerateOptions::suiting) the model and the device.
    pub prefill_chunk: Option<usize>,
    /// The way in which the tokens after the next one are guessed.
    pub speculate: Speculate,
}

/// A text to continue.
#[derive(Debug)]
pub struct Task {
    /// The ids of the prompt, at least one, each below the size of the vocabulary.
    pub prompt: Vec<u32>,
    /// The most tokens to generate; 0 only scores the prompt.
    pub max_tokens: usize,
    /// Ids that end the text.
    pub eos: BTreeSet<u32>,
    /// Prompts with the same salt share stored prefixes.
    pub salt: String,
    /// The rules by which tokens are picked.
    pub pick: PickOptions,
    /// The text ends at this time.
    pub deadline: Instant,
}

/// The reason why a [`Task`] does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// All slots and places in the queue are taken.
    Busy,
    /// The server is stopping, or the engine has failed.
    Stopping,
}

/// A handle to the thread that owns the model.
#[derive(Debug)]
pub struct Engine {
    commands: mpsc::Sender<Command>,
    /// Texts that wait or are continued.
    places: Arc<Places>,
    metrics: Metrics,
    thread: Option<JoinHandle<()>>,
    /// True once the thread has ended.
    ended: watch::Receiver<bool>,
    /// The most tokens of a text: its prompt and its continuation.
    room: usize,
}

#[derive(Debug)]
enum Command {
    Start(Box<Task>, UnboundedSender<Update>, Arc<AtomicBool>),
    /// Finish all texts, then end.
    Stop,
}

/// Counts the texts that wait or are continued.
#[derive(Debug)]
struct Places {
    most: usize,
    taken: AtomicUsize,
    stopping: AtomicBool,
}

impl Places {
    fn take(&self, n: usize) -> Result<(), Refusal> {
        if self.stopping.load(SeqCst) {
            return Err(Refusal::Stopping);
        }
        let add = |taken: usize| taken.checked_add(n).filter(|&taken| taken <= self.most);
        self.taken.fetch_update(SeqCst, SeqCst, add).map_err(|_| Refusal::Busy)?;
        Ok(())
    }

    fn free(&self, n: usize) {
        self.taken.fetch_sub(n, SeqCst);
    }
}

/// A text of a request that is still there.
struct Live {
    to: UnboundedSender<Update>,
    deadline: Instant,
    start: Instant,
    /// When the last token was generated.
    last: Option<Instant>,
    /// Set when the request needs no more tokens.
    is_done: Arc<AtomicBool>,
    /// The reason why the engine stopped the text.
    stopped: Option<End>,
}

impl Engine {
    /// Starts a thread that owns `model`, with caches of `config` for every slot.
    ///
    /// # Errors
    /// Fails for caches that do not fit the model or the device.
    pub fn start(
        model: LanguageModel,
        config: ModelCacheConfig,
        device: Device,
        options: EngineOptions,
        metrics: Metrics,
    ) -> kv_models::Result<Self> {
        let EngineOptions { slots, queue, prefix_bytes, prefix_folder, .. } = options;
        let (prefill_chunk, speculate) = (options.prefill_chunk, options.speculate);
        let mut cache = model.new_cache(config.clone(), slots.max(1), &device)?;
        let room = cache.remaining();
        metrics.cache_bytes.set(cache.memory_bytes().total() as i64);
        let f16 = KvCacheConfig::float().with_float(CacheFloat::F16);
        let f16 = ModelCacheConfig::from(f16.with_capacity(room));
        let mut f16_bytes = 0;
        for (i, layer) in model.spec().layers.iter().enumerate() {
            f16_bytes += layer.cache_bytes(&f16.layer(model.spec(), i), slots.max(1))?.total();
        }
        metrics.cache_f16_bytes.set(f16_bytes as i64);
        let most = slots.max(1).saturating_add(queue);
        let places =
            Arc::new(Places { most, taken: AtomicUsize::new(0), stopping: AtomicBool::new(false) });
        let (commands, receiver) = mpsc::channel();
        let (ends, ended) = watch::channel(false);
        let (ours, measured) = (places.clone(), metrics.clone());
        let run = move || {
            // Dropped even when the thread panics, so that waiting requests end.
            let ending = Ending { ends, places: ours.clone() };
            let mut options = GenerateOptions::suiting(&model, &device);
            options.speculate = speculate;
            options.prefill_chunk = prefill_chunk.unwrap_or(options.prefill_chunk);
            let block = options.prefill_chunk;
            let prefixes = match prefix_bytes {
                // A prompt of one block has none before its last token.
                0 => Ok(None),
                _ if block >= room => Ok(None),
                bytes => PrefixCache::new(&cache, block, bytes).map(|mut prefixes| {
                    if let Some(folder) = &prefix_folder {
                        kv_cli::notes(&prefixes.load(folder, &model, config, &device));
                    }
                    Some(prefixes)
                }),
            };
            let batch = prefixes.and_then(|prefixes| {
                let batch = Batch::new(&model, &mut cache, options, &device)?;
                match prefixes {
                    Some(prefixes) => batch.with_prefixes(prefixes),
                    None => Ok(batch),
                }
            });
            match batch {
                Ok(batch) => {
                    let live = HashMap::new();
                    let engine = Loop { batch, live, receiver, places: ours, metrics: measured };
                    if let Some(prefixes) = engine.run()
                        && let Some(folder) = &prefix_folder
                        && let Err(error) = prefixes.save(folder, &model, &SavedAs::default())
                    {
                        kv_cli::note(format_args!("prefixes are not saved: {error}"));
                    }
                }
                Err(error) => kv_cli::note(format_args!("the engine cannot start: {error}")),
            }
            drop(ending);
        };
        let thread = thread::Builder::new().name("engine".into()).spawn(run);
        let thread = thread.map_err(|error| {
            kv_models::Error::argument("engine", error.to_string(), "needs a thread")
        })?;
        Ok(Self { commands, places, metrics, thread: Some(thread), ended, room })
    }

    /// Returns the most tokens of a text: its prompt and its continuation.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Returns the most texts that wait or are continued at a time.
    pub fn places(&self) -> usize {
        self.places.most
    }

    /// Starts several texts, all of them or none. The last update of each is [`Update::End`].
    ///
    /// # Errors
    /// Fails when too few places are free, and when the engine is stopping.
    pub fn submit(&self, tasks: Vec<Task>) -> Result<Vec<Updates>, Refusal> {
        let n = tasks.len();
        self.places.take(n).inspect_err(|_| {
            self.metrics.count(Outcome::Refused);
        })?;
        let mut texts = vec![];
        for task in tasks {
            let (to, receiver) = unbounded_channel();
            let stopped = Arc::new(AtomicBool::new(false));
            let start = Command::Start(Box::new(task), to, stopped.clone());
            if self.commands.send(start).is_err() {
                self.places.free(n);
                return Err(Refusal::Stopping);
            }
            texts.push(Updates { receiver, stopped });
        }
        Ok(texts)
    }

    /// Returns whether the engine accepts texts.
    pub fn is_ready(&self) -> bool {
        !self.places.stopping.load(SeqCst) && !*self.ended.borrow()
    }

    /// Returns the texts that wait or are continued.
    pub fn n_texts(&self) -> usize {
        self.places.taken.load(SeqCst)
    }

    /// Refuses further texts. The thread ends when all texts have ended.
    pub fn stop(&self) {
        self.places.stopping.store(true, SeqCst);
        let _ = self.commands.send(Command::Stop);
    }

    /// Returns a receiver that becomes true when the thread has ended.
    pub fn ended(&self) -> watch::Receiver<bool> {
        self.ended.clone()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Tells others that the engine's thread has ended.
struct Ending {
    ends: watch::Sender<bool>,
    places: Arc<Places>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.places.stopping.store(true, SeqCst);
        self.ends.send_replace(true);
    }
}

/// The state of the engine's thread.
struct Loop<'a> {
    batch: Batch<'a>,
    /// The requests of the batch's texts, by the text's number.
    live: HashMap<usize, Live>,
    receiver: mpsc::Receiver<Command>,
    places: Arc<Places>,
    metrics: Metrics,
}

/// The longest time until an idle engine notices that a text has no receiver any more.
const IDLE: Duration = Duration::from_secs(3600);

impl Loop<'_> {
    /// Continues texts until the server stops. Returns the stored prefixes.
    fn run(mut self) -> Option<PrefixCache> {
        let mut stopping = false;
        while !(stopping && self.live.is_empty()) {
            let idle = self.live.is_empty();
            loop {
                let command = match idle && !stopping && self.live.is_empty() {
                    true => self.receiver.recv_timeout(IDLE).ok(),
                    false => self.receiver.try_recv().ok(),
                };
                match command {
                    Some(Command::Start(task, to, is_done)) => self.start(*task, to, is_done),
                    Some(Command::Stop) => stopping = true,
                    None => break,
                }
            }
            self.end_stopped();
            if let Err(error) = self.batch.advance() {
                self.fail(&error);
                return None;
            }
            self.publish();
        }
        self.batch.into_prefixes()
    }

    fn start(&mut self, task: Task, to: UnboundedSender<Update>, is_done: Arc<AtomicBool>) {
        let Task { prompt, max_tokens, eos, salt, pick, deadline } = task;
        let pushed = Picking::new(pick, eos.clone(), prompt.len(), to.clone()).and_then(|pick| {
            let pick = Box::new(pick);
            self.batch.push_text(BatchText { prompt, max_tokens, eos, salt: Some(salt), pick })
        });
        match pushed {
            Ok(number) => {
                let (start, last, stopped) = (Instant::now(), None, None);
                self.live.insert(number, Live { to, deadline, start, last, is_done, stopped });
            }
            Err(error) => {
                let _ = to.send(Update::failed(&error));
                self.places.free(1);
                self.metrics.count(Outcome::Failed);
            }
        }
    }

    /// Ends texts that need no more tokens, whose client has gone or whose deadline has passed.
    fn end_stopped(&mut self) {
        let now = Instant::now();
        for (&number, live) in &mut self.live {
            let end = match live.is_done.load(SeqCst) {
                true => End::Eos,
                false if live.to.is_closed() || now >= live.deadline => End::Deadline,
                false => continue,
            };
            live.stopped = Some(end);
            self.batch.stop(number);
        }
    }

    /// Sends the events of the batch to requests.
    fn publish(&mut self) {
        let now = Instant::now();
        while let Some(event) = self.batch.pop_event() {
            match event {
                Event::Token { text, .. } => {
                    let Some(live) = self.live.get_mut(&text) else { continue };
                    self.metrics.token(now - live.last.unwrap_or(live.start), live.last.is_none());
                    live.last = Some(now);
                }
                Event::End { text, generated } => {
                    let Some(live) = self.live.remove(&text) else { continue };
                    self.metrics.prompt_tokens.inc_by(generated.prefill_tokens as u64);
                    self.metrics.guesses(generated.guesses);
                    let gone = live.to.is_closed();
                    let end = live.stopped.unwrap_or(match generated.stop {
                        Stop::Eos => End::Eos,
                        _ => End::Length,
                    });
                    self.metrics.count(match (&end, gone) {
                        (_, true) => Outcome::Cancelled,
                        (End::Deadline, _) => Outcome::Deadline,
                        _ => Outcome::Finished,
                    });
                    self.places.free(1);
                    let prefix_tokens = generated.prefix_tokens;
                    let _ = live.to.send(Update::End { end, prefix_tokens });
                }
                Event::Failed { text, error } => {
                    let Some(live) = self.live.remove(&text) else { continue };
                    self.metrics.count(Outcome::Failed);
                    self.places.free(1);
                    let _ = live.to.send(Update::failed(&error));
                }
            }
        }
        if let Some(prefixes) = self.batch.prefixes() {
            self.metrics.prefixes(prefixes.stats());
        }
        self.metrics.waiting.set(self.batch.n_waiting() as i64);
        self.metrics.active.set(self.batch.n_active() as i64);
    }

    /// Ends all texts with an error of the model or the device.
    fn fail(self, error: &kv_models::Error) {
        kv_cli::note(format_args!("the engine stops: {error}"));
        for live in self.live.into_values() {
            let _ = live.to.send(Update::failed(error));
            self.places.free(1);
            self.metrics.count(Outcome::Failed);
        }
    }
}
