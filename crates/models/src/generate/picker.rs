//! Picks the next tokens on the host or on a GPU.

use std::fmt;

use burn::tensor::{Device, Tensor, Transaction};
use kv_sampling::{Cursor, Draw};
use tracing::trace_span;

use super::{Sampler, Sampling, read};
use crate::{
    error::{Error, Result},
    spans::OPERATION,
};

/// Picks the next token of one text on the host. [`Sampler`] is one; others can add a grammar, or
/// keep the probabilities of tokens.
pub trait Pick: fmt::Debug + Send {
    /// Picks one of `logits.len()` ids; `text` are the ids so far.
    ///
    /// # Errors
    /// An error ends the text, and no other one.
    fn pick(&mut self, logits: &[f32], text: &[u32]) -> Result<u32>;

    /// Returns whether [`score`](Self::score) is called for the prompt. All positions of a prompt
    /// are then computed, even if the cache of its prefix is stored.
    fn scores_prompt(&self) -> bool {
        false
    }

    /// Receives the logits after prompt token `position`.
    ///
    /// # Errors
    /// An error ends the text, and no other one.
    fn score(&mut self, position: usize, logits: &[f32], prompt: &[u32]) -> Result<()> {
        let _ = (position, logits, prompt);
        Ok(())
    }
}

impl Pick for Sampler {
    fn pick(&mut self, logits: &[f32], text: &[u32]) -> Result<u32> {
        self.sample(logits, text)
    }
}

/// Picks the tokens of one text.
#[derive(Debug)]
pub(super) enum Picker {
    /// Picks from logits that the host reads.
    Host(Box<dyn Pick>),
    /// Picks on a GPU; the host reads only the token.
    Device(Draw),
}

/// A text whose next token is to be picked.
pub(super) struct Waiting<'a> {
    pub(super) picker: &'a mut Picker,
    /// The ids so far.
    pub(super) text: &'a [u32],
}

impl Picker {
    /// Chooses the device if it is a GPU and the choice does not depend on earlier tokens.
    ///
    /// # Errors
    /// Fails for an invalid `sampling`.
    pub(super) fn new(sampling: Sampling, device: &Device) -> Result<Self> {
        let sampler = Sampler::new(sampling)?;
        // Burn has this variant only with a backend for it.
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        let on_gpu = matches!(device.as_dispatch(), burn::backend::DispatchDevice::Cube(_));
        #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
        let on_gpu = {
            let _ = device;
            false
        };
        Ok(match sampling.draw().filter(|_| on_gpu) {
            Some(draw) => Self::Device(draw),
            None => Self::Host(Box::new(sampler)),
        })
    }

    /// Returns the parameters for the device, if it picks the tokens.
    pub(super) fn draw(&self) -> Option<Draw> {
        match self {
            Self::Host(_) => None,
            Self::Device(draw) => Some(*draw),
        }
    }

    /// Picks a token of `text` from `logits`, `[1, vocab]`.
    ///
    /// # Errors
    /// Fails for logits that are NaN, and on a GPU for any that are not finite.
    pub(super) fn pick(&mut self, logits: Tensor<2>, text: &[u32]) -> Result<u32> {
        let picked = pick_each(logits, vec![Some(Waiting { picker: self, text })])?;
        picked.into_iter().flatten().next().unwrap_or_else(|| Err(none_picked(0)))
    }
}

/// Picks a token for every text from its row of `logits`, `[texts, vocab]`, and reads all at once.
///
/// # Errors
/// Fails for logits that cannot be read, and on a GPU for any that are not finite. Errors of a text
/// that the host picks are in its place.
pub(super) fn pick_each(
    logits: Tensor<2>,
    texts: Vec<Option<Waiting<'_>>>,
) -> Result<Vec<Option<Result<u32>>>> {
    let vocab = logits.dims()[1];
    let device = logits.device();
    let mut picked: Vec<_> = texts.iter().map(|_| None).collect();
    let (mut cursors, mut on_host) = (vec![], vec![]);
    for (i, waiting) in texts.into_iter().enumerate() {
        let Some(Waiting { picker, text }) = waiting else { continue };
        match picker {
            Picker::Host(sampler) => on_host.push((i, sampler, text)),
            Picker::Device(draw) => {
                // The random stream depends on the position of the last token, as in a captured
                // step.
                let last = text.len().saturating_sub(1);
                let mut cursor = Cursor::new(&[0], last, &[], &device)?;
                cursor.advance(logits.clone().narrow(0, i, 1), draw)?;
                cursors.push((i, cursor));
            }
        }
    }
    if !on_host.is_empty() {
        // Moved: the CPU would copy logits that are still in use.
        let rows = read(logits)?;
        for (i, sampler, text) in on_host {
            let row = rows.chunks_exact(vocab).nth(i);
            picked[i] = Some(sampler.pick(row.unwrap_or(&[]), text));
        }
    }
    let (indices, mut cursors): (Vec<_>, Vec<_>) = cursors.into_iter().unzip();
    for (i, id) in indices.into_iter().zip(read_ids(&mut cursors)?) {
        picked[i] = Some(Ok(id));
    }
    Ok(picked)
}

/// Reads the tokens that cursors of one text each have picked.
///
/// # Errors
/// Fails if logits since the last call were not finite.
pub(super) fn read_ids(cursors: &mut [Cursor]) -> Result<Vec<u32>> {
    if cursors.is_empty() {
        return Ok(vec![]);
    }
    let _span = trace_span!(target: OPERATION, "read").entered();
    let register = |read: Transaction, cursor: &Cursor| {
        read.register(cursor.ids().clone()).register(cursor.broken().clone())
    };
    let read = cursors.iter().fold(Transaction::default(), register).execute();
    let read: Vec<u32> = read.iter().filter_map(|data| data.iter::<u32>().next()).collect();
    let mut ids = Vec::with_capacity(cursors.len());
    for (cursor, pair) in cursors.iter_mut().zip(read.chunks(2)) {
        let &[id, broken] = pair else { return Err(none_picked(pair.len())) };
        if broken > 0 {
            cursor.mend();
            return Err(Error::argument("logits", "not finite", "must be finite"));
        }
        ids.push(id);
    }
    Ok(ids)
}

fn none_picked(read: usize) -> Error {
    Error::argument("picked", read, "the device must return a token and whether logits were finite")
}
