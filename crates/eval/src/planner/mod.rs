//! The memory that a model needs, and the longest context and largest batch that fit: [`plan`].

mod formats;
mod formula;
mod presets;
mod table;

use std::collections::BTreeMap;

use burn::tensor::Device;
use kv_cubecl::{CacheFloat, KvCacheConfig};
use kv_models::{
    CacheBytes, GenerateOptions, LayerSpec, MemoryLimit, ModelCacheConfig, ModelOutline, Planned,
    Usage,
};
use serde::Serialize;

pub use formats::formats;
pub use formula::{Format, Formula, Part};
pub use presets::{Frame, Preset};

use crate::{Error, Result};

const MOST_TOKENS: usize = 1 << 24;

/// A model to plan for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Subject {
    /// The name.
    pub name: String,
    /// The source of its numbers.
    pub source: Option<String>,
    /// Number of parameters, if its authors published it.
    pub parameters: Option<u64>,
    /// The tokens of a frame, for a model of frames.
    pub frame: Option<Frame>,
    /// Notes on the numbers for the user.
    pub notes: Vec<String>,
    /// Tokens per prefill chunk.
    chunk: usize,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A model that this project runs; `true` if its weights are counted.
    Caches(Box<ModelOutline>, bool),
    Formula(Formula),
}

impl Subject {
    fn new(name: &str, kind: Kind) -> Self {
        let (name, notes) = (name.to_string(), vec![]);
        let chunk = GenerateOptions::default().prefill_chunk;
        Self { name, source: None, parameters: None, frame: None, notes, chunk, kind }
    }

    /// Creates a subject from the files of a model.
    pub fn of_files(name: &str, outline: ModelOutline) -> Self {
        Self::new(name, Kind::Caches(Box::new(outline), true))
    }

    /// Creates a subject from the caches of a model whose weights are not known.
    pub fn of_caches(name: &str, outline: ModelOutline) -> Self {
        Self::new(name, Kind::Caches(Box::new(outline), false))
    }

    /// Creates a subject from the formula of a cache.
    pub fn of_formula(name: &str, formula: Formula) -> Self {
        Self::new(name, Kind::Formula(formula))
    }

    /// Sets the device, and with it the
    /// [prefill chunk](GenerateOptions::prefill_chunk_for) of generation.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let chunk = match &self.kind {
            Kind::Caches(outline, _) => GenerateOptions::prefill_chunk_for(&outline.spec, device),
            Kind::Formula(_) => self.chunk,
        };
        Self { chunk, ..self }
    }

    /// Sets the source of the numbers.
    #[must_use]
    pub fn with_source(self, source: &str) -> Self {
        Self { source: Some(source.into()), ..self }
    }

    /// Adds notes.
    #[must_use]
    pub fn with_notes(mut self, notes: impl IntoIterator<Item = String>) -> Self {
        self.notes.extend(notes);
        self
    }

    /// Returns the most tokens of a sequence.
    pub fn max_context(&self) -> usize {
        match &self.kind {
            Kind::Caches(outline, _) => outline.spec.max_positions.min(MOST_TOKENS),
            Kind::Formula(formula) => usize::try_from(formula.max_tokens).unwrap_or(usize::MAX),
        }
    }

    /// Returns the cache that the model's files name.
    pub fn own_cache(&self) -> Option<&ModelCacheConfig> {
        match &self.kind {
            Kind::Caches(outline, _) => outline.cache.as_ref(),
            Kind::Formula(_) => None,
        }
    }
}

/// The settings of a plan.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens of each sequence.
    pub context: usize,
    /// Sequences.
    pub batch: usize,
    /// The memory limit.
    pub limit: MemoryLimit,
    /// The caches by name; empty for the cache of the model's files and [all formats](formats).
    pub caches: Vec<String>,
}

/// The result of [`plan`].
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MemoryPlan {
    /// The model.
    pub model: String,
    /// The source of its numbers; `None` for its files.
    pub source: Option<String>,
    /// Number of parameters, if its authors published it.
    pub parameters: Option<u64>,
    /// The most tokens of a sequence.
    pub max_context: usize,
    /// Tokens of each sequence.
    pub context: usize,
    /// Sequences.
    pub batch: usize,
    /// The available memory.
    pub memory: Memory,
    /// Bytes of the weights by their type in memory; `None` if they are not known and not counted.
    pub weights: Option<BTreeMap<String, usize>>,
    /// One for each cache.
    pub caches: Vec<Row>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

/// The available memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Memory {
    /// Bytes.
    pub bytes: u64,
    /// The source of that number.
    pub source: String,
    /// Bytes that may be allocated: all of them.
    pub usable: u64,
    /// Bytes of the device's largest buffer.
    pub buffer: Option<u64>,
}

