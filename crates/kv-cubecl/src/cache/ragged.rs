//! Appends a different number of tokens to each sequence of a batch.

use burn::tensor::{DType, Tensor, TensorData};

use super::{KvCache, state::StepPosition};
use crate::{
    Attention, CacheShape, Error, Result, error::invalid, layout::CacheLayout,
    sequences::check_sequence,
};

/// Most tokens per sequence that are appended step by step, with one launch for all sequences.
///
/// A step reads the history once per token. A chunk reads it once, but launches for each sequence,
/// and copies the sequence out and back. For 8 sequences of 1000 tokens, with 9 query heads and 3
/// kv heads of 64 channels on 2 CPU cores, chunks are faster from 8 tokens on in float and from 13
/// on at 4 bits.
const FEW: usize = 8;

impl KvCache {
    /// Attends with a different number of tokens per sequence.
    ///
    /// Only the first `tokens[i]` rows of `query`, `key` and `value` of sequence `i` count. All
    /// other rows are padding: they are not written, their output is 0 and their `lse` -inf. A
    /// sequence with 0 tokens is unchanged.
    ///
    /// Sequences with few tokens take steps of one token, each one launch for the batch. Longer
    /// chunks run sequence by sequence.
    ///
    /// # Shapes
    /// - as those of [`attend`](Self::attend), where m is at least the largest of `tokens`
    /// - `tokens`: one number for each sequence, 0 to m
    ///
    /// # Errors
    /// [`Error::Shape`], [`Error::InvalidConfig`] for more tokens than `key` has,
    /// [`Error::Unsupported`] for tensors that record gradients or sit on another device, or
    /// [`Error::SequenceFull`]. On failure no sequence of the cache is changed.
    pub fn attend_ragged(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
    ) -> Result<Attention> {
        self.check_ragged("attend_ragged", [&query, &key, &value], tokens)?;
        let one = self.layout_of_one()?;
        Ok(self.attend_each(query, key, value, tokens, one))
    }

    /// Appends a different number of tokens to each sequence, without attending: see
    /// [`append`](Self::append) and [`attend_ragged`](Self::attend_ragged).
    ///
    /// # Shapes
    /// - as those of [`append`](Self::append), where m is at least the largest of `tokens`
    /// - `tokens`: one number for each sequence, 0 to m
    ///
    /// # Errors
    /// Fails as [`attend_ragged`](Self::attend_ragged) does.
    pub fn append_ragged(
        &mut self,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
    ) -> Result<()> {
        self.check_ragged("append_ragged", [&key, &key, &value], tokens)?;
        let one = self.layout_of_one()?;
        let steps = few(tokens);
        for step in 0..steps.iter().copied().max().unwrap_or(0) {
            // No launch only writes at positions, so this step attends with an arbitrary query.
            let [key, value] = [&key, &value].map(|side| side.clone().narrow(2, step, 1));
            self.step_each(key.clone(), key, value, &steps, step);
        }
        for (sequence, n) in many(tokens) {
            let [key, value] =
                [&key, &value].map(|side| side.clone().narrow(0, sequence, 1).narrow(2, 0, n));
            let mut alone = self.alone(sequence, one);
            alone.write(key, value, n);
            self.state.put(&self.layout, sequence, &alone.state);
        }
        self.count(tokens);
        Ok(())
    }

    /// Computes [`advance`](Self::advance) by a different number of tokens per sequence: 0 for
    /// sequences that steps skipped.
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of sequences, [`Error::SequenceFull`], and those of
    /// [`advance`](Self::advance); the cache is then unchanged.
    pub fn advance_ragged(&mut self, tokens: &[usize]) -> Result<()> {
        let (batch, capacity) = (self.lens.len(), self.capacity());
        if tokens.len() != batch {
            let (op, tensor, shape) = ("advance_ragged", "tokens", vec![tokens.len()]);
            let rule = format!("must be one number for each sequence of batch {batch}");
            return Err(Error::Shape { op, tensor, shape, rule });
        }
        for (sequence, (&added, &len)) in tokens.iter().zip(&self.lens).enumerate() {
            if len.saturating_add(added) > capacity {
                return Err(Error::SequenceFull { sequence, len, added, capacity });
            }
        }
        self.check_stepped(tokens.iter().copied().max().unwrap_or(0))?;
        self.count(tokens);
        Ok(())
    }

