//! `kv-eval generate`: continues texts, or holds a conversation with a model.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::exit,
};

use anyhow::{Context, Result, bail};
use kv_cli::{
    INTERRUPTED, MemoryRequest, ModelArgs, NamedFiles, OutFile, Plain, Screen, SpeculateArgs,
    Weights, cache_help, dispatch, note,
    source::{self, Source},
};
use kv_cubecl::{KvCacheConfig, On, Target};
use kv_models::{
    ChatTemplate, Checkpoints, GenerateOptions, LanguageModel, Sampler, Sampling, SavedCache,
    Speculate, Tokenizer, chat::Message, generate::StopStrings,
};

use crate::{
    arguments::{NamedCache, at_least},
    common::{BosArgs, StepArgs, note_policies, read_text},
    generate_conversation::{CONVERSATION, converse},
    generate_interrupt::Interrupt,
    generate_reply::{JsonLines, prompt_label},
    generate_sampling::SamplingArgs,
    generate_writer::Writer,
    profile::ProfileArgs,
};

const EXAMPLES: &str = "\
Examples:
Continue a text with a cache of 4 bits:
  kv-eval generate -m model.gguf -p \"Once upon a time\" --no-chat --cache k4v4
Talk to a model, one line at a time; Ctrl-C stops an answer:
  kv-eval generate -m HuggingFaceTB/SmolLM2-135M-Instruct
Read a document once, then ask about it, several times:
  kv-eval generate -m model.gguf --prompt-file book.txt --no-chat -n 0 --save-cache book.kv
  kv-eval generate -m model.gguf --prompt-file book-and-question.txt --no-chat --load-cache book.kv
Go on with a conversation in another run:
  kv-eval generate -m model.gguf --load-cache talk.kv --save-cache talk.kv
Answer each line of a file, with a line of JSON per reply:
  kv-eval generate -m model.gguf --prompts questions.txt --stop Question: --json replies.jsonl";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(flatten)]
    on: ModelArgs,
    /// Text to continue, or message for a model with a chat template; repeatable. Several are
    /// continued together, and each line starts with the number of its prompt. Without a prompt, a
    /// conversation is read from standard input, one line at a time.
    #[arg(long, short, conflicts_with_all = ["prompt_file", "prompts"])]
    prompt: Vec<String>,
    /// Read the prompt from a file, or - for standard input.
    #[arg(long, conflicts_with = "prompts")]
    prompt_file: Option<PathBuf>,
    /// Read prompts from a file, or - for standard input, one per line. Empty lines are skipped.
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Number of prompts continued at a time; the next one starts when one ends.
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Put the prompt into the model's chat template, the default for models that have one.
    #[arg(long, overrides_with = "no_chat")]
    chat: bool,
    /// Continue the prompt without a chat template.
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
    #[arg(long, help = cache_help(
        "Cache to generate with [default: the cache of the model's kv_cache.json, else float]"
    ))]
    cache: Option<NamedCache>,
    /// Tokens the cache is allocated for [default: prompt and continuation; 4096 for a
    /// conversation, or the model's limit if that is less].
    #[arg(long, short, value_parser = at_least::<1>)]
    capacity: Option<usize>,
    /// Maximum number of tokens to generate; 0 only fills the cache.
    #[arg(long, short = 'n', default_value_t = 128)]
    max_tokens: usize,
    /// End a text before this string, which is not printed; repeatable.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Save the cache of the prompt, or of the conversation up to its last answer, to this file for
    /// --load-cache.
    #[arg(long, value_name = "FILE")]
    save_cache: Option<PathBuf>,
    /// Include the generated text in the file of --save-cache.
    #[arg(long, requires = "save_cache")]
    save_reply: bool,
    /// Load a cache saved by --save-cache: the longest prefix that the prompt shares with it is not
    /// computed again. Without a prompt, the saved conversation continues.
    #[arg(long, value_name = "FILE")]
    load_cache: Option<PathBuf>,
    /// Write a line of JSON per reply to this file, with finish_reason, usage and timings. Without
    /// a file, write to standard output in place of the texts.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    speculate: SpeculateArgs,
    #[command(flatten)]
    profile: ProfileArgs,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if dispatch!(args.on.backend, Plain, run_on(args))? {
        exit(INTERRUPTED.into());
    }
    Ok(())
}

