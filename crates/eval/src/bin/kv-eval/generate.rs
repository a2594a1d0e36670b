//! `kv-eval generate`: continues a text, or holds a conversation with a model.

use std::{
    fs,
    io::{self, BufRead, IsTerminal},
    path::{Path, PathBuf},
    process::exit,
    sync::mpsc,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use kv_cli::{INTERRUPTED, OutFile, Plain, Screen, dispatch, note};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{
    ChatTemplate, Checkpoints, GenerateOptions, Generated, LanguageModel, ModelCache,
    ModelCacheConfig, PromptCache, Sampler, Sampling, SavedAs, SavedCache, Tokenizer, Usage,
    chat::Message,
    generate::{Stop, StopStrings},
};

use crate::{
    common::{BosArgs, ModelArgs, StepArgs, Weights, note_policies},
    generate_interrupt::Interrupt,
    generate_reply::{End, JsonLines, Reply, TextOut},
    generate_several::number,
    loading::{Need, Room},
    profile::ProfileArgs,
    source::{self, Fitting, Source},
};

const EXAMPLES: &str = "\
Examples:
  Continue a text with a cache of 4 bits:
    kv-eval generate -m model.gguf -p \"Once upon a time\" --no-chat --cache k4v4
  Talk to a model, one line at a time; Ctrl-C stops an answer:
    kv-eval generate -m HuggingFaceTB/SmolLM2-135M-Instruct
  Ask several questions about a document that is read once:
    kv-eval generate -m model.gguf --prompt-file book.txt --no-chat -n 0 --save-cache book.kv
    kv-eval generate -m model.gguf --prompt-file book-and-question.txt --no-chat --load-cache book.kv
  Go on with a conversation in another run:
    kv-eval generate -m model.gguf --load-cache talk.kv --save-cache talk.kv
  Answer each line of a file, a line of JSON per reply:
    kv-eval generate -m model.gguf --prompts questions.txt --stop $'\\n\\n' --json > replies.jsonl";

/// Tokens that the cache of a conversation has room for by default.
const CONVERSATION: usize = 4096;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// The text to continue, or what to say to a model with a chat template; repeatable: several are
    /// continued together, and each line starts with the number of its prompt. Without it, a conversation is
    /// read from standard input, one line at a time.
    #[arg(long, short, conflicts_with_all = ["prompt_file", "prompts"])]
    prompt: Vec<String>,
    /// Read the prompt from a file.
    #[arg(long, conflicts_with = "prompts")]
    prompt_file: Option<PathBuf>,
    /// Read prompts from a file, one per line; empty lines are none, and - is standard input.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Of several prompts, how many are continued at a time; the next starts when one has ended.
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Put the prompt into the model's chat template. The default for models that have one.
    #[arg(long, overrides_with = "no_chat")]
    chat: bool,
    /// Continue the prompt as it is.
    #[arg(long)]
    no_chat: bool,
    /// System message to start the conversation with, in place of the template's own.
    #[arg(long, value_name = "TEXT", conflicts_with = "no_chat")]
    system: Option<String>,
    #[command(flatten)]
    bos: BosArgs,
    /// Use only the first tokens of the prompt.
    #[arg(long)]
    prompt_tokens: Option<usize>,
    /// What the cache stores, or a policy: safe, balanced, small, or a file of .json or .toml [default: what the
    /// model's kv_cache.json says, else float].
    #[arg(long, value_parser = ModelCacheConfig::find)]
    cache: Option<ModelCacheConfig>,
    /// Tokens the cache is allocated for [default: prompt and continuation; 4096 for a conversation, or the model's
    /// limit if that is less].
    #[arg(long, short)]
    capacity: Option<usize>,
    /// Tokens to generate, at most; 0 only fills the cache.
    #[arg(long, short = 'n', default_value_t = 128)]
    max_tokens: usize,
    /// End a text before this string, which is not printed; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Write the cache of the prompt, or of the conversation up to its last answer, to this file in the end, for
    /// --load-cache.
    #[arg(long, value_name = "FILE")]
    save_cache: Option<PathBuf>,
    /// Keep what was generated after the prompt in the file of --save-cache.
    #[arg(long, requires = "save_cache")]
    save_reply: bool,
    /// Reuse a cache that --save-cache wrote: the longest prefix that the prompt shares with it is not computed again.
    /// Without a prompt, the conversation that was saved goes on.
    #[arg(long, value_name = "FILE")]
    load_cache: Option<PathBuf>,
    /// Write a line of JSON per reply here, with finish_reason, usage and timings; without a file, to standard output in
    /// place of the texts.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    profile: ProfileArgs,
}