/// The plan for one cache.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Row {
    /// Its name.
    pub cache: String,
    /// Memory it takes; `None` if the model or any device does not support it.
    pub needs: Option<Needs>,
    /// The reason why the cache is not possible.
    pub why: Option<String>,
    /// Set if it fits the memory limit.
    pub fits: bool,
    /// The most tokens for the planned number of sequences, up to the model's limit.
    pub longest_context: Option<usize>,
    /// The most sequences of the planned context.
    pub largest_batch: Option<usize>,
}

/// The bytes that a cache and its model need.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Needs {
    /// Bytes of the cache, by part.
    pub parts: Vec<(String, u64)>,
    /// Bytes of the cache.
    pub cache: u64,
    /// Bytes of the cache per token of a sequence.
    pub cache_per_token: f64,
    /// Estimated bytes of activations; `None` if the model's widths are not known.
    pub activations: Option<u64>,
    /// The sum of the known parts: weights, cache and activations.
    pub total: u64,
}

/// Plans the memory of `subject` with each cache, and the context and batch that fit.
///
/// # Errors
/// A context, a batch or a cache name that breaks a rule; an unknown memory size.
pub fn plan(subject: &Subject, request: &Request) -> Result<MemoryPlan> {
    let Request { context, batch, ref limit, ref caches } = *request;
    let most = subject.max_context();
    if !(1..=most).contains(&context) {
        let rule = format!("must be 1 to {most}, the most tokens of {}", subject.name);
        return Err(Error::plan("context", context, rule));
    }
    if batch == 0 || u32::try_from(batch).is_err() {
        let rule = "must be 1 to 4294967295: a buffer has fewer than 2^32 elements";
        return Err(Error::plan("batch", batch, rule));
    }
    let Some(bytes) = limit.total else {
        return Err(Error::plan("memory", "unknown", "must be known; give its size"));
    };
    let memory =
        Memory { bytes, source: limit.source.clone(), usable: bytes, buffer: limit.buffer };
    let asked = Asked { context, batch, chunk: subject.chunk, limit };
    let mut notes = subject.notes.clone();
    let (weights, rows) = match &subject.kind {
        Kind::Caches(outline, counted) => {
            let rows = asked.rows(outline, caches, *counted, &mut notes)?;
            (counted.then(|| outline.weights.by_type.clone()), rows)
        }
        Kind::Formula(formula) => (None, asked.formula_rows(formula, caches)?),
    };
    if weights.is_none() {
        let of =
            subject.parameters.map(|n| format!(" of {:.0} billion parameters", n as f64 / 1e9));
        let of = of.unwrap_or_default();
        notes.push(format!("the bytes of the weights{of} are not known and not counted"));
    }
    Ok(MemoryPlan {
        model: subject.name.clone(),
        source: subject.source.clone(),
        parameters: subject.parameters,
        max_context: most,
        context,
        batch,
        memory,
        weights,
        caches: rows,
        notes,
    })
}

/// The settings that apply to each cache.
struct Asked<'a> {
    context: usize,
    batch: usize,
    chunk: usize,
    limit: &'a MemoryLimit,
}