    pub(super) fn check_ragged(
        &self,
        op: &'static str,
        [query, key, value]: [&Tensor<4>; 3],
        tokens: &[usize],
    ) -> Result<()> {
        let m = self.check_tensors(op, query, key, value)?;
        let (batch, capacity) = (self.lens.len(), self.capacity());
        if tokens.len() != batch {
            let rule = format!("must be one number for each sequence of batch {batch}");
            let (tensor, shape) = ("tokens", vec![tokens.len()]);
            return Err(Error::Shape { op, tensor, shape, rule });
        }
        for (sequence, (&added, &len)) in tokens.iter().zip(&self.lens).enumerate() {
            if added > m {
                let value = format!("{added} of sequence {sequence}");
                return Err(invalid("tokens", value, format!("must be at most the {m} of key")));
            }
            if len + added > capacity {
                return Err(Error::SequenceFull { sequence, len, added, capacity });
            }
        }
        let len = capacity.min(self.len() + m).max(m);
        crate::backends::check_attend(&self.layout, query.dims(), len, &query.device())
    }

    /// Returns whether [`attend_ragged`](Self::attend_ragged) appends these numbers of tokens one
    /// by one.
    pub(super) fn takes_steps(&self, tokens: &[usize]) -> bool {
        let longest = tokens.iter().copied().max().unwrap_or(0);
        match self.is_even() && tokens.iter().all(|&n| n == longest) {
            true => longest <= 1 || self.suits_steps(longest),
            false => longest <= FEW,
        }
    }

    /// Computes [`attend_ragged`](Self::attend_ragged).
    fn attend_each(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
        one: CacheLayout,
    ) -> Attention {
        let [batch, heads, m, _] = query.dims();
        let longest = tokens.iter().copied().max().unwrap_or(0);
        if longest > 0 && self.is_even() && tokens.iter().all(|&n| n == longest) {
            let part = |tensor: Tensor<4>| tensor.narrow(2, 0, longest);
            let (query, key, value) = (part(query), part(key), part(value));
            return self.attend_even(query, key, value, longest).padded(m);
        }
        let steps = few(tokens);
        let mut outputs = Vec::new();
        for step in 0..steps.iter().copied().max().unwrap_or(0) {
            let [query, key, value] =
                [&query, &key, &value].map(|side| side.clone().narrow(2, step, 1));
            outputs.push(self.step_each(query, key, value, &steps, step));
        }
        let shape = [batch, heads, m, self.layout.shape().head_dim.values];
        let mut attention = Attention::of_steps(outputs, shape, &query);
        for (sequence, n) in many(tokens) {
            let [query, key, value] = [&query, &key, &value]
                .map(|side| side.clone().narrow(0, sequence, 1).narrow(2, 0, n));
            let mut alone = self.alone(sequence, one);
            let found = alone.attend_even(query, key, value, n);
            self.state.put(&self.layout, sequence, &alone.state);
            attention = attention.with_rows(sequence, heads, n, found);
        }
        self.count(tokens);
        attention
    }

    /// Runs step number `step` of the `steps` of each sequence, without counting its tokens.
    fn step_each(
        &mut self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        steps: &[usize],
        step: usize,
    ) -> Attention {
        let position = |(&len, &n): (&usize, &usize)| match step < n {
            true => (len + step) as i32,
            false => -1,
        };
        let positions: Vec<i32> = self.lens.iter().zip(steps).map(position).collect();
        let positions = TensorData::new(positions, [steps.len()]);
        let positions = Tensor::from_data(positions, (&query.device(), DType::I32));
        let place = StepPosition { position: Some(positions), rope: None };
        self.state.step([query, key, value], place, self.layout, self.len(), self.options)
    }

