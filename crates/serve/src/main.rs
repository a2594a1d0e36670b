//! `kv-serve`: serves a language model with a quantized KV cache to clients of OpenAI's API.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    num::NonZeroUsize,
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use kv_cli::{
    MemoryBudget, MemoryRequest, MemorySize, ModelArgs, Plain, Screen, SpeculateArgs, ThreadArgs,
    Weights, cache_help, check_folder, dispatch, exit_interrupted, note, on_interrupt,
    source::{self, Source},
    start,
};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{ChatTemplate, ModelCacheConfig, Speculate, decimal_size};
use kv_serve::{
    App, Engine, EngineOptions, Gates, Metrics, ServerOptions, constraint::Constraints, router,
    serve,
};
use mimalloc::MiMalloc;
use tokio::{net::TcpListener, sync::watch};

/// Activations are allocated and freed at every layer; the system's allocator gives the pages back
/// and faults them in again each time.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Serve a language model with a quantized KV cache to clients of OpenAI's API.
#[derive(Debug, Parser)]
#[command(version, about)]
#[command(after_help = "Examples:
  kv-serve --model model.gguf --cache k4v4
  kv-serve --model HuggingFaceTB/SmolLM2-135M-Instruct --slots 16 --context 8192 --port 9000
  curl localhost:8080/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'")]
struct Cli {
    #[command(flatten)]
    on: ModelArgs,
    #[arg(long, help = cache_help(
        "Cache of every text [default: the cache of the model's kv_cache.json, else float]"
    ))]
    cache: Option<ModelCacheConfig>,
    /// Address to listen on. Other machines can connect only if it is not a loopback address.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Key that clients must send as `Authorization: Bearer KEY`.
    #[arg(long, value_name = "KEY", env = "KV_SERVE_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Name of the model in requests and responses [default: the name of its file or folder].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Number of texts that are continued together.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    slots: u16,
    /// Most tokens of a text: its prompt and its continuation [default: 4096, or the model's limit
    /// if that is less].
    #[arg(long, short = 'c', value_name = "TOKENS")]
    context: Option<NonZeroUsize>,
    /// Number of texts that may wait for a slot; more are answered with status 429.
    #[arg(long, value_name = "N", default_value_t = 64)]
    queue: usize,
    /// Memory for stored prefixes of prompts, which are not computed again, such as 4G [default:
    /// 1G, or half of the memory that is left if that is less].
    #[arg(long, value_name = "SIZE")]
    prefix_memory: Option<MemorySize>,
    /// Tokens of a prompt that are prefilled between two decode steps, and of a block of stored
    /// prefixes [default: 256 for large models on the CPU, otherwise 512].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u16).range(1..))]
    prefill_chunk: Option<u16>,
    /// Load stored prefixes from this folder at the start, and save them there when the server
    /// stops.
    #[arg(long, value_name = "FOLDER", conflicts_with = "no_prefixes")]
    prefix_folder: Option<PathBuf>,
    /// Compute every prompt whole.
    #[arg(long, conflicts_with = "prefix_memory")]
    no_prefixes: bool,
    /// Longest time from a request to the end of its texts, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    /// Longest time that running requests get to end when the server stops, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=86_400))]
    grace: u64,
    /// Largest body of a request, such as 8M.
    #[arg(long, value_name = "SIZE", default_value = "8M")]
    max_body: MemorySize,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    threads: ThreadArgs,
}

/// The default of `--context`, unless the model's limit is less.
const CONTEXT: usize = 4096;

/// The default of `--prefix-memory`, in bytes, if there is twice as much.
const PREFIX_BYTES: u64 = 1_000_000_000;

impl Cli {
    /// Returns the bytes for stored prefixes, which the plan of the model and its caches leaves.
    fn prefix_bytes(&self, budget: &MemoryBudget) -> Result<usize> {
        let left = budget.left().unwrap_or(u64::MAX);
        let bytes = match self.prefix_memory {
            _ if self.no_prefixes => 0,
            None => PREFIX_BYTES.min(left / 2),
            Some(MemorySize(bytes)) if bytes > left => bail!(
                "prefix-memory: {} is more than the {} that the model and its caches leave",
                decimal_size(bytes),
                decimal_size(left)
            ),
            Some(MemorySize(bytes)) => bytes,
        };
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }
}

fn main() -> ExitCode {
    start(|cli: Cli| {
        cli.threads.start()?;
        dispatch!(cli.on.backend, Plain, run_on(&cli))
    })
}