impl Asked<'_> {
    fn per_token(&self, cache: u64) -> f64 {
        cache as f64 / self.context as f64 / self.batch as f64
    }

    /// Plans for the caches of these `names`, or for the model's own cache and all formats. Adds
    /// notes on caches that were named.
    fn rows(
        &self,
        outline: &ModelOutline,
        names: &[String],
        counted: bool,
        notes: &mut Vec<String>,
    ) -> Result<Vec<Row>> {
        let caches: Vec<ModelCacheConfig> = match names {
            [] => {
                let own = outline.cache.clone();
                own.into_iter().chain(formats().into_iter().map(Into::into)).collect()
            }
            _ => {
                let find = |name: &String| ModelCacheConfig::find(name);
                let caches = names.iter().map(find).collect::<Result<Vec<_>, _>>()?;
                notes.extend(caches.iter().flat_map(|cache| cache.notes(&outline.spec)));
                notes.extend(caches.iter().filter_map(|cache| cache.in_full(&outline.spec)));
                caches
            }
        };
        let planned = outline.planned();
        let rows = caches.iter().map(|cache| self.row(&planned, cache, counted));
        Ok(rows.chain(self.row_of_all_heads(outline, counted)).collect())
    }

    /// Plans an f16 cache with the keys and values of all heads of a model with latent attention,
    /// which stores one row for all of them, to show what that saves.
    fn row_of_all_heads(&self, outline: &ModelOutline, counted: bool) -> Option<Row> {
        let mut apart = outline.clone();
        for layer in &mut apart.spec.layers {
            if let Some(of_heads) = layer.latent {
                let n_heads = layer.n_heads;
                *layer = LayerSpec::new(n_heads, n_heads, of_heads).with_options(layer.options);
            }
        }
        if apart.spec == outline.spec {
            return None;
        }
        let f16 = KvCacheConfig::float().with_float(CacheFloat::F16).into();
        let row = self.row(&apart.planned(), &f16, counted);
        Some(Row { cache: format!("{}, keys and values of all heads", row.cache), ..row })
    }

    /// Plans for the formats of these `names`, or for all of the formula's.
    fn formula_rows(&self, formula: &Formula, names: &[String]) -> Result<Vec<Row>> {
        if names.is_empty() {
            return formula.formats.iter().map(|it| self.formula_row(formula, it)).collect();
        }
        let formats = names.iter().map(|name| formula.format(name)).collect::<Result<Vec<_>>>()?;
        formats.into_iter().map(|format| self.formula_row(formula, format)).collect()
    }

    fn row(&self, planned: &Planned<'_>, cache: &ModelCacheConfig, counted: bool) -> Row {
        let at = cache.clone().with_capacity(self.context);
        // Context and batch limit the tokens of a forward pass, as in the search below.
        let pass = if counted { self.chunk } else { 0 };
        let usage = Usage::new(at).with_batch(self.batch).with_pass(pass);
        let name = cache.to_string();
        let known = cache
            .validate(planned.spec)
            .and_then(|()| Ok((planned.cache_bytes(&usage)?, planned.footprint(&usage)?)));
        let (needs, why) = match known {
            Ok((bytes, needed)) => {
                let cache = bytes.total() as u64;
                let needs = Needs {
                    parts: parts(&bytes),
                    cache,
                    cache_per_token: self.per_token(cache),
                    activations: counted.then_some(needed.activations as u64),
                    total: needed.total() as u64,
                };
                let why = self.limit.buffer.filter(|most| bytes.largest_buffer as u64 > *most);
                (Some(needs), why.map(|most| too_large(bytes.largest_buffer as u64, most)))
            }
            Err(error) => (None, Some(error.to_string())),
        };
        // A shorter context may fit into the largest buffer even if this one does not.
        let servable = cache.validate(planned.spec).is_ok();
        let search = servable.then_some((planned, &usage));
        Row {
            cache: name,
            fits: servable && planned.fits(&usage, self.limit),
            needs,
            why,
            longest_context: search.and_then(|(it, usage)| it.longest_context(usage, self.limit)),
            largest_batch: search.and_then(|(it, usage)| it.largest_batch(usage, self.limit)),
        }
    }

    fn formula_row(&self, formula: &Formula, format: &Format) -> Result<Row> {
        let bytes = |tokens: usize, batch: usize| {
            let parts = formula.bytes(format, tokens as u64, batch as u64)?;
            let sum = parts.iter().map(|(_, bytes)| bytes).sum::<u64>();
            Ok::<_, Error>((parts, sum))
        };
        let fits = |tokens, batch| {
            let within = |sum: u64| self.limit.total.is_none_or(|most| sum <= most);
            bytes(tokens, batch).is_ok_and(|(_, sum)| within(sum))
        };
        let (parts, cache) = bytes(self.context, self.batch)?;
        let most = usize::try_from(formula.max_tokens).unwrap_or(usize::MAX);
        Ok(Row {
            cache: format.name.clone(),
            fits: fits(self.context, self.batch),
            needs: Some(Needs {
                parts,
                cache,
                cache_per_token: self.per_token(cache),
                activations: None,
                total: cache,
            }),
            why: None,
            longest_context: kv_models::most_that_fits(most, |tokens| fits(tokens, self.batch)),
            largest_batch: kv_models::most_that_fits(u32::MAX as usize, |batch| {
                fits(self.context, batch)
            }),
        })
    }
}

fn parts(bytes: &CacheBytes) -> Vec<(String, u64)> {
    let parts = [
        ("packed keys", bytes.keys),
        ("packed values", bytes.values),
        ("floats", bytes.floats),
        ("rotary tables", bytes.rope_tables),
    ];
    parts.map(|(name, bytes)| (name.into(), bytes as u64)).into()
}

fn too_large(bytes: u64, most: u64) -> String {
    let [bytes, most] = [bytes, most].map(kv_models::decimal_size);
    format!("a layer has a buffer of {bytes}, a buffer of the device has at most {most}")
}