/// Loads the model and continues the prompts. Returns whether it was interrupted.
fn run_on<T: Target>(args: &Args) -> Result<bool> {
    args.files().check()?;
    let mut profile = args.profile.record()?;
    let interrupt = Interrupt::listen(profile.interrupted())?;
    let device = On::<T>::open()?;
    let prompts = args.prompts()?;
    let saved = args.saved_cache(prompts.len())?;
    let stops = StopStrings::new(&args.stop)?;
    let sampling = Sampling::from(args.sampling);
    Sampler::new(sampling)?;
    let json = JsonLines::open(args.json.as_ref())?;
    profile.device(&device)?;
    let (Source { model, tokenizer, cache, name, .. }, budget) =
        source::load(&args.on, Weights::Packed, args.request(&prompts), &device)?;
    let both = (&model, &tokenizer);
    let request = args.request(&prompts);
    let speculate =
        args.speculate.load(Speculate::Auto, &args.on, both, &budget, request, &device)?;
    let template = args.template(&tokenizer)?;
    let chosen = args.cache.as_ref().map(|named| named.value.clone()).or(cache);
    let chosen = chosen.unwrap_or_else(|| KvCacheConfig::float().into());
    note_policies([&chosen], model.spec());
    // One cache serves the whole run, so its transform of values can be folded into the weights.
    let cache_name = chosen.to_string();
    let (model, config) = model.fold_hadamard(chosen);
    profile.model(&model, &name);
    profile.fact("cache", &config);
    let options = args.options(sampling, speculate, tokenizer.eos(), &model, &device);
    interrupt.begin();
    let writer = Writer {
        device: &device,
        model: &model,
        tokenizer: &tokenizer,
        options,
        config,
        cache_name,
        capacity: args.capacity,
        budget,
        held: None,
        checkpoints: args.checkpoints(prompts.len(), &model),
        saves: args.save_cache.as_ref().map(|_| args.save_reply),
        n_prompt: 0,
        n_turns: 0,
        saved,
        stops,
        json,
        interrupt,
        interrupted: false,
    };
    let (budget, at) = (writer.budget.clone(), writer.device);
    let interrupted = args.write(writer, prompts, template.as_ref(), &name)?;
    if let Some(memory) = budget.device_use(at) {
        Screen::Error.line(format_args!("device memory: {memory}"))?;
        profile.fact("device memory", memory);
    }
    if interrupted {
        profile.fact("ended", "by Ctrl-C or SIGTERM");
    }
    profile.finish()?;
    Ok(interrupted)
}

impl Args {
    /// Continues the prompts, or holds a conversation if there are none. Returns whether that was
    /// interrupted.
    fn write<T: Target>(
        &self,
        mut writer: Writer<'_, T>,
        prompts: Vec<String>,
        template: Option<&ChatTemplate>,
        name: &str,
    ) -> Result<bool> {
        let mut talk = self.talk(&writer, prompts.is_empty())?;
        let prompts = self.encode(prompts, writer.tokenizer, template, &talk)?;
        let ended = match (&prompts[..], template) {
            ([], None) => {
                bail!("prompt: none given, and the model has no chat template for a conversation")
            }
            ([], Some(template)) => converse(&mut writer, template, &mut talk),
            ([prompt], _) => writer.write(prompt).map(drop),
            _ => writer.write_several(&prompts, self.batch),
        };
        writer.interrupt.finish();
        // A prompt alone is not a conversation that another run can continue.
        let talk = if prompts.is_empty() { &talk[..] } else { &[] };
        self.save(&mut writer, &ended, name, talk)?;
        writer.json.finish()?;
        ended?;
        Ok(writer.interrupted)
    }

