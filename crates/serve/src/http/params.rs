//! The fields that completions and chat share.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use kv_models::{Sampling, generate::StopStrings};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{app::App, error::ApiError};
use crate::{
    constraint::Constraint,
    engine::{PickOptions, Task},
};

/// The most choices of a request.
const MOST_CHOICES: usize = 16;
/// The most log-probabilities at a position.
pub(super) const MOST_LOGPROBS: usize = 20;
/// The most ids with a bias. OpenAI's API allows 300.
const MOST_BIASES: usize = 1024;
/// The most stop strings, and the most bytes of each.
const MOST_STOPS: usize = 16;
const MOST_STOP_BYTES: usize = 1024;
/// The most bytes of a salt. Every text has a copy of it.
const MOST_SALT_BYTES: usize = 256;

/// One or several stop strings.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "must be a string or a list of strings")]
enum Stops {
    One(String),
    Several(Vec<String>),
}

/// Reads a field whose null means its default, as in OpenAI's API.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    field: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(field)?.unwrap_or_default())
}

/// The options of a stream.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StreamOptions {
    #[serde(default, deserialize_with = "or_default")]
    pub(super) include_usage: bool,
}

/// Sampling and limits of a request. `top_k`, `min_p`, `repetition_penalty` and `ignore_eos` are
/// extensions of OpenAI's API, with the names that vLLM gives them.
#[derive(Debug, Deserialize)]
pub(super) struct Params {
    pub(super) model: Option<String>,
    pub(super) max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    logit_bias: Option<BTreeMap<String, f32>>,
    seed: Option<i64>,
    /// Requests share stored prefixes only with requests of the same salt, as in vLLM.
    cache_salt: Option<String>,
    n: Option<usize>,
    best_of: Option<usize>,
    stop: Option<Stops>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) ignore_eos: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) stream: bool,
    pub(super) stream_options: Option<StreamOptions>,
}

impl Params {
    /// Checks the sizes of a request with `prompts` prompts, before anything is done for each of
    /// its choices. Returns the number of choices of a prompt.
    pub(super) fn check(&self, app: &App, prompts: usize) -> Result<usize, ApiError> {
        app.check_model(self.model.as_deref())?;
        let n = self.n.unwrap_or(1);
        if !(1..=MOST_CHOICES).contains(&n) {
            return Err(ApiError::field("n", n, format!("must be 1 to {MOST_CHOICES}")));
        }
        if let Some(best_of) = self.best_of.filter(|&best_of| best_of != n) {
            return Err(ApiError::field("best_of", best_of, "must equal n; all choices return"));
        }
        if self.stream_options.is_some() && !self.stream {
            return Err(ApiError::field("stream_options", "an object", "needs stream = true"));
        }
        let (texts, places) = (n * prompts, app.engine.places());
        if texts > places {
            let rule = format!(
                "with {prompts} prompts makes {texts} texts, but this server has {places} places \
                 in its slots and queue; send fewer at a time"
            );
            return Err(ApiError::field("n", n, rule));
        }
        let biases = self.logit_bias.as_ref().map_or(0, BTreeMap::len);
        if biases > MOST_BIASES {
            let rule = format!("must be at most {MOST_BIASES} ids");
            return Err(ApiError::field("logit_bias", format!("{biases} ids"), rule));
        }
        match self.cache_salt.as_ref().filter(|salt| salt.len() > MOST_SALT_BYTES) {
            Some(salt) => {
                let rule = format!("must have at most {MOST_SALT_BYTES} bytes");
                Err(ApiError::field("cache_salt", salt, rule))
            }
            None => Ok(n),
        }
    }

    /// Checks that a constrained text can end.
    pub(super) fn check_constraint(&self, constraint: Option<&Constraint>) -> Result<(), ApiError> {
        match constraint.is_some() && self.ignore_eos {
            true => Err(ApiError::field("ignore_eos", true, "cannot be used with a constraint")),
            false => Ok(()),
        }
    }

    /// Returns the stop strings.
    pub(super) fn stops(&self) -> Result<StopStrings, ApiError> {
        let stops: &[String] = match &self.stop {
            None => &[],
            Some(Stops::One(stop)) => std::slice::from_ref(stop),
            Some(Stops::Several(stops)) => stops,
        };
        if stops.len() > MOST_STOPS {
            let rule = format!("must be at most {MOST_STOPS} strings");
            return Err(ApiError::field("stop", format!("{} strings", stops.len()), rule));
        }
        if let Some(long) = stops.iter().find(|stop| stop.len() > MOST_STOP_BYTES) {
            let rule = format!("must have at most {MOST_STOP_BYTES} bytes");
            return Err(ApiError::field("stop", long, rule));
        }
        Ok(StopStrings::new(stops)?)
    }

