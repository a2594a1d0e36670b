//! Tokens appended to each sequence of a batch by its own number.

use burn::tensor::{DType, Tensor, TensorData};

use super::{KvCache, slots::check_sequence, state::StepPosition};
use crate::{Attention, CacheShape, Error, Result, error::invalid, layout::CacheLayout};

/// Most tokens of a sequence that are taken step by step, all sequences in one launch. A step reads
/// the history once for each token; a chunk has launches of its own for each sequence, reads its
/// history once, and copies its memory out and back. For 8 sequences of 1000 tokens, 9 query heads
/// on 3 of 64, on 2 CPU cores, chunks are faster from 8 tokens on in float, and from 13 on at 4
/// bits.
const FEW: usize = 8;

impl KvCache {
    /// Attends with a different number of tokens per sequence.
    ///
    /// Only the first `tokens[i]` rows of `query`, `key` and `value` of sequence `i` count. The
    /// rest is padding: none of it is written, its output is 0 and its `lse` -inf. A sequence with
    /// 0 tokens is unchanged.
    ///
    /// If every sequence has at most one token, one launch serves the batch, and so does each
    /// further step while there are few. Longer chunks run sequence by sequence.
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
        let dtype = query.dtype();
        let [query, key, value] = self.stored([query, key, value]);
        let attention = self.attend_each(query, key, value, tokens, one);
        Ok(attention.undo_hadamard(self.layout.config()).with_dtype(dtype))
    }

    /// [`append`](Self::append) of another number of tokens for each sequence, as
    /// [`attend_ragged`](Self::attend_ragged) does.
    ///
    /// # Shapes
    /// - as those of [`append`](Self::append), where m is at least the largest of `tokens`
    /// - `tokens`: one number for each sequence, 0 to m
    ///
    /// # Errors
    /// As [`attend_ragged`](Self::attend_ragged).
    pub fn append_ragged(
        &mut self,
        key: Tensor<4>,
        value: Tensor<4>,
        tokens: &[usize],
    ) -> Result<()> {
        self.check_ragged("append_ragged", [&key, &key, &value], tokens)?;
        let one = self.layout_of_one()?;
        let [_, key, value] = self.stored([key.clone(), key, value]);
        let steps = few(tokens);
        for step in 0..steps.iter().copied().max().unwrap_or(0) {
            // A step that attends, for any query: there is no launch that only writes at positions.
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

    /// [`advance`](Self::advance) by another number of tokens for each sequence: 0 for one whose
    /// position was below 0, whose memory holds no such tokens.
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

    fn check_ragged(
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

    /// [`attend_ragged`](Self::attend_ragged) to values as they are stored, and with an output like
    /// them.
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
            return self.attend_stored(query, key, value, longest).padded(m);
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
            let Attention { output, lse } = alone.attend_stored(query, key, value, n);
            self.state.put(&self.layout, sequence, &alone.state);
            let (this, rows) = (sequence..sequence + 1, 0..n);
            let whole = [this.clone(), 0..heads, rows.clone(), 0..shape[3]];
            attention.output = attention.output.slice_assign(whole, output);
            attention.lse = attention.lse.slice_assign([this, 0..heads, rows], lse);
        }
        self.count(tokens);
        attention
    }

    /// One step, number `step` of the `steps` of each sequence, without counting its tokens.
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

    /// The layout of a cache of one sequence like these.
    pub(super) fn layout_of_one(&self) -> Result<CacheLayout> {
        let shape = CacheShape { batch: 1, ..self.layout.shape() };
        CacheLayout::new(self.layout.config(), shape)
    }

    /// A copy of one sequence; `layout` is that of [`layout_of_one`](Self::layout_of_one).
    pub(super) fn alone(&self, sequence: usize, layout: CacheLayout) -> Self {
        debug_assert_eq!(check_sequence(sequence, self.lens.len()), Ok(()));
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

/// The tokens of each sequence that are taken step by step: all of them or none.
fn few(tokens: &[usize]) -> Vec<usize> {
    tokens.iter().map(|&n| if n <= FEW { n } else { 0 }).collect()
}

/// The sequences that are not in [`few`], and their tokens.
fn many(tokens: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    tokens.iter().copied().enumerate().filter(|&(_, n)| n > FEW)
}

impl Attention {
    /// Steps one after the other, and after them rows that take no part, up to `shape`.
    fn of_steps(steps: Vec<Self>, shape: [usize; 4], query: &Tensor<4>) -> Self {
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

    /// With rows that take no part, up to `m`.
    fn padded(self, m: usize) -> Self {
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
