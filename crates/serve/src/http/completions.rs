//! `/v1/completions`: continues texts.

use std::{collections::BTreeMap, iter::repeat_n, sync::Arc};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use kv_models::generate::StopStrings;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::block_in_place;

use super::{
    app::App,
    body::Body,
    error::ApiError,
    format::constraint,
    gates::Turn,
    json::Json,
    params::{Params, check_logprobs, or_default, refuse},
    reply::{Collected, Finish, Piece, Pieces},
    stream::{self, Envelope, Usage},
};
use crate::engine::{PickOptions, Scored, Task};

/// The prompts of a request, as text or as ids.
#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "prompt must be a string, a list of strings, a list of ids, or a list of those"
)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    prompt: Prompts,
    #[serde(default, deserialize_with = "or_default")]
    echo: bool,
    logprobs: Option<usize>,
    #[serde(flatten)]
    params: Params,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// The default of `max_tokens`, as in OpenAI's API.
const MAX_TOKENS: usize = 16;
/// The most prompts of a request.
const MOST_PROMPTS: usize = 128;

/// A prompt's ids, and its text if it was given as one.
type Prompt<'a> = (Vec<u32>, Option<&'a str>);

impl Request {
    fn n_prompts(&self) -> Result<usize, ApiError> {
        let n = match &self.prompt {
            Prompts::Text(_) | Prompts::Ids(_) => 1,
            Prompts::Texts(texts) => texts.len(),
            Prompts::IdLists(lists) => lists.len(),
        };
        match n {
            1..=MOST_PROMPTS => Ok(n),
            _ => {
                let rule = format!("must be 1 to {MOST_PROMPTS} prompts");
                Err(ApiError::field("prompt", format!("{n} prompts"), rule))
            }
        }
    }

    /// Returns the prompts. Texts begin with the begin-of-text token if the model was trained so.
    /// Of a prompt that does not fit into the context, only as many ids are returned as show it.
    fn prompts(&self, app: &App) -> Result<Vec<Prompt<'_>>, ApiError> {
        let encode = |text| -> Result<Prompt<'_>, ApiError> {
            let ids = app.tokenizer.encode_first(text, app.engine.room() + 1)?;
            Ok((app.tokenizer.leading_bos().into_iter().chain(ids).collect(), Some(text)))
        };
        match &self.prompt {
            Prompts::Text(text) => Ok(vec![encode(text)?]),
            Prompts::Texts(texts) => texts.iter().map(|text| encode(text)).collect(),
            Prompts::Ids(ids) => Ok(vec![(ids.clone(), None)]),
            Prompts::IdLists(lists) => Ok(lists.iter().map(|ids| (ids.clone(), None)).collect()),
        }
    }
}

/// A checked request.
struct Prepared {
    tasks: Vec<Task>,
    stops: StopStrings,
    usage: Usage,
    /// The text before each choice, if the prompt is echoed.
    head: Vec<String>,
    /// The number of likely tokens at each position, if log-probabilities were requested.
    top: Option<usize>,
}

impl Request {
    fn prepare(&self, app: &App, turn: Turn) -> Result<Prepared, ApiError> {
        refuse(&self.others, &["suffix"])?;
        let n = self.params.check(app, self.n_prompts()?)?;
        let constraint = constraint(app, &self.others)?;
        self.params.check_constraint(constraint.as_ref())?;
        let top = self.logprobs.map(|n| check_logprobs("logprobs", n)).transpose()?;
        let prompts = self.prompts(app)?;
        let max_tokens = self.params.max_tokens.unwrap_or(MAX_TOKENS);
        if max_tokens == 0 && !self.echo {
            return Err(ApiError::field("max_tokens", 0, "needs echo = true"));
        }
        let scores_prompt = self.echo && top.is_some();
        let change = |pick: PickOptions| {
            let constraint = constraint.clone();
            PickOptions { top, scores_prompt, constraint, ..pick }
        };
        let (mut tasks, mut head) = (vec![], vec![]);
        for (ids, text) in &prompts {
            let max_tokens = Some(max_tokens);
            tasks.extend(self.params.tasks(app, ids, n, max_tokens, turn.deadline, change)?);
            if self.echo {
                let text = match text {
                    Some(text) => text.to_string(),
                    None => app.tokenizer.decode(ids)?,
                };
                head.extend(repeat_n(text, n));
            }
        }
        let usage = Usage::new(prompts.iter().map(|(ids, _)| ids.len()).sum(), n);
        Ok(Prepared { tasks, stops: self.params.stops()?, usage, head, top })
    }
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Body(request, turn): Body<Request>,
) -> Result<Response, ApiError> {
    let (prepared, params) = app
        .blocking(move |app| request.prepare(app, turn).map(|prepared| (prepared, request.params)))
        .await?;
    let Prepared { tasks, stops, mut usage, head, top } = prepared;
    let n = tasks.len();
    let pieces = Pieces::new(&app, tasks, &stops)?;
    let envelope = Envelope::new(&app, "cmpl", "text_completion");
    if params.stream {
        let mut offsets = vec![0; n];
        let mut heads: Vec<Option<String>> = head.into_iter().map(Some).collect();
        let render = move |app: &App, piece: &Piece| {
            let before = heads.get_mut(piece.index).and_then(Option::take).unwrap_or_default();
            let text = before + &piece.text;
            let logprobs = top.map(|_| logprobs(app, &piece.tokens, &mut offsets[piece.index]));
            vec![json!({
                "index": piece.index, "text": text, "logprobs": logprobs,
                "finish_reason": piece.finish.as_ref().map(Finish::name),
            })]
        };
        let options = params.stream_options.unwrap_or_default();
        return Ok(stream::respond(app, envelope, pieces, usage, options, render));
    }
    let mut choices = pieces.collect(|piece| usage.add(piece)).await?;
    for (choice, text) in choices.iter_mut().zip(head) {
        choice.text.insert_str(0, &text);
    }
    let choice = |(index, choice): (usize, Collected)| {
        let logprobs = top.map(|_| logprobs(&app, &choice.tokens, &mut 0));
        json!({
            "index": index, "text": choice.text, "logprobs": logprobs,
            "finish_reason": choice.finish.as_ref().map(Finish::name),
        })
    };
    let choices = choices.into_iter().enumerate();
    // Log-probabilities of long texts take long to render.
    let choices: Vec<Value> = block_in_place(|| choices.map(choice).collect());
    Ok(Json(envelope.with(choices, Some(usage))).into_response())
}

/// Returns the log-probabilities of tokens as parallel lists. `offset` is the position of the next
/// token in the text, in characters.
fn logprobs(app: &App, tokens: &[Scored], offset: &mut usize) -> Value {
    let texts: Vec<String> = tokens.iter().map(|token| app.token_text(token.id)).collect();
    let offsets: Vec<usize> = texts
        .iter()
        .map(|text| {
            let at = *offset;
            *offset += text.chars().count();
            at
        })
        .collect();
    let top = |token: &Scored| {
        token.logprob?;
        let mut all: serde_json::Map<String, Value> = serde_json::Map::new();
        for &(id, logprob) in &token.top {
            // Of tokens with the same text, the most likely comes first and stays.
            all.entry(app.token_text(id)).or_insert_with(|| json!(logprob));
        }
        Some(all)
    };
    json!({
        "tokens": texts,
        "token_logprobs": tokens.iter().map(|token| token.logprob).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}
