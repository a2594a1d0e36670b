//! The sequences of a [`DeltaState`]: select, join, remove, admit, fork and truncate, and its
//! tensors as they are saved.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::{DeltaConfig, DeltaState};
use crate::{
    Error, Result,
    error::invalid,
    sequences::{check_free, check_holds, check_room, check_sequence},
};

/// The name of a tensor of a state, as it is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaPart {
    /// The last inputs of the convolution, `[batch, conv_tokens - 1, conv_channels]`.
    Conv,
    /// The matrices, `[batch, n_value_heads, head_dim.keys, head_dim.values]`.
    State,
}

impl DeltaPart {
    /// Both, in the order in which they are saved.
    pub const BOTH: [Self; 2] = [Self::Conv, Self::State];

    /// Returns the name of the tensor.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conv => "conv",
            Self::State => "state",
        }
    }
}

/// A tensor of a state without its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaPartLayout {
    /// Its name.
    pub name: &'static str,
    /// A float type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<usize>,
}

impl DeltaConfig {
    /// Lists the tensors of a state of `batch` sequences.
    ///
    /// # Errors
    /// Fails as [`memory_bytes`](Self::memory_bytes) does.
    pub fn parts(&self, batch: usize) -> Result<Vec<DeltaPartLayout>> {
        self.memory_bytes(batch)?;
        let part = |part: DeltaPart| {
            let (dtype, shape) = match part {
                DeltaPart::Conv => (DType::F32, self.conv_shape(batch).to_vec()),
                DeltaPart::State => (self.float.dtype(), self.state_shape(batch).to_vec()),
            };
            DeltaPartLayout { name: part.name(), dtype, shape }
        };
        Ok(DeltaPart::BOTH.map(part).to_vec())
    }
}

impl DeltaState {
    fn map(&self, lens: Vec<usize>, conv: Tensor<3>, state: Tensor<4>) -> Self {
        Self { config: self.config, conv, state, lens }
    }

    /// Returns the state of the given sequences, in this order.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] without a sequence, and for one that the batch does not have.
    pub fn select(&self, sequences: &[usize]) -> Result<Self> {
        if sequences.is_empty() {
            return Err(invalid("sequences", "none", "must be at least one"));
        }
        let batch = self.lens.len();
        sequences.iter().try_for_each(|&at| check_sequence("sequence", at, batch))?;
        let lens = sequences.iter().map(|&sequence| self.lens[sequence]).collect();
        let numbers: Vec<i32> = sequences.iter().map(|&sequence| sequence as i32).collect();
        let data = TensorData::new(numbers, [sequences.len()]);
        let rows = Tensor::<1, Int>::from_data(data, (&self.device(), DType::I32));
        let conv = self.conv.clone().select(0, rows.clone());
        Ok(self.map(lens, conv, self.state.clone().select(0, rows)))
    }

    /// Joins the sequences of several states, in this order.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] without a state, and [`Error::Unsupported`] for states that differ
    /// in more than their sequences.
    pub fn join(states: &[Self]) -> Result<Self> {
        let Some(first) = states.first() else {
            return Err(invalid("states", "none", "must be at least one"));
        };
        states.iter().try_for_each(|state| first.check_alike("join", state))?;
        let lens = states.iter().flat_map(|state| state.lens.iter().copied()).collect();
        let conv = Tensor::cat(states.iter().map(|state| state.conv.clone()).collect(), 0);
        let state = Tensor::cat(states.iter().map(|state| state.state.clone()).collect(), 0);
        Ok(first.map(lens, conv, state))
    }

    /// Forgets all tokens of all sequences.
    pub fn reset(&mut self) {
        self.conv = self.conv.zeros_like();
        self.state = self.state.zeros_like();
        self.lens.fill(0);
    }