#[derive(Clone, Copy, Debug, clap::Args)]
struct SamplingArgs {
    /// 0 picks the most likely token; higher values flatten the distribution.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Sample from this many most likely tokens; 0 for all.
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Sample from the smallest set of tokens with this much probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Sample from tokens at least this much as likely as the most likely one.
    #[arg(long, default_value_t = 0.0)]
    min_p: f32,
    /// Above 1, makes tokens that occurred already less likely.
    #[arg(long, default_value_t = 1.0)]
    repeat_penalty: f32,
    /// Subtract this from the logit of a token for each time it occurred. On a GPU, the host computes penalties.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtract this from the logit of a token that occurred, however often.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// How many of the last tokens the penalties look at, those of the prompt among them.
    #[arg(long, default_value_t = 64)]
    repeat_last: usize,
    /// Seed of the sampling; of several prompts, the second draws as with the next seed, and so on.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        Self {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repeat_penalty: args.repeat_penalty,
            frequency_penalty: args.frequency_penalty,
            presence_penalty: args.presence_penalty,
            repeat_last: args.repeat_last,
            seed: args.seed,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if dispatch!(args.on.backend, Plain, run_on(args))? {
        exit(INTERRUPTED.into());
    }
    Ok(())
}

/// Returns whether it was interrupted.
fn run_on<T: Target>(args: &Args) -> Result<bool> {
    let mut profile = args.profile.record()?;
    let interrupt = Interrupt::listen(profile.interrupted())?;
    let device = On::<T>::open()?;
    let mut prompts = args.prompts()?;
    let saved = args.saved_cache(prompts.len())?;
    let stops = StopStrings::new(&args.stop)?;
    let sampling = Sampling::from(args.sampling);
    Sampler::new(sampling)?;
    let json = JsonLines::open(args.json.as_ref())?;
    profile.device(&device)?;
    let Fitting { source: Source { model, tokenizer, cache, name }, room } =
        source::load(&args.on, Weights::Packed, args.need(&prompts), &device)?;
    let template = args.template(&tokenizer)?;
    let chosen = args.cache.clone().or(cache);
    let chosen = chosen.unwrap_or_else(|| KvCacheConfig::float().into());
    chosen.note(model.spec()).iter().for_each(kv_cli::note);
    note_policies([&chosen], model.spec());
    // One cache serves the whole run, so that a rotation of its values can be in the weights.
    let cache_name = chosen.to_string();
    let (model, config) = model.fold_rotation(chosen);
    profile.model(&model, &name);
    profile.fact("cache", &config);
    if sampling.penalizes() && T::NAME != "flex" {
        note("penalties are computed on the host, which reads the logits of every step");
    }
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        sampling,
        eos: tokenizer.eos().clone(),
        recorded: args.steps.recorded(),
        ..GenerateOptions::suiting(&model, &device)
    };
    interrupt.begin();
    let mut writer = Writer {
        device: &device,
        model: &model,
        tokenizer: &tokenizer,
        options,
        config,
        cache_name,
        capacity: args.capacity,
        room,
        held: None,
        checkpoints: match (&args.save_cache, prompts.len()) {
            (Some(_), _) => Checkpoints::All,
            (None, 0) => Checkpoints::Ends,
            (None, _) => Checkpoints::None,
        },
        saves: args.save_cache.as_ref().map(|_| args.save_reply),
        n_prompt: 0,
        n_turns: 0,
        saved,
        stops,
        json,
        interrupt,
        interrupted: false,
    };
    let converses = prompts.is_empty();
    let mut talk = args.talk(&writer, converses)?;
    let encode = |prompt: String| -> Result<Vec<u32>> {
        let Some(template) = &template else { return args.continued(&tokenizer, &prompt) };
        let talk = [&talk[..], &[Message::new("user", prompt)]].concat();
        Ok(tokenizer.encode(&template.render(&talk)?)?)
    };
    let ended = match (prompts.len(), &template) {
        (0, None) => {
            bail!("prompt: none given, and without a chat template there is no conversation")
        }
        (0, Some(template)) => {
            let saved = writer.saved.as_ref().map_or(0, |saved| saved.tokens()[0].len());
            let capacity = CONVERSATION.max(saved.saturating_add(args.max_tokens));
            writer.capacity.get_or_insert(capacity.min(model.max_positions()));
            converse(&mut writer, template, &mut talk)
        }
        (1, _) => writer.write(&encode(prompts.remove(0))?).map(drop),
        _ => {
            let encode = |(i, prompt)| encode(prompt).with_context(|| number(i));
            let prompts = prompts.into_iter().enumerate().map(encode);
            let prompts = prompts.collect::<Result<Vec<_>>>()?;
            writer.write_several(&prompts, args.batch)
        }
    };
    writer.interrupt.finish();
    // A prompt alone is no conversation that another run could go on with.
    let talk = if converses { &talk[..] } else { &[] };
    if let Some(path) = &args.save_cache {
        match &ended {
            Ok(()) => writer.save(path, &name, talk)?,
            // The turns before the one that failed; why it did is the error there is.
            Err(_) if writer.held.is_some() => {
                let saved = writer.save(path, &name, talk);
                saved.unwrap_or_else(|error| note(format_args!("{error:#}")));
            }
            Err(_) => {}
        }
    }
    let Writer { json, interrupted, .. } = writer;
    json.finish()?;
    ended?;
    if interrupted {
        profile.fact("ended", "by Ctrl-C or SIGTERM");
    }
    profile.finish()?;
    Ok(interrupted)
}