fn run_on<T: Target>(cli: &Cli) -> Result<()> {
    if cli.api_key.as_deref().is_some_and(str::is_empty) {
        bail!("api-key: must not be empty");
    }
    if let Some(folder) = &cli.prefix_folder {
        check_folder("prefix-folder", folder)?;
    }
    if !cli.host.is_loopback() && cli.api_key.is_none() {
        bail!(
            "host = {}: other machines can use a server that is not on a loopback address; give it \
             a key with --api-key or KV_SERVE_API_KEY",
            cli.host
        );
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start threads")?;
    // Bound before the model is loaded, so that a wrong port is an error at once.
    let address = SocketAddr::new(cli.host, cli.port);
    let listener = runtime
        .block_on(TcpListener::bind(address))
        .with_context(|| format!("port {}: cannot listen on {address}", cli.port))?;
    let device = On::<T>::open()?;
    let context = cli.context.map(NonZeroUsize::get);
    let request = MemoryRequest {
        // One sequence more reads the prompts.
        batch: usize::from(cli.slots) + 1,
        exact: context.map(|_| "context"),
        generates: true,
        ..MemoryRequest::new(cli.cache.clone(), context.unwrap_or(CONTEXT))
    };
    let (Source { model, tokenizer, cache, name, .. }, budget) =
        source::load(&cli.on, Weights::Packed, request.clone(), &device)?;
    let both = (&model, &tokenizer);
    let speculate =
        cli.speculate.load(Speculate::Auto, &cli.on, both, &budget, request, &device)?;
    let template = ChatTemplate::of(&tokenizer)?;
    let chosen = cli.cache.clone().or(cache).unwrap_or_else(|| KvCacheConfig::float().into());
    chosen.notes(model.spec()).iter().for_each(note);
    let cache = chosen.to_string();
    let room = context.unwrap_or(CONTEXT.min(model.spec().max_positions));
    // One cache serves all texts, so its transform of values can be folded into the weights.
    let (model, config) = model.fold_hadamard(chosen.with_capacity(room));
    let n_ids = model.spec().vocab_size;
    let constraints = Constraints::new(&tokenizer, n_ids);
    let metrics = Metrics::default();
    let options = EngineOptions {
        slots: cli.slots.into(),
        queue: cli.queue,
        prefix_bytes: cli.prefix_bytes(&budget)?,
        prefix_folder: cli.prefix_folder.clone(),
        prefill_chunk: cli.prefill_chunk.map(usize::from),
        speculate,
    };
    let engine = Engine::start(model, config, (*device).clone(), options, metrics.clone())?;
    let app = Arc::new(App {
        name: cli.name.clone().unwrap_or(name),
        cache,
        tokenizer,
        template,
        n_ids,
        constraints,
        engine,
        metrics,
        options: ServerOptions {
            api_key: cli.api_key.clone(),
            max_body: usize::try_from(cli.max_body.0).unwrap_or(usize::MAX),
            timeout: Duration::from_secs(cli.timeout),
            is_local: cli.host.is_loopback(),
            ..ServerOptions::default()
        },
        gates: Gates::default(),
    });
    runtime.block_on(listen(listener, app, cli.slots, Duration::from_secs(cli.grace)))
}

/// Serves until a signal comes or the engine fails. A second signal does not wait for requests.
async fn listen(listener: TcpListener, app: Arc<App>, slots: u16, grace: Duration) -> Result<()> {
    let address = listener.local_addr()?;
    let (signals, mut signalled) = watch::channel(0);
    on_interrupt(move || {
        signals.send_modify(|n| *n += 1);
        if *signals.borrow() > 1 {
            exit_interrupted();
        }
    })?;
    Screen::Error.line(format_args!(
        "serving {} with the cache {} at http://{address}: {slots} texts together, {} tokens each",
        app.name,
        app.cache,
        app.engine.room(),
    ))?;
    let mut ended = app.engine.ended();
    let (stopping, options) = (app.clone(), app.options.clone());
    let stop = async move {
        let failed = tokio::select! {
            _ = signalled.wait_for(|&n| n > 0) => false,
            _ = ended.wait_for(|&ended| ended) => true,
        };
        let n = stopping.engine.n_texts();
        stopping.engine.stop();
        if !failed && n > 0 {
            note(format_args!("stopping: {n} texts get up to {} s to end", grace.as_secs()));
        }
        failed
    };
    if serve(listener, router(app.clone()), options, stop, grace).await? {
        bail!("the engine has failed");
    }
    Ok(())
}