    /// Returns how tokens are picked, for choice `index`.
    pub(super) fn pick(&self, app: &App, index: usize) -> Result<PickOptions, ApiError> {
        let temperature = self.temperature.unwrap_or(1.0);
        // Greedy sampling ignores filters, as OpenAI's API does.
        let drawn = temperature > 0.0;
        let [top_p, min_p] = [self.top_p, self.min_p].map(|filter| filter.filter(|_| drawn));
        let top_k = match self.top_k.filter(|_| drawn) {
            // -1 is vLLM's word for all tokens.
            None | Some(-1 | 0) => 0,
            Some(k) => usize::try_from(k)
                .map_err(|_| ApiError::field("top_k", k, "must be -1, 0 or more"))?,
        };
        let seed = self.seed.map_or_else(rand::random::<u64>, |seed| seed as u64);
        let sampling = Sampling {
            temperature,
            top_k,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            repeat_penalty: self.repetition_penalty.unwrap_or(1.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            repeat_last: usize::MAX,
            seed: seed.wrapping_add(index as u64),
        };
        for (field, value) in [
            ("frequency_penalty", sampling.frequency_penalty),
            ("presence_penalty", sampling.presence_penalty),
        ] {
            if !(-2.0..=2.0).contains(&value) {
                return Err(ApiError::field(field, value, "must be from -2 to 2"));
            }
        }
        if temperature > 2.0 {
            return Err(ApiError::field("temperature", temperature, "must be from 0 to 2"));
        }
        kv_models::Sampler::new(sampling)?;
        let mut biases = BTreeMap::new();
        for (key, &bias) in self.logit_bias.iter().flatten() {
            let id = key.parse::<u32>().ok().filter(|&id| (id as usize) < app.n_ids);
            let id = id.ok_or_else(|| {
                let rule = format!("keys must be ids below {}", app.n_ids);
                ApiError::field("logit_bias", key, rule)
            })?;
            if !(-100.0..=100.0).contains(&bias) {
                return Err(ApiError::field("logit_bias", bias, "must be from -100 to 100"));
            }
            if biases.insert(id, bias).is_some() {
                let rule = format!("another key is id {id}, too");
                return Err(ApiError::field("logit_bias", key, rule));
            }
        }
        let bias = biases.into_iter().collect();
        Ok(PickOptions { sampling, bias, ..PickOptions::default() })
    }

    /// Returns a task for each of the `n_choices` of a prompt.
    pub(super) fn tasks(
        &self,
        app: &App,
        prompt: &[u32],
        n_choices: usize,
        max_tokens: Option<usize>,
        deadline: Instant,
        change: impl Fn(PickOptions) -> PickOptions,
    ) -> Result<Vec<Task>, ApiError> {
        let (n, room) = (prompt.len(), app.engine.room());
        if n == 0 {
            return Err(ApiError::field("prompt", "empty", "must have at least one token"));
        }
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= app.n_ids) {
            return Err(ApiError::field("prompt", id, format!("ids must be below {}", app.n_ids)));
        }
        let asked = max_tokens.unwrap_or(1);
        if n.saturating_add(asked) > room {
            let message = match n > room {
                // Of a text, no more tokens were encoded.
                true => {
                    format!("the prompt has more than {room} tokens, the context of this server")
                }
                false => format!(
                    "the prompt has {n} tokens and max_tokens is {asked}, but the context of this \
                     server is {room} tokens"
                ),
            };
            return Err(ApiError::bad(message).with_code("context_length_exceeded"));
        }
        let max_tokens = max_tokens.unwrap_or(room - n);
        let eos = match self.ignore_eos {
            true => BTreeSet::new(),
            false => app.tokenizer.eos().clone(),
        };
        let task = |index| {
            let (prompt, eos) = (prompt.to_vec(), eos.clone());
            let pick = change(self.pick(app, index)?);
            let salt = self.cache_salt.clone().unwrap_or_default();
            Ok(Task { prompt, max_tokens, eos, salt, pick, deadline })
        };
        (0..n_choices).map(task).collect()
    }
}

/// Checks the number of log-probabilities.
pub(super) fn check_logprobs(field: &str, n: usize) -> Result<usize, ApiError> {
    match n <= MOST_LOGPROBS {
        true => Ok(n),
        false => Err(ApiError::field(field, n, format!("must be at most {MOST_LOGPROBS}"))),
    }
}

/// Refuses fields that this server does not support, unless they have the value that changes
/// nothing.
pub(super) fn refuse(
    fields: &BTreeMap<String, Value>,
    unsupported: &[&str],
) -> Result<(), ApiError> {
    for name in unsupported {
        match fields.get(*name) {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(value) => {
                return Err(ApiError::field(name, value, "is not supported by this server"));
            }
        }
    }
    Ok(())
}
