//! Listens to spans.

use std::{
    cell::RefCell,
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

use burn::{module::ParamId, tensor::Device};
#[cfg(feature = "cube")]
use kv_models::spans::REPLAY;
use kv_models::spans::{LAYER, OPERATION, PASS, PHASE};
use kv_report::Timeline;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
    subscriber::Interest,
};
use tracing_subscriber::{
    Layer,
    layer::{Context, SubscriberExt},
    registry::LookupSpan,
};

use crate::{
    Error, Result,
    label::{Key, Labels, Named, OUTSIDE},
    log::{Amounts, ThreadLog},
    page,
};

/// Records spans and launches from [`install`](Self::install) to [`finish`](Self::finish).
#[derive(Clone, Debug)]
pub struct Recorder {
    shared: Arc<Shared>,
    #[cfg(feature = "cube")]
    device: Arc<Mutex<crate::device::Watch>>,
}

/// State shared by the threads.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Tells recorders apart.
    number: usize,
    pub(crate) start: Instant,
    pub(crate) labels: Mutex<Labels>,
    pub(crate) threads: Mutex<Vec<Arc<Mutex<ThreadLog>>>>,
    /// Bytes that the device copies in a second, if they were measured.
    copy_rate: Mutex<Option<f64>>,
    #[cfg(feature = "cube")]
    pub(crate) queue: crate::device::ToReader,
}

/// A span's view of the spans around it.
#[derive(Clone, Debug)]
struct Scope {
    named: Named,
    phase: u32,
    amounts: Amounts,
    /// The layer that the pass is in, counted from 1; 0 for none.
    layer: Arc<AtomicUsize>,
}

thread_local! {
    /// The log of this thread, and the number of its recorder.
    static LOG: RefCell<Option<(usize, Arc<Mutex<ThreadLog>>)>> = const { RefCell::new(None) };
}

impl Recorder {
    /// A recorder that listens to nothing yet; its clock starts.
    pub fn new() -> Self {
        static RECORDERS: AtomicUsize = AtomicUsize::new(0);
        let mut labels = Labels::default();
        labels.group(OUTSIDE);
        let shared = Arc::new(Shared {
            number: RECORDERS.fetch_add(1, Ordering::Relaxed),
            start: Instant::now(),
            labels: Mutex::new(labels),
            threads: Mutex::default(),
            copy_rate: Mutex::default(),
            #[cfg(feature = "cube")]
            queue: Default::default(),
        });
        Self {
            #[cfg(feature = "cube")]
            device: Arc::new(Mutex::new(crate::device::Watch::new(shared.clone()))),
            shared,
        }
    }

    /// Starts to listen to the spans of all threads and to launches.
    ///
    /// # Errors
    /// [`Error::Subscribed`] if something else listens already.
    pub fn install(&self) -> Result<()> {
        let subscriber = tracing_subscriber::registry().with(self.layer());
        tracing::subscriber::set_global_default(subscriber).map_err(|_| Error::Subscribed)?;
        #[cfg(feature = "cube")]
        lock(&self.device).start();
        Ok(())
    }

    /// Returns the layer for a program with its own subscriber.
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a>>(&self) -> impl Layer<S> + use<S> {
        Listener(self.shared.clone())
    }

    #[cfg(all(test, feature = "cube"))]
    pub(crate) fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Takes the names of a model's operations, as
    /// [`LanguageModel::operation_names`](kv_models::LanguageModel::operation_names) returns them.
    /// Must be called before the model runs.
    pub fn name_operations(&self, names: HashMap<ParamId, String>) {
        let mut labels = lock(&self.shared.labels);
        for (parameter, name) in names {
            labels.name_operation(parameter.val(), name);
        }
    }

    /// Sets the bytes that the device copies in a second, to which the tables compare operations.
    pub fn set_copy_rate(&self, bytes_per_second: f64) {
        *lock(&self.shared.copy_rate) = Some(bytes_per_second);
    }

