//! The next tokens of a batch and their position: [`Cursor`].

use burn::{
    backend::Dispatch,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

use crate::{CursorState, Draw, Result, SamplingOps, error::invalid};

/// The next token of every text of a batch and its position, on the device, where steps read and
/// write them. The buffers stay the same, so steps can be captured and replayed.
#[derive(Clone, Debug)]
pub struct Cursor {
    ids: Tensor<2, Int>,
    position: Tensor<1, Int>,
    broken: Tensor<1, Int>,
    ends: Tensor<1, Int>,
    past: usize,
}

impl Cursor {
    /// Creates the cursor of texts whose next tokens are `ids`, all at `position`. A token of
    /// `ends` ends a text.
    ///
    /// # Errors
    /// No id, and `ends` for more than one text.
    pub fn new(ids: &[u32], position: usize, ends: &[u32], device: &Device) -> Result<Self> {
        Self::at(ids, position as i32, ends, device)
    }

    /// Creates the cursor of texts that take no part until their [tokens](Self::set_ids) and
    /// [position](Self::set_position) are set. Their position stays below 0 for a billion steps, so
    /// trial steps write nothing.
    ///
    /// # Errors
    /// Fails as [`new`](Self::new) does.
    pub fn idle(texts: usize, ends: &[u32], device: &Device) -> Result<Self> {
        Self::at(&vec![0; texts], i32::MIN / 2, ends, device)
    }

    fn at(ids: &[u32], position: i32, ends: &[u32], device: &Device) -> Result<Self> {
        if ids.is_empty() {
            return Err(invalid("ids", "none", "there must be a text"));
        }
        if ids.len() > 1 && !ends.is_empty() {
            let rule = "must be 1 for texts that end, which share a position";
            return Err(invalid("texts", ids.len(), rule));
        }
        // A buffer must not be empty, and no token is -1.
        let ends = if ends.is_empty() { vec![-1] } else { ints(ends) };
        Ok(Self {
            ids: tensor(ints(ids), [ids.len(), 1], device),
            position: tensor(vec![position], [1], device),
            broken: tensor(vec![0], [1], device),
            ends: tensor(ends.clone(), [ends.len()], device),
            past: 0,
        })
    }

    /// Sets the number that an end adds to the position. Beyond the capacity of a cache, further
    /// steps write nothing.
    #[must_use]
    pub fn with_past(self, past: usize) -> Self {
        Self { past, ..self }
    }

    /// The next token of every text, `[batch, 1]`.
    pub fn ids(&self) -> &Tensor<2, Int> {
        &self.ids
    }

    /// The position of the next tokens, `[1]`.
    pub fn position(&self) -> &Tensor<1, Int> {
        &self.position
    }

    /// Counts the rows of logits that were not finite since [`mend`](Self::mend), `[1]`.
    pub fn broken(&self) -> &Tensor<1, Int> {
        &self.broken
    }

    /// Overwrites the next tokens.
    ///
    /// # Errors
    /// A number of ids that differs from the number of texts.
    pub fn set_ids(&mut self, ids: &[u32]) -> Result<()> {
        let texts = self.ids.dims()[0];
        if ids.len() != texts {
            let rule = format!("must be one for each of {texts} texts");
            return Err(invalid("ids", ids.len(), rule));
        }
        let new = tensor(ints(ids), [ids.len(), 1], &self.ids.device());
        write(&mut self.ids, new);
        Ok(())
    }

    /// Overwrites the position.
    pub fn set_position(&mut self, position: usize) {
        let new = tensor(vec![position as i32], [1], &self.position.device());
        write(&mut self.position, new);
    }

    /// Resets the [count](Self::broken) of rows that were not finite.
    pub fn mend(&mut self) {
        let zero = tensor(vec![0], [1], &self.broken.device());
        write(&mut self.broken, zero);
    }

    /// Picks the next token of every text from `logits`, f32 `[batch, vocab]`, and moves to the
    /// next position. A row that is not finite is [counted](Self::broken), and its token is 0.
    ///
    /// # Errors
    /// Logits for another number of texts, without a token or of another type; an invalid `draw`.
    pub fn advance(&mut self, logits: Tensor<2>, draw: &Draw) -> Result<()> {
        draw.validate()?;
        let ([texts, _], [batch, vocab]) = (self.ids.dims(), logits.dims());
        if batch != texts || vocab == 0 || logits.dtype() != DType::F32 {
            let rule = format!("must be [{texts}, vocab] of F32");
            let found = format!("{:?} of {:?}", logits.dims(), logits.dtype());
            return Err(invalid("logits", found, rule));
        }
        let empty = || Tensor::<1, Int>::empty([1], &self.ends.device());
        // The only handles, so that the backend writes in place.
        let position = core::mem::replace(&mut self.position, empty());
        let broken = core::mem::replace(&mut self.broken, empty());
        let ids = core::mem::replace(&mut self.ids, empty().unsqueeze());
        let state = CursorState {
            ids: ids.into_dispatch(),
            position: position.into_dispatch(),
            broken: broken.into_dispatch(),
        };
        let (logits, ends) = (logits.into_dispatch(), self.ends.clone().into_dispatch());
        let state = <Dispatch as SamplingOps>::advance(logits, state, ends, self.past, *draw);
        self.ids = Tensor::from_dispatch(state.ids);
        self.position = Tensor::from_dispatch(state.position);
        self.broken = Tensor::from_dispatch(state.broken);
        Ok(())
    }
}

fn ints(ids: &[u32]) -> Vec<i32> {
    ids.iter().map(|&id| id as i32).collect()
}

fn tensor<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}

/// Overwrites all values of `tensor` without giving it another buffer.
fn write<const D: usize>(tensor: &mut Tensor<D, Int>, values: Tensor<D, Int>) {
    let all = values.dims().map(|n| 0..n);
    tensor.inplace(|tensor| tensor.slice_assign(all, values));
}
