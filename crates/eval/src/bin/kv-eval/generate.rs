//! `kv-eval generate`: continues a text, or holds a conversation with a model.

use std::{
    fs,
    io::{self, BufRead, IsTerminal},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use kv_cli::{OutFile, Plain, Screen, dispatch, note};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{
    ChatTemplate, GenerateOptions, Generated, LanguageModel, ModelCache, ModelCacheConfig,
    Sampling, SavedCache, Tokenizer, Usage, chat::Message, generate,
};

use crate::{
    common::{BosArgs, ModelArgs, StepArgs, Weights, note_policies},
    generate_several::number,
    loading::{Need, Room},
    profile::ProfileArgs,
    source::{self, Fitting, Source},
};

/// Tokens that the cache of a conversation has room for by default.
const CONVERSATION: usize = 4096;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// The text to continue, or what to say to a model with a chat template; repeatable: several are
    /// continued together, and each line starts with the number of its prompt. Without it, a conversation is
    /// read from standard input, one line at a time.
    #[arg(long, conflicts_with_all = ["prompt_file", "prompts"])]
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
    /// What the cache stores, or a policy: safe, balanced, small, or a file of .json or .toml. By default what the
    /// model's kv_cache.json says, else float.
    #[arg(long, value_parser = ModelCacheConfig::find)]
    cache: Option<ModelCacheConfig>,
    /// Tokens the cache is allocated for; by default prompt and continuation, or 4096 for a
    /// conversation.
    #[arg(long)]
    capacity: Option<usize>,
    /// Tokens to generate, at most.
    #[arg(long, default_value_t = 128)]
    max_tokens: usize,
    /// Write the cache to this file in the end, with its tokens, for --load-cache; of one prompt or a conversation.
    #[arg(long, value_name = "FILE")]
    save_cache: Option<PathBuf>,
    /// Go on from a cache that --save-cache wrote, instead of reading its tokens again. The prompt, or the conversation
    /// as the model's chat template has it, must begin with them.
    #[arg(long, value_name = "FILE")]
    load_cache: Option<PathBuf>,
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
    /// How many of the last tokens the repeat penalty looks at.
    #[arg(long, default_value_t = 64)]
    repeat_last: usize,
    /// Seed of the sampling; of several prompts, the second draws as with the next seed, and so on.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        let SamplingArgs { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last, seed } =
            args;
        Self { temperature, top_k, top_p, min_p, repeat_penalty, repeat_last, seed }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    dispatch!(args.on.backend, Plain, run_on(args))
}