impl Args {
    /// The cache to go on from; finds out whether the one that is asked for can be written.
    fn saved_cache(&self, n_prompts: usize) -> Result<Option<SavedCache>> {
        for (name, path) in [("save-cache", &self.save_cache), ("load-cache", &self.load_cache)] {
            let Some(path) = path else { continue };
            if path == Path::new("-") {
                bail!("{name} -: must be the name of a file");
            }
            if n_prompts > 1 {
                bail!(
                    "{name} {}: a file holds one text, and there are {n_prompts}",
                    path.display()
                );
            }
        }
        if let Some(path) = &self.save_cache {
            // Before it is opened, which of a pipe would wait for a reader.
            if fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir()) {
                bail!("save-cache {}: is no regular file", path.display());
            }
            OutFile::open("save-cache", path)?;
        }
        let Some(path) = &self.load_cache else { return Ok(None) };
        let saved = SavedCache::open(path)?;
        match saved.tokens().len() {
            1 => Ok(Some(saved)),
            n => bail!("load-cache {}: it holds {n} texts, one is continued", path.display()),
        }
    }

    /// The conversation so far: the one that was saved, or the system message.
    fn talk<T: Target>(&self, writer: &Writer<'_, T>, converses: bool) -> Result<Vec<Message>> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        let system: Vec<Message> = system.collect();
        let saved = writer.saved.as_ref().filter(|_| converses).map_or(&[][..], SavedCache::talk);
        if saved.is_empty() {
            return Ok(system);
        }
        if !saved.starts_with(&system) {
            bail!(
                "system: the saved conversation has another; leave out --system to go on with it"
            );
        }
        note(format_args!("going on with a conversation of {} messages", saved.len()));
        Ok(saved.to_vec())
    }

    /// What is known of the caches before there is a tokenizer: a token is seldom less than a byte, and mostly four.
    fn need(&self, prompts: &[String]) -> Need {
        let longest = prompts.iter().map(String::len).max().unwrap_or(0) / 4;
        let longest = longest.min(self.prompt_tokens.unwrap_or(usize::MAX));
        let capacity = self.capacity.unwrap_or(match prompts {
            [] => CONVERSATION,
            _ => longest.saturating_add(self.max_tokens).max(1),
        });
        let batch = self.batch.min(prompts.len()).max(1);
        let exact = self.capacity.is_some();
        Need { batch, exact, generates: true, ..Need::new(&self.cache, capacity) }
    }

    /// The prompts; none for a conversation.
    fn prompts(&self) -> Result<Vec<String>> {
        if self.batch == 0 {
            bail!("batch 0: must be at least 1");
        }
        if let Some(path) = &self.prompt_file {
            let cannot = || format!("prompt-file {}: cannot read", path.display());
            return Ok(vec![fs::read_to_string(path).with_context(cannot)?]);
        }
        let Some(path) = &self.prompts else { return Ok(self.prompt.clone()) };
        let text = match path == Path::new("-") {
            true => io::read_to_string(io::stdin()),
            false => fs::read_to_string(path),
        };
        let text = text.with_context(|| format!("prompts {}: cannot read", path.display()))?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let prompts: Vec<String> = lines.map(Into::into).collect();
        if prompts.is_empty() {
            bail!("prompts {}: has no line with a prompt", path.display());
        }
        Ok(prompts)
    }

    /// The template to use, if any.
    fn template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        let template = match self.no_chat {
            true => None,
            false => ChatTemplate::of(tokenizer)
                .context("--no-chat continues the prompt without the model's template")?,
        };
        match &template {
            None if self.chat => bail!("chat: the model's files have no chat template"),
            None if self.system.is_some() => {
                bail!("system: the model's files have no chat template to put it in");
            }
            Some(_) => {
                for (given, name) in
                    [(self.prompt_tokens.is_some(), "prompt-tokens"), (self.bos.is_given(), "bos")]
                {
                    if given {
                        bail!("{name}: the model's chat template decides that; give --no-chat");
                    }
                }
                if !self.chat {
                    note("talking by the model's chat template; --no-chat continues the prompt");
                }
            }
            None => {}
        }
        Ok(template)
    }

    /// The ids of a prompt that is continued as it is.
    fn continued(&self, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>> {
        let limit = self.prompt_tokens.unwrap_or(usize::MAX);
        let bos = self.bos.choose(tokenizer)?;
        let ids: Vec<u32> = bos.into_iter().chain(tokenizer.encode_first(prompt, limit)?).collect();
        if ids.is_empty() {
            bail!("prompt: has no token, there is nothing to continue");
        }
        Ok(ids)
    }
}

