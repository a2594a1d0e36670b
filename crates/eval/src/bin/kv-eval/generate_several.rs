//! Continues several prompts together; each line of text starts with the number of its prompt.

use anyhow::{Context, Result};
use kv_cli::Screen;
use kv_cubecl::Target;
use kv_models::{
    Generated,
    generate::{Batch, Event},
};

use crate::{
    generate_reply::{End, Reply, TextOut, prompt_label},
    generate_writer::Writer,
};

/// The text of one prompt, written line by line so texts do not mix within a line.
struct Lines<'a> {
    /// The number of the prompt, from 1.
    number: usize,
    out: TextOut<'a>,
    /// The unfinished line, not yet written.
    line: String,
    /// Set if the lines are written to standard output.
    prints: bool,
}

impl Lines<'_> {
    /// Writes the lines that `id` completes. Returns `false` if the output is closed.
    fn push(&mut self, id: u32) -> Result<bool> {
        self.line += &self.out.push(id)?;
        let Some((whole, rest)) = self.line.rsplit_once('\n') else { return Ok(true) };
        let heard = self.write(whole)?;
        self.line = rest.into();
        Ok(heard)
    }

    /// Writes the rest. Returns `false` if the output is closed.
    fn finish(&mut self) -> Result<bool> {
        self.line += &self.out.finish()?;
        match std::mem::take(&mut self.line) {
            rest if rest.is_empty() => Ok(true),
            rest => self.write(&rest),
        }
    }

    /// Writes all lines at once, so no other text separates them.
    fn write(&self, lines: &str) -> Result<bool> {
        if !self.prints {
            return Ok(true);
        }
        let number = self.number;
        let lines: Vec<_> = lines.split('\n').map(|line| format!("[{number}] {line}\n")).collect();
        Screen::Out.print(lines.concat())
    }
}

impl<T: Target> Writer<'_, T> {
    /// Continues `prompts`, `slots` at a time. Writes their lines as they are generated, the reason
    /// why each ended, and the speed.
    pub(crate) fn write_several(&mut self, prompts: &[Vec<u32>], slots: usize) -> Result<()> {
        let slots = slots.min(prompts.len());
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        // One sequence more reads the prompts.
        let config = self.fitting(longest, slots + 1)?;
        let mut cache = self.model.new_cache(config, slots, self.device)?;
        let (capacity, bytes) = (cache.remaining(), cache.memory_bytes().total());
        let mut batch = Batch::new(self.model, &mut cache, self.options.clone(), self.device)?;
        for (i, prompt) in prompts.iter().enumerate() {
            batch.push(prompt).with_context(|| prompt_label(i))?;
        }
        let new = |(number, prompt): (usize, &Vec<u32>)| {
            let out = TextOut::after(self.tokenizer, prompt, &self.stops);
            Some(Lines { number, out, line: String::new(), prints: self.json.prints_texts() })
        };
        let mut texts: Vec<_> = (1..).zip(prompts).map(new).collect();
        self.interrupt.begin();
        let mut interrupted = false;
        while let Some(event) = batch.next_event()? {
            if self.interrupt.stops() && !interrupted {
                interrupted = true;
                for text in 0..prompts.len() {
                    batch.stop(text);
                }
            }
            let heard = match event {
                Event::Token { text, id } => match &mut texts[text] {
                    Some(lines) => {
                        let heard = lines.push(id)?;
                        if lines.out.stopped().is_some() {
                            batch.stop(text);
                        }
                        heard
                    }
                    None => true,
                },
                Event::End { text, generated } => match texts[text].take() {
                    Some(lines) => self.end(lines, prompts[text].len(), generated)?,
                    None => true,
                },
                Event::Failed { text, error } => {
                    return Err(error).with_context(|| prompt_label(text));
                }
            };
            if !heard {
                break;
            }
        }
        self.interrupted |= interrupted;
        self.budget.see(self.device);
        let (n, totals) = (prompts.len(), batch.totals());
        Screen::Error.line(format_args!(
            "{n} prompts, {slots} at a time: prefill {} tokens, {:.1} tokens/s; decode {} tokens, \
             {:.1} tokens/s in all; cache {}: {slots} sequences of up to {capacity} tokens, \
             {:.2} MiB",
            totals.prefill_tokens,
            totals.prefill_tokens_per_second(),
            totals.decode_tokens,
            totals.decode_tokens_per_second(),
            self.cache_name,
            bytes as f64 / (1 << 20) as f64,
        ))?;
        Ok(())
    }

    /// Writes the rest of a text that has ended, and its reply. Returns `false` if the output is
    /// closed.
    fn end(&mut self, mut lines: Lines<'_>, prompt: usize, generated: Generated) -> Result<bool> {
        let read = lines.finish()?;
        let end = End::new(generated.stop, lines.out.stopped(), self.options.max_tokens);
        let (index, text) = (lines.number - 1, lines.out.into_text());
        let reply = Reply { index, text, end, prompt, generated };
        let read = self.json.push(&reply)? && read;
        tell(&reply)?;
        Ok(read)
    }
}

fn tell(reply: &Reply) -> Result<bool> {
    let Reply { index, end, prompt, generated, .. } = reply;
    Screen::Error.line(format_args!(
        "[{}] {end}; prefill {prompt} tokens, first token after {:.3} s, generated {}",
        index + 1,
        generated.first_token_time.as_secs_f64(),
        generated.ids.len()
    ))
}
