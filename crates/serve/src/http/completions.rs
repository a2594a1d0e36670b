//! `/v1/completions`: continues texts.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use kv_models::generate::StopStrings;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    app::App,
    body::Body,
    error::ApiError,
    format::constraint,
    json::Json,
    params::{Params, check_logprobs, refuse},
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
    #[serde(default)]
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

impl Request {
    /// Returns the ids of each prompt. Texts begin with the begin-of-text token if the model was
    /// trained so.
    fn prompts(&self, app: &App) -> Result<Vec<Vec<u32>>, ApiError> {
        let encode = |text: &String| -> Result<Vec<u32>, ApiError> {
            let bos = app.tokenizer.leading_bos().into_iter();
            Ok(bos.chain(app.tokenizer.encode(text)?).collect())
        };
        let prompts = match &self.prompt {
            Prompts::Text(text) => vec![encode(text)?],
            Prompts::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
            Prompts::Ids(ids) => vec![ids.clone()],
            Prompts::IdLists(lists) => lists.clone(),
        };
        match prompts.len() {
            1..=MOST_PROMPTS => Ok(prompts),
            n => {
                let rule = format!("must be 1 to {MOST_PROMPTS} prompts");
                Err(ApiError::field("prompt", format!("{n} prompts"), rule))
            }
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
    fn prepare(&self, app: &App) -> Result<Prepared, ApiError> {
        refuse(&self.others, &["suffix"])?;
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
        for prompt in &prompts {
            let choices = self.params.tasks(app, prompt, Some(max_tokens), change)?;
            if self.echo {
                let text = app.tokenizer.decode(prompt)?;
                head.extend(std::iter::repeat_n(text, choices.len()));
            }
            tasks.extend(choices);
        }
        let usage = Usage { prompt: prompts.iter().map(Vec::len).sum(), completion: 0, cached: 0 };
        Ok(Prepared { tasks, stops: self.params.stops()?, usage, head, top })
    }
}

pub(super) async fn complete(
    State(app): State<Arc<App>>,
    Body(request): Body<Request>,
) -> Result<Response, ApiError> {
    let (prepared, params) = app
        .blocking(move |app| request.prepare(app).map(|prepared| (prepared, request.params)))
        .await?;
    let Prepared { tasks, stops, mut usage, head, top } = prepared;
    let n = tasks.len();
    let pieces = Pieces::new(&app, app.engine.submit(tasks)?, &stops);
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
    let choices: Vec<Value> = choices.into_iter().enumerate().map(choice).collect();
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