/// What a conversation waits for.
enum Said {
    Line(io::Result<String>),
    End,
    /// Ctrl-C.
    Interrupt,
}

/// A conversation over standard input, one line at a time.
fn converse<T: Target>(
    writer: &mut Writer<'_, T>,
    template: &ChatTemplate,
    talk: &mut Vec<Message>,
) -> Result<()> {
    let asks = io::stdin().is_terminal();
    // A thread of its own reads, so that a signal ends the waiting.
    let (sender, said) = mpsc::sync_channel(1);
    let wake = sender.clone();
    writer.interrupt.wait(move || drop(wake.try_send(Said::Interrupt)));
    thread::spawn(move || {
        let lines = io::stdin().lock().lines().map(Said::Line);
        lines.chain([Said::End]).try_for_each(|said| sender.send(said))
    });
    loop {
        if asks {
            Screen::Error.print("> ")?;
        }
        let line = match said.recv() {
            Ok(Said::Line(line)) => line.context("standard input: cannot read")?,
            Ok(Said::Interrupt) => String::new(),
            Ok(Said::End) | Err(_) => return Ok(()),
        };
        if writer.interrupt.ends() {
            writer.interrupted = true;
            return Ok(());
        }
        if !line.trim().is_empty() {
            writer.interrupt.begin();
            talk.push(Message::new("user", line));
            let ids = writer.tokenizer.encode(&template.render(talk)?)?;
            let answer = match writer.write(&ids) {
                Ok(answer) => answer,
                Err(error) => {
                    talk.pop();
                    return Err(error);
                }
            };
            // A turn without an answer is no part of the conversation.
            match std::mem::take(&mut writer.interrupted) && answer.is_empty() {
                true => drop(talk.pop()),
                false => talk.push(Message::new("assistant", answer)),
            }
        }
        writer.interrupt.pause();
        if writer.interrupt.ends() {
            writer.interrupted = true;
            return Ok(());
        }
    }
}

