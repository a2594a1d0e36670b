//! Several prompts continued together, each line of text behind the number of its prompt.

use anyhow::{Context, Result};
use kv_cli::Screen;
use kv_cubecl::Target;
use kv_models::{
    Generated, Tokenizer,
    generate::{Batch, Event},
    tokenizer::TextStream,
};

use crate::generate::Writer;

/// The text of one prompt, which is written line by line: tokens of several texts on one line could not be told
/// apart.
struct Lines<'a> {
    /// The number of the prompt, from 1.
    number: usize,
    stream: TextStream<'a>,
    /// What is not written yet: no whole line.
    line: String,
}

impl<'a> Lines<'a> {
    fn new(number: usize, tokenizer: &'a Tokenizer) -> Self {
        Self { number, stream: tokenizer.stream(), line: String::new() }
    }

    /// Writes the lines that `id` completes. Whether there still is a reader.
    fn push(&mut self, id: u32) -> Result<bool> {
        self.line += &self.stream.push(id)?;
        let Some((whole, rest)) = self.line.rsplit_once('\n') else { return Ok(true) };
        let heard = self.write(whole)?;
        self.line = rest.into();
        Ok(heard)
    }

    /// Writes what is left. Whether there still is a reader.
    fn finish(self) -> Result<bool> {
        let Self { number, stream, line } = self;
        let rest = line + &stream.finish()?;
        match rest.is_empty() {
            true => Ok(true),
            false => write(number, &rest),
        }
    }

    fn write(&self, lines: &str) -> Result<bool> {
        write(self.number, lines)
    }
}

/// All at once, so that nothing comes between the lines.
fn write(number: usize, lines: &str) -> Result<bool> {
    let lines: Vec<String> = lines.split('\n').map(|line| format!("[{number}] {line}\n")).collect();
    Screen::Out.print(lines.concat())
}

impl<T: Target> Writer<'_, T> {
    /// Continues `prompts`, `slots` at a time; writes their lines as they are generated, why each ended, and how
    /// fast all were.
    pub(crate) fn write_several(&self, prompts: &[Vec<u32>], slots: usize) -> Result<()> {
        let slots = slots.min(prompts.len());
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut cache = self.new_cache(longest, slots)?;
        let capacity = cache.remaining();
        let bytes = cache.memory_bytes().total();
        let mut batch = Batch::new(self.model, &mut cache, self.options.clone(), self.device)?;
        for (i, prompt) in prompts.iter().enumerate() {
            batch.push(prompt).with_context(|| number(i))?;
        }
        let new = |number| Some(Lines::new(number, self.tokenizer));
        let mut texts: Vec<_> = (1..=prompts.len()).map(new).collect();
        while let Some(event) = batch.next_event()? {
            let heard = match event {
                Event::Token { text, id } => {
                    texts[text].as_mut().map_or(Ok(true), |lines| lines.push(id))?
                }
                Event::End { text, generated } => {
                    let heard = texts[text].take().map_or(Ok(true), Lines::finish)?;
                    tell(text + 1, &generated)?;
                    heard
                }
            };
            // Nobody reads the output any more.
            if !heard {
                break;
            }
        }
        let totals = batch.totals();
        Screen::Error.line(format_args!(
            "{} prompts, {slots} at a time: prefill {} tokens, {:.1} tokens/s; decode {} tokens, \
             {:.1} tokens/s in all; cache {}: {slots} of {capacity} tokens, {:.2} MiB",
            prompts.len(),
            totals.prefill_tokens,
            totals.prefill_tokens_per_second(),
            totals.decode_tokens,
            totals.decode_tokens_per_second(),
            self.cache_name,
            bytes as f64 / (1 << 20) as f64,
        ))?;
        Ok(())
    }
}

/// Which of several prompts an error is about.
pub(crate) fn number(index: usize) -> String {
    format!("prompt {}", index + 1)
}

fn tell(number: usize, generated: &Generated) -> Result<bool> {
    let Generated { stop, prefill_tokens, ids, .. } = generated;
    Screen::Error.line(format_args!(
        "[{number}] stopped by {stop}; prefill {prefill_tokens} tokens, generated {}",
        ids.len()
    ))
}