fn run_on<T: Target>(args: &Args) -> Result<()> {
    let mut profile = args.profile.start()?;
    let device = On::<T>::open()?;
    let mut prompts = args.prompts()?;
    let saved = args.saved_cache(prompts.len())?;
    profile.device(&device)?;
    let Fitting { source: Source { model, tokenizer, cache, name, .. }, room } =
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
    let options = GenerateOptions {
        max_tokens: args.max_tokens,
        sampling: args.sampling.into(),
        eos: tokenizer.eos().clone(),
        recorded: args.steps.recorded(),
        ..GenerateOptions::suiting(&model, &device)
    };
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
        saves: args.save_cache.is_some(),
        saved,
    };
    let system = args.system.iter().map(|text| Message::new("system", text));
    let mut talk: Vec<Message> = system.collect();
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
            writer.capacity.get_or_insert(CONVERSATION.min(model.max_positions()));
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
    if let Some(path) = &args.save_cache {
        match &ended {
            Ok(()) => writer.save(path, &name)?,
            // The turns before the one that failed; why it did is the error there is.
            Err(_) if writer.held.is_some() => {
                writer.save(path, &name).unwrap_or_else(|error| note(format_args!("{error:#}")));
            }
            Err(_) => {}
        }
    }
    ended?;
    profile.finish()
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

    /// What is known of the caches before there is a tokenizer: a token is seldom less than a byte, and mostly four.
    fn need(&self, prompts: &[String]) -> Need {
        let longest = prompts.iter().map(String::len).max().unwrap_or(0) / 4;
        let longest = longest.min(self.prompt_tokens.unwrap_or(usize::MAX));
        let capacity = self.capacity.unwrap_or(match prompts {
            [] => CONVERSATION,
            _ => longest.saturating_add(self.max_tokens),
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

/// A conversation over standard input, one line at a time.
fn converse<T: Target>(
    writer: &mut Writer<'_, T>,
    template: &ChatTemplate,
    talk: &mut Vec<Message>,
) -> Result<()> {
    let stdin = io::stdin();
    let ask = || match stdin.is_terminal() {
        true => Screen::Error.print("> ").map(drop),
        false => Ok(()),
    };
    ask()?;
    for line in stdin.lock().lines() {
        let line = line.context("standard input: cannot read")?;
        if !line.trim().is_empty() {
            talk.push(Message::new("user", line));
            let ids = writer.tokenizer.encode(&template.render(talk)?)?;
            let answer = writer.write(&ids)?;
            talk.push(Message::new("assistant", answer));
        }
        ask()?;
    }
    Ok(())
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
    /// A cache, and the ids in it.
    held: Option<(ModelCache, Vec<u32>)>,
    /// Whether what is held is saved in the end.
    saves: bool,
    /// What the first text goes on from.
    saved: Option<SavedCache>,
}

impl<T: Target> Writer<'_, T> {
    /// Continues `ids`, writes the text as it is generated, then why it ended. Returns the text. A turn that fails before
    /// it has read anything leaves what is held as it was.
    fn write(&mut self, ids: &[u32]) -> Result<String> {
        let begins = |held: &[u32]| ids.len() > held.len() && ids.starts_with(held);
        let held = self.held.take_if(|(_, held)| begins(held));
        let goes_on = held.is_some();
        let (mut cache, n_held) = match (held, self.saved.take()) {
            (Some((cache, held)), _) => (cache, held.len()),
            (None, Some(saved)) => {
                let n_held = saved.check_prompt(0, ids)?;
                let config = self.fitting(ids.len(), 1)?;
                (saved.restore(self.model, config, self.device)?, n_held)
            }
            (None, None) => {
                // This turn has no use for what is held, but it is all there is to save should the turn fail.
                if !self.saves {
                    self.held = None;
                }
                (self.new_cache(ids.len(), 1)?, 0)
            }
        };
        let mut stream = self.tokenizer.stream();
        let (mut text, mut failure) = (String::new(), None);
        // Generation stops when nobody reads the output any more.
        let on_token = |id| {
            let part = stream.push(id).map_err(anyhow::Error::from);
            let told = part.and_then(|part| {
                text += &part;
                Screen::Out.print(part)
            });
            told.unwrap_or_else(|error| {
                failure = Some(error);
                false
            })
        };
        let Self { model, device, options, .. } = self;
        let new = &ids[n_held..];
        let generated = match generate(model, &mut cache, new, options, device, on_token) {
            Ok(generated) => generated,
            Err(error) => {
                // Nothing was appended, as to a cache that is too small: it still holds the turns before.
                if goes_on && cache.len() == n_held {
                    self.held = Some((cache, ids[..n_held].to_vec()));
                }
                return Err(error.into());
            }
        };
        let told = failure.map_or(Ok(()), Err).and_then(|()| {
            let rest = stream.finish()?;
            Screen::Out.line(&rest)?;
            text += &rest;
            self.tell(&generated, &cache).map(drop)
        });
        // The cache has what was generated, whether or not it could be written.
        let mut held = [ids, &generated.ids].concat();
        held.truncate(cache.len());
        self.held = Some((cache, held));
        told.map(|()| text)
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

    /// Writes the cache and the ids in it to a file.
    fn save(&self, path: &Path, name: &str) -> Result<()> {
        let Some((cache, ids)) = &self.held else {
            bail!("save-cache {}: nothing was read that it could hold", path.display());
        };
        cache.save(path, self.model, name, &[ids])?;
        let n = cache.len();
        Screen::Error.line(format_args!("saved the cache of {n} tokens: {}", path.display()))?;
        Ok(())
    }

    fn tell(&self, generated: &Generated, cache: &ModelCache) -> Result<bool> {
        Screen::Error.line(format_args!(
            "stopped by {}; prefill {} tokens, {:.1} tokens/s; decode {} tokens, {:.1} tokens/s; \
             cache {}: {} of {} tokens, {:.2} MiB",
            generated.stop,
            generated.prefill_tokens,
            generated.prefill_tokens_per_second(),
            generated.decode_tokens,
            generated.decode_tokens_per_second(),
            self.cache_name,
            cache.len(),
            cache.len() + cache.remaining(),
            cache.memory_bytes().total() as f64 / (1 << 20) as f64,
        ))
    }
}