/// Writes what a model generates, and keeps its cache for the next turn.
pub(crate) struct Writer<'a, T: Target> {
    pub(crate) device: &'a On<T>,
    pub(crate) model: &'a LanguageModel,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) options: GenerateOptions,
    pub(crate) config: ModelCacheConfig,
    /// The cache that was asked for, whose rotation may be in the weights of `model` rather than in `config`.
    pub(crate) cache_name: String,
    /// Tokens the cache is allocated for; by default the prompt and its continuation.
    capacity: Option<usize>,
    /// The memory that there is.
    room: Room,
    /// The cache of the turns so far.
    held: Option<PromptCache>,
    /// Where the cache can be cut back to.
    checkpoints: Checkpoints,
    /// Whether the cache is saved in the end, and if so with what was generated last.
    saves: Option<bool>,
    /// Tokens of the last prompt.
    n_prompt: usize,
    n_turns: usize,
    /// What the first text reuses.
    saved: Option<SavedCache>,
    pub(crate) stops: StopStrings,
    pub(crate) json: JsonLines,
    pub(crate) interrupt: Interrupt,
    /// Whether the last text was.
    pub(crate) interrupted: bool,
}

impl<T: Target> Writer<'_, T> {
    /// Continues `ids`, writes the text as it is generated, then why it ended. Returns the text. A turn that fails before
    /// it has read anything leaves what is held as it was.
    fn write(&mut self, ids: &[u32]) -> Result<String> {
        let (mut held, before) = self.begin(ids)?;
        let reuses = before.is_some() || !held.tokens().is_empty();
        let start = Instant::now();
        let Self { model, device, options, interrupt, .. } = self;
        let proceed = || !interrupt.stops();
        let prefilled = held.reuse(ids).and_then(|n_held| {
            let logits = held.prefill(model, ids, options.prefill_chunk, device, proceed)?;
            Ok((n_held, logits))
        });
        let (n_held, logits) = match prefilled {
            Ok(prefilled) => prefilled,
            Err(error) => {
                // Nothing was appended, as to a cache that is too small: it still holds the turns before.
                self.held = before.or(Some(held).filter(|held| !held.tokens().is_empty()));
                return Err(error.into());
            }
        };
        let (prefill_time, n_prefilled) = (start.elapsed(), held.tokens().len() - n_held);
        self.n_prompt = held.tokens().len();
        let mut out = TextOut::new(self.tokenizer, &self.stops);
        let mut failure = None;
        let prints = self.json.prints_texts();
        // Generation stops when nobody reads the output any more.
        let on_token = |id| {
            let told = out.push(id).and_then(|part| match prints && !part.is_empty() {
                true => Screen::Out.print(part),
                false => Ok(true),
            });
            let told = told.unwrap_or_else(|error| {
                failure = Some(error);
                false
            });
            told && out.stopped().is_none() && !interrupt.stops()
        };
        let generated = match logits {
            Some(logits) => held.generate(model, logits, options, device, on_token).map(Some),
            None => Ok(None),
        };
        // The cache has what was generated, whether or not it could be written.
        self.held = Some(held);
        self.interrupted = interrupt.stops();
        let mut generated = generated?.unwrap_or_else(|| Generated::new(Stop::Callback));
        if let Some(error) = failure {
            return Err(error);
        }
        let rest = out.finish()?;
        if prints && options.max_tokens > 0 {
            Screen::Out.line(&rest)?;
        }
        (generated.prefill_tokens, generated.prefill_time) = (n_prefilled, prefill_time);
        if !generated.ids.is_empty() {
            generated.first_token_time += prefill_time;
        }
        let end = End::new(generated.stop, out.stopped(), options.max_tokens);
        let prompt = n_held + n_prefilled;
        let text = out.into_text();
        let reply = Reply { index: self.n_turns, text, end, prompt, generated };
        self.n_turns += 1;
        self.json.push(&reply)?;
        self.tell(&reply, reuses)?;
        Ok(reply.text)
    }

    /// The cache that `ids` go on from, and the one that they have no use for, to save should they fail.
    fn begin(&mut self, ids: &[u32]) -> Result<(PromptCache, Option<PromptCache>)> {
        if let Some(saved) = self.saved.take() {
            let capacity = ids.len().max(saved.tokens()[0].len());
            let config = self.fitting(capacity, 1)?;
            let restored = saved.restore_prompt(self.model, config, self.device, self.checkpoints);
            return match (restored, saved.cache()) {
                (Ok(held), _) => Ok((held, None)),
                (Err(error), Some(cache)) if cache != self.cache_name => {
                    let path = saved.path().display();
                    let other = format!(
                        "load-cache {path}: it was saved with --cache {cache}, and {} is asked for",
                        self.cache_name
                    );
                    match error.to_string().contains(".cache = ") {
                        true => Err(anyhow::Error::from(error).context(other)),
                        // A rotation that is in the weights makes them others.
                        false => bail!("{other}; give --cache {cache}"),
                    }
                }
                (Err(error), _) => Err(error.into()),
            };
        }
        let shares = |held: &PromptCache| held.tokens().first() == ids.first();
        match self.held.take() {
            Some(held) if shares(&held) => Ok((held, None)),
            // It is all there is to save should the turn fail.
            other => {
                let other = other.filter(|_| self.saves.is_some());
                Ok((PromptCache::new(self.new_cache(ids.len(), 1)?, self.checkpoints)?, other))
            }
        }
    }

    /// A cache for so many sequences, the longest of whose prompts has `n_prompt` tokens.
    pub(crate) fn new_cache(&self, n_prompt: usize, batch: usize) -> Result<ModelCache> {
        Ok(self.model.new_cache(self.fitting(n_prompt, batch)?, batch, self.device)?)
    }

    /// What such a cache stores, for which there is memory.
    fn fitting(&self, n_prompt: usize, batch: usize) -> Result<ModelCacheConfig> {
        let most = self.model.max_positions();
        // A prompt beyond the model's limit is refused by what reads it, not by what allocates for it.
        let wanted = n_prompt.saturating_add(self.options.max_tokens).min(most);
        let mut config = self.config.clone();
        config.capacity = self.capacity.unwrap_or(wanted);
        let usage = Usage::new(config.clone()).with_batch(batch);
        let usage = usage.with_pass(self.options.prefill_chunk);
        self.room.check(self.model.spec(), &usage)?;
        Ok(config)
    }

    /// Writes the cache and its tokens to a file.
    fn save(&mut self, path: &Path, name: &str, talk: &[Message]) -> Result<()> {
        let Some(held) = &mut self.held else {
            bail!("save-cache {}: nothing was read that it could hold", path.display());
        };
        if self.saves == Some(false) {
            held.cut_back(self.n_prompt)?;
        }
        let named = SavedAs { model: name, cache: Some(&self.cache_name), talk };
        held.save(path, self.model, &named)?;
        let n = held.tokens().len();
        Screen::Error.line(format_args!("saved the cache of {n} tokens: {}", path.display()))?;
        Ok(())
    }

    fn tell(&self, reply: &Reply, reuses: bool) -> Result<bool> {
        let Reply { end, prompt, generated, .. } = reply;
        let reused = match reuses {
            true => format!("reused {} of {prompt} prompt tokens; ", reply.reused()),
            false => String::new(),
        };
        let first = match generated.ids.is_empty() {
            true => String::new(),
            false => {
                format!("first token after {:.2} s; ", generated.first_token_time.as_secs_f64())
            }
        };
        let cache = self.held.as_ref().map_or_else(String::new, |held| {
            let cache = held.cache();
            format!(
                "cache {}: {} of {} tokens, {:.2} MiB",
                self.cache_name,
                cache.len(),
                cache.len() + cache.remaining(),
                cache.memory_bytes().total() as f64 / (1 << 20) as f64
            )
        });
        Screen::Error.line(format_args!(
            "{end}; {reused}prefill {} tokens, {:.1} tokens/s; {first}decode {} tokens, \
             {:.1} tokens/s; {cache}",
            generated.prefill_tokens,
            generated.prefill_tokens_per_second(),
            generated.decode_tokens,
            generated.decode_tokens_per_second(),
        ))
    }
}