    /// Forgets all tokens of one sequence, which frees its slot.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have or that holds no token.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        check_holds(sequence, &self.lens)?;
        self.clear(sequence);
        Ok(())
    }

    fn clear(&mut self, sequence: usize) {
        let conv = self.conv.clone().narrow(0, sequence, 1).zeros_like();
        let state = self.state.clone().narrow(0, sequence, 1).zeros_like();
        self.put(sequence, conv, state);
        self.lens[sequence] = 0;
    }

    fn put(&mut self, sequence: usize, conv: Tensor<3>, state: Tensor<4>) {
        let [_, rows, channels] = self.conv.dims();
        let [_, heads, keys, values] = self.state.dims();
        let slot = sequence..sequence + 1;
        self.conv = self.conv.clone().slice_assign([slot.clone(), 0..rows, 0..channels], conv);
        let whole = [slot, 0..heads, 0..keys, 0..values];
        self.state = self.state.clone().slice_assign(whole, state);
    }

    /// Copies the only sequence of `state` into a free slot.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a slot that does not exist or is not free, and for a `state`
    /// that is empty or has another batch than 1. [`Error::Unsupported`] for a `state` of another
    /// configuration or device. On failure nothing changes.
    pub fn admit(&mut self, sequence: usize, state: &Self) -> Result<()> {
        check_free("sequence", sequence, &self.lens)?;
        if state.lens.len() != 1 {
            let rule = "a state that is admitted must be of 1 sequence";
            return Err(invalid("batch", state.lens.len(), rule));
        }
        self.check_alike("admit", state)?;
        check_holds(0, &state.lens)?;
        self.put(sequence, state.conv.clone(), state.state.clone());
        self.lens[sequence] = state.lens[0];
        Ok(())
    }

    /// Copies one sequence into a free slot; both then continue independently.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, if `from` is empty, or
    /// if `to` is not free. On failure nothing changes.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<()> {
        check_holds(from, &self.lens)?;
        check_free("to", to, &self.lens)?;
        let alone = self.select(&[from])?;
        self.admit(to, &alone)
    }

    /// Adds `tokens` that calls at device positions have appended to the length of each sequence.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if they do not fit. On failure nothing changes.
    pub fn advance(&mut self, tokens: usize) -> Result<()> {
        check_room(&[self.len()], &[tokens], self.config.capacity)?;
        self.lens.iter_mut().for_each(|len| *len += tokens);
        Ok(())
    }

    /// Returns the state with another capacity.
    ///
    /// # Errors
    /// [`Error::CapacityExceeded`] if a sequence has more tokens.
    pub fn resized(&self, capacity: usize) -> Result<Self> {
        check_room(&[0], &[self.len()], capacity)?;
        Ok(Self { config: self.config.with_capacity(capacity), ..self.clone() })
    }

    /// Returns the smallest length above 0 that [`truncate`](Self::truncate) accepts for a
    /// sequence: all of its tokens, because a state does not contain earlier ones.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have.
    pub fn shortest(&self, sequence: usize) -> Result<usize> {
        check_sequence("sequence", sequence, self.lens.len())?;
        Ok(self.lens[sequence])
    }

    /// Removes all tokens of one sequence if `len` is 0.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, and for a `len` other
    /// than 0 and its tokens.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<()> {
        let now = self.shortest(sequence)?;
        if len == now {
            return Ok(());
        }
        if len > now {
            return Err(self.too_long(sequence, len));
        }
        if len > 0 {
            let rule = format!(
                "must be 0 or {now} for sequence {sequence}: a recurrent state contains no \
                 earlier one; continue from a kept checkpoint"
            );
            return Err(invalid("len", len, rule));
        }
        self.clear(sequence);
        Ok(())
    }

    /// Returns the largest number of tokens up to `len` that [`truncate`](Self::truncate) can cut
    /// the sequence back to.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for a sequence that the batch does not have, and for a `len` above
    /// its tokens.
    pub fn exact(&self, sequence: usize, len: usize) -> Result<usize> {
        let now = self.shortest(sequence)?;
        if len > now {
            return Err(self.too_long(sequence, len));
        }
        Ok(if len == now { len } else { 0 })
    }

    fn too_long(&self, sequence: usize, len: usize) -> Error {
        let now = self.lens[sequence];
        invalid("len", len, format!("must be at most the {now} tokens of sequence {sequence}"))
    }

    /// Returns the tensors, in the order of [`DeltaPart::BOTH`].
    pub fn parts(&self) -> (Tensor<3>, Tensor<4>) {
        (self.conv.clone(), self.state.clone())
    }

    /// Makes a state of the tensors of [`parts`](Self::parts).
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), [`Error::Shape`] for a tensor that does not fit the
    /// configuration, and [`Error::CapacityExceeded`] or [`Error::SequenceFull`] for more tokens.
    pub fn from_parts(
        config: &DeltaConfig,
        lens: Vec<usize>,
        conv: Tensor<3>,
        state: Tensor<4>,
        device: &Device,
    ) -> Result<Self> {
        let empty = Self::new(config, lens.len(), device)?;
        check_room(&vec![0; lens.len()], &lens, config.capacity)?;
        let wrong = |tensor, shape: &[usize], expected: &[usize]| {
            let rule = format!("must be {expected:?}");
            Err(Error::Shape { op: "from_parts", tensor, shape: shape.to_vec(), rule })
        };
        if conv.dims() != empty.conv.dims() {
            return wrong("conv", &conv.dims(), &empty.conv.dims());
        }
        if state.dims() != empty.state.dims() {
            return wrong("state", &state.dims(), &empty.state.dims());
        }
        let (conv, state) = (conv.without_autodiff(), state.without_autodiff());
        for (name, device) in [("conv", conv.device()), ("state", state.device())] {
            if device != empty.device() {
                let what = format!("from_parts: {name} on {device:?}");
                let why = format!("must be on {:?}", empty.device());
                return Err(Error::Unsupported { what, why });
            }
        }
        let (conv, state) = (conv.cast(DType::F32), state.cast(config.float.dtype()));
        Ok(empty.map(lens, conv, state))
    }

    /// Checks that sequences of `other` can be copied to this state.
    fn check_alike(&self, op: &str, other: &Self) -> Result<()> {
        let unlike = |what: &str| Error::Unsupported {
            what: format!("{op}: {what} of another state"),
            why: "must equal the one of the state that it joins".into(),
        };
        if self.config != other.config {
            return Err(unlike("configuration"));
        }
        if self.device() != other.device() {
            return Err(unlike("device"));
        }
        Ok(())
    }
}