    fn files(&self) -> NamedFiles<'_> {
        // A cache may be saved to the file that it was loaded from.
        let loaded = self.load_cache.as_ref().filter(|&it| Some(it) != self.save_cache.as_ref());
        NamedFiles::default()
            .reads_model("model", self.on.source.given())
            .reads_models("draft-model", self.speculate.draft_model())
            .reads_optional("load-cache", loaded)
            .reads_optional("prompt-file", self.prompt_file.as_ref())
            .reads_optional("prompts", self.prompts.as_ref())
            .reads_optional("cache", self.cache.as_ref().map(|cache| &cache.name))
            .writes("save-cache", self.save_cache.as_deref())
            .writes("json", self.json.as_deref())
            .writes("profile", self.profile.path())
    }

    /// Opens the cache to load, after checking that the cache to save can be written.
    fn saved_cache(&self, n_prompts: usize) -> Result<Option<SavedCache>> {
        for (name, path) in [("save-cache", &self.save_cache), ("load-cache", &self.load_cache)] {
            let Some(path) = path else { continue };
            if path == Path::new("-") {
                bail!("{name} -: must be the name of a file");
            }
            if n_prompts > 1 {
                bail!(
                    "{name} {}: a file holds one text, but there are {n_prompts} prompts",
                    path.display()
                );
            }
        }
        if let Some(path) = &self.save_cache {
            // Checked before it is opened, because opening a pipe waits for a reader.
            match fs::metadata(path) {
                Ok(found) if !found.is_file() && !found.is_dir() => {
                    bail!("save-cache {}: must be a regular file", path.display());
                }
                Ok(found) if found.is_file() && found.len() > 0 && !SavedCache::is_one(path) => {
                    bail!(
                        "save-cache {}: is a file that holds no cache; remove it, or name another \
                         one",
                        path.display()
                    );
                }
                _ => {}
            }
            OutFile::open("save-cache", path)?;
        }
        let Some(path) = &self.load_cache else { return Ok(None) };
        if path.is_dir() {
            bail!("load-cache {}: is a folder; name a file of --save-cache", path.display());
        }
        let saved = SavedCache::open(path)?;
        match saved.tokens().len() {
            1 => Ok(Some(saved)),
            n => bail!("load-cache {}: holds {n} texts, but must hold one", path.display()),
        }
    }

    fn options<T: Target>(
        &self,
        sampling: Sampling,
        speculate: Speculate,
        eos: &BTreeSet<u32>,
        model: &LanguageModel,
        device: &On<T>,
    ) -> GenerateOptions {
        if sampling.penalizes() && T::NAME != "flex" {
            note("penalties are computed on the host, which reads the logits of every step");
        }
        GenerateOptions {
            max_tokens: self.max_tokens,
            sampling,
            eos: eos.clone(),
            graph_capture: self.steps.graph_capture(),
            speculate,
            ..GenerateOptions::suiting(model, device)
        }
    }

    fn checkpoints(&self, n_prompts: usize, model: &LanguageModel) -> Checkpoints {
        // A recurrent state contains no earlier one, so without more checkpoints a prompt that
        // changes its end would be computed again from the start.
        let recurrent = model.spec().layers.iter().any(|layer| layer.delta.is_some());
        match (&self.save_cache, n_prompts) {
            (Some(_), _) => Checkpoints::All,
            (None, 0) if recurrent => Checkpoints::All,
            (None, 0) => Checkpoints::Ends,
            (None, _) => Checkpoints::None,
        }
    }

    /// Encodes prompts, with a template as the next message of the conversation `talk`.
    fn encode(
        &self,
        prompts: Vec<String>,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        talk: &[Message],
    ) -> Result<Vec<Vec<u32>>> {
        let several = prompts.len() > 1;
        let encode = |prompt: String| -> Result<Vec<u32>> {
            let Some(template) = template else { return self.continued(tokenizer, &prompt) };
            let talk = [talk, &[Message::new("user", prompt)]].concat();
            Ok(tokenizer.encode(&template.render(&talk)?)?)
        };
        let labelled = |(i, prompt)| match several {
            true => encode(prompt).with_context(|| prompt_label(i)),
            false => encode(prompt),
        };
        prompts.into_iter().enumerate().map(labelled).collect()
    }

    /// Saves the cache if the user asked for it. After an error, saves the turns before it; if this
    /// fails as well, prints a note.
    fn save<T: Target>(
        &self,
        writer: &mut Writer<'_, T>,
        ended: &Result<()>,
        name: &str,
        talk: &[Message],
    ) -> Result<()> {
        let Some(path) = &self.save_cache else { return Ok(()) };
        if ended.is_ok() {
            return writer.save(path, name, talk);
        }
        if writer.held.is_some()
            && let Err(error) = writer.save(path, name, talk)
        {
            note(format_args!("{error:#}"));
        }
        Ok(())
    }

    /// Returns the conversation so far: the saved one, or the system message.
    fn talk<T: Target>(&self, writer: &Writer<'_, T>, converses: bool) -> Result<Vec<Message>> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        let system: Vec<Message> = system.collect();
        let saved = writer.saved.as_ref().filter(|_| converses).map_or(&[][..], SavedCache::talk);
        if saved.is_empty() {
            return Ok(system);
        }
        if !saved.starts_with(&system) {
            bail!("system: differs from the saved conversation's; omit --system to continue it");
        }
        note(format_args!("continuing a conversation of {} messages", saved.len()));
        Ok(saved.to_vec())
    }

    /// Estimates the memory request before the tokenizer is loaded, at four bytes per token.
    fn request(&self, prompts: &[String]) -> MemoryRequest {
        let longest = prompts.iter().map(String::len).max().unwrap_or(0) / 4;
        let longest = longest.min(self.prompt_tokens.unwrap_or(usize::MAX));
        let capacity = self.capacity.unwrap_or(match prompts {
            [] => CONVERSATION,
            _ => longest.saturating_add(self.max_tokens).max(1),
        });
        // A batch has one sequence more, which reads the prompts.
        let batch = match prompts.len() {
            0 | 1 => 1,
            n => self.batch.min(n).saturating_add(1),
        };
        let exact = self.capacity.map(|_| "capacity");
        let caches = self.cache.as_ref().map(|named| named.value.clone());
        MemoryRequest { batch, exact, generates: true, ..MemoryRequest::new(caches, capacity) }
    }

    /// Returns the prompts; none for a conversation.
    fn prompts(&self) -> Result<Vec<String>> {
        if self.batch == 0 {
            bail!("batch 0: must be at least 1");
        }
        if let Some(path) = &self.prompt_file {
            return Ok(vec![read_text("prompt-file", path)?]);
        }
        let Some(path) = &self.prompts else { return Ok(self.prompt.clone()) };
        let text = read_text("prompts", path)?;
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let prompts: Vec<String> = lines.map(Into::into).collect();
        if prompts.is_empty() {
            bail!("prompts {}: has no line with a prompt", path.display());
        }
        Ok(prompts)
    }

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
                    note("using the model's chat template; --no-chat disables it");
                }
            }
            None => {}
        }
        Ok(template)
    }

    /// Encodes a prompt without a template.
    fn continued(&self, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>> {
        let limit = self.prompt_tokens.unwrap_or(usize::MAX);
        let bos = self.bos.choose(tokenizer)?;
        let ids: Vec<u32> = bos.into_iter().chain(tokenizer.encode_first(prompt, limit)?).collect();
        if ids.is_empty() {
            bail!("prompt: must have at least one token");
        }
        Ok(ids)
    }
}