    /// Compares the clocks of device and host by launches that the host waits for. Must be called
    /// before and after the recorded work to measure the drift. Does nothing on the CPU.
    ///
    /// # Errors
    /// [`Error::Device`].
    #[cfg_attr(
        not(feature = "cube"),
        expect(unused_variables, reason = "only devices have clocks")
    )]
    pub fn calibrate(&self, device: &Device) -> Result<()> {
        #[cfg(feature = "cube")]
        {
            self.shared.queue.watch(device);
            let rounds = crate::device::calibrate(&self.shared, device)?;
            lock(&self.device).calibrations.push(rounds);
        }
        Ok(())
    }

    /// Ends the recording. `facts` are names and values that describe the run.
    pub fn finish(self, title: &str, facts: Vec<(String, String)>) -> Timeline {
        let now = self.shared.now();
        #[cfg(feature = "cube")]
        let launches = lock(&self.device).finish();
        #[cfg(not(feature = "cube"))]
        let launches = crate::launch::Launches::default();
        let threads: Vec<_> = lock(&self.shared.threads).clone();
        let mut logs: Vec<MutexGuard<'_, ThreadLog>> =
            threads.iter().map(|log| lock(log)).collect();
        logs.iter_mut().for_each(|log| log.finish(now));
        let logs: Vec<&ThreadLog> = logs.iter().map(|log| &**log).collect();
        let copy_rate = *lock(&self.shared.copy_rate);
        let labels = lock(&self.shared.labels);
        page::timeline(title, facts, &labels, &logs, &launches, (now, copy_rate))
    }
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    /// Nanoseconds since the start.
    pub(crate) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Calls `f` with the log of this thread.
    pub(crate) fn log<R>(&self, f: impl FnOnce(&mut ThreadLog) -> R) -> R {
        LOG.with_borrow_mut(|log| {
            if log.as_ref().is_none_or(|(number, _)| *number != self.number) {
                *log = Some((self.number, self.begin_thread()));
            }
            let (_, log) = log.as_ref().expect("it was made just before");
            f(&mut lock(log))
        })
    }

    fn begin_thread(&self) -> Arc<Mutex<ThreadLog>> {
        let mut threads = lock(&self.threads);
        let name = match std::thread::current().name() {
            Some(name) => name.to_string(),
            None => format!("thread {}", threads.len() + 1),
        };
        let log = Arc::new(Mutex::new(ThreadLog::new(threads.len(), name)));
        threads.push(log.clone());
        log
    }
}

/// Locks a mutex; data written by a thread that panicked is still valid.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Listener(Arc<Shared>);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Listener {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match is_ours(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        is_ours(metadata)
    }

    fn on_new_span(
        &self,
        attributes: &span::Attributes<'_>,
        id: &span::Id,
        context: Context<'_, S>,
    ) {
        let Some(span) = context.span(id) else { return };
        let outer = span.parent().and_then(|span| span.extensions().get::<Scope>().cloned());
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let metadata = attributes.metadata();
        let layer = outer.as_ref().map_or(0, |scope| scope.layer.load(Ordering::Relaxed));
        let key = match metadata.target() {
            PHASE => {
                let of = fields.cache.map_or(String::new(), |cache| format!(" {cache}"));
                Key::Phase(format!("{}{of}", metadata.name()), fields.n)
            }
            PASS => Key::Pass,
            _ => match fields.parameter {
                Some(parameter) => Key::Parameter(parameter),
                None => Key::Operation(metadata.name(), layer.checked_sub(1)),
            },
        };
        let is_phase = matches!(key, Key::Phase(..));
        let named = lock(&self.0.labels).get(key);
        // A phase within another is a part of it: only the outermost one has sums of its own.
        let phase = match &outer {
            Some(scope) if scope.phase != 0 || !is_phase => scope.phase,
            None if !is_phase => 0,
            _ => named.group,
        };
        // What is within an operation is in its pass's layer.
        let layer = match outer {
            Some(scope) if metadata.target() == OPERATION => scope.layer,
            _ => Arc::default(),
        };
        let amounts = fields.amounts;
        span.extensions_mut().insert(Scope { named, phase, amounts, layer });
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let (Some(layer), Some(pass)) = (fields.layer, context.lookup_current()) else { return };
        let extensions = pass.extensions();
        let Some(scope) = extensions.get::<Scope>() else { return };
        scope.layer.store(layer as usize + 1, Ordering::Relaxed);
        let named = lock(&self.0.labels).get(Key::Layer(layer as usize));
        self.0.log(|log| log.layer(named, scope.phase, self.0.now()));
    }

    fn on_enter(&self, id: &span::Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let extensions = span.extensions();
        let Some(scope) = extensions.get::<Scope>() else { return };
        let Scope { named, phase, amounts, .. } = *scope;
        self.0.log(|log| log.enter(id.into_u64(), named, (phase, amounts), self.0.now()));
        #[cfg(feature = "cube")]
        if span.metadata().name() == REPLAY {
            self.0.queue.begin_replay(&self.0);
        }
    }

    #[cfg_attr(not(feature = "cube"), expect(unused_variables, reason = "only devices replay"))]
    fn on_exit(&self, id: &span::Id, context: Context<'_, S>) {
        #[cfg(feature = "cube")]
        if context.span(id).is_some_and(|span| span.metadata().name() == REPLAY) {
            self.0.queue.end_replay(&self.0);
        }
        let now = self.0.now();
        self.0.log(|log| log.exit(id.into_u64(), now));
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

fn is_ours(metadata: &Metadata<'_>) -> bool {
    [PHASE, PASS, LAYER, OPERATION].contains(&metadata.target())
}

/// The fields that spans of `kv_models::spans` have.
#[derive(Default)]
struct Fields {
    parameter: Option<u64>,
    n: Option<u64>,
    layer: Option<u64>,
    amounts: Amounts,
    cache: Option<String>,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "parameter" => self.parameter = Some(value),
            "n" => self.n = Some(value),
            "layer" => self.layer = Some(value),
            "bytes" => self.amounts.bytes = value,
            "tokens" => self.amounts.tokens = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "cache" {
            self.cache = Some(format!("{value:?}"));
        }
    }
}