    fn count(&mut self, tokens: &[usize]) {
        self.lens.iter_mut().zip(tokens).for_each(|(len, n)| *len += n);
    }

    /// Returns the layout of a cache of one sequence that is otherwise alike.
    pub(super) fn layout_of_one(&self) -> Result<CacheLayout> {
        let shape = CacheShape { batch: 1, ..self.layout.shape() };
        CacheLayout::new(self.layout.config(), shape)
    }

    /// Copies one sequence to a cache of its own, of layout
    /// [`layout_of_one`](Self::layout_of_one).
    pub(super) fn alone(&self, sequence: usize, layout: CacheLayout) -> Self {
        debug_assert_eq!(check_sequence("sequence", sequence, self.lens.len()), Ok(()));
        let state = self.state.select(&self.layout, &layout, &[sequence]);
        let (lens, options) = (vec![self.lens[sequence]], self.options);
        Self {
            layout,
            options,
            state,
            lens,
            stepped: self.stepped,
            restored: self.restored.clone(),
        }
    }
}

/// Returns the tokens of each sequence that are appended step by step: all of them or none.
fn few(tokens: &[usize]) -> Vec<usize> {
    tokens.iter().map(|&n| if n <= FEW { n } else { 0 }).collect()
}

/// Returns the sequences without tokens in [`few`], and their tokens.
fn many(tokens: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    tokens.iter().copied().enumerate().filter(|&(_, n)| n > FEW)
}

impl Attention {
    /// Concatenates steps, and pads them with skipped rows to `shape`.
    pub(super) fn of_steps(steps: Vec<Self>, shape: [usize; 4], query: &Tensor<4>) -> Self {
        let [batch, heads, m, width] = shape;
        let rest = m - steps.len();
        let device = (&query.device(), query.dtype());
        let (mut outputs, mut lses): (Vec<_>, Vec<_>) =
            steps.into_iter().map(|Self { output, lse }| (output, lse)).unzip();
        if rest > 0 {
            let lse_type = (device.0, DType::F32);
            outputs.push(Tensor::zeros([batch, heads, rest, width], device));
            lses.push(Tensor::full([batch, heads, rest], f32::NEG_INFINITY, lse_type));
        }
        match outputs.len() {
            1 => Self { output: outputs.remove(0), lse: lses.remove(0) },
            _ => Self { output: Tensor::cat(outputs, 2), lse: Tensor::cat(lses, 2) },
        }
    }

    /// Returns `m` skipped rows for each sequence and head of `query`, with values of `width`.
    pub(super) fn skipped(m: usize, width: usize, query: &Tensor<4>) -> Self {
        let [batch, heads, _, _] = query.dims();
        Self::of_steps(vec![], [batch, heads, m, width], query)
    }

    /// Replaces the first `n` rows of a sequence by those that were `found`.
    pub(super) fn with_rows(self, sequence: usize, heads: usize, n: usize, found: Self) -> Self {
        let (this, rows, width) = (sequence..sequence + 1, 0..n, found.output.dims()[3]);
        let whole = [this.clone(), 0..heads, rows.clone(), 0..width];
        Self {
            output: self.output.slice_assign(whole, found.output),
            lse: self.lse.slice_assign([this, 0..heads, rows], found.lse),
        }
    }

    /// Pads the result with skipped rows, up to `m`.
    pub(super) fn padded(self, m: usize) -> Self {
        let [batch, heads, rows, width] = self.output.dims();
        if rows == m {
            return self;
        }
        let like = self.output.clone();
        let rest = Self::of_steps(vec![], [batch, heads, m - rows, width], &like);
        let output = Tensor::cat(vec![self.output, rest.output], 2);
        Self { output, lse: Tensor::cat(vec![self.lse, rest.lse], 2) }
    }
}
