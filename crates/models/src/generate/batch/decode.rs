//! Decode steps of a batch, with and without guesses.

use std::time::Instant;

use burn::tensor::Tensor;
use tracing::trace_span;

use super::{
    Batch,
    text::{Event, Text},
};
use crate::{
    error::{Error, Result},
    generate::{
        Stop, ids_to_tensor,
        picker::{Picker, Waiting, pick_each},
        read,
        speculate::{MOST_GUESSES, Pace},
    },
    pass::PendingTokens,
    spans::PHASE,
};

/// Why a text ends, or why no token could be picked for it.
type Ended = core::result::Result<Stop, Error>;

impl Batch<'_> {
    /// Appends the last token of each text and picks the next, and those after it that were
    /// guessed.
    pub(super) fn step(&mut self) -> Result<()> {
        let (start, n) = (Instant::now(), self.steps + 1);
        let _phase = trace_span!(target: PHASE, "decode", n).entered();
        self.steps = n;
        let rows = self.rows()?;
        let tokens: Vec<usize> = rows.iter().map(Vec::len).collect();
        let ended = match tokens.iter().copied().max() {
            None | Some(0) => vec![],
            Some(1) => self.step_each(&rows, &tokens)?,
            Some(_) => self.verify(&rows, &tokens)?,
        };
        for (i, ended) in ended.into_iter().enumerate() {
            if let Some(ended) = ended {
                self.end(i, ended)?;
            }
        }
        self.totals.decode_time += start.elapsed();
        Ok(())
    }

    /// Ends the text in slot `i`, which is then free.
    fn end(&mut self, i: usize, ended: Ended) -> Result<()> {
        self.cache.remove(i)?;
        if let Some(text) = self.slots[i].take() {
            self.events.push_back(match ended {
                Ok(stop) => text.end(stop),
                Err(error) => Event::Failed { text: text.number, error },
            });
        }
        Ok(())
    }

    /// Returns the last token of the text in each slot, and guesses of the next ones; none for a
    /// free slot. A text fails whose draft model does.
    fn rows(&mut self) -> Result<Vec<Vec<u32>>> {
        // Tokens that a device picks are not known here before the next step.
        let on_host = |text: &Text| matches!(text.picker, Picker::Host(_));
        let texts = self.slots.iter().flatten().count();
        let most = match self.slots.iter().flatten().all(on_host) {
            true => MOST_GUESSES / texts.max(1),
            false => 0,
        };
        let (room, pace) = (self.cache.room(), Pace::new(texts.max(1), self.device));
        let (mut rows, mut failed) = (vec![], vec![]);
        for (i, (slot, &len)) in self.slots.iter_mut().zip(self.cache.lens()).enumerate() {
            let Some(text) = slot else {
                rows.push(vec![]);
                continue;
            };
            let mut row: Vec<u32> = text.ids.last().copied().into_iter().collect();
            let left = text.max_tokens.saturating_sub(text.ids.len() - text.n_prompt);
            let most = most.min(left.saturating_sub(1)).min(room.saturating_sub(len + 1));
            match text.drafter.as_mut().map(|drafter| drafter.draft(most, pace)) {
                None => {}
                Some(Ok(guesses)) => row.extend(guesses),
                Some(Err(error)) => {
                    row.clear();
                    failed.push((i, error));
                }
            }
            rows.push(row);
        }
        for (i, error) in failed {
            self.end(i, Err(error))?;
        }
        Ok(rows)
    }

    /// Takes a step of one token per text. Returns the texts that end.
    fn step_each(&mut self, rows: &[Vec<u32>], tokens: &[usize]) -> Result<Vec<Option<Ended>>> {
        let ids: Vec<u32> = rows.iter().map(|row| row.first().copied().unwrap_or(0)).collect();
        let ids = ids_to_tensor(&ids, [rows.len(), 1], self.device);
        let logits = self.model.step_ragged(ids, tokens, self.cache)?.squeeze_dim(1);
        let waiting = self.slots.iter_mut().map(|slot| {
            slot.as_mut().map(|Text { picker, ids, .. }| Waiting { picker, text: ids })
        });
        let picked = pick_each(logits, waiting.collect())?;
        let mut ended = vec![];
        for (i, id) in picked.into_iter().enumerate() {
            let remaining = self.cache.room() - self.cache.lens()[i];
            ended.push(id.and_then(|id| self.take(i, id, remaining)));
        }
        Ok(ended)
    }

    /// Computes the logits after the last tokens and all guesses, and picks tokens as long as
    /// guesses are right. Returns the texts that end.
    fn verify(&mut self, rows: &[Vec<u32>], tokens: &[usize]) -> Result<Vec<Option<Ended>>> {
        let lens = self.cache.lens().to_vec();
        let (logits, pending) = self.draft(rows, tokens)?;
        let vocab = logits.dims()[1];
        let logits = read(logits)?;
        let (mut ended, mut kept, mut start) = (vec![], vec![], 0);
        for (i, row) in rows.iter().enumerate() {
            let (mut end, mut held) = (None, 0);
            if let Some(text) = &mut self.slots[i] {
                text.guesses.verified += row.len().saturating_sub(1);
            }
            for at in 0..row.len() {
                let Some(text) = &mut self.slots[i] else { break };
                let first = (start + at) * vocab;
                let picked = match &mut text.picker {
                    Picker::Host(pick) => pick.pick(&logits[first..first + vocab], &text.ids),
                    Picker::Device(_) => {
                        Err(Error::unsupported("guesses", "tokens are picked on the device"))
                    }
                };
                held += 1;
                let next = picked.as_ref().ok().copied();
                end = self.take(i, picked, self.cache.room() - lens[i] - held);
                let is_right = next.is_some() && row.get(at + 1).copied() == next;
                if end.is_some() || !is_right {
                    break;
                }
                if let Some(text) = &mut self.slots[i] {
                    text.guesses.right += 1;
                }
            }
            start += row.len();
            ended.push(end);
            kept.push(held);
        }
        pending.keep(self.cache, &kept)?;
        Ok(ended)
    }

    /// Returns the logits of all rows, `[tokens, vocab]`, and their tokens.
    fn draft(&mut self, rows: &[Vec<u32>], tokens: &[usize]) -> Result<(Tensor<2>, PendingTokens)> {
        let seq = tokens.iter().copied().max().unwrap_or(0);
        let padded = |row: &Vec<u32>| {
            let padding = std::iter::repeat_n(0, seq - row.len());
            row.iter().copied().chain(padding).collect::<Vec<_>>()
        };
        let ids: Vec<u32> = rows.iter().flat_map(padded).collect();
        let ids = ids_to_tensor(&ids, [rows.len(), seq], self.device);
        self.model.draft(ids, tokens, self.cache)
    }

    /// Gives the text in slot `i` its next token, when `remaining` more tokens fit. Returns why it
    /// ends, if it does.
    fn take(&mut self, i: usize, id: Result<u32>, remaining: usize) -> Option<Ended> {
        let text = self.slots[i].as_mut()?;
        text.decode_tokens += 1;
        self.totals.decode_tokens += 1;
        match id {
            Ok(id) => text.take(id, remaining, &mut self.events).map(Ok),
            Err(error) => Some(Err(error)),
        }
    }
}
