//! Generated texts: why they ended, in words and as a line of JSON.

use core::fmt;
use std::{path::PathBuf, time::Duration};

use anyhow::{Result, bail};
use kv_cli::{OutFile, Screen};
use kv_models::{
    Generated, Tokenizer,
    generate::{Stop, StopStrings},
    tokenizer::TextStream,
};
use serde_json::{Value, json};

/// The reason why a text ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// An end-of-text token.
    Eos,
    /// A string of `--stop`.
    StopString(String),
    /// The number of tokens of `--max-tokens`.
    MaxTokens(usize),
    /// No room for another token.
    Capacity,
    /// Ctrl-C, or a closed output.
    Interrupted,
}

impl End {
    /// Returns the reason, given the stop string in the text and the requested number of tokens.
    pub(crate) fn new(stop: Stop, stop_string: Option<&str>, most: usize) -> Self {
        match (stop, stop_string) {
            (_, Some(stop)) => Self::StopString(stop.into()),
            (Stop::Eos, None) => Self::Eos,
            (Stop::MaxTokens, None) => Self::MaxTokens(most),
            (Stop::Capacity, None) => Self::Capacity,
            _ => Self::Interrupted,
        }
    }

    /// Returns the reason's name in OpenAI's API, or `abort`, which that API lacks.
    fn finish_reason(&self) -> &'static str {
        match self {
            Self::Eos | Self::StopString(_) => "stop",
            Self::MaxTokens(_) | Self::Capacity => "length",
            Self::Interrupted => "abort",
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eos => write!(f, "stopped by the end of the text"),
            Self::StopString(stop) => write!(f, "stopped by --stop {stop:?}"),
            Self::MaxTokens(most) => write!(f, "reached --max-tokens ({most})"),
            Self::Capacity => write!(f, "stopped by a full cache"),
            Self::Interrupted => write!(f, "interrupted"),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Reply {
    /// Index of the prompt or turn, from 0.
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) end: End,
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// Tokens and timings. Prompt tokens that were not prefilled were reused.
    pub(crate) generated: Generated,
}

impl Reply {
    /// Returns the tokens of the prompt that were already in the cache.
    pub(crate) fn reused(&self) -> usize {
        self.prompt - self.generated.prefill_tokens
    }

    /// Returns the reply as a JSON object. Text and usage have the names of OpenAI's API, timings
    /// those of llama.cpp's server.
    pub(crate) fn json(&self) -> Value {
        let Self { index, text, end, prompt, generated } = self;
        let n = generated.ids.len();
        let mut json = json!({
            "index": index,
            "text": text,
            "finish_reason": end.finish_reason(),
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": n,
                "total_tokens": prompt + n,
                "prompt_tokens_details": { "cached_tokens": self.reused() },
            },
            "timings": {
                "cache_n": self.reused(),
                "prompt_n": generated.prefill_tokens,
                "prompt_ms": milliseconds(generated.prefill_time),
                "prompt_per_second": generated.prefill_tokens_per_second(),
                "first_token_ms": milliseconds(generated.first_token_time),
                "predicted_n": generated.decode_tokens,
                "predicted_ms": milliseconds(generated.decode_time),
                "predicted_per_second": generated.decode_tokens_per_second(),
            },
        });
        if generated.guesses.verified > 0 {
            json["timings"]["draft_n"] = generated.guesses.verified.into();
            json["timings"]["draft_n_accepted"] = generated.guesses.right.into();
        }
        if let End::StopString(stop) = end {
            json["stopping_word"] = stop.clone().into();
        }
        json
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Names one of several prompts in an error, counting from 1.
pub(crate) fn prompt_label(index: usize) -> String {
    format!("prompt {}", index + 1)
}

/// The output of replies as JSON: none, standard output instead of their texts, or a file.
pub(crate) enum JsonLines {
    None,
    Stdout,
    /// The lines so far.
    File(PathBuf, String),
}

impl JsonLines {
    pub(crate) fn open(path: Option<&PathBuf>) -> Result<Self> {
        Ok(match path {
            None => Self::None,
            Some(path) if path.as_os_str() == "-" => Self::Stdout,
            Some(path) => {
                // The file is opened again at the end, so a killed run leaves no unfinished file.
                OutFile::open("json", path)?;
                Self::File(path.clone(), String::new())
            }
        })
    }

    /// Returns whether texts are printed as they are generated.
    pub(crate) fn prints_texts(&self) -> bool {
        !matches!(self, Self::Stdout)
    }

    /// Prints a part of a text, unless JSON is printed instead. Returns `false` if the output is
    /// closed.
    pub(crate) fn print(&self, part: String) -> Result<bool> {
        match self.prints_texts() && !part.is_empty() {
            true => Screen::Out.print(part),
            false => Ok(true),
        }
    }

    /// Writes a reply. Returns `false` if the output is closed.
    pub(crate) fn push(&mut self, reply: &Reply) -> Result<bool> {
        match self {
            Self::None => Ok(true),
            Self::Stdout => Screen::Out.line(reply.json()),
            Self::File(_, lines) => {
                *lines += &format!("{}\n", reply.json());
                Ok(true)
            }
        }
    }

    pub(crate) fn finish(self) -> Result<()> {
        match self {
            Self::File(path, lines) => OutFile::open("json", &path)?.write(lines.as_bytes()),
            _ => Ok(()),
        }
    }
}

/// The text of generated tokens, up to a stop string.
pub(crate) struct TextOut<'a> {
    stream: Option<TextStream<'a>>,
    stops: StopStrings,
    text: String,
}

impl<'a> TextOut<'a> {
    /// Creates the text that continues `prompt`.
    pub(crate) fn after(tokenizer: &'a Tokenizer, prompt: &[u32], stops: &StopStrings) -> Self {
        let stream = Some(tokenizer.stream_after(prompt));
        Self { stream, stops: stops.clone(), text: String::new() }
    }

    pub(crate) fn push(&mut self, id: u32) -> Result<String> {
        let Some(stream) = &mut self.stream else { bail!("text: it has ended") };
        let new = self.stops.push(&stream.push(id)?);
        self.text += &new;
        Ok(new)
    }

    /// Returns the text that was held back.
    pub(crate) fn finish(&mut self) -> Result<String> {
        let rest = self.stream.take().map_or(Ok(String::new()), TextStream::finish)?;
        let mut new = self.stops.push(&rest);
        new += &self.stops.finish();
        self.text += &new;
        Ok(new)
    }

    pub(crate) fn stopped(&self) -> Option<&str> {
        self.stops.found()
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }
}
