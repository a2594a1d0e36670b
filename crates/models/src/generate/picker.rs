//! Who picks the next tokens: the host, or the device that their logits are on.

use burn::tensor::{Device, Tensor, Transaction};
use kv_sampling::{Cursor, Draw};
use tracing::trace_span;

use super::{Sampler, Sampling, read};
use crate::{Error, Result, spans::OPERATION};

/// Picks the tokens of one text.
#[derive(Clone, Debug)]
pub(super) enum Picker {
    /// From logits that are read.
    Host(Box<Sampler>),
    /// On a GPU, of which only the token is read.
    Device(Draw),
}

/// A text whose next token is picked.
pub(super) struct Waiting<'a> {
    pub(super) picker: &'a mut Picker,
    /// Its ids.
    pub(super) text: &'a [u32],
}

impl Picker {
    /// The device, if it is a GPU and the choice does not depend on the tokens that occurred.
    ///
    /// # Errors
    ///
    /// An invalid `sampling`.
    pub(super) fn new(sampling: Sampling, device: &Device) -> Result<Self> {
        let sampler = Sampler::new(sampling)?;
        // Burn names this kind of device only where it is built with a backend for it.
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

    /// The choice, if the device makes it.
    pub(super) fn draw(&self) -> Option<Draw> {
        match self {
            Self::Host(_) => None,
            Self::Device(draw) => Some(*draw),
        }
    }

    /// ExpertSelection a token of `text` from `logits`, `[1, vocab]`.
    ///
    /// # Errors
    ///
    /// Logits that are not numbers, or on a GPU not finite.
    pub(super) fn pick(&mut self, logits: Tensor<2>, text: &[u32]) -> Result<u32> {
        let picked = pick_each(logits, vec![Some(Waiting { picker: self, text })])?;
        picked.into_iter().flatten().next().ok_or_else(|| none_picked(0))
    }
}

/// Picks a token for every text from its row of `logits`, `[texts, vocab]`, and reads all at
/// once.
///
/// # Errors
///
/// Those of [`Picker::pick`], for any of the texts.
pub(super) fn pick_each(
    logits: Tensor<2>,
    texts: Vec<Option<Waiting<'_>>>,
) -> Result<Vec<Option<u32>>> {
    let vocab = logits.dims()[1];
    let device = logits.device();
    let mut rows = None;
    let mut picked = vec![None; texts.len()];
    let mut cursors = vec![];
    for (i, waiting) in texts.into_iter().enumerate() {
        let Some(Waiting { picker, text }) = waiting else { continue };
        match picker {
            Picker::Host(sampler) => {
                if rows.is_none() {
                    rows = Some(read(logits.clone())?);
                }
                let row = rows.iter().flat_map(|rows| rows.chunks_exact(vocab)).nth(i);
                picked[i] = Some(sampler.sample(row.unwrap_or(&[]), text)?);
            }
            Picker::Device(draw) => {
                // The position of the last token, as in a recorded step.
                let last = text.len().saturating_sub(1);
                let mut cursor = Cursor::new(&[0], last, &[], &device)?;
                cursor.advance(logits.clone().narrow(0, i, 1), draw)?;
                cursors.push((i, cursor));
            }
        }
    }
    let (places, mut cursors): (Vec<_>, Vec<_>) = cursors.into_iter().unzip();
    for (i, id) in places.into_iter().zip(read_ids(&mut cursors)?) {
        picked[i] = Some(id);
    }
    Ok(picked)
}

/// The tokens that cursors of one text each were moved to.
///
/// # Errors
///
/// Logits since the last call that were not finite.
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
    Error::argument("picked", read, "the device must tell a token and whether logits were finite")
}
