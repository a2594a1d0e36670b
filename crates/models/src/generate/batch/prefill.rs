//! Prefills the prompts of a batch, one chunk at a time.

use std::{ops::Range, time::Instant};

use burn::tensor::Tensor;
use tracing::trace_span;

use super::{
    Batch,
    text::{Event, Reading, Text},
};
use crate::{
    error::Result,
    generate::{
        Stop, finish, ids_to_tensor, last_logits,
        picker::{Pick, Picker},
        read,
    },
    spans::PHASE,
};

impl Batch<'_> {
    /// Starts to prefill a prompt after its stored prefix, if there is one.
    pub(super) fn start(&mut self, slot: usize, mut text: Text) -> Result<Reading> {
        let start = Instant::now();
        self.reader.reset();
        let mut marks = vec![];
        if let (Some(prefixes), Some(salt)) = (&mut self.prefixes, &text.salt) {
            text.prefix_tokens = prefixes.restore(salt, &text.ids, &mut self.reader)?;
            marks = prefixes.marks(salt, &text.ids);
        }
        text.prefill_time = start.elapsed();
        Ok(Reading { text, slot, marks, start })
    }

    /// Prefills the next chunk of a prompt. After the last one, picks the first token and gives the
    /// text its slot, unless the text ends there.
    pub(super) fn read_chunk(&mut self, mut reading: Reading) -> Result<Option<Reading>> {
        let started = Instant::now();
        let text = &mut reading.text;
        let (from, chunk) = (self.reader.len(), self.options.prefill_chunk);
        let to = text.n_prompt.min(from + chunk);
        let phase = trace_span!(target: PHASE, "prefill").entered();
        let logits = match &mut text.picker {
            Picker::Host(pick) if pick.scores_prompt() => {
                let scored = self.score(from..to, &text.ids, &mut **pick)?;
                match scored {
                    Ok(logits) => Some(logits),
                    Err(error) => {
                        self.events.push_back(Event::Failed { text: text.number, error });
                        return Ok(None);
                    }
                }
            }
            _ if to == text.n_prompt => {
                Some(last_logits(self.model, &mut self.reader, &text.ids[from..], self.device)?)
            }
            _ => {
                let ids = ids_to_tensor(&text.ids[from..to], [1, to - from], self.device);
                self.model.hidden_step(ids, &mut self.reader)?;
                None
            }
        };
        if let (Some(prefixes), Some(salt)) = (&mut self.prefixes, &text.salt)
            && reading.marks.contains(&to)
        {
            prefixes.insert(salt, &text.ids[..to], &self.reader)?;
        }
        finish(self.device)?;
        drop(phase);
        let now = Instant::now();
        text.prefill_time += now - started;
        self.totals.prefill_time += now - started;
        self.totals.prefill_tokens += to - from;
        match logits.filter(|_| to == text.n_prompt) {
            Some(logits) => self.begin(reading, logits).map(|()| None),
            None => Ok(Some(reading)),
        }
    }

    /// Appends prompt tokens and passes the logits after each to `pick`. Returns the last logits,
    /// `[1, vocab]`, or the error of `pick`.
    fn score(
        &mut self,
        tokens: Range<usize>,
        prompt: &[u32],
        pick: &mut dyn Pick,
    ) -> Result<Result<Tensor<2>>> {
        let n = tokens.len();
        let ids = ids_to_tensor(&prompt[tokens.clone()], [1, n], self.device);
        let hidden = self.model.hidden_step(ids, &mut self.reader)?;
        let logits: Tensor<2> = self.model.head(hidden).squeeze_dim(0);
        let vocab = logits.dims()[1];
        let last = logits.clone().narrow(0, n - 1, 1);
        let rows = read(logits)?;
        let mut positions = tokens.zip(rows.chunks_exact(vocab));
        let scored = positions.try_for_each(|(at, row)| pick.score(at, row, prompt));
        Ok(scored.map(|()| last))
    }

    /// Picks the first token of a text whose prompt has been prefilled.
    fn begin(&mut self, reading: Reading, logits: Tensor<2>) -> Result<()> {
        let Reading { mut text, slot, start, .. } = reading;
        text.start = Instant::now();
        let ended = match text.max_tokens {
            0 => Some(Stop::MaxTokens),
            _ => match text.picker.pick(logits, &text.ids) {
                Ok(id) => {
                    text.first_token_time = start.elapsed();
                    text.take(id, self.reader.remaining(), &mut self.events)
                }
                Err(error) => {
                    self.events.push_back(Event::Failed { text: text.number, error });
                    return Ok(());
                }
            },
        };
        match ended {
            Some(stop) => self.events.push_back(text.end(stop)),
            None => {
                if let Picker::Host(_) = text.picker {
                    let speculate = &self.options.speculate;
                    text.drafter = speculate.drafter(self.cache, &text.ids, self.device)?;
                }
                self.cache.admit(slot, &self.reader)?;
                self.slots[slot] = Some(text);
            }
        }
        Ok(())
    }
}
